"""A hyperparameter sweep of PPO: python experiments/ppo_sweep.py [--trials N] [--scheduler asha] [--SETTING VALUE]"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlx.cli.options import add_settings, end_on_sigterm, exit_code, parse
from rlx.config.errors import ConfigError, one_line
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.sections import SchedulerName, SearchName

if TYPE_CHECKING:
    from rlx.storage.filesystem import Storage

_DEFAULTS = Path(__file__).parent / "defaults"
SETTINGS, SPACE = _DEFAULTS / "sweep.yaml", _DEFAULTS / "ppo.py"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="A sweep of PPO runs; every setting that the search space does not vary can be given too.",
        usage="%(prog)s [--space FILE] [--trials N] [--seeds K] [--search NAME] [--scheduler NAME] [--resume [NAME]] "
        "[--SECTION.SETTING VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", default=str(SETTINGS), help="YAML settings")
    parser.add_argument("--space", metavar="FILE", default=str(SPACE))
    parser.add_argument("--trials", metavar="N", type=int, default=4, help="settings to try (random search)")
    parser.add_argument("--seeds", metavar="K", type=int, default=1, help="run each setting with so many seeds")
    parser.add_argument("--search", choices=get_args(SearchName), default="random", help="how settings are drawn")
    parser.add_argument(
        "--scheduler", choices=get_args(SchedulerName), default="none", help="which trials are stopped early"
    )
    parser.add_argument("--max-concurrent", metavar="N", type=int, help="at most so many trials at once")
    parser.add_argument("--resume", metavar="NAME", nargs="?", const="", help="continue this sweep, or the newest")
    parser.add_argument(
        "--restart-errored", action="store_true", help="with --resume: failed trials run again from the start"
    )
    add_settings(parser)

    def script() -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        args, given = parse(parser, words)
        if args.restart_errored and args.resume is None:
            raise ConfigError("--restart-errored goes with --resume")
        if args.resume is not None and (set(given) - {"storage"} or _changed(parser, args)):
            raise ConfigError("--resume has the sweep's own settings: give it --storage and --restart-errored at most")
        for option in ("trials", "seeds", "max_concurrent"):
            if (value := getattr(args, option)) is not None and value < 1:
                raise ConfigError(f"--{option.replace('_', '-')} {value}: at least 1")
        tree = with_overrides(read_yaml(args.config), given)
        from_tree(tree, args.config)  # refused before anything is imported
        return run_sweep(args, tree)

    return exit_code(script, "interrupted: --resume continues the sweep")


def run_sweep(args: argparse.Namespace, tree: dict[str, Any]) -> int:
    """Starts or resumes the sweep, shows it, and writes its analysis."""
    from rlx.analysis import loading, report, tables
    from rlx.runs import launch, preflight
    from rlx.storage.addresses import local_folder, open_storage
    from rlx.storage.filesystem import free_name
    from rlx.sweeps import tuner
    from rlx.sweeps.records import SweepPlan
    from rlx.tracking import console, outbox

    started = time.monotonic()
    tree = with_overrides(tree, preflight.absolute_paths(from_tree(tree)))
    storage = open_storage(tree["storage"])
    if args.resume is not None:
        plan = tuner.saved_sweep(storage, args.resume or None)
        plan = replace(plan, tree=plan.tree | {"storage": tree["storage"]})  # which may have been moved since
        again = tuner.begin_again(plan, storage) if args.restart_errored else []
    else:
        name, again = tree.pop("name", None) or free_name(storage / "sweeps", "sweep"), []
        chosen = (args.trials, args.search, args.scheduler, args.seeds, args.max_concurrent)
        plan = SweepPlan(name, tree, str(Path(args.space).resolve()), *chosen)
    config = from_tree(plan.tree)
    uri = launch.tracking_uri(config)
    with console.SweepProgress(config.train.steps) as shown:
        with console.RunProgress(config.train.steps, shown.console) as making:
            preflight.prepare(config, making.warm_start)
        launch.connect(config)
        end_on_sigterm()
        if args.resume is None:
            plan = tuner.create_sweep(plan, storage)
        lines = [tuner.described(plan), *(f"{trial} runs again" for trial in again)]
        where = _where(uri, storage / "sweeps" / plan.name)
        shown.console.print(*lines, *where, sep="\n", soft_wrap=True)
        results = tuner.run_sweep(plan, storage, resume=args.resume is not None, watch=shown.update)
    failed = tuner.failures(results)
    for reason in failed:
        print(f"error: {reason}", file=sys.stderr)
    print(f"sweep {plan.name} finished in {time.monotonic() - started:.0f} s")
    try:
        own = outbox.run_id(storage / "sweeps" / plan.name)  # a server may know other sweeps of that name
        loaded = loading.load_sweep(uri, config.tracking.experiment, own or plan.name)
        paths = report.write_report(loaded, local_folder(config.storage) / "analysis" / plan.name, uri)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(tables.format_table(tables.settings_table(loaded), width))
        print("\n".join(str(path) for path in paths))
    except Exception as error:  # each kind of MLflow store has its own
        print(f"no analysis: {one_line(error, 300)}; later: analyze.py --sweep {plan.name}", file=sys.stderr)
    print("\n".join(where))
    return 1 if failed else 0


def _where(uri: str, folder: Storage) -> list[str]:
    """Where a person can see the sweep: two lines."""
    from rlx.tracking import outbox
    from rlx.tracking.tracker import service_at

    service = service_at(uri)
    return [f"in MLflow: {service.browse_command()}", f"at: {service.run_page(outbox.run_id(folder))}"]


def _changed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> bool:
    """Whether options were given that a sweep has of its own."""
    own = ("config", "space", "trials", "seeds", "search", "scheduler", "max_concurrent")
    return any(getattr(args, option) != parser.get_default(option) for option in own)
