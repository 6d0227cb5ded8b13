"""Writes checkpoints while training goes on: a thread writes, verifies and uploads copies that lie in main memory.

One checkpoint at a time, and all ranks together: each rank writes its own file, all ranks exchange sizes and checksums,
rank 0 writes the manifest and deletes old checkpoints. An operation that fails on the storage is repeated; a failure
that lasts is raised on every rank, by the next call; old checkpoints that cannot be deleted are only reported.
Left out: the content of the files (checkpoint_files.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlx.storage import checkpoint_catalog, checkpoint_files
from rlx.storage.checkpoint_catalog import CheckpointEntry, CheckpointState, Retention
from rlx.storage.checkpoint_files import Shard
from rlx.storage.checkpoint_manifest import MANIFEST, FileRecord, Manifest
from rlx.storage.filesystem import Storage, StorageError, retry, upload_file
from rlx.storage.rank_group import RankGroup, error_text
from rlx.types import Notify

_WRITE_TIMEOUT_S = 3600.0  # a file system that hangs raises no error
_TEMPORARY = "rlx-checkpoint-"


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A complete checkpoint on the storage."""

    folder: Storage
    seconds: float  # that writing took, while training continued
    metrics: Mapping[str, float]  # of its own step, with the newest evaluation and "step"
    problem: str = ""  # why older checkpoints could not be deleted, the first time


@dataclass(frozen=True)
class _FileOutcome:
    """The result of writing or reading one rank's part of a checkpoint; sent to the other ranks."""

    name: str = ""
    record: FileRecord | None = None
    damage: str = ""
    error: str = ""


class CheckpointWriter:
    """One rank's part in writing the checkpoints of a run.

    The constructor, `save`, `newest_checkpoint`, `verified_checkpoint` and `close` are collective: every rank calls
    them in the same order. `wait`, `has_finished` and `finished_checkpoint` look at this rank's thread alone.
    """

    def __init__(self, run: Storage, retention: Retention, settle: Callable[[], object] | None = None) -> None:
        """Collective. Also deletes the temporary files of killed processes on this machine.

        Args:
            run: folder of the run, which holds its checkpoints.
            settle: called in the thread before a checkpoint becomes complete: waits for what else it needs there.
        """
        self.run = run
        self.retention = retention
        self._settle = settle
        self._ranks = RankGroup()
        self._thread = ThreadPoolExecutor(1, "checkpoint-writer")
        self._writing: Future[FinishedCheckpoint] | None = None
        self._finished: list[FinishedCheckpoint] = []  # not taken yet, oldest first
        self._cannot_prune = False
        _delete_leftovers()

    def save(self, shards: Mapping[str, Shard], manifest: Manifest) -> None:
        """Waits until the previous checkpoint is written, then begins to write this one and returns. Collective.

        Args:
            shards: this rank's tensors by key; nobody may write into them afterwards.
            manifest: without `files`; the one of rank 0 is written.

        Raises:
            StorageError: the previous checkpoint could not be written.
        """
        self.wait()
        self._writing = self._thread.submit(self._write, shards, manifest)

    def wait(self) -> None:
        """Returns when this rank's thread is not writing a checkpoint.

        Raises:
            StorageError: it could not be written, or is not written after an hour.
        """
        if self._writing:
            writing, self._writing = self._writing, None
            try:
                self._finished.append(writing.result(_WRITE_TIMEOUT_S))
            except TimeoutError:
                raise StorageError(f"{self.run}: a checkpoint is not written after {_WRITE_TIMEOUT_S:.0f} s") from None

    def has_finished(self) -> bool:
        """Whether `finished_checkpoint` has something to return or to raise."""
        return bool(self._finished) or (self._writing is not None and self._writing.done())

    def finished_checkpoint(self) -> FinishedCheckpoint | None:
        """Returns the oldest checkpoint that has been completed and not returned yet, None if there is none.

        Raises:
            StorageError: it could not be written.
        """
        if self._writing and self._writing.done():
            self.wait()
        return self._finished.pop(0) if self._finished else None

    def close(self) -> None:
        """Waits for the checkpoint that is being written, then ends the thread and the process group. Collective."""
        self._thread.shutdown()
        self._ranks.close()

    def newest_checkpoint(self, notify: Notify) -> CheckpointEntry | None:
        """Returns the newest undamaged checkpoint of the run, None if there is none. Collective.

        Each rank verifies the checksums of a share of the files. Damaged checkpoints are set aside, and rank 0 calls
        `notify` for each.

        Raises:
            StorageError: the storage cannot be read, or all checkpoints are damaged. A start from the first
                step would overwrite them.
        """
        entries = self._ranks.on_first(partial(checkpoint_catalog.list_checkpoints, self.run), f"reading {self.run}")
        damage = ""
        for listed in reversed(entries):
            if listed.state in (CheckpointState.UNFINISHED, CheckpointState.SET_ASIDE):
                continue
            entry = self._read_again(listed)
            if not (new_damage := self._find_damage(entry)):
                return entry
            damage = new_damage
            self._ranks.on_first(partial(checkpoint_catalog.set_aside, entry), f"setting {entry.name} aside")
            if self._ranks.rank == 0:
                notify(f"{damage}; it is set aside, and the checkpoint before it is used")
        set_aside = [entry for entry in entries if entry.state is CheckpointState.SET_ASIDE]
        if set_aside and not damage:
            damage = f"checkpoint {set_aside[0].name}: {set_aside[0].problem}"
        if damage:
            raise StorageError(f"no checkpoint in {self.run} is complete; the oldest: {damage}")
        return None

    def verified_checkpoint(self, folder: Storage) -> CheckpointEntry:
        """Returns the checkpoint in a folder, of any run, after its every byte has been verified. Collective.

        Raises:
            StorageError: it cannot be read, is not complete or is damaged.
        """
        entry = self._ranks.on_first(partial(checkpoint_catalog.read_checkpoint, folder), f"reading {folder}")
        if damage := self._find_damage(entry):
            raise StorageError(f"{folder}: {damage}")
        return entry

    def _read_again(self, entry: CheckpointEntry) -> CheckpointEntry:
        """Reads a damaged checkpoint again, after a while."""
        if entry.manifest:
            return entry
        time.sleep(checkpoint_catalog.SECOND_READ_S)
        read = partial(checkpoint_catalog.read_checkpoint, entry.folder)
        return self._ranks.on_first(read, f"reading {entry.folder}")

    def _find_damage(self, entry: CheckpointEntry) -> str:
        """Returns the damage to the files of a checkpoint, the same text on all ranks; "" if there is none."""
        if not entry.manifest:
            return f"checkpoint {entry.name}: {entry.problem}"
        share = sorted(entry.manifest.files)[self._ranks.rank :: self._ranks.size]
        outcome = _FileOutcome()
        try:
            retry(partial(checkpoint_catalog.verify, entry, share), f"reading checkpoint {entry.name}")
        except checkpoint_catalog.DamagedError as error:
            outcome = _FileOutcome(damage=str(error))
        except Exception as error:  # the other ranks wait, so they must learn of any failure
            outcome = _FileOutcome(error=str(error))
        outcomes = self._ranks.gather(outcome)
        if error_of_first := next((each.error for each in outcomes if each.error), ""):
            raise StorageError(error_of_first)
        return next((each.damage for each in outcomes if each.damage), "")

    def _write(self, shards: Mapping[str, Shard], manifest: Manifest) -> FinishedCheckpoint:
        """Writes a checkpoint; runs in the thread of every rank."""
        started = time.monotonic()
        folder = self.run / checkpoint_catalog.checkpoint_name(manifest.step)
        what = f"writing checkpoint {folder.name} to {self.run}"
        # The manifest of an earlier checkpoint of this step is deleted before its files change.
        self._ranks.on_first((folder / MANIFEST).delete, what)
        outcome = _write_rank_file(shards, folder, self._ranks.rank, what)
        if self._settle:
            self._settle()
        outcomes = self._ranks.gather(outcome)
        try:
            if error_of_first := next((outcome.error for outcome in outcomes if outcome.error), ""):
                raise StorageError(error_of_first)
            files = {outcome.name: outcome.record for outcome in outcomes}
            complete = manifest.model_copy(update={"files": files})
            self._ranks.on_first(partial(checkpoint_catalog.commit, folder, complete), what)
            self._ranks.on_first(partial(checkpoint_catalog.mark_saved, self.run), what)
        except StorageError as error:
            raise StorageError(str(error) + self._discard(folder)) from error
        metrics = {**manifest.metrics, **manifest.evaluation, "step": manifest.step}
        problem = _prune(self._ranks, self.run, self.retention)
        news, self._cannot_prune = "" if self._cannot_prune else problem, bool(problem)
        return FinishedCheckpoint(folder, time.monotonic() - started, metrics, news)

    def _discard(self, folder: Storage) -> str:
        """Deletes a half-written checkpoint; returns the end of an error's text: which checkpoint is the newest."""
        try:
            if self._ranks.rank == 0 and not (folder / MANIFEST).exists():
                folder.delete()
            left = checkpoint_catalog.complete_checkpoints(self.run)
        except OSError:
            return "; earlier checkpoints are unchanged"
        return f"; the newest complete checkpoint is {left[-1].name}" if left else "; there is no earlier checkpoint"


