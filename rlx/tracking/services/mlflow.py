"""The MLflow tracking service; what it returns are records of rlx. Only this module and mlflow_page import mlflow.

A sweep is a parent run, a trial a child run of it, and a later attempt of a trial a child run of the trial. A resumed
run continues its own MLflow run.

Importing this module does not import mlflow, which takes seconds: a worker imports it while its engine starts. Left
out: what happens to records while a server is down (outbox.py, delivery.py).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from rlx.config.errors import ConfigError, nearest
from rlx.tracking.base import ERROR_TAG, Failure, MetricPoint, Reach, RunStatus, TrackedRun
from rlx.tracking.services import artifact_places, mlflow_page
from rlx.tracking.services.mlflow_errors import cause, deleted, failure, is_purged, without_password
from rlx.tracking.services.mlflow_page import LONGEST_PARAM, PAUSED, paused_ms
from rlx.tracking.services.origin import origin_tags

_MAX_LISTED_TABLES = 100  # the tag that lists the sample tables for the MLflow page holds at most 8000 characters
_MAX_RUNS = 50_000
_LONGEST_WAIT_S = 120  # until another process has made the tables of a database, which takes it seconds
_OF_THE_CLIENT = {
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # delivery.py repeats requests
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_LEVELS = {"mlflow": logging.ERROR, "mlflow.store.db.utils": logging.CRITICAL, "alembic": logging.ERROR}
_PARENT = "mlflow.parentRunId"


def default_uri(folder: Path) -> str:
    """The address of the SQLite tracking store in a folder; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return artifact_places.database_uri(folder / artifact_places.DATABASE)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class MLflowService:
    """MLflow at one address: a server, or a database that MLflow opens itself. Implements `TrackingService`.

    Methods raise what the MLflow client raises, unless they say otherwise.
    """

    name: Final = "mlflow"
    title = "MLflow"

    def __init__(self, uri: str) -> None:
        self.uri, self.address = uri, without_password(uri)
        self.reach = Reach.NODE if uri.startswith("sqlite:") else Reach.ANYWHERE  # MLflow opens the file itself

    def check(self, experiment: str) -> None:
        """Returns if a server or database answers and takes runs of an experiment.

        Raises:
            ConfigError: none answers at the address, or the experiment is deleted.
        """
        try:
            found = client(self.uri).get_experiment_by_name(experiment)
        except Exception as error:  # the error type depends on the kind of store
            raise ConfigError(f"tracking.uri {self.address}: {cause(error)}") from None
        if way_back := mlflow_page.way_back(self.address, found):
            raise ConfigError(f"tracking.experiment {way_back}, --tracking.experiment NAME takes another")

    def browse_command(self) -> str:
        """What to type in a shell to see the runs in a browser."""
        return mlflow_page.browse_command(self.uri)

    def run_page(self, run_id: str | None) -> str:
        """The web address of a run once the store is served; of the server if MLflow cannot find the run."""
        server = mlflow_page.server(self.uri)
        try:
            info = client(self.uri).get_run(run_id).info
            return server + mlflow_page.run_path(info.experiment_id, info.run_id)
        except Exception:  # the error type depends on the kind of store
            return server

    def make_run(
        self,
        key: str,
        experiment: str,
        name: str,
        *,
        parent: str | None,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        at: int,
    ) -> str:
        """Returns the id of the run that has a key; creates the run first if no run has the key.

        Args:
            key: unique text, so that a request that is repeated creates one run.
            parent: id of the run that contains this one.
            at: start time in ms since the epoch.
        """
        from mlflow.entities import Param

        mlflow, experiment_id = client(self.uri), _experiment_id(self.uri, experiment)
        same_key = mlflow.search_runs([experiment_id], f"tags.`rlx.key` = '{key}'", max_results=1)
        if same_key:
            run_id = str(same_key[0].info.run_id)
        else:
            extra = {"rlx.key": key, "rlx.opened": str(at)} | ({_PARENT: parent} if parent else {})
            created = mlflow.create_run(experiment_id, at, dict(tags) | origin_tags() | extra, name)
            run_id = str(created.info.run_id)
        mlflow.log_batch(run_id, params=[Param(key, value[:LONGEST_PARAM]) for key, value in params.items()])
        mlflow_page.dress(mlflow, run_id, params, tags)
        return run_id

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Marks a run as running again, without an error, and increments its attempt number.

        Args:
            at: start time of the new attempt. A repeated call with the same time changes nothing.
            params: of the new attempt; what has changed is told by the description and a tag.
            tags: of the new attempt.
        """
        mlflow = client(self.uri)
        run = mlflow.get_run(run_id)
        if run.data.tags.get("rlx.opened") == str(at):
            return
        mlflow.update_run(run_id, status="RUNNING")  # MLflow refuses it if the run is deleted
        if ERROR_TAG in run.data.tags:
            mlflow.delete_tag(run_id, ERROR_TAG)
        attempt = int(run.data.tags.get("rlx.attempt", "1")) + 1
        new = {"rlx.attempt": str(attempt), "rlx.opened": str(at), PAUSED: str(paused_ms(run, at))}
        mlflow_page.tell_changes(mlflow, run, params, tags)
        self.writer(run_id).set_tags(new)

    def writer(self, run_id: str) -> MLflowRun:
        """Opens a run for writing."""
        return MLflowRun(self.uri, run_id)

    def failure(self, error: Exception) -> Failure:
        """Which kind of failure it is that MLflow has not taken a record."""
        return failure(error)

    def cause(self, error: Exception) -> str:
        """Why the MLflow client failed, in a few words and without a password; how to restore what is deleted."""
        if gone := deleted(error):
            return mlflow_page.way_back_of(self.address, client(self.uri), *gone)
        if is_purged(error):
            return f"{cause(error)}; without the run's outbox a resume begins a new one"
        return cause(error)


class MLflowRun:
    """Writes to one MLflow run: a record that is sent twice is stored once. Implements `RunWriter`.

    Methods raise what the MLflow client raises; `MLflowService.failure` tells which errors are final.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self.run_id, self._client = run_id, client(uri)
        run = self._client.get_run(run_id)
        self._keeps_files = artifact_places.is_beside(uri, run)
        self._last_step = max((int(metric.step) for metric in run.data.to_proto().metrics), default=-1)
        self._tables: list[str] | None = None  # paths of the sample tables; None until they are listed

    def missing(self) -> str:
        """Says that the run gets no artifacts, and why, if its place for them is not known; otherwise empty."""
        return "" if self._keeps_files else artifact_places.why_not_kept(self._client, self.run_id)

    def log(self, metrics: Mapping[str, float], step: int, at: int, again: bool = False) -> None:
        """Logs all metrics of a step in one request. A step that a resumed run repeats is skipped, unless `again`.

        Args:
            at: time of the step in ms since the epoch.
        """
        if step <= self._last_step and not again:
            return
        from mlflow.entities import Metric

        self._client.log_batch(self.run_id, metrics=[Metric(key, value, at, step) for key, value in metrics.items()])
        self._last_step = max(step, self._last_step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int, again: bool = False) -> None:
        """Logs completions as a table that the MLflow page shows. Call it before the `log` of the step.

        MLflow's `log_table` is not used: it appends to an existing table, and fails after 145 tables.
        """
        if (step <= self._last_step and not again) or not self._keeps_files:
            return
        import pandas as pd

        if self._tables is None:
            self._tables = [artifact.path for artifact in self._client.list_artifacts(self.run_id, "samples")]
        name = f"samples/step_{step:06d}.json"
        self._client.log_text(self.run_id, pd.DataFrame(list(rows)).to_json(orient="split", index=False), name)
        self._tables = sorted({*self._tables, name})
        newest = [{"path": path, "type": "table"} for path in self._tables[-_MAX_LISTED_TABLES:]]
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(newest))

    def log_text(self, name: str, text: str) -> None:
        """Stores a text artifact, e.g. the resolved config."""
        if self._keeps_files:
            self._client.log_text(self.run_id, text, name)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def end(self, status: RunStatus, at: int) -> None:
        """Ends the run. A run that has this status already keeps its end time."""
        run = self._client.get_run(self.run_id)
        if run.info.status != status:
            if (status := status.after(run.info.status)) == RunStatus.FINISHED:
                mlflow_page.log_best(self._client, self.run_id, at)
            self._client.set_terminated(self.run_id, status, at - paused_ms(run))


