"""What a storage has of runs and their checkpoints, as tables, and the commands that go on from there.

Everything is read from the folders themselves, so it needs no tracking store and neither torch nor Ray. A checkpoint is
whole here if its manifest is, and its files have the sizes that this says; their bytes are checked by what reads them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs
from rich import box
from rich.table import Table

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.config.sections import DEFAULT_METRIC
from rlx.runs import run_folder
from rlx.runs.run_folder import finished, saved_config
from rlx.storage import checkpoint_catalog, checkpoint_manifest
from rlx.storage.addresses import join_address, open_storage, resolve_address
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import Storage
from rlx.tracking.console import table_text

WATCHED = ("reward/mean", "eval/accuracy", "kl/ref")
_NUMBERS = {"steps", "size", "step", "ranks"}  # columns that are right-aligned, beside the metrics'


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint folder, and what the filesystem tells of it."""

    entry: CheckpointEntry
    bytes: int  # of all its files
    written: float | None  # when it became whole, in seconds since the epoch, if the filesystem knows


@dataclass(frozen=True)
class StoredRun:
    """A run as it lies on a storage."""

    called: str  # what scripts know it by: its name, or its address if it is not among the storage's own runs
    address: str
    folder: Storage
    config: RunConfig | None  # None if it cannot be read
    problem: str  # why not
    done: int  # steps
    checkpoints: tuple[StoredCheckpoint, ...]  # oldest first, also those that are not whole

    @property
    def whole(self) -> list[CheckpointEntry]:
        return [one.entry for one in self.checkpoints if one.entry.manifest]

    @property
    def newest(self) -> CheckpointEntry | None:
        return self.whole[-1] if self.whole else None

    @property
    def best_by(self) -> str:
        return (self.config.checkpoint.best_by if self.config else None) or DEFAULT_METRIC

    @property
    def best(self) -> CheckpointEntry | None:
        return checkpoint_catalog.best_checkpoint(
            self.whole, self.best_by, self.config.checkpoint.best_mode if self.config else "max"
        )

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.checkpoints)


def runs(storage: str) -> list[StoredRun]:
    """The runs of a storage, then the trials of its sweeps, each in the order of their names."""
    place = open_storage(storage, create=False)
    own = [_read(name, join_address(storage, "runs", name)) for name in (place / "runs").names()]
    trials = []
    for sweep in (place / "sweeps").names():
        for trial in (place / "sweeps" / sweep / "runs").names():
            address = join_address(storage, "sweeps", sweep, "runs", trial)
            trials.append(_read(_from_here(address), address))
    return [run for run in (*own, *trials) if run_folder.exists(run.folder)]


def find_run(which: str, storage: str) -> StoredRun:
    """A run by its name, or by its folder or address; ConfigError if there is none, with the nearest name."""
    if "/" not in which:
        run_folder.find(open_storage(storage, create=False) / "runs", which)
        return _read(which, join_address(storage, "runs", which))
    run = _read(_from_here(resolve_address(which)), resolve_address(which))
    if not run_folder.exists(run.folder):
        raise ConfigError(f"no run in {run.folder.path}")
    return run


def runs_table(found: Sequence[StoredRun], width: int | None = None) -> str:
    """One row per run: steps done of how many, its newest and its best checkpoint, what all of them take."""
    rows = [
        {
            "run": run.called,
            "steps": f"{run.done}/{run.config.train.steps if run.config else '?'}",
            "newest": _name(run.newest),
            "best": _name(run.best),
            "size": readable_size(run.bytes),
            "problem": run.problem or _not_whole(run),
        }
        for run in found
    ]
    return _table(rows, width)


