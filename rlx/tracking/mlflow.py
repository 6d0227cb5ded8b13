"""Metric names, and the one door to MLflow: sweep = parent run, trial = child run, restart = the same child run.

Importing this does not import mlflow, which takes seconds: a worker does that while its engine starts. What is sent to
a server that may be down goes through tracker.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx import __version__
from rlx.config.errors import ConfigError, one_line

_TABLES = 100  # of the newest sample tables, named in a tag of 8000 characters by which MLflow's page finds them
_PATIENCE = {  # of MLflow's client with a server: one attempt, as tracker does the rest
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
# Not BAD_REQUEST, which is also what MLflow makes of a database that is out of connections.
_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"}
_REFUSED_FILES = {400, 413}  # HTTP's own, which is what an artifact's upload is answered with
_CAUSE = re.compile(
    r"connection refused|timed out|connection reset|remote end closed|too many \d+ error responses"
    r"|name or service not known|database is locked|error code \d+",
    re.IGNORECASE,
)


def default_uri(folder: Path) -> str:
    """The SQLite tracking store in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


class MLflowRun:
    """One MLflow run as a process writes it: what is sent again, with its own time, is there once.

    All of it raises whatever MLflow's client raises; `is_refusal` tells which of that is final.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self.run_id, self._door = run_id, client(uri)
        newest = self._door.get_run(run_id).data.to_proto().metrics
        self._logged_to = max((int(metric.step) for metric in newest), default=-1)
        self._tables: list[str] | None = None

    def log(self, metrics: Mapping[str, float], step: int, at: int) -> None:
        """Logs a step's metrics, all at once; a step that the run has already, as a resumed one repeats it, is not.

        Args:
            at: when they were, in ms since the epoch.
        """
        if step <= self._logged_to:
            return
        from mlflow.entities import Metric

        self._door.log_batch(self.run_id, metrics=[Metric(key, value, at, step) for key, value in metrics.items()])
        self._logged_to = step

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Logs completions as a table that the MLflow page shows; call it before the step's `log`.

        MLflow's own `log_table` puts rows behind those that are there, and fails after 145 tables.
        """
        if step <= self._logged_to:
            return
        import pandas as pd

        if self._tables is None:
            self._tables = [artifact.path for artifact in self._door.list_artifacts(self.run_id, "samples")]
        name = f"samples/step_{step:06d}.json"
        self._door.log_text(self.run_id, pd.DataFrame(list(rows)).to_json(orient="split", index=False), name)
        self._tables = sorted({*self._tables, name})
        shown = [{"path": path, "type": "table"} for path in self._tables[-_TABLES:]]
        self._door.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(shown))

    def log_text(self, name: str, text: str) -> None:
        """Stores a text artifact, e.g. the resolved config."""
        self._door.log_text(self.run_id, text, name)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._door.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def end(self, status: str, at: int) -> None:
        """Closes the run as FINISHED, FAILED or KILLED; one that ended so keeps its end time."""
        if self._door.get_run(self.run_id).info.status != status:
            self._door.set_terminated(self.run_id, status, at)


def make_run(
    uri: str,
    key: str,
    experiment: str,
    name: str,
    *,
    parent: str | None,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    at: int,
) -> str:
    """The id of the MLflow run that has a key, made as of `at` (ms since the epoch) if there is none: one is made,
    however often it is asked for."""
    from mlflow.entities import Param

    door, experiment_id = client(uri), _experiment_id(uri, experiment)
    found = door.search_runs([experiment_id], f"tags.`rlx.key` = '{key}'", max_results=1)
    if found:
        run_id = str(found[0].info.run_id)
    else:
        own = _origin() | {"rlx.key": key, "rlx.opened": str(at)} | ({"mlflow.parentRunId": parent} if parent else {})
        run_id = str(door.create_run(experiment_id, at, dict(tags) | own, name).info.run_id)
    door.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
    return run_id


