"""Where an MLflow store in a SQLite database and the artifacts of a store lie.

A SQLite database may come from a stranger, and it names a place for each run: an address would be asked with the user's
own key for MLflow, and a folder elsewhere would be written to. Left out: reading and writing artifacts (mlflow.py).
"""

from __future__ import annotations

import os
import posixpath
import re
import urllib.parse
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError, printable
from rlx.tracking.services.mlflow_errors import without_password

DATABASE = "mlflow.db"
"""the file of the store in a storage folder"""
_SQLITE = "sqlite:///"


def database_uri(file: Path) -> str:
    """The address of a SQLite database. What would mean another path in an address is quoted."""
    return _SQLITE + _quoted(str(file))


def absolute_uri(uri: str) -> str:
    """The address of a store, which means the same database in any working folder; options stay."""
    path, mark, options = uri.removeprefix(_SQLITE).partition("?")
    if not uri.startswith(_SQLITE) or path.startswith(("/", ":memory:", "file:")) or not path:
        return uri
    return f"{_SQLITE}{posixpath.normpath(posixpath.join(_quoted(os.getcwd()), path))}{mark}{options}"


def _quoted(path: str) -> str:
    return re.sub(r"%(?=[0-9A-Fa-f]{2})|\?", lambda found: urllib.parse.quote(found[0]), path)


def database(uri: str) -> Path | None:
    """The file of a SQLite store; None for another store."""
    path = uri.removeprefix(_SQLITE)
    return None if path == uri else Path(urllib.parse.unquote(path.partition("?")[0]))


def location(uri: str) -> str | None:
    """The artifact folder of a SQLite store, beside the database; None for a server, which has its own."""
    file = database(uri)
    return (file.resolve().parent / "mlartifacts").as_uri() if file else None


def is_known(client: Any, uri: str, run_id: str) -> bool:
    """Whether the artifacts of a run lie where rlx puts them, so that they may be read and written.

    They do not if the database names another place: a stranger's, or that of before the folder was moved.
    """
    return location(uri) is None or is_beside(uri, client.get_run(run_id))


def is_beside(uri: str, run: Any) -> bool:
    """The same of a run that MLflow has given."""
    if (own := location(uri)) is None:
        return True
    parts = urllib.parse.urlsplit(str(run.info.artifact_uri))
    path = posixpath.normpath(urllib.parse.unquote(parts.path))
    folder = urllib.parse.unquote(urllib.parse.urlsplit(own).path)
    return _is_on_disk(parts) and path.startswith(f"{folder}/")


def why_not_kept(client: Any, run_id: str) -> str:
    """A message that MLflow gets no files of a run, of which `is_beside` is false, why, and what to do."""
    experiment = client.get_experiment(client.get_run(run_id).info.experiment_id)
    address = str(experiment.artifact_location)
    parts = urllib.parse.urlsplit(address)
    place, cause = without_password(address), ""
    if _is_on_disk(parts):
        place, cause = urllib.parse.unquote(parts.path), ", as after the storage was moved or copied"
    return (
        f"MLflow gets no tables of samples, texts and pages of this run: experiment {experiment.name!r} keeps them in "
        f"{printable(place)[:300]}, not beside its database{cause}; --tracking.experiment NAME makes another "
        "experiment here for new runs"
    )


def _is_on_disk(parts: urllib.parse.SplitResult) -> bool:
    """Whether an address of artifacts is a folder of this machine."""
    return parts.scheme in ("", "file") and not parts.netloc


def required(client: Any, uri: str, run_id: str) -> Any:
    """The client.

    Raises:
        ConfigError: the place of the run's artifacts is not known.
    """
    if not is_known(client, uri, run_id):
        raise ConfigError(f"MLflow at {uri}: its database says that the files of run {run_id} lie elsewhere")
    return client
