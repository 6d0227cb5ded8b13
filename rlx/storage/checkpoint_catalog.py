"""The checkpoints of a run: lists them, checks them, chooses one, deletes old ones. Needs no torch.

A checkpoint is a folder step_000010 with one safetensors file per rank and a manifest.json. The manifest is written
last and names each file with its size and SHA-256. So a folder without a manifest was never finished, and is never
chosen. Left out: the content of the files (checkpoint_files.py) and writing them (checkpoint_writer.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

from pyarrow import fs

from rlx.config.errors import nearest
from rlx.storage.checkpoint_manifest import MANIFEST, FileRecord, Manifest, OtherFormatError
from rlx.storage.filesystem import Storage, StorageError, explain

REFERENCE = "reference"
"""folder in a run's folder that holds, as a checkpoint of step 0, the weights of a reference that is not the model's"""
SAVED = "saved"
"""file in a run's folder, written after the run's first checkpoint: with it, a run without checkpoints has lost them"""
SECOND_READ_S = 2.0
"""seconds until what looks damaged is read again: a network file system may show old sizes for a while"""
_LOG = logging.getLogger("rlx")
_NAME = re.compile(r"step_(\d{6,})")
_SET_ASIDE_MANIFEST = f"{MANIFEST}.damaged"
_READ_BYTES = 8 << 20  # per read


class DamagedError(ValueError):
    """The files of a checkpoint are not what was written. The text names the checkpoint and the file."""


class CheckpointState(Enum):
    """What can be done with a checkpoint folder."""

    COMPLETE = "complete"  # by the names and sizes of its files
    UNFINISHED = "unfinished"  # no manifest: the run was killed, or still writes
    SET_ASIDE = "set aside"  # was damaged, and is not read again
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"  # another version of rlx wrote it, or the storage does not give its files


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint folder, as its manifest and the sizes of its files describe it."""

    folder: Storage
    step: int  # -1 if the folder's name has none
    state: CheckpointState
    manifest: Manifest | None = None  # of a complete checkpoint
    problem: str = ""  # why it is not complete

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def files(self) -> list[Storage]:
        """The files with its tensors; none if it is not complete."""
        return [self.folder / name for name in sorted(self.manifest.files)] if self.manifest else []

    @property
    def bytes(self) -> int:
        """Size of the files with its tensors; 0 if it is not complete."""
        return sum(file.bytes for file in self.manifest.files.values()) if self.manifest else 0

    def metric(self, name: str) -> float | None:
        """A metric of the checkpoint's own step; None if that step did not measure it."""
        return self.manifest.metrics.get(name) if self.manifest else None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep` (None: all of them), and besides the best one by a metric, if one is
    named, and those of every `every` steps."""

    keep: int | None = None
    best_by: str | None = None
    best_mode: str = "max"
    every: int | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def checkpoint_name(step: int) -> str:
    """Returns the name of a step's checkpoint folder: step_000010."""
    return f"step_{step:06d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder with this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def list_checkpoints(run: Storage) -> list[CheckpointEntry]:
    """Returns all checkpoints in a run's folder, oldest first, also those that are not complete.

    Raises:
        StorageError: another version of rlx wrote one of them.
    """
    return [read_checkpoint(folder) for folder in _checkpoint_folders(run)]


def described_checkpoints(run: Storage) -> list[CheckpointEntry]:
    """Returns the same checkpoints for a person to read: one that cannot be read is an entry with its problem."""
    return [_described(folder) for folder in _checkpoint_folders(run)]


def complete_checkpoints(run: Storage) -> list[CheckpointEntry]:
    """Returns the complete checkpoints in a run's folder, oldest first.

    Raises:
        StorageError: another version of rlx wrote a checkpoint of the run.
    """
    return [entry for entry in list_checkpoints(run) if entry.manifest]


def saved_checkpoints(run: Storage) -> list[CheckpointEntry]:
    """Returns the checkpoints in a run's folder, oldest first, be they damaged; those never finished are none.

    Raises:
        StorageError: another version of rlx wrote one of them.
    """
    return [entry for entry in list_checkpoints(run) if entry.state is not CheckpointState.UNFINISHED]


def settled_checkpoints(run: Storage, had_some: bool) -> list[CheckpointEntry]:
    """Returns the same checkpoints; if a run has had some and none of them is whole, it looks again after a while.

    Args:
        had_some: whether something else shows that the run has had some.

    Raises:
        StorageError: another version of rlx wrote one of them.
    """
    saved = saved_checkpoints(run)
    if any(entry.manifest for entry in saved) or not (saved or had_some):
        return saved
    time.sleep(SECOND_READ_S)
    return saved_checkpoints(run)


def read_checkpoint(folder: Storage) -> CheckpointEntry:
    """Describes the checkpoint in a folder. It compares sizes; only `verify` compares checksums.

    Raises:
        StorageError: another version of rlx wrote it.
    """
    step, sizes = _step(folder), _file_sizes(folder)
    if MANIFEST not in sizes and _SET_ASIDE_MANIFEST in sizes:
        return CheckpointEntry(
            folder, step, CheckpointState.SET_ASIDE, problem="it was damaged, and has been set aside"
        )
    if MANIFEST not in sizes:
        problem = f"no {MANIFEST}: it was never finished" if sizes else "there are no files"
        return CheckpointEntry(folder, step, CheckpointState.UNFINISHED, problem=problem)
    try:
        manifest = Manifest.from_json((folder / MANIFEST).read_text())
        _check_step_and_sizes(manifest, step, sizes)
    except FileNotFoundError:  # a run has pruned it meanwhile
        return CheckpointEntry(folder, step, CheckpointState.UNFINISHED, problem=f"its {MANIFEST} was just deleted")
    except OtherFormatError as error:
        raise StorageError(f"checkpoint {folder}: {error}") from None
    except ValueError as error:  # a UnicodeDecodeError is one too
        return CheckpointEntry(folder, step, CheckpointState.DAMAGED, problem=str(error))
    return CheckpointEntry(folder, step, CheckpointState.COMPLETE, manifest)


def _described(folder: Storage) -> CheckpointEntry:
    try:
        return read_checkpoint(folder)
    except (OSError, StorageError) as error:
        return CheckpointEntry(folder, _step(folder), CheckpointState.UNREADABLE, problem=explain(error))


def _checkpoint_folders(run: Storage) -> list[Storage]:
    """Returns the checkpoint folders of a run, oldest first."""
    return sorted((run / name for name in run.names() if is_checkpoint_name(name)), key=_step)


def _step(folder: Storage) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _check_step_and_sizes(manifest: Manifest, step: int, sizes: dict[str, int]) -> None:
    """Raises ValueError if the manifest is not of this step, or a file is missing or has another size."""
    if manifest.step != step:
        raise ValueError(f"its manifest is of step {manifest.step}, its name is not")
    for name, file in manifest.files.items():
        if name not in sizes:
            raise ValueError(f"{name} is missing")
        if sizes[name] != file.bytes:
            raise ValueError(f"{name} has {sizes[name]} bytes, not {file.bytes}")


def _file_sizes(folder: Storage) -> dict[str, int]:
    """Returns the bytes of each file in a folder; an empty dict if it is not a folder."""
    try:
        infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    except NotADirectoryError:
        return {}
    return {info.base_name: info.size for info in infos if info.is_file}


def verify(checkpoint: CheckpointEntry, names: Iterable[str]) -> None:
    """Reads these files of a complete checkpoint and compares their checksums with the manifest.

    Raises:
        DamagedError: a file is missing, or its content has changed.
    """
    assert checkpoint.manifest
    for name in names:
        try:
            digest = _sha256(checkpoint.folder / name)
        except FileNotFoundError:
            raise DamagedError(f"checkpoint {checkpoint.name}: {name} is missing") from None
        if digest != checkpoint.manifest.files[name].sha256:
            raise DamagedError(f"checkpoint {checkpoint.name}: {name} is damaged: its checksum differs")


def file_record(file: Storage) -> FileRecord:
    """Returns the size and the checksum of a file."""
    return FileRecord(bytes=file.size() or 0, sha256=_sha256(file))


def _sha256(file: Storage) -> str:
    digest = hashlib.sha256()
    with file.filesystem.open_input_stream(file.path) as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Choosing


def best_checkpoint(checkpoints: Sequence[CheckpointEntry], metric: str, mode: str) -> CheckpointEntry | None:
    """Returns the complete checkpoint with the largest ("max") or smallest ("min") value of a metric.

    Of equal values the newest checkpoint is returned; None if no checkpoint has a value other than NaN.
    """
    sign = 1.0 if mode == "max" else -1.0
    rated = [(sign * value, entry.step, entry) for entry in checkpoints if (value := entry.metric(metric)) is not None]
    rated = [row for row in rated if row[0] == row[0]]  # NaN is not equal to itself
    return max(rated, key=lambda row: row[:2])[2] if rated else None


def find_checkpoint(run: Storage, which: str, metric: str, mode: str) -> CheckpointEntry:
    """Returns the complete checkpoint of a run that a person names.

    Args:
        which: newest, best, the number of a step or the name of a folder.
        metric: the metric of "best"; `mode` as in `best_checkpoint`.

    Raises:
        StorageError: there is no such complete checkpoint, or the best one is damaged; the text lists those that exist.
    """
    entries = list_checkpoints(run)
    complete = [entry for entry in entries if entry.manifest]
    if not complete:
        problems = "; ".join(f"{entry.name}: {entry.problem}" for entry in entries)
        raise StorageError(f"no complete checkpoint in {run}{f' ({problems})' if problems else ''}")
    if which == "newest":
        for entry in _damaged(entries[entries.index(complete[-1]) :]):
            _LOG.warning("checkpoint %s is not used, %s is: %s", entry.name, complete[-1].name, entry.problem)
        return complete[-1]
    if which == "best":
        return whole_best(run, entries, metric, mode)
    name = checkpoint_name(int(which)) if which.isdecimal() else which
    named = next((entry for entry in entries if entry.name == name), None)
    if named and named.problem:
        raise StorageError(f"checkpoint {name} in {run} is not complete: {named.problem}")
    if named:
        return named
    names = ["newest", "best", *(entry.name for entry in complete)]
    asked = which or repr(which)
    raise StorageError(f"no checkpoint {asked} in {run}, there are {', '.join(names)}{nearest(which, names)}")


def whole_best(run: Storage, entries: Sequence[CheckpointEntry], metric: str, mode: str) -> CheckpointEntry:
    """Returns the best of all checkpoints of a run; parameters as for `find_checkpoint`.

    Raises:
        StorageError: it is damaged, or one that may be the best is or cannot be read; or there is none.
    """
    as_written = [_as_written(entry) for entry in entries]
    if not (best := best_checkpoint(as_written, metric, mode)):
        raise StorageError(f"no checkpoint in {run} has {metric}: other steps measured it (eval.every)")
    unknown = [each for each in as_written if not each.manifest and each.state is not CheckpointState.UNFINISHED]
    if wrong := best if best.problem else next(iter(unknown), None):
        which = "the best" if wrong is best else "which may be the best"
        raise StorageError(
            f"checkpoint {wrong.name} in {run}, {which} by {metric}, cannot be used: {wrong.problem}; give "
            "another: newest, or the number of a step"
        )
    return best


def _damaged(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    """Those that were complete once."""
    return [entry for entry in entries if entry.state in (CheckpointState.DAMAGED, CheckpointState.SET_ASIDE)]


def _as_written(checkpoint: CheckpointEntry) -> CheckpointEntry:
    """Returns a damaged checkpoint with its manifest, if that can be read; any other one as it is."""
    for entry in _damaged([checkpoint]):
        name = _SET_ASIDE_MANIFEST if entry.state is CheckpointState.SET_ASIDE else MANIFEST
        with suppress(OSError, ValueError):
            return replace(entry, manifest=Manifest.from_json((entry.folder / name).read_text()))
    return checkpoint


# ---------------------------------------------------------------------------------------------------------------------
# Changing


def commit(folder: Storage, manifest: Manifest) -> None:
    """Makes the files in a folder a checkpoint; other files there are left from an earlier attempt and are deleted.

    Raises:
        OSError: a file that another node has written is not visible here (yet).
    """
    sizes = _file_sizes(folder)
    for name, file in manifest.files.items():
        if sizes.get(name) != file.bytes:
            raise OSError(f"{folder}/{name} is not there as it was written: do all nodes share this folder?")
    for name in set(folder.names()) - set(manifest.files):
        (folder / name).delete()
    (folder / MANIFEST).write_text(manifest.to_json())


def mark_saved(run: Storage) -> None:
    """Notes in a run's folder that the run has had a complete checkpoint."""
    if not (mark := run / SAVED).exists():
        mark.write_text("a checkpoint of this run was complete\n")


def set_aside(checkpoint: CheckpointEntry) -> None:
    """Renames the manifest of a damaged checkpoint, so that it is never chosen again.

    Its files stay until the same step is written again.
    """
    manifest = checkpoint.folder / MANIFEST
    if manifest.exists():  # it may have been deleted meanwhile
        checkpoint.folder.filesystem.copy_file(manifest.path, (checkpoint.folder / _SET_ASIDE_MANIFEST).path)
        manifest.delete()


def prune(run: Storage, retention: Retention) -> None:
    """Deletes all checkpoints that are older than the newest complete one and that need not be kept.

    Those that were never finished are deleted too. The manifest goes first: a deletion that is interrupted leaves no
    checkpoint that looks complete. Of one that somebody has linked here, only the link is deleted.

    Raises:
        OSError: some of them cannot be deleted; the others are.
    """
    if retention.keep is None:
        return
    entries = list_checkpoints(run)
    complete = [entry for entry in entries if entry.manifest]
    kept = {entry.name for entry in complete[-retention.keep :]}
    if retention.best_by and (best := best_checkpoint(complete, retention.best_by, retention.best_mode)):
        kept.add(best.name)
    if retention.every:
        kept |= {entry.name for entry in complete if entry.step % retention.every == 0}
    failures = []
    for entry in entries:
        if complete and entry.step < complete[-1].step and entry.name not in kept:
            try:
                _delete(entry.folder)
            except OSError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _delete(folder: Storage) -> None:
    if folder.is_local and os.path.islink(folder.path):
        os.unlink(folder.path)
    else:
        (folder / MANIFEST).delete()
        folder.delete()
