"""Hugging Face data sets: hf:NAME by name, and folders that `Dataset.save_to_disk` wrote.

The process that asks for the rows downloads a named data set, once; tasks on its node read it in parts. Needs the
package `datasets`. Left out: streaming, and data sets that run code of their own.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.reach import why_silent
from rlx.config.sections.data import DataConfig
from rlx.data.stored import parsers
from rlx.data.stored.columns import ColumnError, Columns
from rlx.data.stored.source import NO_ROWS, Reading, StoredSource

_LOG = logging.getLogger("rlx")
HUB = "hf:"
"""prefix of the addresses of Hugging Face data sets"""
_SAVED = ("state.json", "dataset_dict.json")  # one of them is in a folder of save_to_disk
_SYNTAX = "hf:NAME, hf:ORGANIZATION/NAME/CONFIG@SPLIT or hf:FOLDER@SPLIT"
_PIECE_ROWS = 32_768


@dataclass(frozen=True)
class HubAddress:
    """hf:ORGANIZATION/NAME[/CONFIG][@SPLIT], hf:NAME[@SPLIT] or [hf:]FOLDER[@SPLIT]."""

    name: str  # or the folder
    config: str | None
    split: str  # empty: the one that there is, or train
    is_folder: bool

    @classmethod
    def parse(cls, address: str) -> HubAddress:
        """Raises ValueError if the address is malformed, or names a folder that is none of save_to_disk."""
        name, split = _name_and_split(address)
        if is_saved_folder(name):
            return cls(name, None, split, True)
        names = name.split("/")
        if name.startswith((".", "/", "~")) or (name and os.path.isdir(name)):
            raise ValueError(f"{name} is no folder that Dataset.save_to_disk wrote")
        if len(names) > 3 or not all(names):
            raise ValueError(f"expected {_SYNTAX}")
        return cls("/".join(names[:2]), names[2] if len(names) == 3 else None, split, False)


def _name_and_split(address: str) -> tuple[str, str]:
    """The name or folder in an address, and the split, empty if none is named; a folder may have @ in its path."""
    path = os.path.expanduser(address.removeprefix(HUB))
    name, mark, split = path.rpartition("@")
    return (name, split) if mark and "/" not in split and not is_saved_folder(path) else (path, "")


def is_saved_folder(address: str) -> bool:
    """Returns whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
    return "://" not in address and any(os.path.isfile(os.path.join(address, name)) for name in _SAVED)


class HubSource(StoredSource):
    """A Hugging Face data set, by its name or in a folder."""

    def check(self, address: str, data: DataConfig, setting: str) -> None:
        """Raises ConfigError if the address is malformed, the package `datasets` is missing, or the data set has to be
        downloaded and the hub does not answer.

        A data set is opened later: importing the package takes seconds.
        """
        parsed = self._parse(address, setting)
        if not parsed.is_folder and not _is_cached(parsed.name):
            _check_hub(f"{setting} {address}")

    def _parse(self, address: str, setting: str) -> HubAddress:
        try:
            parsed = HubAddress.parse(address)
        except ValueError as error:
            raise ConfigError(f"{setting} {address}: {error}") from None
        if not importlib.util.find_spec("datasets"):
            raise ConfigError(f"{setting} {address}: needs the package datasets: pip install 'rlx[hf]'")
        return parsed

    def resolve(self, address: str) -> str:
        """Returns the address with an absolute path if it names a folder."""
        name, split = _name_and_split(address)
        return f"{HUB}{Path(name).resolve()}{split and f'@{split}'}" if is_saved_folder(name) else address

    def reading(self, address: str, columns: Columns, setting: str) -> Reading:
        parsed = self._parse(address, setting)
        try:
            rows = _load(parsed)
        except Exception as error:  # of the network, the hub, or a damaged folder
            is_empty = parsed.is_folder and isinstance(error, IndexError)  # as datasets reads one without rows
            raise ConfigError(f"{setting} {address}: {NO_ROWS if is_empty else one_line(error, 500)}") from None
        try:
            wanted = columns.roots(rows.column_names)
        except ColumnError as error:
            raise ConfigError(f"{setting} {address}: {error}") from None
        if not len(rows):
            raise ConfigError(f"{setting} {address}: {NO_ROWS}")
        rows = rows.select_columns(wanted).with_format("arrow")
        pieces = [(start, min(start + _PIECE_ROWS, len(rows))) for start in range(0, len(rows), _PIECE_ROWS)]
        return Reading(pieces, _SliceReader(rows, columns), here=True)


@dataclass(frozen=True)
class _SliceReader:
    """Reads rows of a data set, in a task; what is pickled of a data set are the names of its files."""

    rows: Any  # datasets.Dataset
    columns: Columns

    def __call__(self, piece: tuple[int, int]) -> Iterator[pa.Table]:
        yield from parsers.as_tables(parsers.table_rows(self.rows[slice(*piece)], self.columns, piece[0]))


def _is_cached(name: str) -> bool:
    """Whether the package `datasets` has downloaded something of this name before."""
    from huggingface_hub import constants

    cache = os.environ.get("HF_DATASETS_CACHE") or f"{constants.HF_HOME}/datasets"
    return Path(cache, name.replace("/", "___")).exists()


def _check_hub(what: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{what}: it is not in the cache of the package datasets, and HF_HUB_OFFLINE is set")
    if reason := why_silent(constants.ENDPOINT):
        raise ConfigError(f"{what}: the Hugging Face hub does not answer ({reason})")


@functools.cache
def _load(address: HubAddress) -> Any:
    """Returns a data set as a `datasets.Dataset`; downloads it unless it is on this machine."""
    import datasets

    datasets.disable_progress_bars()
    if not address.is_folder:
        return datasets.load_dataset(address.name, address.config, split=address.split or "train")
    loaded = datasets.load_from_disk(address.name)
    if isinstance(loaded, datasets.Dataset):
        recorded = str(loaded.split or "").partition("[")[0]  # a part has the name of its whole
        if recorded and address.split not in ("", recorded, str(loaded.split)):
            says = "%s: the folder has one split alone, and says %r, not %r"
            _LOG.warning(says, address.name, recorded, address.split)
        return loaded
    split = address.split or "train"
    if split not in loaded:
        raise ValueError(f"no split {split!r}, it has {', '.join(loaded)}{nearest(split, list(loaded))}")
    return loaded[split]