def _origin() -> dict[str, str]:
    """By whom and what a run is made, as MLflow's page shows it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for the number, as in some containers
        user = str(os.getuid())
    return {"mlflow.user": user, "mlflow.source.name": f"rlx {__version__}", "mlflow.source.type": "LOCAL"}


def reopen_run(uri: str, run_id: str, at: int) -> bool:
    """Marks a run as running again and counts the attempt that began `at`, once; False if MLflow has no such run."""
    door = client(uri)
    try:
        run = door.get_run(run_id)
    except Exception as error:
        if is_refusal(error):
            return False
        raise
    if run.info.lifecycle_stage != "active":
        return False
    if run.data.tags.get("rlx.opened") != str(at):
        from mlflow.entities import RunTag

        door.update_run(run_id, status="RUNNING")
        attempt = int(run.data.tags.get("rlx.attempt", "1")) + 1
        door.log_batch(run_id, tags=[RunTag("rlx.attempt", str(attempt)), RunTag("rlx.opened", str(at))])
    return True


def is_refusal(error: Exception) -> bool:
    """Whether MLflow has answered with a no that trying again does not change."""
    answer = getattr(getattr(error, "response", None), "status_code", None)
    return getattr(error, "error_code", None) in _REFUSALS or answer in _REFUSED_FILES


def cause(error: Exception) -> str:
    """Why MLflow's client failed, in a few words without a password that an address may hold."""
    text = one_line(error, 2000)
    known = _CAUSE.search(text)
    return known[0].lower() if known else without_password(text)[:300]


def without_password(text: str) -> str:
    """The same, but addresses in it only from their host on."""
    return re.sub(r"//[^/\s]*@", "//", text)


def send_briefly() -> None:
    """From now on a request of this process to a tracking server is made once and waits 10 s at most."""
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)


def _experiment_id(uri: str, name: str) -> str:
    """Of the experiment of that name, made if there is none."""
    found = client(uri).get_experiment_by_name(name)
    if found:
        return str(found.experiment_id)
    # Otherwise MLflow opens it among traces and prompts.
    kind = {"mlflow.experimentKind": "custom_model_development"}
    return str(client(uri).create_experiment(name, _artifacts(uri), kind))


def check_server(uri: str) -> None:
    """ConfigError if there is no tracking server or database at an address."""
    send_briefly()
    try:
        client(uri).search_experiments(max_results=1)
    except Exception as error:  # each kind of store has its own
        raise ConfigError(f"tracking.uri {without_password(uri)}: {cause(error)}") from None


def ui_command(uri: str) -> str:
    """What to type to see a tracking store in a browser; a server is there already."""
    return f"open {uri}" if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"


def run_address(uri: str, run_id: str | None) -> str:
    """The page of a run, once the store is served; that of the store if MLflow cannot say where the run is."""
    server = uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"
    send_briefly()
    try:
        return f"{server}/#/experiments/{client(uri).get_run(run_id).info.experiment_id}/runs/{run_id}"
    except Exception:  # each kind of store has its own
        return server


def log_files(uri: str, run_id: str, paths: Sequence[Path], folder: str | None = None) -> None:
    """Stores files as artifacts."""
    for path in paths:
        client(uri).log_artifact(run_id, str(path), folder)


def register(uri: str, run_id: str, folder: Path, name: str) -> str:
    """Stores a model's folder with its run, as artifact `model`, and registers it; which version it has become."""
    from mlflow.exceptions import MlflowException

    door = client(uri)
    door.log_artifacts(run_id, str(folder), "model")
    try:
        door.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{door.get_run(run_id).info.artifact_uri}/model"
    return str(door.create_model_version(name, source, run_id).version)


def client(uri: str) -> Any:
    """MLflow's client for a tracking store, without its chatter."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    for name in ("mlflow", "mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _artifacts(uri: str) -> str | None:
    """Where a SQLite store keeps its artifacts: beside the database. A server decides for itself."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else (Path(path).resolve().parent / "mlartifacts").as_uri()
