"""`Storage`: a path on a local or remote filesystem, with the few file operations that rlx needs.

Also here: repeated attempts for operations that fail, and one-line errors that say what to do.
Left out: how an address becomes a `Storage` (addresses.py) and what a checkpoint is (checkpoint_catalog.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pyarrow import fs

from rlx.config.errors import one_line

T = TypeVar("T")
_ATTEMPTS = 6
"""attempts of `retry`; the waits between them are 1, 2, 4, 8 and 16 s"""
_DESCRIPTORS = re.compile(r"/proc/(\d+)/fd")  # the folder of what a process has open


class StorageError(ValueError):
    """Storage that cannot be used. The text is one line for the person who chose the storage."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.splitlines()))


@dataclass(frozen=True, slots=True)
class Storage:
    """A file or folder: a filesystem and a path on it. It need not exist."""

    filesystem: fs.FileSystem
    path: str

    @classmethod
    def local(cls, path: Path) -> Storage:
        """A path on this machine."""
        return cls(fs.LocalFileSystem(), str(path))

    def __str__(self) -> str:
        """As messages show it: the path of a folder of this machine, or s3://BUCKET/FOLDER."""
        return f"s3://{self.path}" if self.filesystem.type_name == "s3" else self.path

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
        """Names of the files and folders in this folder, sorted; an empty list if the folder does not exist."""
        if self.is_local:  # pyarrow looks twice, and fails if another process makes the folder in between
            with suppress(FileNotFoundError):
                return sorted(os.listdir(self.path))
            return []
        selector = fs.FileSelector(self.path, allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector))

    def size(self) -> int | None:
        """Bytes of this file; None if it does not exist or is a folder."""
        info = self.filesystem.get_file_info(self.path)
        return int(info.size) if info.type == fs.FileType.File else None

    def read_text(self) -> str:
        with self.filesystem.open_input_stream(self.path) as stream:
            return stream.read().decode()

    def read_json(self) -> dict[str, Any]:
        return dict(json.loads(self.read_text()))

    def write_text(self, text: str) -> None:
        """Replaces the file at once: a reader never sees half of it. On a local disk it survives a loss of power."""
        write_bytes(self, text.encode())

    def delete(self) -> None:
        """Deletes this file, or this folder with its content; does nothing if it does not exist."""
        kind = self.filesystem.get_file_info(self.path).type
        if kind == fs.FileType.File:
            self.filesystem.delete_file(self.path)
        elif kind == fs.FileType.Directory:
            self.filesystem.delete_dir(self.path)


def free_name(folder: Storage, prefix: str) -> str:
    """Returns the first of prefix-1, prefix-2, ... that is not yet a name in the folder."""
    taken = folder.names()
    return next(name for name in (f"{prefix}-{i}" for i in range(1, len(taken) + 2)) if name not in taken)


def write_bytes(file: Storage, content: bytes) -> None:
    """Replaces a file at once, as `Storage.write_text` does."""
    file.filesystem.create_dir(file.path.rpartition("/")[0], recursive=True)
    if file.is_local:
        replace_file(Path(file.path), content)
        return
    with file.filesystem.open_output_stream(file.path) as stream:
        stream.write(content)


def upload_file(local: Path, file: Storage) -> None:
    """Copies a file of this machine."""
    fs.copy_files(str(local), file.path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=file.filesystem)


def rewrite_file(file: Path, content: bytes) -> None:
    """Writes a file that a person names, which stays what it is: a link leads where it led, mode and owner are kept.

    A plain file of this user is replaced at once, if its folder lets it; another one is written over. What is open
    (/dev/stdout, /dev/fd/3) is gone on with, and a pipe or a terminal is written to.
    """
    if file.exists() and (stream := _opened(file)):
        with stream:
            stream.write(content)
        return
    place = Path(os.path.realpath(file))
    known = place.stat() if place.exists() else None
    if known is None:
        replace_file(place, content)
    elif place.is_file() and known.st_uid == os.geteuid() and _may_write(place) and _may_write(place.parent):
        replace_file(place, content, known.st_mode)
    else:
        place.write_bytes(content)


