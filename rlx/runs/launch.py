"""run(config) -> Result: checks the input, has a crew do the run, keeps its records, relays, cleans up.

The same function runs from the command line and inside a Tune trial. A run's folder on the storage is its identity:
what is found there is what a resume continues.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import yaml

from rlx.config.errors import ConfigError, one_line
from rlx.config.run import RunConfig
from rlx.config.sections import flatten
from rlx.runs import preflight
from rlx.runs.actor_group import ActorGroup
from rlx.runs.ray_train import Notify, Report, RunStopped, WorkerSpec
from rlx.runs.resources import check_room, plan_resources
from rlx.runs.run_folder import check_new, check_start, write
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import local_folder, open_storage
from rlx.storage.filesystem import Storage, StorageError, check_writable
from rlx.tracking import mlflow, outbox, tracker
from rlx.tracking.tracker import OutboxTracker

if TYPE_CHECKING:
    from rlx.runs.doctor import Verdict


# Nobody preempts or scrapes a cluster that lives in this process: no actors for that.
_OWN_CLUSTER = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}

# Ray Train's list of the checkpoints that it was told of. It is rewritten in place and asks for this very version of
# Ray: what there is to go on from is read from the folders themselves.
_TRAIN_RECORD = "checkpoint_manager_snapshot.json"
_LOG = logging.getLogger("rlx")
_PATIENCE_S = 10.0  # with MLflow, at the end of a run

_crew: ActorGroup | None = None  # of this process


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    name: str
    folder: str  # on its storage
    metrics: dict[str, Any]  # of the last step
    mlflow_run: str | None  # None: MLflow has not answered yet


def connect(config: RunConfig) -> None:
    """Joins the cluster, or starts one in this process, unless that is done already.

    Raises:
        ConfigError: the cluster cannot be reached, or can never hold the config's plan.
    """
    if not ray.is_initialized():
        _quiet_environment()
        own = {}
        if config.ray_address is None:
            own = {"num_cpus": os.cpu_count(), "include_dashboard": False}
            os.environ.update(_OWN_CLUSTER)
        try:
            ray.init(address=config.ray_address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"ray_address {config.ray_address}: {one_line(error, 500)}") from None
    check_room(plan_resources(config))


def run(
    config: RunConfig,
    folder: Storage,
    *,
    resume: bool = False,
    parent: Storage | None = None,
    tags: Mapping[str, str] | None = None,
    tables: Mapping[str, Any] | None = None,
    on_report: Report | None = None,
    say: Notify | None = None,
    keep: bool = False,
) -> Result:
    """Trains to the last step and gives the last step's metrics.

    Args:
        folder: where the run is kept; one there already is continued if `resume`, and otherwise an error.
        parent: folder of the sweep that it belongs to, or of the run: its MLflow run is nested in theirs.
        tags: of its MLflow run, beside those that all runs have.
        tables: what `inputs.prompt_tables` gave for this config, to spare doing it again.
        on_report: called with each step's metrics as they come.
        say: called with what a person should know beside them, e.g. that an engine died; kept with the run as well.
        keep: whether engines and workers stay for the next run of this process, until `release`; otherwise nothing is
            left running, whatever happens.

    Raises:
        ConfigError: the input cannot be used.
        RunError: training failed.
        RunStopped: `stop` was called meanwhile.
    """
    path = preflight.prepare(config, tables=tables)
    check_writable(folder)
    if config.checkpoint.init_from and not (resume and checkpoint_catalog.complete_checkpoints(folder)):
        check_start(config)
    if not resume and parent is None:  # later on its records wait for a server that does not answer
        tracker.service_at(tracking_uri(config)).check()
    crew, say = _hired(config, path), say or _LOG.warning
    try:
        # Before there is a run: one without prompts leaves no trace.
        tables = tables or preflight.prompt_tables(config, path)
        record = _opened(config, folder, resume, parent, tags or {}, say)
        metrics = _trained(crew, config, folder, record, on_report, say, tables)
        return Result(config.name or "", folder.path, metrics, record.run_id)
    finally:
        if not keep:
            release()


def send_pending(config: RunConfig, folder: Storage, say: Notify) -> bool:
    """Sends MLflow what a run that is over could not send; False, and it is said, if the server still takes nothing."""
    if not outbox.pending(folder):
        return True
    left = tracker.send_pending(tracking_uri(config), folder, say)
    say(
        f"{left} records for MLflow still wait in {folder.path}/outbox" if left else "what MLflow had not taken is sent"
    )
    return not left


def stop() -> None:
    """Ends the run that another thread of this process is at, if there is one, with the step that it is in."""
    if _crew:
        _crew.stop()


def release() -> None:
    """Ends the engines and workers that this process has kept."""
    global _crew
    if _crew:
        _crew.close()
    _crew = None


def examine(config: RunConfig) -> list[Verdict]:
    """What the doctor says of a config: a few steps that change nothing and leave nothing, neither a run nor a record.

    Raises:
        ConfigError: the input cannot be used.
        RunError: a step failed.
    """
    from rlx.runs import doctor

    path = preflight.prepare(config)
    crew = _hired(config, path)
    try:
        with tempfile.TemporaryDirectory(prefix="rlx-check-") as folder:
            tables, place = preflight.prompt_tables(config, path), open_storage(f"{folder}/check")
            job = _job(doctor.with_no_learning(config), place, "", examine=True)
            figures = crew.run(config, job, place, tables, _ignore, lambda words: None)
    finally:
        release()
    return doctor.verdicts(figures, config)


def tracking_uri(config: RunConfig) -> str:
    """Where MLflow keeps what the config's runs report."""
    return config.tracking.uri or mlflow.default_uri(local_folder(config.storage))


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a run


