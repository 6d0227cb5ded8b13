"""Lists the runs of a storage, or one run's checkpoints: rlx checkpoints [RUN] [--storage ADDRESS]

Everything is read from the folders, so neither a tracking store nor torch nor Ray is needed. A checkpoint counts as
complete if its manifest is valid and its files have the sizes that the manifest says.
Left out: the checksums of the files, which are verified when a checkpoint is loaded.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pyarrow import fs
from rich import box
from rich.table import Table

from rlx.cli.arguments import add_storage, terminal_width
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError, where_looked
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig, storage_words, valid_name
from rlx.config.sweep import DEFAULT_METRIC
from rlx.runs import run_folder
from rlx.runs.run_folder import finished_metrics, saved_config
from rlx.storage import checkpoint_catalog, checkpoint_manifest
from rlx.storage.addresses import join_address, open_storage, resolve_address, without_options
from rlx.storage.checkpoint_catalog import CheckpointEntry, CheckpointState
from rlx.storage.filesystem import Storage, StorageError, explain
from rlx.tracking.console import table_text

LISTED_METRICS = ("reward/mean", DEFAULT_METRIC, "kl/ref")
_NUMBER_COLUMNS = {"steps", "size", "step", "ranks"}  # right-aligned, as the metrics are


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        description="Lists the runs of a storage; with RUN, its checkpoints and how to continue from them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="?", type=run_argument, help="a run's name, or its folder or address"
    )
    add_storage(parser)
    args = parser.parse_args(argv)
    return exit_code(lambda: show_run(args.run, args.storage) if args.run else show_runs(args.storage))


def show_runs(storage: str) -> int:
    """Prints a row per run.

    Raises:
        ConfigError: there is no folder at the address, which is not the default.
    """
    stored = runs(storage)
    if not stored:
        if storage != RunConfig().storage and not open_storage(storage, create=False).exists():
            raise ConfigError(f"--storage {storage}: no such folder{where_looked(storage)}")
        print(f"no runs in {resolve_address(storage)} yet: rlx train makes one")
        return 0
    print(runs_table(stored, terminal_width()))
    print("\ncheckpoints of one of them: rlx checkpoints RUN")
    return 0


def show_run(which: str, storage: str) -> int:
    """Prints a row per checkpoint of a run, the run's address, and the commands that continue from it."""
    run = find_run(which, storage)
    steps = f"{run.steps_done} of {run.config.train.steps} steps done" if run.config else run.problem
    print(f"run {run.label}: {steps}\n")
    print(checkpoints_table(run, terminal_width()) if run.checkpoints else "no checkpoints yet")
    print("\n" + "\n".join([f"in {run.address}", *commands(run, storage)]))
    return 0


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint folder, and what the filesystem knows of it."""

    entry: CheckpointEntry
    bytes: int  # of all its files
    written: float | None  # when it was completed, in seconds since the epoch; None: the filesystem does not know


@dataclass(frozen=True)
class StoredRun:
    """A run on a storage."""

    label: str  # what scripts take: its name, or its address if it is not among the storage's own runs
    address: str
    folder: Storage
    config: RunConfig | None  # None if it cannot be read
    problem: str  # why it cannot be read
    steps_done: int
    checkpoints: tuple[StoredCheckpoint, ...]  # oldest first; some may not be complete

    @property
    def complete(self) -> list[CheckpointEntry]:
        return [checkpoint.entry for checkpoint in self.checkpoints if checkpoint.entry.manifest]

    @property
    def newest(self) -> CheckpointEntry | None:
        return self.complete[-1] if self.complete else None

    @property
    def best_by(self) -> str:
        return (self.config.checkpoint.best_by if self.config else None) or DEFAULT_METRIC

    @cached_property
    def best(self) -> CheckpointEntry | None:
        """What NAME@best gives; None if that is refused, e.g. because a damaged one may be it."""
        mode = self.config.checkpoint.best_mode if self.config else "max"
        entries = [checkpoint.entry for checkpoint in self.checkpoints]
        try:
            return checkpoint_catalog.whole_best(self.folder, entries, self.best_by, mode)
        except StorageError:
            return None

    @property
    def bytes(self) -> int:
        return sum(checkpoint.bytes for checkpoint in self.checkpoints)


def runs(storage: str) -> list[StoredRun]:
    """Returns the runs of a storage, then the trials of its sweeps, each sorted by name.

    A run or sweep that cannot be read is one of them, with its problem.
    """
    root = open_storage(storage, create=False)
    found = [_read(name, join_address(storage, "runs", name)) for name in (root / "runs").names()]
    for sweep in (root / "sweeps").names():
        found += _trials(join_address(storage, "sweeps", sweep))
    return [run for run in found if run]


def find_run(which: str, storage: str) -> StoredRun:
    """Returns a run by its name, or by its folder or address.

    Raises:
        ConfigError: there is no such run; the text has the nearest name, or says what the folder is.
    """
    address, folder = run_folder.locate(which, storage)
    return _stored_run(_shortest(address) if "/" in which else which, address, folder)


def run_of(which: str) -> str:
    """Returns the run that a text names, itself or by a checkpoint: NAME@STEP, or the folder or address of one."""
    if "@" in which.rpartition("/")[2]:
        return which.rpartition("@")[0]
    address = without_options(which)
    run, _, name = address.rstrip("/").rpartition("/")
    return run + which[len(address) :] if run and checkpoint_catalog.is_checkpoint_name(name) else which


def run_argument(text: str) -> str:
    """The value of an argument that names a run, for argparse; what is a checkpoint ends the command with one line."""
    if (run := run_of(text)) != text:
        print(f"error: {text} is a checkpoint; give the run: {run}", file=sys.stderr)
        sys.exit(2)  # argparse would name the argument, and end with a word on all options
    return text


def runs_table(stored: Sequence[StoredRun], width: int | None = None) -> str:
    """Returns a table with a row per run: steps done, newest and best checkpoint, size of all checkpoints."""
    rows = [
        {
            "run": run.label,
            "steps": f"{run.steps_done}/{run.config.train.steps if run.config else '?'}",
            "newest": _name(run.newest),
            "best": _name(run.best),
            "size": readable_size(run.bytes),
            "problem": run.problem or _incomplete(run),
        }
        for run in stored
    ]
    return markdown_table(rows, width)


def checkpoints_table(run: StoredRun, width: int | None = None) -> str:
    """Returns a table with a row per checkpoint: step, when written, size, ranks, metrics, state, newest or best."""
    watched = tuple(dict.fromkeys([*LISTED_METRICS, run.best_by]))
    metrics = [name for name in watched if any(entry.metric(name) is not None for entry in run.complete)]
    return markdown_table([_checkpoint_row(run, checkpoint, metrics) for checkpoint in run.checkpoints], width)


def _checkpoint_row(run: StoredRun, checkpoint: StoredCheckpoint, metrics: Sequence[str]) -> dict[str, str]:
    entry, named = checkpoint.entry, (("newest", run.newest), ("best", run.best))
    marks = [mark for mark, other in named if other and other.name == entry.name]
    return {
        "step": str(entry.step),
        "written": _when(checkpoint.written),
        "size": readable_size(checkpoint.bytes),
        "ranks": str(entry.manifest.ranks) if entry.manifest else "-",
        **{name: _number(entry.metric(name)) for name in metrics},
        "state": entry.problem or "complete",
        "which": ", ".join(marks),
    }


def commands(run: StoredRun, storage: str) -> list[str]:
    """Returns the command lines that continue from a run: resume it, start another from its best checkpoint, export it.

    Args:
        storage: the storage of a run that is known by its name, as a person writes it.
    """
    by_name = "/" not in run.label
    options = storage_words(storage) if by_name else []
    lines = []
    if by_name and run.config and run.label == valid_name(run.label):  # a folder that was renamed may not go on
        # A run that has done all its steps continues if it is given more.
        more = ["--train.steps", str(2 * run.steps_done)] if run.steps_done >= run.config.train.steps else []
        lines.append(["train", "--resume", run.label, *more, *options])
    if checkpoint := run.best or run.newest:
        step = "best" if run.best else "newest"
        is_uri = "://" in run.label
        start = join_address(run.address, checkpoint.name) if is_uri else f"{run.label}@{step}"
        export = [start] if is_uri else [run.label, "--checkpoint", step]
        lines += [["train", "--from", start, *options], ["export", *export, *options]]
    return [shlex.join(["rlx", *words]) for words in lines]


def readable_size(count: int) -> str:
    """Returns a number of bytes as 512 B, 14.2 MiB and the like."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _trials(sweep: str) -> list[StoredRun | None]:
    """The runs of a sweep, by its address."""
    folder = open_storage(join_address(sweep, "runs"), create=False)
    try:
        addresses = [join_address(sweep, "runs", name) for name in folder.names()]
    except NotADirectoryError:  # a file among the sweeps
        return []
    except OSError as error:
        return [_unreadable(_shortest(sweep), sweep, folder, error)]
    return [_read(_shortest(address), address) for address in addresses]


