"""Turns a storage address into a `Storage`: a folder, a file:// or s3:// URI, or the name of a storage profile.

S3 keys come from the environment, as pyarrow reads them. An address that holds a key is refused, so that no key is
ever saved, logged or printed. Left out: operations on files (filesystem.py).
"""

from __future__ import annotations

import difflib
import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import fs

from rlx.config.addresses import holds_secret, names_secret, why_unusable
from rlx.config.errors import nearest, one_line, printable
from rlx.config.loading import parse_yaml
from rlx.config.reach import why_silent
from rlx.storage.filesystem import Storage, StorageError, explain

PROFILES = (Path("storage"), Path(__file__).parent / "profiles")
"""folders with NAME.yaml profiles, the first counts most: the working folder's, then those that ship with rlx"""
_S3_OPTIONS = ("region", "endpoint_override", "scheme")
_S3_CONNECT_TIMEOUT_S, _S3_REQUEST_TIMEOUT_S = 5.0, 30.0
_S3_ATTEMPTS = 5  # of one request; the SDK waits longer each time


_BELOW = re.compile(
    r"(?P<storage>(\w+://)?+/?[^/].*?)(/sweeps/[^/]+)?"  # a storage is a folder; `?+` keeps :// from being one
    r"/runs/(?!step_\d+(/|$))[^/]+(/step_\d+)?/?"  # of checkpoints alone are no runs
)
_SWEEP = re.compile(r"(?P<storage>.+)/sweeps/(?P<name>[^/?]+)/?(?P<options>\?.*)?")
_SCHEMES, _SCHEME = ("file", "s3"), re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{1,2})")


def open_storage(address: str, create: bool = True) -> Storage:
    """Opens the folder at an address; makes it if `create`.

    Raises:
        StorageError: the address is malformed, or the folder cannot be made.
    """
    resolved = resolve_address(address)
    try:
        filesystem, path = _open_filesystem(resolved)
        _check_answer(resolved)
        if create:
            filesystem.create_dir(path, recursive=True)
    except (OSError, ValueError) as error:
        raise StorageError(f"storage {without_options(resolved)}: {explain(error)}") from None
    return Storage(filesystem, path.rstrip("/"))


def resolve_address(address: str) -> str:
    """Returns an absolute path or a URI for the address; it means the same in any working directory.

    Raises:
        StorageError: the profile cannot be used, the address holds a key, or no folder can be called so.
    """
    if reason := why_unusable(address):
        raise StorageError(f"storage {printable(address[:80])}: {reason}")
    if (found := _SCHEME.match(address)) and not (found[2] == "//" and found[1] in _SCHEMES):
        scheme = found[1]
        hint = f"; write {scheme}://" if scheme in _SCHEMES else nearest(scheme, _SCHEMES)
        shown = f"{scheme}:..." if holds_secret(address) else address.partition("?")[0]
        raise StorageError(f"storage {shown}: expected a folder, file:///FOLDER or s3://BUCKET/FOLDER{hint}")
    if "://" in address:
        return _without_keys(address)
    profiles = {file.stem: file for folder in reversed(PROFILES) for file in sorted(folder.glob("*.yaml"))}
    profiles.pop("storage", None)  # the default: a folder that somebody has unpacked may not lead it elsewhere
    if address in profiles:
        return _read_profile(profiles[address])
    similar = difflib.get_close_matches(address, profiles, 1)
    if similar and not Path(address).exists():
        raise StorageError(f"storage {address}: no such profile or folder; did you mean {similar[0]}?")
    return _absolute_path(address)


def join_address(address: str, *names: str) -> str:
    """Returns the address of a file or folder below the folder at `address`; URI options are kept."""
    resolved = resolve_address(address)
    folder = without_options(resolved)
    return "/".join([folder.rstrip("/"), *names]) + resolved[len(folder) :]


def storage_above(address: str) -> str | None:
    """Returns the address of the storage that a run, a trial or a checkpoint lies in; None for what lies elsewhere."""
    path = without_options(address)
    found = _BELOW.fullmatch(path)
    return found["storage"] + address[len(path) :] if found else None


def split_sweep(address: str) -> tuple[str, str] | None:
    """Returns the name of the sweep at an address, and the address of its storage; None for what lies elsewhere."""
    found = _SWEEP.fullmatch(address)
    return (found["name"], found["storage"] + (found["options"] or "")) if found else None


def without_options(address: str) -> str:
    """Returns an address without the options of a URI; the name of a plain folder may have a question mark."""
    return address.partition("?")[0] if "://" in address else address


