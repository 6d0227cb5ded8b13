"""A storage address becomes a pyarrow filesystem and a path on it: a folder, an NFS mount, or s3://.

Credentials and endpoints are pyarrow's business: they come from the environment and never appear here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs  # type: ignore[import-untyped]


class StorageError(ValueError):
    """Storage that cannot be used; the text is one line for the person who named it."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A place for files: a filesystem and a path on it."""

    filesystem: fs.FileSystem
    path: str

    def __truediv__(self, name: str) -> Storage:
        return Storage(self.filesystem, f"{self.path}/{name}")

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

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

    def read_text(self) -> str:
        with self.filesystem.open_input_stream(self.path) as stream:
            return stream.read().decode()

    def write_text(self, text: str) -> None:
        """Writes a whole file; on a local disk it appears at once or not at all."""
        self.filesystem.create_dir(str(Path(self.path).parent), recursive=True)
        target = f"{self.path}.{os.getpid()}.part" if self.is_local else self.path
        with self.filesystem.open_output_stream(target) as stream:
            stream.write(text.encode())
        if self.is_local:
            os.replace(target, self.path)

    def read_json(self) -> dict[str, Any]:
        return dict(json.loads(self.read_text()))


def open_storage(address: str) -> Storage:
    """The storage at a folder or URI; StorageError if the address is malformed or the folder cannot be made."""
    try:
        filesystem, path = _located(address)
        filesystem.create_dir(path, recursive=True)
    except (OSError, ValueError) as error:
        raise StorageError(f"storage {address}: {' '.join(str(error).split())}") from None
    return Storage(filesystem, path.rstrip("/"))


def absolute(address: str) -> str:
    """The same address, good from any working directory: workers and trials have their own."""
    return address if "://" in address else str(Path(address).expanduser().resolve())


def local_folder(address: str) -> Path:
    """Where things that need a real disk go (the model that rlx makes, the MLflow database): the storage folder
    itself, or ./storage when that is remote."""
    if "://" in address and not address.startswith("file://"):
        return Path("storage").resolve()
    return Path(_located(address)[1])


def _located(address: str) -> tuple[fs.FileSystem, str]:
    if "://" in address:
        filesystem, path = fs.FileSystem.from_uri(address)
        return filesystem, path
    return fs.LocalFileSystem(), str(Path(address).expanduser().resolve())
