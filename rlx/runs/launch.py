"""`run(prepared, folder) -> RunResult`: trains a prepared run to its last step; keeps its folder and its MLflow run.

The same function runs from the command line and inside a Tune trial. A run's folder on the storage is its identity:
a resume continues what is in the folder.
Left out: the checks before a run (`preflight`) and the processes (`processes`, `train_run`).
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import yaml

from rlx.cluster import nodes
from rlx.cluster.nodes import FolderCopies
from rlx.config.errors import ConfigError, one_line
from rlx.config.loading import from_tree
from rlx.config.sections.base import flatten
from rlx.config.sections.data import prompt_addresses
from rlx.data.blocks import rows_of
from rlx.data.mixture import JoinedRows
from rlx.data.record import PUT_BACK, RECORD, check_record, prompt_record
from rlx.data.sources import FILES, find_source, table_names, table_places
from rlx.data.stored.files import find_files
from rlx.data.stream import PromptRows, check_cursor
from rlx.models.folder import is_model_folder
from rlx.runs import relay
from rlx.runs.mailbox import JobSpec
from rlx.runs.preflight import PreparedRun, companions, prompt_tables
from rlx.runs.processes import RunProcesses
from rlx.runs.run_folder import check_new, check_start, saved_config
from rlx.runs.train_run import RunLostError, RunStopped
from rlx.samples import last_page
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage, StorageError, check_writable, write_record
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.tracking import changes, outbox, provenance, tracker
from rlx.tracking.base import RunStatus, TrackingService
from rlx.tracking.parameters import params_of
from rlx.tracking.startup import EventLog
from rlx.tracking.tracker import OutboxTracker
from rlx.types import Notify, OnReport, Phase

if TYPE_CHECKING:
    from rlx.runs.doctor import Verdict

# Ray Train's list of the checkpoints that were reported to it. A resume deletes it: only the same version of
# Ray can read it, and the checkpoint folders themselves show which checkpoints there are.
_TRAIN_RECORD = "checkpoint_manager_snapshot.json"
_LOG = logging.getLogger("rlx")
_PATIENCE_S = 10.0  # longest wait for the tracking service at the end of a run


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    name: str
    folder: str  # its path on the run's storage
    metrics: dict[str, Any]  # of the last step
    mlflow_run: str | None  # None: MLflow has not answered yet
    train: ray.train.Result | None  # Ray Train's own result; None while the workers stay


@dataclass(frozen=True)
class Parent:
    """The sweep or trial whose MLflow run a run is nested in."""

    folder: Storage
    tags: Mapping[str, str] = field(default_factory=dict)  # of the nested run
    signer: Signer | None = None  # for its settings; None: the user's key is read


def run(
    prepared: PreparedRun,
    folder: Storage,
    *,
    resume: bool = False,
    parent: Parent | None = None,
    on_report: OnReport | None = None,
    notify: Notify | None = None,
    processes: RunProcesses | None = None,
    waits: bool = False,
) -> RunResult:
    """Trains to the last step.

    Args:
        folder: where the run is kept; an existing run is continued if `resume`, and is an error otherwise.
        parent: what the run's MLflow run is nested in.
        on_report: called after each step, see `OnReport`.
        notify: called with messages that are not metrics, e.g. that an engine died; they are also kept with the run.
        processes: engines and workers of an earlier run of this process; they do this run, too, as far as they suit.
            None: nothing is left running, whatever happens.
        waits: after each evaluation the run waits until `processes.release` is called with its step.

    Raises:
        ConfigError: the input cannot be used.
        RunError: training failed.
        RunStopped: `processes.stop` was called meanwhile.
    """
    config, notify = prepared.config, notify or _log
    _check(prepared, folder, resume, parent)
    # The driver of a sweep has done this for its trials. `tracking` stays until the end: see `_on_cluster`.
    prepared, tracking = (prepared, prepared.tracking) if parent else _on_cluster(prepared)
    with (processes or RunProcesses()).lease(prepared) as leased:
        # Before the run exists: a run without prompts leaves no trace, and a resume on others changes nothing.
        notify(Phase("prompts"))
        prepared = replace(prepared, tables=prepared.tables or prompt_tables(config, prepared.model_path))
        rows = {name: rows_of(table) for name, table in (prepared.tables or {}).items()}
        _check_prompts(prepared, folder, rows)
        record = _open_record(prepared, folder, rows, resume, parent, notify)
        signature = _signed(folder, config.model_dump(mode="json"), parent)
        with _closing(record, prepared.name, notify, parent), _adding_page(record, prepared, folder):
            job = _job(prepared, folder, tracking, signature, waits)
            events = EventLog(record, notify, on_report or _ignore)
            events(Phase("workers"))
            grace_s = config.checkpoint.grace_s
            metrics = leased.run(prepared, job, events.report, events, grace_s=grace_s, again=resume)
            write_record(folder / "result.json", json.dumps(metrics))
        return RunResult(prepared.name, folder.path, metrics, record.run_id, leased.result and _pruned(leased.result))


def _on_cluster(prepared: PreparedRun) -> tuple[PreparedRun, Sequence[TrackingService]]:
    """Returns the run with its models on all nodes, and its tracking services as workers reach them.

    Keep the services: what passes records on is an actor, which ends with its last handle.
    """
    copies, services = bring_folders(prepared), prepared.tracking
    reachable = relay.reachable(services)
    here = relay.from_driver(services, reachable)
    return replace(prepared, copies=copies, reachable=here), reachable


def _job(
    prepared: PreparedRun, folder: Storage, tracking: Sequence[TrackingService], signature: str, waits: bool
) -> JobSpec:
    """Returns what the workers are told of a run, without the processes that it has."""
    return JobSpec(
        config=prepared.config,
        model_path=prepared.model_path,
        folder=folder,
        tracking=tracking,
        signature=signature,
        waits=waits,
        replay=prepared.replay,
        copies=prepared.copies,
    )


def input_files(prepared: PreparedRun) -> dict[str, list[Storage]]:
    """Returns the files of the models and of the stored prompts of a run that this process can read, by setting."""
    config, found = prepared.config, dict[str, list[Storage]]()
    models = companions(config.model) | {"model.path": prepared.model_path, "reward.model": config.reward.model}
    for setting, path in models.items():
        if path and is_model_folder(path, setting):
            folder = open_storage(path, create=False)
            found[setting] = [folder / name for name in folder.names() if (folder / name).size() is not None]
    for setting, address in prompt_addresses(config.data, config.eval).items():
        if find_source(address) is FILES:
            filesystem, files = find_files(address, setting)
            found[setting] = [Storage(filesystem, file.path) for file in files]
    return found


def _check(prepared: PreparedRun, folder: Storage, resume: bool, parent: Parent | None) -> None:
    """Raises an error for a folder, a start, a model or a tracking service that cannot be used."""
    check_writable(folder)
    config = prepared.config
    if config.checkpoint.init_from and not (resume and checkpoint_catalog.complete_checkpoints(folder)):
        check_start(config, is_new=False)  # what is new has been checked: a resume reads what it read
    if resume and (config.model.lora_rank or config.resolved_reference != "none"):  # else checkpoints have all weights
        provenance.check_same_weights(folder, input_files(prepared))
    if not resume and parent is None:  # a resume and a trial keep their records until the server answers
        for service in prepared.tracking:
            service.check(config.tracking.experiment)


def _check_prompts(prepared: PreparedRun, folder: Storage, rows: Mapping[str, PromptRows]) -> None:
    """Raises ConfigError if the run goes on from a checkpoint's state or replays another run, and has other prompts."""
    config, found = prepared.config, checkpoint_catalog.complete_checkpoints(folder)
    if recorded := folder if found else prepared.replayed:
        check_record(recorded, config.data, config.eval, rows)
    if not found and config.checkpoint.init_from and config.checkpoint.init_state == "all":
        found = [checkpoint_catalog.read_checkpoint(open_storage(config.checkpoint.init_from, create=False))]
    if found and (manifest := found[-1].manifest):
        names, places = table_names(config.data, "train"), table_places(config.data, config.eval)
        try:
            check_cursor(manifest.cursor, JoinedRows(tuple(rows[name] for name in names)), config.seed)
        except ConfigError as error:
            of = " or ".join(dict.fromkeys(places[name] for name in names))
            raise ConfigError(f"{of}: {error}: {PUT_BACK}") from None