def _prune(ranks: RankGroup, run: Storage, retention: Retention) -> str:
    """Deletes old checkpoints. Returns why it cannot; the next checkpoint tries again."""
    try:
        ranks.on_first(partial(checkpoint_catalog.prune, run, retention), f"pruning {run}")
    except StorageError as error:
        return str(error)
    return ""


def _write_rank_file(shards: Mapping[str, Shard], folder: Storage, rank: int, what: str) -> _FileOutcome:
    """Writes this rank's file, with repeated attempts. It raises nothing: the other ranks must learn of any failure."""
    file = folder / f"rank_{rank:05d}.safetensors"
    try:
        return _FileOutcome(file.name, retry(partial(_write_file, shards, file), what))
    except Exception as error:
        return _FileOutcome(file.name, error=error_text(error))


def _write_file(shards: Mapping[str, Shard], file: Storage) -> FileRecord:
    """Writes shards to a local file, or through a temporary local file to a remote one."""
    if file.is_local:
        checkpoint_files.write_shards(shards, Path(file.path))
        return checkpoint_catalog.file_record(file)
    with tempfile.TemporaryDirectory(prefix=f"{_TEMPORARY}{os.getpid()}-") as temporary:
        local = Path(temporary, file.name)
        checkpoint_files.write_shards(shards, local)
        record = checkpoint_catalog.file_record(Storage.local(local))
        upload_file(local, file)
    if file.size() != record.bytes:
        raise OSError(f"{file} has {file.size()} bytes after the upload of {record.bytes}")
    return record


def _delete_leftovers() -> None:
    """Deletes the temporary files of processes on this machine that were killed while they wrote."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*-*"):
        process = folder.name.removeprefix(_TEMPORARY).partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
