"""Lists the runs of a storage, or one run's checkpoints: rlx checkpoints [RUN] [--storage ADDRESS]"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.cli import listing
from rlx.cli.arguments import add_storage, terminal_width
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError, where_looked
from rlx.config.run import RunConfig
from rlx.storage.addresses import open_storage, resolve_address


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        description="Lists the runs of a storage; with RUN, its checkpoints and how to continue from them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="?", type=listing.run_argument, help="a run's name, or its folder or address"
    )
    add_storage(parser)
    args = parser.parse_args(argv)
    return exit_code(lambda: show_run(args.run, args.storage) if args.run else show_runs(args.storage))


def show_runs(storage: str) -> int:
    """Prints a row per run.

    Raises:
        ConfigError: there is no folder at the address, which is not the default.
    """
    runs = listing.runs(storage)
    if not runs:
        if storage != RunConfig().storage and not open_storage(storage, create=False).exists():
            raise ConfigError(f"--storage {storage}: no such folder{where_looked(storage)}")
        print(f"no runs in {resolve_address(storage)} yet: rlx train makes one")
        return 0
    print(listing.runs_table(runs, terminal_width()))
    print("\ncheckpoints of one of them: rlx checkpoints RUN")
    return 0


def show_run(which: str, storage: str) -> int:
    """Prints a row per checkpoint of a run, the run's address, and the commands that continue from it."""
    run = listing.find_run(which, storage)
    steps = f"{run.steps_done} of {run.config.train.steps} steps done" if run.config else run.problem
    print(f"run {run.label}: {steps}\n")
    print(listing.checkpoints_table(run, terminal_width()) if run.checkpoints else "no checkpoints yet")
    print("\n" + "\n".join([f"in {run.address}", *listing.commands(run, storage)]))
    return 0