def _read(label: str, address: str) -> StoredRun | None:
    """The run at an address; None if there is none."""
    folder = open_storage(address, create=False)
    try:
        return _stored_run(label, address, folder) if run_folder.holds_run(folder) else None
    except OSError as error:
        return _unreadable(label, address, folder, error)


def _unreadable(label: str, address: str, folder: Storage, error: OSError) -> StoredRun:
    return StoredRun(label, address, folder, None, explain(error), 0, ())


def _stored_run(label: str, address: str, folder: Storage) -> StoredRun:
    config, problem, steps_done = None, "", 0
    try:
        config = from_tree(saved_config(folder), f"{folder}/config.yaml")
        last = finished_metrics(folder, config.train.steps)
        steps_done = last["step"] if last else 0
    except ConfigError as error:
        problem = str(error)
    checkpoints = tuple(_with_size(entry) for entry in checkpoint_catalog.described_checkpoints(folder))
    saved_steps = [checkpoint.entry.step for checkpoint in checkpoints if checkpoint.entry.manifest]
    return StoredRun(label, address, folder, config, problem, max([steps_done, *saved_steps]), checkpoints)


def _with_size(entry: CheckpointEntry) -> StoredCheckpoint:
    selector = fs.FileSelector(entry.folder.path, recursive=True, allow_not_found=True)
    try:
        files = [info for info in entry.folder.filesystem.get_file_info(selector) if info.is_file]
    except OSError:  # a file with the name of a checkpoint, or a folder that cannot be read
        files = []
    written = next((info.mtime for info in files if info.base_name == checkpoint_manifest.MANIFEST), None)
    return StoredCheckpoint(entry, sum(info.size for info in files), written.timestamp() if written else None)


