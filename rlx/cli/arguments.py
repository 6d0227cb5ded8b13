"""Arguments of several commands, and the width of their tables. Left out: an option for each setting (options.py)."""

from __future__ import annotations

import argparse
import shutil
import sys

from rlx.config.run import RunConfig


def add_storage(parser: argparse.ArgumentParser, kept: str = "runs") -> None:
    """Adds --storage, the address where runs are kept, or what else `kept` names."""
    usual = RunConfig().storage
    shown = f"where {kept} are kept (default: {usual})"
    parser.add_argument("--storage", metavar="ADDRESS", default=usual, help=shown)


def positive_int(text: str) -> int:
    """Reads a whole number above 0, as the `type` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def terminal_width() -> int | None:
    """The columns of the terminal; None if the output goes elsewhere, where no line is too long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