def _opened(file: Path) -> BinaryIO | None:
    """A stream that goes on with what a path names as open: /dev/stdout, /dev/fd/3, /proc/1/fd/1; None for a file.

    What this process has open is written to where it stands, and stands behind it for others who share it.
    """
    while not (found := _DESCRIPTORS.fullmatch(os.path.realpath(file.parent))):
        if not file.is_symlink():
            return None
        file = file.parent / os.readlink(file)
    is_own = int(found[1]) == os.getpid()
    return os.fdopen(os.dup(int(file.name)), "wb") if is_own else file.open("ab")


def _may_write(file: Path) -> bool:
    return os.access(file, os.W_OK, effective_ids=True)


def replace_file(file: Path, content: bytes, mode: int | None = None) -> None:
    """Replaces a file of this machine at once; after an error, e.g. of a full disk, the old one is still there.

    Args:
        mode: of the new file; None for that of all files this process makes.
    """
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), stat.S_IMODE(mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
        fsync_folder(file.parent)
    finally:
        part.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, so that new files survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Storage) -> None:
    """Writes, reads and deletes a small file in the folder.

    Raises:
        StorageError: one of the three fails.
    """
    probe = folder / f"probe-{os.getpid()}"
    try:
        existed = folder.exists()
        probe.write_text("rlx")
        if probe.read_text() != "rlx":
            raise OSError("a file was written, but another content is read")
        probe.delete()
        if not existed and not folder.names():
            folder.delete()
    except (OSError, ValueError) as error:
        raise StorageError(f"storage {folder}: cannot write there: {explain(error)}") from None


def check_free(folder: Storage, needed: int, what: str, instead: str = "give another --storage") -> None:
    """Checks that a disk of this machine has room for something; other storage says so when it is full.

    Args:
        needed: bytes.
        what: what needs them, for the error.
        instead: what else to do than to free some.

    Raises:
        StorageError: it has not.
    """
    if not folder.is_local:
        return
    existing = next(path for path in (Path(folder.path), *Path(folder.path).parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise StorageError(
            f"storage {folder}: {free / 2**20:,.1f} MiB are free on its disk, and {what} takes about "
            f"{needed / 2**20:,.1f} MiB: free some, or {instead}"
        )


def retry(action: Callable[[], T], what: str, wait: Callable[[float], Any] = time.sleep) -> T:
    """Calls the action until it raises no OSError, and returns its result.

    Args:
        what: the action in words, for the error, e.g. "writing step_000010".

    Raises:
        StorageError: all attempts failed; the text has the reason of the last one.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except (NotADirectoryError, IsADirectoryError) as error:  # which no waiting changes
            raise StorageError(f"{what} failed: {explain(error)}") from error
        except OSError as error:
            if attempt == _ATTEMPTS - 1:
                raise StorageError(f"{what} failed {_ATTEMPTS} times: {explain(error)}") from error
        wait(2.0**attempt)
    raise AssertionError


def write_record(file: Storage, text: str) -> None:
    """Writes a record, with retries.

    Raises:
        StorageError: the storage keeps failing.
    """
    retry(lambda: file.write_text(text), f"writing {file}")


_ADVICE = {
    "To create buckets": "there is no such bucket",
    "NO_SUCH_BUCKET": "there is no such bucket",
    "NoSuchBucket": "there is no such bucket",
    "ACCESS_DENIED": "access denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "INVALID_ACCESS_KEY_ID": "the server does not know the key: check AWS_ACCESS_KEY_ID",
    "InvalidAccessKeyId": "the server does not know the key: check AWS_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY",
    "NETWORK_CONNECTION": "the server does not answer: check AWS_ENDPOINT_URL",
}
"""part of an error's text -> what to do"""


def explain(error: BaseException) -> str:
    """Returns the error's text in one line, preceded by advice where the cause is known."""
    text = one_line(error, 400)
    advice = next((advice for part, advice in _ADVICE.items() if part in text), None)
    return f"{advice} ({text})" if advice else text