def local_folder(address: str) -> Path:
    """Returns the folder for files that need a real disk (the tiny model, the MLflow database).

    It is the storage folder itself, or ./storage when the storage is remote.
    """
    resolved = resolve_address(address)
    if "://" in resolved and not resolved.startswith("file://"):
        return Path("storage").resolve()
    return Path(_open_filesystem(resolved)[1])


def _read_profile(file: Path) -> str:
    """Returns the address that a profile describes; ${NAME} and ${NAME:-default} come from the environment.

    Keys of a profile: `address`; `mount`, a folder that must be a mount point; `region` and `endpoint` of S3.
    """
    try:
        profile = parse_yaml(file.read_text())
        if not isinstance(profile, dict):
            raise StorageError(f"expected a mapping, found {type(profile).__name__}")
        unknown = set(profile) - {"address", "mount", "region", "endpoint"}
        if unknown or not profile.get("address"):
            raise StorageError(f"unknown key {min(unknown, key=str)}" if unknown else "it has no address")
        values = {key: _expand_variables(str(value)) for key, value in profile.items() if value is not None}
    except (OSError, ValueError) as error:
        raise StorageError(f"storage profile {file}: {one_line(error, 400)}") from None
    if "mount" in values and not os.path.ismount(values["mount"]):
        raise StorageError(f"storage profile {file}: nothing is mounted at {values['mount']}")
    if "://" not in values["address"]:
        return _absolute_path(values["address"])
    options = {"region": values.get("region"), "endpoint_override": values.get("endpoint")}
    query = urllib.parse.urlencode({key: value for key, value in options.items() if value})
    return _without_keys(values["address"] + (f"?{query}" if query else ""))


def _expand_variables(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if names_secret(name):
            raise StorageError(f"${{{name}}} is called as a secret is: an address shows it to everybody")
        if (expanded := os.environ.get(name) or default) is None:
            raise StorageError(f"set {name} in the environment")
        return expanded

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, text)


def _absolute_path(path: str) -> str:
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a user without a home, a cycle of links
        raise StorageError(f"storage {path!r:.80}: {one_line(error, 400)}") from None


def _without_keys(address: str) -> str:
    """Returns the address as it is; raises StorageError if it seems to hold a key."""
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError as error:
        raise StorageError(f"storage {address.partition(':')[0]}://...: malformed address: {error}") from None
    if holds_secret(address):
        raise StorageError(
            f"storage {parts.scheme}://...: the address holds a key: "
            f"put keys into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )
    return address


def _open_filesystem(resolved: str) -> tuple[fs.FileSystem, str]:
    """Returns the filesystem of a resolved address and the path on it."""
    if "://" not in resolved:
        return fs.LocalFileSystem(), _absolute_path(resolved)
    parts = urllib.parse.urlsplit(resolved)
    if parts.scheme != "s3":
        filesystem, path = fs.FileSystem.from_uri(resolved)
        return filesystem, path
    options = dict(urllib.parse.parse_qsl(parts.query))
    if unknown := sorted(set(options) - set(_S3_OPTIONS)):
        raise ValueError(f"unknown option {unknown[0]}, known are {', '.join(_S3_OPTIONS)}")
    if not parts.netloc:
        raise ValueError("the address names no bucket")
    return _open_s3(options), f"{parts.netloc}{parts.path}".rstrip("/")


def _check_answer(resolved: str) -> None:
    """Raises ConnectionError if no server answers for an S3 address: the client would try for half a minute."""
    parts = urllib.parse.urlsplit(resolved)
    if parts.scheme == "s3":
        options = _s3_environment() | dict(urllib.parse.parse_qsl(parts.query))
        server = options["endpoint_override"] or f"s3.{options['region']}.amazonaws.com"
        address = server if "://" in server else f"{options.get('scheme', 'https')}://{server}"
        if reason := why_silent(address):
            shown = server.rpartition("@")[2]
            raise ConnectionError(f"the server does not answer: check AWS_ENDPOINT_URL ({shown}: {reason})")


class _S3(fs.S3FileSystem):
    """pyarrow's S3 filesystem; it keeps its timeouts and retries when it is pickled for a worker."""

    def __reduce__(self) -> Any:
        options = super().__reduce__()[1][0]
        return _open_s3, ({key: value for key, value in options.items() if key in _S3_OPTIONS and value},)


def _open_s3(options: Mapping[str, str]) -> fs.FileSystem:
    timeouts = {"connect_timeout": _S3_CONNECT_TIMEOUT_S, "request_timeout": _S3_REQUEST_TIMEOUT_S}
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS)
    return _S3(**_s3_environment() | dict(options) | timeouts, retry_strategy=retries)


def _s3_environment() -> dict[str, str | None]:
    return {
        "region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        "endpoint_override": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
    }
