"""A run's checkpoints on its storage: which there are, which are whole, which to keep; none needs torch to be asked.

A checkpoint is a folder step_000010 of safetensors files, one per rank, and a manifest.json. The manifest is written
last and names each file with its size and SHA-256: a folder without one, or without a file that it names, was never
finished and is never chosen. What is in the files is checkpoint.py's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from pyarrow import fs
from rlx.config.errors import nearest
from rlx.storage.checkpoint_manifest import FileRecord
from rlx.storage.checkpoint_manifest import MANIFEST
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.checkpoint_manifest import OtherFormatError
from rlx.storage.filesystem import Storage
from rlx.storage.filesystem import StorageError
import hashlib
import re


_NAME = re.compile(r"step_(\d{6,})")
_DAMAGED = f"{MANIFEST}.damaged"
_UNFINISHED = f"no {MANIFEST}: it was never finished"
_SET_ASIDE = "it was damaged, and has been set aside"
_BLOCK = 8 << 20  # bytes read at once


class DamagedError(ValueError):
    """A checkpoint whose files are not what was written; the text names it and the file."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint folder as it is found."""

    place: Storage
    step: int
    manifest: Manifest | None  # None if it is not whole
    problem: str = ""  # why not

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def files(self) -> list[Storage]:
        """Where its tensors are; none if it is not whole."""
        return [self.place / name for name in sorted(self.manifest.files)] if self.manifest else []

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(file.bytes for file in self.manifest.files.values()) if self.manifest else 0

    def metric(self, name: str) -> float | None:
        """A metric of its own step; None if it has none."""
        return self.manifest.metrics.get(name) if self.manifest else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder is called like a checkpoint."""
    return _NAME.fullmatch(name) is not None


def folder_name(step: int) -> str:
    """step_000010 and the like."""
    return f"step_{step:06d}"


def entries(folder: Storage) -> list[CheckpointEntry]:
    """The checkpoints of a run, oldest first; whole as far as names and sizes say."""
    found = [(int(match[1]), name) for name in folder.names() if (match := _NAME.fullmatch(name))]
    return [entry(folder / name) for _, name in sorted(found)]


def entry(place: Storage) -> CheckpointEntry:
    """The checkpoint in a folder."""
    matched = _NAME.fullmatch(place.name)
    step = int(matched[1]) if matched else -1
    sizes = _sizes(place)
    if MANIFEST not in sizes:
        return CheckpointEntry(place, step, None, _SET_ASIDE if _DAMAGED in sizes else _UNFINISHED)
    try:
        manifest = Manifest.parsed((place / MANIFEST).read_text())
    except OtherFormatError as error:
        raise StorageError(f"checkpoint {place.path}: {error}") from None
    except ValueError as error:  # a UnicodeDecodeError is one too
        return CheckpointEntry(place, step, None, str(error))
    if manifest.step != step:
        return CheckpointEntry(place, step, None, f"it is of step {manifest.step}, not of the one in its name")
    for name, file in manifest.files.items():
        if sizes.get(name) != file.bytes:
            what = f"has {sizes[name]} bytes, not {file.bytes}" if name in sizes else "is missing"
            return CheckpointEntry(place, manifest.step, None, f"{name} {what}")
    return CheckpointEntry(place, manifest.step, manifest)


def _sizes(folder: Storage) -> dict[str, int]:
    """Bytes of each file in a folder; none if it is no folder."""
    try:
        found = folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    except NotADirectoryError:
        return {}
    return {info.base_name: info.size for info in found if info.is_file}


def whole(folder: Storage) -> list[CheckpointEntry]:
    """The checkpoints of a run that are whole as far as names and sizes say, oldest first."""
    return [one for one in entries(folder) if one.manifest]


def verify(checkpoint: CheckpointEntry, names: Iterable[str]) -> None:
    """DamagedError naming the first of these files whose bytes are not those that were written."""
    assert checkpoint.manifest
    for name in names:
        try:
            digest = _sha256(checkpoint.place / name)
        except FileNotFoundError:
            raise DamagedError(f"checkpoint {checkpoint.name}: {name} is missing") from None
        if digest != checkpoint.manifest.files[name].sha256:
            raise DamagedError(f"checkpoint {checkpoint.name}: {name} is damaged: its checksum differs")


def file_record(file: Storage) -> FileRecord:
    """Size and checksum of a file."""
    return FileRecord(bytes=file.size() or 0, sha256=_sha256(file))


def _sha256(file: Storage) -> str:
    digest = hashlib.sha256()
    with file.filesystem.open_input_stream(file.path) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def commit(place: Storage, manifest: Manifest) -> None:
    """Makes a checkpoint of the files in a folder; others there are remains of an earlier attempt, and go.

    Raises:
        OSError: a file of another node is not to be seen here (yet).
    """
    sizes = _sizes(place)
    for name, file in manifest.files.items():
        if sizes.get(name) != file.bytes:
            raise OSError(f"{place.path}/{name} is not there as it was written: do all nodes share this folder?")
    for name in set(place.names()) - set(manifest.files):
        (place / name).delete()
    (place / MANIFEST).write_text(manifest.text())


def is_unfinished(checkpoint: CheckpointEntry) -> bool:
    """Whether it was never finished, or has been set aside: no fault that anyone need hear of."""
    return checkpoint.problem in (_UNFINISHED, _SET_ASIDE)


def is_set_aside(checkpoint: CheckpointEntry) -> bool:
    """Whether it was found damaged before."""
    return checkpoint.problem == _SET_ASIDE


def set_aside(checkpoint: CheckpointEntry) -> None:
    """Makes a damaged checkpoint one that is never chosen; its files stay until the step is written again."""
    manifest = checkpoint.place / MANIFEST
    if manifest.exists():  # somebody may have deleted it meanwhile
        checkpoint.place.filesystem.copy_file(manifest.path, (checkpoint.place / _DAMAGED).path)
        manifest.delete()


def best(checkpoints: Sequence[CheckpointEntry], by: str, mode: str) -> CheckpointEntry | None:
    """The whole checkpoint with the best value of a metric, the newest of equals; None if none has it."""
    sign = 1.0 if mode == "max" else -1.0
    rated = [(sign * value, one.step, one) for one in checkpoints if (value := one.metric(by)) is not None]
    rated = [row for row in rated if row[0] == row[0]]  # a NaN is no best
    return max(rated, key=lambda row: row[:2])[2] if rated else None


def prune(folder: Storage, keep: int | None, by: str | None, mode: str) -> None:
    """Deletes all but the newest `keep` whole checkpoints and the best one; also what was never finished before them.

    The manifest goes first, so that a deletion cut short leaves no checkpoint that looks whole.
    """
    if keep is None:
        return
    there = entries(folder)
    sound = [one for one in there if one.manifest]
    kept = {one.name for one in sound[-keep:]}
    if by and (top := best(sound, by, mode)):
        kept.add(top.name)
    for one in there:
        if sound and one.step < sound[-1].step and one.name not in kept:
            (one.place / MANIFEST).delete()
            one.place.delete()


def chosen(folder: Storage, which: str, by: str, mode: str) -> CheckpointEntry:
    """The checkpoint that a person means: newest, best, a step's number or a folder's name.

    Raises:
        StorageError: there is no such whole checkpoint; says which there are.
    """
    there = entries(folder)
    sound = [one for one in there if one.manifest]
    if not sound:
        unfinished = "; ".join(f"{one.name}: {one.problem}" for one in there)
        raise StorageError(f"no whole checkpoint in {folder.path}" + (f" ({unfinished})" if unfinished else ""))
    if which == "newest":
        return sound[-1]
    if which == "best":
        if not (top := best(sound, by, mode)):
            raise StorageError(f"no checkpoint in {folder.path} has {by}: it is measured at other steps (eval.every)")
        return top
    name = folder_name(int(which)) if which.isdecimal() else which
    for one in there:
        if one.name == name and one.problem:
            raise StorageError(f"checkpoint {name} in {folder.path} is not whole: {one.problem}")
        if one.name == name:
            return one
    names = ["newest", "best", *(one.name for one in sound)]
    raise StorageError(f"no checkpoint {which} in {folder.path}, there are {', '.join(names)}{nearest(which, names)}")