def _experiment_id(uri: str, name: str) -> str:
    """The id of the experiment with a name, which is created if there is none. In a deleted one MLflow makes no run."""
    from mlflow.exceptions import MlflowException

    if found := client(uri).get_experiment_by_name(name):
        return str(found.experiment_id)
    # Without this tag, the MLflow page opens the experiment at its traces.
    kind = {"mlflow.experimentKind": "custom_model_development"}
    try:
        return str(client(uri).create_experiment(name, artifact_places.location(uri), kind))
    except MlflowException:
        if found := client(uri).get_experiment_by_name(name):  # another process has made it meanwhile
            return str(found.experiment_id)
        raise


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def find_experiment(uri: str, name: str) -> str:
    """The id of the experiment with a name.

    Raises:
        ConfigError: no such store or experiment.
    """
    file = artifact_places.database(uri)
    if file and not file.is_file():  # MLflow would create an empty database
        raise ConfigError(f"no MLflow database {file}")
    try:
        found = client(uri).get_experiment_by_name(name)
        names = [] if found else [each.name for each in client(uri).search_experiments()]
    except Exception as error:  # the error type depends on the kind of store
        raise ConfigError(f"tracking store {without_password(uri)}: {cause(error)}") from None
    if not found:
        raise ConfigError(f"no experiment {name!r} in {without_password(uri)}{nearest(name, names)}")
    if way_back := mlflow_page.way_back(without_password(uri), found):
        raise ConfigError(f"experiment {way_back}")
    return str(found.experiment_id)