def _hired(config: RunConfig, path: str) -> ActorGroup:
    """The crew of this process's last run if it can do this one too, or a new one."""
    global _crew
    if not _crew or not _crew.suits(config, path):
        release()
        _crew = ActorGroup(config, path)
    return _crew


def _trained(
    crew: ActorGroup,
    config: RunConfig,
    folder: Storage,
    record: OutboxTracker,
    on_report: Report | None,
    say: Notify,
    tables: Any,
) -> dict[str, Any]:
    """The run from where it is to its last step: its last metrics; whatever happens, its records are closed."""
    status = "FAILED"
    job, events = _job(config, folder, record.uri), _Events(record, say)
    try:
        metrics = crew.run(config, job, folder, tables, on_report or _ignore, events, config.checkpoint.grace_s)
        write(folder / "result.json", json.dumps(metrics))
        status = "FINISHED"
    except (RunStopped, SystemExit):  # Tune's report exits the thread of a trial that it has stopped
        status = "FINISHED"
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        record.end(status)
        _close(record, folder, say, config)
    return metrics


def _close(record: OutboxTracker, folder: Storage, say: Notify, config: RunConfig) -> None:
    """Sends MLflow what it has not yet, also what a worker had no more time for; says what is left."""
    where = f"{folder.path}/outbox: --resume {config.name} sends them"
    taken = record.close(_PATIENCE_S) == 0
    try:
        if taken:
            tracker.send_pending(record.uri, folder, say, _PATIENCE_S)
        if left := outbox.pending(folder):
            say(f"{left} records for MLflow wait in {where}")
    except (StorageError, OSError) as error:  # the run is as it is
        say(f"records for MLflow may wait in {where} ({one_line(error)})")


def _job(config: RunConfig, folder: Storage, uri: str, examine: bool = False) -> WorkerSpec:
    """What the workers are told of a run."""
    return WorkerSpec(config.model_dump(), preflight.model_folder(config), folder, uri, examine)


def _opened(
    config: RunConfig, folder: Storage, resume: bool, parent: Storage | None, tags: Mapping[str, str], say: Notify
) -> OutboxTracker:
    """The run's record in its folder and in MLflow, new or the one that is to go on."""
    uri = tracking_uri(config)
    if resume:
        (folder / _TRAIN_RECORD).delete()
    else:
        check_new(config, folder)
    # On a resume too: what was changed for the rest of the run holds for a later one.
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write(folder / "config.yaml", text)
    record = OutboxTracker(uri, folder, "driver", say)
    record.open(
        config.tracking.experiment,
        config.name or "run",
        params={key: value for key, value in flatten(config).items() if value is not None},
        tags={"rlx.kind": "run", "rlx.folder": folder.path, **tags},
        parent=parent,
    )
    record.log_text("config.yaml", text)
    return record


def _ignore(metrics: dict[str, Any], checkpoint: str | None) -> None:
    pass


class _Events:
    """What a run says beside its metrics: passed on, and kept as a text file with its MLflow run."""

    def __init__(self, record: OutboxTracker, say: Notify) -> None:
        self.record, self.say = record, say
        self.file = f"events_{time.strftime('%Y-%m-%d_%H:%M:%S')}.txt"
        self.text = ""

    def __call__(self, words: str) -> None:
        self.text += f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {words}\n"
        self.say(words)
        self.record.log_text(self.file, self.text)


def _quiet_environment() -> None:
    """What the libraries read when they start: fewer words, and reports as often as steps."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    quiet = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a config mean the same everywhere
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # also how often a report is taken in
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
