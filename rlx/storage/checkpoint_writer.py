"""Checkpoints written beside training: copied to main memory at once, then written, checked and uploaded by a thread.

One at a time, in step on all ranks: each writes its own file, all exchange sizes and checksums, and rank 0 makes the
whole a checkpoint and deletes what need not be kept. What fails on the storage is tried again; what fails for good is
raised on every rank, by the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from rlx.storage import checkpoint_catalog
from rlx.storage import checkpoint_files
from rlx.storage import checkpoint_manifest
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.checkpoint_files import Shard
from rlx.storage.checkpoint_manifest import FileRecord
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.filesystem import Storage
from rlx.storage.filesystem import StorageError
from rlx.storage.filesystem import retry
from typing import TypeVar
from typing import cast
import os
import shutil
import tempfile
import time
import torch.distributed as dist



T = TypeVar("T")
_LONGEST_S = 3600.0  # that a checkpoint may take: a file system that hangs says nothing
_SECOND_LOOK_S = 2.0
_TEMPORARY = "rlx-checkpoint-"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep` (None: all) and the best by a metric, if one is named."""

    keep: int | None = None
    best_by: str | None = None
    best_mode: str = "max"


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A checkpoint that is whole and on the storage."""

    place: Storage
    seconds: float  # from the copy on, beside training


class CheckpointWriter:
    """One rank's part in writing a run's checkpoints; every rank makes the same calls in the same order."""

    def __init__(self, folder: Storage, retention: Retention) -> None:
        self.folder = folder
        self.retention = retention
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")  # its own: training's collectives run at the same time
        self._thread = ThreadPoolExecutor(1, "saver")
        _remove_leftovers()
        self._writing: Future[FinishedCheckpoint] | None = None
        self._news: FinishedCheckpoint | None = None

    def save(self, shards: Mapping[str, Shard], manifest: Manifest) -> None:
        """Begins to write a checkpoint, once the one before is done.

        Args:
            manifest: all of it but `files`; rank 0's is written.

        Raises:
            StorageError: the one before could not be written.
        """
        self.wait()
        self._writing = self._thread.submit(self._save, shards, manifest)

    def wait(self) -> None:
        """Returns when nothing is being written; StorageError if it could not be."""
        if self._writing:
            writing, self._writing = self._writing, None
            try:
                self._news = writing.result(_LONGEST_S)
            except TimeoutError:
                raise StorageError(
                    f"{self.folder.path}: a checkpoint is not written after {_LONGEST_S:.0f} s"
                ) from None

    def news(self) -> FinishedCheckpoint | None:
        """A checkpoint that has become whole since the last call, if there is one; StorageError if one could not."""
        if self._writing and self._writing.done():
            self.wait()
        news, self._news = self._news, None
        return news

    def close(self) -> None:
        """Ends its thread and its process group, once what is being written is."""
        self._thread.shutdown()
        dist.destroy_process_group(self._group)

    def newest(self, say: Callable[[str], None]) -> CheckpointEntry | None:
        """The newest checkpoint whose every byte is what was written; None if there is none.

        One that is damaged is named by `say` on rank 0, and never chosen again. Each rank reads a share of the files.

        Raises:
            StorageError: the storage cannot be read, or all that there is is damaged: to begin anew would overwrite it.
        """
        there = self._done_by_first(partial(checkpoint_catalog.entries, self.folder), f"reading {self.folder.path}")
        damaged = ""
        for listed in reversed([one for one in there if not checkpoint_catalog.is_unfinished(one)]):
            found = self._second_look(listed)
            if not (damage := self._damage(found)):
                return found
            self._done_by_first(partial(checkpoint_catalog.set_aside, found), f"setting {found.name} aside")
            damaged = damage
            if self.rank == 0:
                say(f"{damage} - it is set aside, the one before it is used")
        if not damaged and (aside := [one for one in there if checkpoint_catalog.is_set_aside(one)]):
            damaged = f"checkpoint {aside[0].name}: {aside[0].problem}"
        if damaged:
            raise StorageError(f"no checkpoint in {self.folder.path} is whole; the oldest was {damaged}")
        return None

    def sound(self, place: Storage) -> CheckpointEntry:
        """Another run's checkpoint; StorageError unless every byte of it is what was written."""
        found = self._done_by_first(partial(checkpoint_catalog.entry, place), f"reading {place.path}")
        if damage := self._damage(found):
            raise StorageError(f"{place.path}: {damage}")
        return found

    def _second_look(self, found: CheckpointEntry) -> CheckpointEntry:
        """One that looks damaged is looked at again: a file system that others write to may show old sizes a while."""
        if not found.problem:
            return found
        time.sleep(_SECOND_LOOK_S)
        return self._done_by_first(partial(checkpoint_catalog.entry, found.place), f"reading {found.place.path}")

    def _damage(self, found: CheckpointEntry) -> str:
        """What is wrong with the files of a checkpoint, the same on all ranks; empty if nothing is."""
        if not found.manifest:
            return f"checkpoint {found.name}: {found.problem}"
        share = sorted(found.manifest.files)[self.rank :: self.ranks]
        damage, failed = "", ""
        try:
            retry(partial(checkpoint_catalog.verify, found, share), f"reading checkpoint {found.name}")
        except checkpoint_catalog.DamagedError as error:
            damage = str(error)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failed = str(error)
        everyone = [(damage, failed)] * self.ranks
        dist.all_gather_object(everyone, (damage, failed), group=self._group)
        if first := next((failed for _, failed in everyone if failed), ""):
            raise StorageError(first)
        return next((damage for damage, _ in everyone if damage), "")

    def _save(self, shards: Mapping[str, Shard], manifest: Manifest) -> FinishedCheckpoint:
        started = time.monotonic()
        place = self.folder / checkpoint_catalog.folder_name(manifest.step)
        what = f"writing checkpoint {place.name} to {self.folder.path}"
        file = place / f"rank_{self.rank:05d}.safetensors"
        own: tuple[str, FileRecord | None, str] = (file.name, None, "")
        # What is there of that step is no checkpoint any more before its files change.
        self._done_by_first((place / checkpoint_manifest.MANIFEST).delete, what)
        try:
            own = (file.name, retry(partial(_put, shards, file), what), "")
        except Exception as error:  # whatever it is, the other ranks must hear of it
            own = (file.name, None, _words(error))
        files, failed = self._exchanged(own)
        if failed:
            raise StorageError(failed + self._give_up(place))
        try:
            whole = manifest.model_copy(update={"files": files})
            self._done_by_first(partial(checkpoint_catalog.commit, place, whole), what)
            self._done_by_first(partial(checkpoint_catalog.prune, self.folder, *self._retained), f"pruning {self.folder.path}")
        except StorageError as error:
            raise StorageError(str(error) + self._give_up(place)) from error
        return FinishedCheckpoint(place, time.monotonic() - started)

    @property
    def _retained(self) -> tuple[int | None, str | None, str]:
        return self.retention.keep, self.retention.best_by, self.retention.best_mode

    def _exchanged(self, own: tuple[str, FileRecord | None, str]) -> tuple[dict[str, FileRecord], str]:
        """All ranks' files, and the first error if there is one."""
        parts: list[tuple[str, FileRecord | None, str]] = [own] * self.ranks
        dist.all_gather_object(parts, own, group=self._group)
        files = {name: record for name, record, _ in parts if record}
        return files, next((error for _, _, error in parts if error), "")

    def _done_by_first(self, action: Callable[[], T], what: str) -> T:
        """What rank 0 gets when it does something on the storage; StorageError on all ranks if it fails."""
        outcome: list[tuple[T | None, str]] = [(None, "")]
        if self.rank == 0:
            try:
                outcome = [(retry(action, what), "")]
            except Exception as error:
                outcome = [(None, _words(error))]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        result, failed = outcome[0]
        if failed:
            raise StorageError(failed)
        return cast(T, result)

    def _give_up(self, place: Storage) -> str:
        """Frees the room that half a checkpoint takes; what there is to go on from."""
        try:
            if self.rank == 0 and not (place / checkpoint_manifest.MANIFEST).exists():
                place.delete()
            left = checkpoint_catalog.whole(self.folder)
        except OSError:
            return "; the checkpoints before it are as they were"
        return f"; the newest whole one is {left[-1].name}" if left else "; there is none before it"


def _remove_leftovers() -> None:
    """Deletes the temporary files of processes on this machine that were killed while they wrote."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*-*"):
        process = folder.name.removeprefix(_TEMPORARY).partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"


def _put(shards: Mapping[str, Shard], file: Storage) -> FileRecord:
    """Writes this rank's file: where it belongs, or on this machine first if the storage is remote."""
    if file.is_local:
        checkpoint_files.write(shards, Path(file.path))
        return checkpoint_catalog.file_record(file)
    with tempfile.TemporaryDirectory(prefix=f"{_TEMPORARY}{os.getpid()}-") as folder:
        local = Path(folder, file.name)
        checkpoint_files.write(shards, local)
        record = checkpoint_catalog.file_record(Storage.here(local))
        file.take(local)
    if file.size() != record.bytes:
        raise OSError(f"{file.path} has {file.size()} bytes after the upload of {record.bytes}")
    return record