def find_runs(uri: str, experiment_id: str, *, kind: str | None = None, parent: str | None = None) -> list[TrackedRun]:
    """The runs of an experiment in the order of their start.

    Args:
        kind: only runs with this tag `rlx.kind`.
        parent: only runs that the run with this id contains.
    """
    wanted = {"rlx.kind": kind, _PARENT: parent}
    conditions = [f"tags.`{tag}` = '{value}'" for tag, value in wanted.items() if value is not None]
    runs = client(uri).search_runs([experiment_id], " and ".join(conditions), max_results=_MAX_RUNS)
    return [_tracked_run(run) for run in runs][::-1]  # MLflow lists the newest first


def get_run(uri: str, run_id: str) -> TrackedRun:
    """One run by its id."""
    return _tracked_run(client(uri).get_run(run_id))


def history(uri: str, run_id: str, metric: str) -> list[MetricPoint]:
    """All values of a metric in the order of logging. SQL databases store infinity as the largest float."""
    points = client(uri).get_metric_history(run_id, metric)
    return [MetricPoint(point.step, point.value, point.timestamp) for point in points]


def artifact_names(uri: str, run_id: str, folder: str | None = None) -> list[str]:
    """The paths of the artifacts in one folder of a run, sorted."""
    found = client(uri)
    known = artifact_places.is_known(found, uri, run_id)
    return sorted(str(artifact.path) for artifact in found.list_artifacts(run_id, folder)) if known else []


def read_artifact(uri: str, run_id: str, path: str) -> str:
    """The text of an artifact."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with tempfile.TemporaryDirectory() as folder:
        found = artifact_places.required(client(uri), uri, run_id)
        return Path(found.download_artifacts(run_id, path, folder)).read_text()


def _tracked_run(run: Any) -> TrackedRun:
    info, data = run.info, run.data
    return TrackedRun(
        id=str(info.run_id),
        name=str(info.run_name),
        experiment_id=str(info.experiment_id),
        parent_id=data.tags.get(_PARENT),
        status=RunStatus(info.status),
        params=dict(data.params),
        tags=dict(data.tags),
        metrics=dict(data.metrics),
        start_ms=info.start_time,
        end_ms=info.end_time,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Results of a run that is over


def log_files(uri: str, run_id: str, paths: Sequence[Path], folder: str | None = None) -> None:
    """Stores files as artifacts, where the run's place for them is known."""
    for path in paths if artifact_places.is_known(client(uri), uri, run_id) else ():
        client(uri).log_artifact(run_id, str(path), folder)


def log_summary(uri: str, run_id: str, description: str, metrics: Mapping[str, float]) -> None:
    """Gives a sweep its description, and its best values under names of their own: trials have curves of these."""
    mlflow_page.summarize(client(uri), run_id, description, metrics)


def register(uri: str, run_id: str, folder: Path, name: str) -> str:
    """Stores a model folder as artifact `model` of a run and registers it; returns the version number."""
    from mlflow.exceptions import MlflowException

    mlflow = artifact_places.required(client(uri), uri, run_id)
    mlflow.log_artifacts(run_id, str(folder), "model")
    try:
        mlflow.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{mlflow.get_run(run_id).info.artifact_uri}/model"
    return str(mlflow.create_model_version(name, source, run_id).version)


# ---------------------------------------------------------------------------------------------------------------------
# The MLflow client


def client(uri: str) -> Any:
    """The MLflow client of a tracking store, silent and with short requests. For this module and for tests."""
    for name, value in _OF_THE_CLIENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name, level in _LEVELS.items():  # the second logs tracebacks of a locked database
        if logging.getLogger(name).level != level:  # to set it takes milliseconds: all loggers forget theirs
            logging.getLogger(name).setLevel(level)
    _make_tables(uri)
    return MlflowClient(tracking_uri=uri)


@functools.cache
def _make_tables(uri: str) -> None:
    """Makes the tables of a fresh SQLite database, one process at a time: two at once would fail.

    Raises:
        ConfigError: another process has been at it for too long.
    """
    from mlflow import MlflowClient

    if not (file := artifact_places.database(uri)):
        return
    try:
        with FileLock(f"{file}.lock", timeout=_LONGEST_WAIT_S):
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except Timeout:
        raise ConfigError(f"another process has held {file}.lock for {_LONGEST_WAIT_S} s") from None
    except Exception:  # who asks next hears of it
        return