def bring_folders(prepared: PreparedRun) -> FolderCopies | None:
    """Copies the models that only this node has to the other nodes; returns what later nodes need of them.

    Raises:
        ConfigError: one of them is too large.
    """
    others = companions(prepared.config.model) | {"reward.model": prepared.config.reward.model}
    models = [(path, setting) for setting, path in others.items() if path]
    return nodes.bring_models([(prepared.model_path, "model.path"), *models])


def _pruned(result: ray.train.Result) -> ray.train.Result:
    """Returns Ray Train's result without the checkpoints that rlx has deleted since they were reported."""
    listed = result.best_checkpoints or []
    kept = [entry for entry in listed if Storage(entry[0].filesystem, entry[0].path).exists()]
    return replace(result, best_checkpoints=kept)


def examine(
    prepared: PreparedRun, processes: RunProcesses | None = None, notify: Notify = lambda message: None
) -> list[Verdict]:
    """Runs a few steps that change nothing. No run folder and no MLflow record remain.

    Args:
        processes: as for `run`.
        notify: called with what is being started.

    Returns:
        The doctor's verdicts on the config, one for each property that it measures.

    Raises:
        ConfigError: the input cannot be used.
        RunError: a step failed.
    """
    from rlx.runs import doctor

    config = prepared.config
    lease = (processes or RunProcesses()).lease(prepared)
    with lease as leased, tempfile.TemporaryDirectory(prefix="rlx-check-") as temporary:
        prepared = replace(prepared, tables=prompt_tables(config, prepared.model_path))
        folder = open_storage(f"{temporary}/check")
        job = JobSpec(doctor.with_no_learning(config), prepared.model_path, folder, examine=True)
        figures = leased.run(prepared, job, _ignore, notify)
    at_reference = doctor.starts_at_reference(config.resolved_reference, config.model, config.checkpoint)
    return doctor.verdicts(figures, config.model.dtype, at_reference)


