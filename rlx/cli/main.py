"""The command `rlx`: finds the subcommand and hands it the other words.

A subcommand is imported when it is asked for, so that `rlx --help` and `rlx --version` need neither torch nor Ray.
Left out: the options of the subcommands, which their own modules read.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rlx import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand: the module with its `main`, and what it does."""

    module: str
    meaning: str


COMMANDS = {
    "train": Command("rlx.cli.train", "run PPO once, or continue a run"),
    "sweep": Command("rlx.cli.sweep", "run PPO with many settings, or continue a sweep"),
    "analyze": Command("rlx.cli.analyze", "rank and plot the trials of a sweep"),
    "samples": Command("rlx.cli.samples", "read the completions of a run, in the terminal or as a page"),
    "checkpoints": Command("rlx.cli.listing", "list runs, or the checkpoints of one"),
    "replay": Command("rlx.cli.timemachine.replay", "do a step of a run again, and compare it with the record"),
    "whatif": Command("rlx.cli.timemachine.whatif", "continue a run with other settings, beside an unchanged twin"),
    "verify": Command("rlx.cli.timemachine.verify", "do random steps of a run again: does its record hold?"),
    "lineage": Command("rlx.cli.timemachine.lineage", "make a schedule of what population based training found"),
    "export": Command("rlx.cli.export", "write the policy of a checkpoint as a Hugging Face folder"),
    "reward-model": Command("rlx.cli.reward_model", "train a reward model on preferences"),
    "doctor": Command("rlx.cli.doctor", "check that trainer and engines agree, without training"),
}

CALLED = {
    **dict.fromkeys(("resume", "continue"), "train --resume"),
    **dict.fromkeys(("list", "ls", "runs"), "checkpoints"),
    **dict.fromkeys(("tune", "tuner"), "sweep"),
    **dict.fromkeys(("merge", "convert"), "export"),
}
"""what other programs call a command of rlx, and the words that stand for it here"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code: 0, 1 after an error, or 128 + the number of a signal."""
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if args.command is None:
        parser.print_help()
        return 0
    command = COMMANDS.get(args.command)
    if command is None:
        from rlx.config.errors import nearest  # with pydantic

        here = shlex.join(["rlx", *CALLED.get(args.command, "").split(), *args.arguments])
        hint = nearest(args.command, list(COMMANDS)) or f"; there are {', '.join(COMMANDS)}"
        hint = f"; here it is {here}" if args.command in CALLED else hint
        parser.exit(2, f"error: there is no command {args.command}{hint}\n")
    sys.argv[0] = f"{parser.prog} {args.command}"  # argparse calls the program by it in --help and errors
    return int(importlib.import_module(command.module).main(args.arguments))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {command.meaning}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="rlx",
        usage="rlx COMMAND [ARGUMENT ...]",
        description="PPO on language models as experiments.",
        epilog=f"commands:\n{listing}\n\nrlx COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rlx {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
