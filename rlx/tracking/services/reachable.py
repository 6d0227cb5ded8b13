"""Whether tracking services can take records, as far as a moment shows it: addresses, packages and keys.

Nothing here needs Ray, and only W&B's own package is imported, if it is used: a run is refused before it starts.
Left out: whether a database opens (`TrackingService.check`).
"""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import json
import os
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections.records import TrackingConfig
from rlx.storage.addresses import local_folder
from rlx.tracking.services import artifact_places, mlflow_errors
from rlx.tracking.services.wandb import WandbService

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""what a service needs to be installed, by its name, which is also that of pip's extra"""
_ANSWER_S = 2.0
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "databricks-uc", "uc")
"""of MLflow's own stores"""
_BARE = ("", "databricks", "databricks-uc", "uc")
"""addresses of MLflow's that have no more than a scheme"""
_QUESTION = "/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
_UNKNOWN = (404, 405, 501)
"""what web servers say of a path, or a method, that they do not have"""
_SIGNED_IN = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
_LONGEST = 1 << 20  # bytes of an answer


def check_packages(tracking: TrackingConfig) -> None:
    """Raises ConfigError if a service needs a package that is not installed."""
    for name in tracking.backends:
        package = PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(f"tracking.backends {name}: needs the package {package}: pip install 'rlx[{name}]'")


def check_tracking(tracking: TrackingConfig, storage: str) -> None:
    """Raises ConfigError if MLflow's address is of no kind, nobody answers there or no MLflow, or W&B finds no key.

    Databases open later; what is looked at is whether the file of a SQLite database may be written.

    Args:
        storage: the address of the storage, where MLflow's database is if `tracking.uri` names none.
    """
    if "mlflow" in tracking.backends:
        check_mlflow(tracking.uri)
        if not tracking.uri:
            _check_file(local_folder(storage) / artifact_places.DATABASE, "storage")
        elif file := artifact_places.database(tracking.uri):
            _check_file(file, "tracking.uri")
    if "wandb" in tracking.backends:
        WandbService(Path()).check(tracking.experiment)


def check_mlflow(uri: str | None) -> None:
    """Raises ConfigError if an address is of no kind that MLflow knows, or no MLflow server answers there.

    Databases open later.
    """
    address = uri or ""
    scheme = address.partition("://")[0].partition("+")[0]
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="mlflow.tracking_store")]
    if "://" in address and scheme not in (known := [*_SCHEMES, *plugins]):
        raise ConfigError(
            f"tracking.uri {mlflow_errors.without_password(address)}: MLflow knows no {scheme}{nearest(scheme, known)}"
        )
    if "://" not in address and address not in _BARE and not Path(address).is_dir():
        raise ConfigError(f"tracking.uri {address}: no address, as http://HOST:5000 or sqlite:////FOLDER/mlflow.db is")
    if address.startswith(("http://", "https://")):
        _ask(address)


def _check_file(file: Path, setting: str) -> None:
    """Raises ConfigError if a SQLite database cannot be written: MLflow would try again and again to open it.

    SQLite writes beside the file, too; MLflow makes a folder that is missing.

    Args:
        setting: the one that says where the file is, for errors.
    """
    place = next(each for each in (file.absolute().parent, *file.absolute().parents) if os.path.exists(each))
    cause = ""
    if not place.is_dir():
        cause = f"{place} is no folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        cause = f"no write access to the folder {place}"
    elif file.exists() and not file.is_file():
        cause = "this is no file"
    elif file.exists() and not os.access(file, os.W_OK):
        cause = "no write access to this file"
    if cause:
        raise ConfigError(f"{setting}: MLflow cannot write its database {file}: {cause}")


def _ask(address: str) -> None:
    """Raises ConfigError if no server answers at a web address, or one that is not MLflow's.

    Who is slow, or has a certificate that only MLflow is told to take, passes: MLflow asks again later.
    """
    shown, answer = mlflow_errors.without_password(address), _answer(address.rstrip("/") + _QUESTION)
    if isinstance(answer, _Answer):
        signed_in = any(os.environ.get(name) for name in _SIGNED_IN)  # a proxy may show others its page
        if (answer.status < 400 or answer.status in _UNKNOWN) and not _is_object(answer.body) and not signed_in:
            raise ConfigError(
                f"tracking.uri {shown}: a web server answers there, but not as MLflow does (status {answer.status})"
            )
        return
    reason = getattr(answer, "reason", answer)
    if isinstance(reason, http.client.BadStatusLine | http.client.LineTooLong):
        raise ConfigError(f"tracking.uri {shown}: something answers there that is no web server")
    if not isinstance(reason, ssl.SSLError | TimeoutError):
        raise ConfigError(f"tracking.uri {shown}: no server answers there ({reason})")


@dataclass(frozen=True)
class _Answer:
    """What a web server says."""

    status: int
    body: bytes


def _answer(url: str) -> _Answer | Exception:
    """The answer of a web server, or why there is none: a TimeoutError if it has not said all within the limit."""
    found: list[_Answer | Exception] = []

    def ask() -> None:
        try:
            found.append(_read(url))
        except Exception as error:  # of the network, of the address, of the protocol
            found.append(error)

    # In a thread: the limit of a connection is one for each of its parts, however many come.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return found[0] if found else TimeoutError()


def _read(url: str) -> _Answer:
    _ = urllib.parse.urlsplit(url).port  # a ValueError beyond 65535, of which the system may take the rest
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return _Answer(answer.status, answer.read(_LONGEST))
    except urllib.error.HTTPError as error:
        with error:
            return _Answer(error.code, error.read(_LONGEST))


def _is_object(body: bytes) -> bool:
    """Whether an answer is a JSON object, as all of MLflow's are, errors too."""
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False