def _shortest(address: str) -> str:
    """Returns an address in its shortest form: a folder below the working directory by its relative path, unless that
    would look like a run's name."""
    path, working_directory = Path(address), Path.cwd()
    is_below = "://" not in address and path.is_relative_to(working_directory) and path.parent != working_directory
    return str(path.relative_to(working_directory)) if is_below else address


def _incomplete(run: StoredRun) -> str:
    states = {checkpoint.entry.state: checkpoint.entry.problem for checkpoint in run.checkpoints}
    if problem := states.get(CheckpointState.UNREADABLE):
        return problem
    count = len(run.checkpoints) - len(run.complete)
    return f"{count} of {len(run.checkpoints)} checkpoints not complete" if count else ""


def _name(entry: CheckpointEntry | None) -> str:
    return entry.name if entry else "-"


def _when(written: float | None) -> str:
    return "-" if written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(written))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def markdown_table(
    rows: Sequence[dict[str, Any]], width: int | None, numbers: Collection[str] = _NUMBER_COLUMNS
) -> str:
    """Returns rows as a Markdown table, folded to a terminal's width, without columns that are empty in all rows.

    Args:
        numbers: columns that are right-aligned, as those of metrics are.
    """
    table = Table(box=box.MARKDOWN)
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in columns:
        is_number = name in numbers or "/" in name
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table_text(table, width or 10_000)