def checkpoints_table(run: StoredRun, width: int | None = None) -> str:
    """One row per checkpoint: step, when written, size, ranks, metrics, and whether it is whole or what is wrong."""
    watched = tuple(dict.fromkeys([*WATCHED, run.best_by]))
    shown = [name for name in watched if any(one.metric(name) is not None for one in run.whole)]
    rows = []
    for one in run.checkpoints:
        entry, manifest = one.entry, one.entry.manifest
        marks = [word for word, top in (("newest", run.newest), ("best", run.best)) if top and top.name == entry.name]
        row = {"step": str(entry.step), "written": _when(one.written), "size": readable_size(one.bytes)}
        row["ranks"] = str(manifest.ranks) if manifest else "-"
        row |= {name: _number(entry.metric(name)) for name in shown}
        rows.append(row | {"state": entry.problem or "whole", "which": ", ".join(marks)})
    return _table(rows, width)


def commands(run: StoredRun, storage: str) -> list[str]:
    """The command lines that go on from a run: resume it, start another from its best checkpoint, export that.

    Args:
        storage: where a run that is called by its name lies, as a person writes it.
    """
    by_name = "/" not in run.called
    where = ["--storage", storage] if by_name and storage != RunConfig().storage else []
    lines = []
    if by_name and run.config:
        # One that has done all its steps goes on if it is given more.
        more = ["--train.steps", str(2 * run.done)] if run.done >= run.config.train.steps else []
        lines.append(["ppo.py", "--resume", run.called, *more, *where])
    if run.newest:
        step = "best" if run.best else "newest"
        start = (
            f"{run.called}@{step}"
            if "://" not in run.called
            else join_address(run.address, (run.best or run.newest).name)
        )
        export = [run.called, "--checkpoint", step] if "://" not in run.called else [start]
        lines += [["ppo.py", "--from", start, *where], ["export.py", *export, *where]]
    return [shlex.join(["python", f"experiments/{script}", *words]) for script, *words in lines]


def readable_size(count: int) -> str:
    """A number of bytes: 512 B, 14.2 MiB."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _read(called: str, address: str) -> StoredRun:
    folder = open_storage(address, create=False)
    config, problem, done = None, "", 0
    try:
        config = from_tree(saved_config(folder), f"{folder.path}/config.yaml")
        last = finished(config, folder)
        done = last["step"] if last else 0
    except ConfigError as error:
        problem = str(error)
    found = tuple(_described(entry) for entry in checkpoint_catalog.list_checkpoints(folder))
    steps = [one.entry.step for one in found if one.entry.manifest]
    return StoredRun(called, address, folder, config, problem, max([done, *steps]), found)


def _described(entry: CheckpointEntry) -> StoredCheckpoint:
    selector = fs.FileSelector(entry.folder.path, recursive=True, allow_not_found=True)
    try:
        files = [info for info in entry.folder.filesystem.get_file_info(selector) if info.is_file]
    except NotADirectoryError:  # a file called like a checkpoint
        files = []
    written = next((info.mtime for info in files if info.base_name == checkpoint_manifest.MANIFEST), None)
    return StoredCheckpoint(entry, sum(info.size for info in files), written.timestamp() if written else None)


def _from_here(address: str) -> str:
    """An address as it is shortest to type: a folder below the working directory by its relative path, unless that
    would look like a run's name."""
    path, here = Path(address), Path.cwd()
    near = "://" not in address and path.is_relative_to(here) and path.parent != here
    return str(path.relative_to(here)) if near else address


def _not_whole(run: StoredRun) -> str:
    count = len(run.checkpoints) - len(run.whole)
    return f"{count} of {len(run.checkpoints)} checkpoints not whole" if count else ""


def _name(entry: CheckpointEntry | None) -> str:
    return entry.name if entry else "-"


def _when(written: float | None) -> str:
    return "-" if written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(written))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(rows: Sequence[dict[str, Any]], width: int | None) -> str:
    """Rows as text that is Markdown, too, unless folding it to a terminal's width breaks its cells; a column that is
    empty in all of them is left out."""
    shown = Table(box=box.MARKDOWN)
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in columns:
        number = name in _NUMBERS or "/" in name
        shown.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(row[name] for name in columns))
    return table_text(shown, width or 10_000)