def send_pending(services: Sequence[TrackingService], folder: Storage, notify: Notify) -> bool:
    """Sends the records of a finished run that still wait; returns False if a tracking service is away."""
    if not outbox.pending(folder):
        return True
    left, titles = tracker.send_pending(services, folder, notify), titles_of(services)
    notify(
        f"{left.count} records for {titles} still wait in {folder}/outbox"
        if left.count
        else f"the records that waited for {titles} are sent"
    )
    return not left.is_away


def titles_of(services: Sequence[TrackingService]) -> str:
    """The names of tracking services, as messages show them."""
    return " and ".join(service.title for service in services)


# ---------------------------------------------------------------------------------------------------------------------
# Records of a run


def _open_record(
    prepared: PreparedRun,
    folder: Storage,
    rows: Mapping[str, PromptRows],
    resume: bool,
    parent: Parent | None,
    notify: Notify,
) -> OutboxTracker:
    """Writes the run's config and opens its MLflow run: a new one, or the one that a resume continues."""
    config = prepared.config
    if resume:
        _go_on(folder, config.model_dump(mode="json"), notify)
    else:
        check_new(prepared.name, folder)
        if not parent:  # else each trial would read the whole model
            provenance.begin_record(folder, input_files(prepared))
    # Also on a resume: settings that were changed for it hold for later resumes.
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_record(folder / "config.yaml", text)
    write_record(folder / RECORD, prompt_record(config.data, config.eval, rows))
    record = OutboxTracker(prepared.tracking, folder, "driver", notify)
    record.open(
        config.tracking.experiment,
        prepared.name,
        params=params_of(flatten(config)),
        tags={"rlx.kind": "run", "rlx.folder": folder.path, **(parent.tags if parent else {})},
        parent=parent.folder if parent else None,
    )
    record.log_text("config.yaml", text)
    return record


