"""Writes a rank's completions from a thread of its own: training hands them over and goes on.

A full disk or a slow mount ends no run: what could not be written is counted, and said in one line. Left out: the
columns of a file (columns.py).
"""

from __future__ import annotations

import copy
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlx.config.errors import one_line
from rlx.samples.columns import (
    COMPLETIONS,
    REDONE,
    CompletionFile,
    Kind,
    StepCompletions,
    as_table,
    is_kept,
)
from rlx.samples.evaluations import EVALUATIONS, EvaluationFile
from rlx.samples.token_texts import TokenTexts
from rlx.storage.filesystem import Storage, StorageError, retry, write_bytes
from rlx.types import Notify

MAX_WAITING = 4
"""steps that wait to be written, of a storage that is slower than training; what comes then is left out"""
_RESERVED_SHARE, _RESERVED_BYTES = 0.05, 50 << 30  # of a disk, the smaller of the two: checkpoints need it more
_REPEATED = ("kind", "question", "expected", "prompt", "finish", "token_ids", "tokens")
_FLOATS = ("engine_logprobs", "logprobs", "ratios", "advantages")


@dataclass(frozen=True)
class Keeping:
    """Which completions a rank keeps."""

    share: float  # of the prompts
    seed: int
    rank: int  # among those that have completions of their own
    ranks: int
    metadata: Mapping[bytes, bytes] = field(default_factory=dict)  # of its files, see `made_with`

    def part(self, step: StepCompletions) -> StepCompletions:
        """The completions of the prompts that are kept. Each evaluation keeps the same prompts."""
        if self.share >= 1:
            return step
        number = step.step if step.kind == Kind.TRAINING else 0
        groups = {row.completion.prompt.id for row in step.rows}
        kept = {group for group in groups if is_kept(self.share, self.seed, number, group)}
        chosen = [i for i, row in enumerate(step.rows) if row.completion.prompt.id in kept]
        return replace(step, rows=[step.rows[i] for i in chosen], trained=step.trained and step.trained.rows(chosen))


