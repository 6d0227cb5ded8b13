"""TODO rlx.storage.addresses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pyarrow import fs
from rlx.config.errors import one_line
from rlx.config.loading import parse_yaml
from rlx.storage.filesystem import Storage
from rlx.storage.filesystem import StorageError
from rlx.storage.filesystem import advice
from typing import Any
import difflib
import os
import re
import urllib.parse

PROFILES = (Path("storage"), Path(__file__).resolve().parents[2] / "storage")
"""folders of NAME.yaml: here, and beside rlx"""
_S3_OPTIONS = ("region", "endpoint_override", "scheme")
_SECRET = re.compile(r"key|secret|token|password", re.IGNORECASE)  # no option of an address is called like this
_CONNECT_S, _ANSWER_S = 5.0, 30.0  # longest waits for an S3 server
_S3_TRIES = 5  # of one request; the SDK waits a little longer each time


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
        raise StorageError(f"storage {place.partition('?')[0]}: {advice(error)}") from None
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