def _go_on(folder: Storage, tree: Mapping[str, Any], notify: Notify) -> None:
    """Prepares the folder of a run for a resume with the settings of a tree."""
    (folder / _TRAIN_RECORD).delete()
    saved = saved_config(folder)
    if begins_again := not checkpoint_catalog.saved_checkpoints(folder):
        notify("no checkpoint yet: the run begins again with its first step")
    before, now = (from_tree(dict(each)).train.steps for each in (saved, tree))
    if now < before:  # no service can be asked to forget a step
        notify(f"train.steps is {now}, and was {before}: what has been logged of later steps stays logged")
    changes.note_resume(folder, saved if begins_again else tree, tree)


def _signed(folder: Storage, tree: Mapping[str, Any], parent: Parent | None) -> str:
    """Signs a run's settings in its folder; returns the signature, which its checkpoints have too."""
    signer = parent.signer if parent and parent.signer else Signer.new()
    write_record(folder / SIGNATURE, signature := signer.sign(tree))
    return signature


@contextmanager
def _closing(record: OutboxTracker, name: str, notify: Notify, parent: Parent | None) -> Iterator[None]:
    """Ends the run's MLflow run with the status of the block and why it failed, and sends what still waits."""
    status, reason = RunStatus.FAILED, ""
    try:
        yield
        status = RunStatus.FINISHED
    except (RunStopped, SystemExit):  # Tune's report exits the thread of a trial that it has stopped
        # That of a sweep may have been paused or interrupted, which is not its end: the driver knows, see `TrialLog`.
        status = RunStatus.KILLED if parent else RunStatus.FINISHED
        raise
    except KeyboardInterrupt:
        status = RunStatus.KILLED
        raise
    except ray.exceptions.RayError as error:  # an actor of the cluster has died, or the cluster itself
        reason = f"Ray failed: {one_line(error, 300)}"
        raise RunLostError(reason) from error
    except Exception as error:
        reason = one_line(error, 500)
        raise
    finally:
        record.end(status, reason)
        _send_rest(record, name, record.folder, notify)


@contextmanager
def _adding_page(record: OutboxTracker, prepared: PreparedRun, folder: Storage) -> Iterator[None]:
    """Adds a page of the completions to the records at the end of the block, also of one that fails."""
    try:
        yield
    except KeyboardInterrupt:  # a person waits
        raise
    except BaseException:
        _add_page(record, prepared, folder)
        raise
    _add_page(record, prepared, folder)


def _add_page(record: OutboxTracker, prepared: PreparedRun, folder: Storage) -> None:
    keeps = prepared.config.tracking.completions > 0
    if keeps and (text := last_page.last_page(folder, prepared.name)):
        record.log_text(last_page.FILE, text)


def _send_rest(record: OutboxTracker, name: str, folder: Storage, notify: Notify) -> None:
    """Sends what the driver and the workers have not sent yet; says how many records are left."""
    titles, where, resume = titles_of(record.services), f"{folder}/outbox", f": --resume {name} sends them"
    rest = tracker.Unsent(record.close(_PATIENCE_S), record.is_away)
    try:
        if not rest.count:
            rest = tracker.send_pending(record.services, folder, notify, _PATIENCE_S)
        if left := outbox.pending(folder):  # what a deleted run waits for, a person was told
            notify(f"{left} records for {titles} wait in {where}{resume if rest.is_away else ''}")
    except (StorageError, OSError) as error:  # the run itself is over
        notify(f"records for {titles} may wait in {where}{resume} ({one_line(error)})")


def _log(message: str) -> None:
    """Logs a message, where nobody else shows messages."""
    _LOG.info("starting: %s", message) if isinstance(message, Phase) else _LOG.warning(message)


def _ignore(metrics: dict[str, Any], checkpoint: str | None) -> None:
    pass