class CompletionWriter:
    """One rank's completions on their way to the run's folder. All calls but `wait` and `close` return at once.

    Args:
        run: the folder of the run.
        tokenizer: of the model; it is copied.
        notify: called from the thread with a message when completions are lost, and when they are kept again.
    """

    def __init__(self, run: Storage, keeping: Keeping, tokenizer: Any, notify: Notify) -> None:
        self.folder, self.keeping = run / COMPLETIONS, keeping
        self.lost: list[int] = []  # steps whose completions were not kept
        self._tokenizer, self._notify, self._in_trouble = tokenizer, notify, False
        self._waiting: deque[StepCompletions] = deque()  # the first is being written
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def keep(self, step: StepCompletions) -> None:
        """Has a step's completions written, those of its share of the prompts; nobody may change them afterwards."""
        step = self.keeping.part(step)
        with self._changed:
            is_full = len(self._waiting) >= MAX_WAITING
            if not is_full:
                self._waiting.append(step)
                self._changed.notify_all()
        if is_full:
            self._lose(step.step, "the storage is slower than training")
        elif self._thread is None:
            texts = TokenTexts(copy.deepcopy(self._tokenizer))
            self._thread = threading.Thread(target=self._write_all, args=(texts,), name="completions", daemon=True)
            self._thread.start()

    def wait(self, patience_s: float = 60.0) -> bool:
        """Waits until what was handed over is written or lost; whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, patience_s)

    def close(self, patience_s: float = 10.0) -> None:
        """Waits for the rest, then gives up, and says which steps are missing. No other call may follow."""
        is_written = self.wait(patience_s)
        with self._changed:
            self._is_closed = True
            late = [step.step for step in self._waiting if not is_written]
            self._changed.notify_all()
        for number in late:
            self._lose(number, f"the storage has not taken them in {patience_s:.0f} s")
        if self.lost:
            self._notify(f"completions of {len(set(self.lost))} steps were not kept: {_spans(self.lost)}")

    def _write_all(self, texts: TokenTexts) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                step = self._waiting[0]
            try:
                self._write(step, texts)
                self._recover()
            except Exception as error:  # whatever it is, training goes on
                self._lose(step.step, one_line(error, 300))
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _write(self, step: StepCompletions, texts: TokenTexts) -> None:
        """Writes one file.

        Raises:
            StorageError: the storage does not take it.
        """
        name = CompletionFile(step.step, step.kind, self.keeping.rank, self.keeping.ranks)
        file = self.folder / str(name)
        content = as_bytes(as_table(step, texts).replace_schema_metadata(dict(self.keeping.metadata)))
        check_reserve(self.folder, len(content))
        retry(partial(write_bytes, file, content), f"writing {file}")

    def _lose(self, step: int, reason: str) -> None:
        self.lost.append(step)
        if not self._in_trouble:
            self._in_trouble = True
            self._notify(f"completions of step {step} are not kept, training goes on: {reason}")

    def _recover(self) -> None:
        if self._in_trouble:
            self._in_trouble = False
            self._notify(f"completions are kept again; those of {len(set(self.lost))} steps are missing")


def discard_after(run: Storage, step: int, notify: Notify, sets_aside: bool = False) -> None:
    """Takes away what a killed run has left of steps after the checkpoint that it continues from.

    The steps are done again, perhaps on another number of ranks, whose files have other names.

    Args:
        sets_aside: completions go to the folder `REDONE`, also for a resume of the resume; else they are deleted.
    """
    left, redone = f"of steps after {step} are left from before", run / REDONE
    aside = redone if sets_aside else None
    _take_away(run / COMPLETIONS, CompletionFile.of, lambda of: of > step, f"{COMPLETIONS} {left}", notify, aside)
    _take_away(run / EVALUATIONS, EvaluationFile.of, lambda of: of > step, f"{EVALUATIONS} {left}", notify)
    if sets_aside:  # a checkpoint has what was set aside of earlier steps
        _take_away(redone, CompletionFile.of, lambda of: of <= step, REDONE, notify)


def _take_away(
    folder: Storage,
    file_of: Callable[[str], CompletionFile | EvaluationFile | None],
    is_useless: Callable[[int], bool],
    said: str,
    notify: Notify,
    aside: Storage | None = None,
) -> None:
    """Deletes the files of some steps, or moves them to another folder, and deletes what is half written.

    Args:
        file_of: reads a name; None: the file is another's, and stays.
        is_useless: whether files of this step are taken away.
        said: what an error is said of.
    """
    try:
        for name in retry(folder.names, f"reading {folder}"):
            file = file_of(name)
            is_chosen = file is not None and is_useless(file.step)
            if is_chosen and aside:
                retry(partial(_move, folder / name, aside), f"moving {name}")
            elif is_chosen or name.endswith(".part"):
                retry((folder / name).delete, f"deleting {name}")
    except StorageError as error:
        notify(f"{said}: {error}")


def _move(file: Storage, folder: Storage) -> None:
    file.filesystem.create_dir(folder.path)
    file.filesystem.move(file.path, (folder / file.name).path)


def as_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file."""
    stream = pa.BufferOutputStream()
    leaves = [name if name not in ("token_ids", "tokens") else f"{name}.list.element" for name in _REPEATED]
    pq.write_table(
        table,
        stream,
        compression="zstd",
        use_dictionary=leaves,
        use_byte_stream_split=[f"{name}.list.element" for name in _FLOATS],
    )
    return bytes(stream.getvalue().to_pybytes())


def check_reserve(folder: Storage, size: int) -> None:
    """Raises StorageError if so many bytes would fill a disk of this machine: checkpoints have to go there, too."""
    if not folder.is_local:
        return
    existing = next(path for path in (Path(folder.path), *Path(folder.path).parents) if path.exists())
    usage = shutil.disk_usage(existing)
    share = _RESERVED_SHARE * usage.total
    if usage.free - size < min(share, _RESERVED_BYTES):
        reserved = f"{_RESERVED_SHARE:.0%}" if share < _RESERVED_BYTES else f"{_RESERVED_BYTES >> 30} GiB"
        raise StorageError(f"less than {reserved} of the disk of {folder} would stay free")


def _spans(steps: list[int]) -> str:
    """Steps as text: 3, 5 to 7."""
    spans: list[list[int]] = []
    for step in sorted(set(steps)):
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
