"""A storage address becomes a filesystem and a path on it: a folder, an NFS mount, s3://, or a profile that names one.

S3's keys come from the environment, as pyarrow reads them; an address that holds one is refused, so that none is ever
saved, logged or printed. Which files make a checkpoint is archive's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pyarrow import fs
from rlx.config.errors import one_line
from typing import Any
from typing import TypeVar
import json
import os
import time



T = TypeVar("T")
ATTEMPTS = 6
"""tries of what fails on a storage, with back-off: 1, 2, 4, 8 and 16 s apart"""
_PART = ".part"


class StorageError(ValueError):
    """Storage that cannot be used; the text is one line for the person who named it."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.splitlines()))


@dataclass(frozen=True, slots=True)
class Storage:
    """A place for files: a filesystem and a path on it."""

    filesystem: fs.FileSystem
    path: str

    @classmethod
    def here(cls, path: Path) -> Storage:
        """A path on this machine."""
        return cls(fs.LocalFileSystem(), str(path))

    def __truediv__(self, name: str) -> Storage:
        return Storage(self.filesystem, f"{self.path}/{name}")

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def exists(self) -> bool:
        return self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound

    def names(self) -> list[str]:
        """Names of the entries in this folder, sorted; none if it is not there."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector))

    def free_name(self, prefix: str) -> str:
        """The first of prefix-1, prefix-2, ... that no entry of this folder has."""
        taken = self.names()
        return next(name for name in (f"{prefix}-{i}" for i in range(1, len(taken) + 2)) if name not in taken)

    def size(self) -> int | None:
        """Bytes of a file; None if there is none."""
        info = self.filesystem.get_file_info(self.path)
        return int(info.size) if info.type == fs.FileType.File else None

    def read_text(self) -> str:
        with self.filesystem.open_input_stream(self.path) as stream:
            return stream.read().decode()

    def write_text(self, text: str) -> None:
        """Writes a whole file: it appears at once or not at all, and a local one outlives a loss of power."""
        self.filesystem.create_dir(self.path.rpartition("/")[0], recursive=True)
        if self.is_local:
            _replace(Path(self.path), text.encode())
            return
        with self.filesystem.open_output_stream(self.path) as stream:
            stream.write(text.encode())

    def read_json(self) -> dict[str, Any]:
        return dict(json.loads(self.read_text()))

    def take(self, file: Path) -> None:
        """Copies a file of this machine here."""
        fs.copy_files(
            str(file), self.path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=self.filesystem
        )

    def delete(self) -> None:
        """Deletes a file, or a folder with all that is in it, if it is there."""
        kind = self.filesystem.get_file_info(self.path).type
        if kind == fs.FileType.File:
            self.filesystem.delete_file(self.path)
        elif kind == fs.FileType.Directory:
            self.filesystem.delete_dir(self.path)


def _replace(file: Path, content: bytes) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}{_PART}")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
        sync_folder(file.parent)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sees to it that the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Storage) -> None:
    """StorageError unless a file can be written there, read again and deleted; leaves nothing there."""
    probe = folder / f"probe-{os.getpid()}"
    try:
        was_there = folder.exists()
        probe.write_text("rlx")
        if probe.read_text() != "rlx":
            raise OSError("a file that was written reads differently")
        probe.delete()
        if not was_there and not folder.names():
            folder.delete()
    except (OSError, ValueError) as error:
        raise StorageError(f"storage {folder.path}: cannot write there: {advice(error)}") from None


def retry(action: Callable[[], T], what: str, wait: Callable[[float], Any] = time.sleep) -> T:
    """What the action returns, tried again while the storage fails.

    Args:
        what: what an error says could not be done, e.g. "writing step_000010".

    Raises:
        StorageError: all attempts failed; says why the last one did.
    """
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except OSError as error:
            if attempt == ATTEMPTS - 1:
                raise StorageError(f"{what} failed {ATTEMPTS} times: {advice(error)}") from error
        wait(2.0**attempt)
    raise AssertionError


_CAUSES = {
    "To create buckets": "there is no such bucket",
    "NO_SUCH_BUCKET": "there is no such bucket",
    "NoSuchBucket": "there is no such bucket",
    "ACCESS_DENIED": "access denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "INVALID_ACCESS_KEY_ID": "the key is not known there: check AWS_ACCESS_KEY_ID",
    "InvalidAccessKeyId": "the key is not known there: check AWS_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY",
    "NETWORK_CONNECTION": "the server does not answer: check AWS_ENDPOINT_URL",
}


def advice(error: BaseException) -> str:
    """An error's text in one line, what to do about it first where that is known."""
    text = one_line(error, 400)
    cause = next((advice for name, advice in _CAUSES.items() if name in text), None)
    return f"{cause} ({text})" if cause else text
