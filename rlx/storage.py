"""A storage address becomes a filesystem and a path on it: a folder, an NFS mount, s3://, or a profile that names one.

S3's keys come from the environment, as pyarrow reads them; an address that holds one is refused, so that none is ever
saved, logged or printed. Which files make a checkpoint is archive's business.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import fs

from rlx.config.errors import one_line
from rlx.config.loading import parse_yaml

T = TypeVar("T")
PROFILES = (Path("storage"), Path(__file__).resolve().parent.parent / "storage")
"""folders of NAME.yaml: here, and beside rlx"""
ATTEMPTS = 6
"""tries of what fails on a storage, with back-off: 1, 2, 4, 8 and 16 s apart"""
_S3_OPTIONS = ("region", "endpoint_override", "scheme")
_SECRET = re.compile(r"key|secret|token|password", re.IGNORECASE)  # no option of an address is called like this
_CONNECT_S, _ANSWER_S = 5.0, 30.0  # longest waits for an S3 server
_S3_TRIES = 5  # of one request; the SDK waits a little longer each time
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


# ---------------------------------------------------------------------------------------------------------------------
# Addresses


def open_storage(address: str, create: bool = True) -> Storage:
    """The storage at a folder, URI or profile; the folder is made if it is not there.

    Raises:
        StorageError: the address is malformed, or the folder cannot be made there.
    """
    place = resolved(address)
    try:
        filesystem, path = _located(place)
        if create:
            filesystem.create_dir(path, recursive=True)
    except (OSError, ValueError) as error:
        raise StorageError(f"storage {place.partition('?')[0]}: {_advice(error)}") from None
    return Storage(filesystem, path.rstrip("/"))


def resolved(address: str) -> str:
    """The same place as an address that is good from any working directory: a profile's, an absolute path or a URI.

    Raises:
        StorageError: a profile that cannot be used, or an address with a key in it.
    """
    if "://" in address:
        return _without_keys(address)
    profiles = {file.stem: file for folder in reversed(PROFILES) for file in sorted(folder.glob("*.yaml"))}
    if address in profiles:
        return _profile(profiles[address])
    near = difflib.get_close_matches(address, profiles, 1)
    if near and not Path(address).exists():
        raise StorageError(f"storage {address}: no such profile or folder; did you mean {near[0]}?")
    return _absolute(address)


def below(address: str, *names: str) -> str:
    """The address of something in the folder at an address."""
    place, mark, query = resolved(address).partition("?")
    return "/".join([place.rstrip("/"), *names]) + mark + query


def local_folder(address: str) -> Path:
    """Where things that need a real disk go (the model that rlx makes, the MLflow database): the storage folder
    itself, or ./storage when that is remote."""
    place = resolved(address)
    if "://" in place and not place.startswith("file://"):
        return Path("storage").resolve()
    return Path(_located(place)[1])


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
        raise StorageError(f"storage {folder.path}: cannot write there: {_advice(error)}") from None


def patiently(action: Callable[[], T], what: str, wait: Callable[[float], Any] = time.sleep) -> T:
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
                raise StorageError(f"{what} failed {ATTEMPTS} times: {_advice(error)}") from error
        wait(2.0**attempt)
    raise AssertionError


def _profile(file: Path) -> str:
    """The address that a profile comes to, ${NAME} and ${NAME:-default} in it taken from the environment.

    `mount` names a folder that must be a mount point; `region` and `endpoint` are S3's.
    """
    try:
        profile = parse_yaml(file.read_text())
        if not isinstance(profile, dict):
            raise StorageError(f"expected a mapping, found {type(profile).__name__}")
        unknown = set(profile) - {"address", "mount", "region", "endpoint"}
        if unknown or not profile.get("address"):
            raise StorageError(f"unknown key {min(unknown, key=str)}" if unknown else "no address in it")
        known = {key: _expanded(str(value)) for key, value in profile.items() if value is not None}
    except (OSError, ValueError) as error:
        raise StorageError(f"storage profile {file}: {one_line(error, 400)}") from None
    if "mount" in known and not os.path.ismount(known["mount"]):
        raise StorageError(f"storage profile {file}: nothing is mounted at {known['mount']}")
    query = {"region": known.get("region"), "endpoint_override": known.get("endpoint")}
    given = urllib.parse.urlencode({key: value for key, value in query.items() if value})
    if "://" not in known["address"]:
        return _absolute(known["address"])
    return _without_keys(known["address"] + (f"?{given}" if given else ""))


def _expanded(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if (found := os.environ.get(name) or default) is None:
            raise StorageError(f"set {name} in the environment")
        return found

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, text)


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a byte 0, a user who has no home, links that go in a circle
        raise StorageError(f"storage {path!r:.80}: {one_line(error, 400)}") from None


def _without_keys(address: str) -> str:
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError as error:
        raise StorageError(f"storage {address.partition(':')[0]}://...: malformed address: {error}") from None
    if (
        "@" in parts.netloc
        or "@" in urllib.parse.unquote(parts.query)
        or any(_SECRET.search(option) for option, _ in urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    ):
        raise StorageError(
            f"storage {parts.scheme}://{parts.netloc.rpartition('@')[2]}: the address holds a key: "
            f"put keys into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )
    return address


def _located(address: str) -> tuple[fs.FileSystem, str]:
    if "://" not in address:
        return fs.LocalFileSystem(), _absolute(address)
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "s3":
        filesystem, path = fs.FileSystem.from_uri(address)
        return filesystem, path
    options = dict(urllib.parse.parse_qsl(parts.query))
    if unknown := sorted(set(options) - set(_S3_OPTIONS)):
        raise ValueError(f"unknown option {unknown[0]}, known are {', '.join(_S3_OPTIONS)}")
    if not parts.netloc:
        raise ValueError("there is no bucket in it")
    return _s3(options), f"{parts.netloc}{parts.path}".rstrip("/")


class _S3(fs.S3FileSystem):
    """pyarrow's, which loses its patience when it is pickled on its way to a worker."""

    def __reduce__(self) -> Any:
        return _s3, ({key: value for key, value in super().__reduce__()[1][0].items() if key in _S3_OPTIONS and value},)


def _s3(options: Mapping[str, str]) -> fs.FileSystem:
    patience = {"connect_timeout": _CONNECT_S, "request_timeout": _ANSWER_S}
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=_S3_TRIES)
    surroundings = {
        "region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        "endpoint_override": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
    }
    return _S3(**surroundings | dict(options) | patience, retry_strategy=retries)


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


def _advice(error: BaseException) -> str:
    """An error's text in one line, what to do about it first where that is known."""
    text = one_line(error, 400)
    cause = next((advice for name, advice in _CAUSES.items() if name in text), None)
    return f"{cause} ({text})" if cause else text
