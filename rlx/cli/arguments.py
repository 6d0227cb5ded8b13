"""Arguments of several commands, what an unknown option may mean, and the width of their tables.

Left out: an option for each setting (options.py).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from rlx.config.errors import ConfigError, called_here, most_similar
from rlx.config.run import RunConfig


def add_storage(parser: argparse.ArgumentParser, kept: str = "runs") -> None:
    """Adds --storage, the address where runs are kept, or what else `kept` names."""
    usual = RunConfig().storage
    shown = f"where {kept} are kept (default: {usual})"
    parser.add_argument("--storage", metavar="ADDRESS", default=usual, help=shown)


def add_tracking_uri(parser: argparse.ArgumentParser, shown: str) -> None:
    """Adds --tracking.uri, as the setting is called, and its earlier name, which --help does not show."""
    parser.add_argument("--tracking.uri", dest="tracking_uri", metavar="URI", help=shown)
    parser.add_argument("--tracking-uri", help=argparse.SUPPRESS)


def find_sweep_place(which: str | None, storage: str) -> tuple[str | None, str]:
    """Returns the name of a sweep and the address of its storage.

    Args:
        which: its name, or its folder or address; None: the newest one.
        storage: address of the storage that a named sweep is in.

    Raises:
        ConfigError, StorageError: an address that is no sweep's.
    """
    from rlx.storage.addresses import resolve_address, split_sweep

    if "/" not in (which or ""):
        return which, storage
    if found := split_sweep(resolve_address(str(which))):
        return found
    raise ConfigError(f"{which}: expected the name of a sweep, or its address, STORAGE/sweeps/NAME")


def meant_option(name: str, known: Sequence[str]) -> str:
    """What an unknown option may mean: a setting's name elsewhere, or what it is similar to."""
    return elsewhere_option(name.removeprefix("--"), known) or similar_option(name, known)


def similar_option(name: str, known: Sequence[str]) -> str:
    """The one known option that ends as an unknown one, or the nearest one, in words; empty: there is none."""
    word = name.removeprefix("--").replace("_", "-")
    options = [option for option in known if option.endswith(f".{word}")]
    if len(options) == 1:
        return f"; here it is {options[0]}"
    # Without the dashes, which all options share and which make short words alike; and without sections, as the word.
    names = {option.removeprefix("--"): option for option in known}
    if "." not in word:
        ends: dict[str, str] = {}
        for each, option in names.items():  # several sections may have a setting of that name
            end = each.rpartition(".")[2]
            ends[end] = f"{ends[end]}, {option}" if end in ends else option
        names = ends | names
    found = most_similar(word, list(names))
    return f"; nearest: {names[found]}" if found else ""


def elsewhere_option(name: str, known: Sequence[str]) -> str:
    """The known option that another library or an earlier version calls so, in words; empty: there is none."""
    here, note = called_here(name, [option.removeprefix("--").replace("-", "_") for option in known])
    return f"; here it is --{here.replace('_', '-')}{note}" if here else ""


def positive_int(text: str) -> int:
    """Reads a whole number above 0, as the `type` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def terminal_width() -> int | None:
    """The columns of the terminal; None if the output goes elsewhere, where no line is too long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
