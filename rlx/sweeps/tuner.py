"""Starts, resumes and ends a sweep: one Ray Tuner, each trial one run, nested in one MLflow run.

A resume uses the sweep's own records and nothing of Tune's, see `trial_source`.
Left out: what happens in a trial's process (`trainable`), tables and figures (rlx.analysis).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from ray import tune
from ray.tune.search.sample import Categorical

from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import DEFAULT_METRIC, flatten
from rlx.runs import launch, nodes, preflight, run_folder
from rlx.runs.mailbox import start_mailbox
from rlx.runs.resources import cluster_nodes
from rlx.runs.run_folder import exists, saved_config
from rlx.storage import signatures
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.sweeps import searchers
from rlx.sweeps.callback import Helpers, SweepCallback, TrialLog, Watch
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialRecords, TrialState
from rlx.sweeps.room import NeededModel, Room, concurrency, most_at_once, total_trials
from rlx.sweeps.schedulers import PAUSING, REPLAYING, SCHEDULERS, Schedule
from rlx.sweeps.space import MODE, Space, complete_settings, extremes, load_space
from rlx.sweeps.trainable import SharedInputs, attempt_number, forgive, newest_attempt, trainable
from rlx.sweeps.trial_source import TrialOptions, TrialSource
from rlx.tracking.base import RunStatus, TrackingService
from rlx.tracking.tracker import OutboxTracker

_LOG = logging.getLogger("rlx")
_PLAN_FILE, _SPACE_FILE = "sweep.json", "space.py"
_PATIENCE_S = 10.0  # longest wait for the tracking service
_TUNE_FOLDER = "tune"  # holds Tune's own records
_LOGGERS_OFF = "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"


# ---------------------------------------------------------------------------------------------------------------------
# Plans


def check_sweep(plan: SweepPlan) -> SweepPlan:
    """Returns the sweep as it will run: with a grid's own number of trials, and with what its scheduler needs.

    Raises:
        ConfigError: its space cannot be used, or its search, scheduler and seeds do not fit together.
    """
    space = load_space(plan.space, plan.tree)
    if plan.seeds > 1 and "seed" in space:
        raise ConfigError(f"--seeds {plan.seeds}: {plan.space} varies the seed already")
    if plan.scheduler in PAUSING and plan.max_concurrent:
        raise ConfigError(f"--max-concurrent: --scheduler {plan.scheduler} pauses and resumes its trials by itself")
    if plan.scheduler == "pbt":
        plan = _with_population(plan, space)
    search = searchers.searcher(plan.search, space, plan.trials, plan.config.seed)
    if not isinstance(search, searchers.ListSearch):
        return plan
    for settings in search.settings:
        from_tree(with_overrides(plan.tree, complete_settings(space, settings)), f"--space {plan.space}")
    return replace(plan, trials=len(search.settings))


def _with_population(plan: SweepPlan, space: Space) -> SweepPlan:
    """Returns a sweep by population based training: each evaluation has a checkpoint that is complete and stays."""
    if plan.search != "random" or plan.seeds > 1:
        raise ConfigError("--scheduler pbt changes settings by itself: leave --search and --seeds out")
    if fixed := [key for key in space if run_folder.is_fixed(key)]:
        raise ConfigError(f"--space {plan.space}: {fixed[0]} cannot change within a run, as --scheduler pbt would")
    first_rung = _schedule(plan, space).first_rung
    checkpoints = {"checkpoint.every": first_rung, "checkpoint.keep_last": None, "checkpoint.async_save": False}
    return replace(plan, tree=with_overrides(plan.tree, checkpoints))


def describe(plan: SweepPlan) -> str:
    """Returns what a sweep is going to do, in one line."""
    found = cluster_nodes()
    where = f"{len(found)} {'node' if len(found) == 1 else 'nodes'}"
    trials = f"{plan.trials} settings x {plan.seeds} seeds" if plan.seeds > 1 else f"{plan.trials} trials"
    return (
        f"sweep {plan.name}: {trials}, {concurrency(plan, found)} at once on {where} "
        f"({plan.resources} each), {plan.config.train.steps} steps, search {plan.search}, scheduler {plan.scheduler}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sweep's folder


def create_sweep(plan: SweepPlan, storage: Storage) -> SweepPlan:
    """Records a new sweep in its folder and in MLflow; returns its checked plan.

    Raises:
        ConfigError: its name is taken, it cannot be run, or MLflow does not answer.
    """
    folder, plan = storage / "sweeps" / plan.name, check_sweep(plan)
    if (folder / _PLAN_FILE).exists():
        raise ConfigError(f"sweep {plan.name!r} exists in {folder.path}: --resume {plan.name} continues it")
    plan.tracking.check()
    _create_mlflow_run(plan, folder)
    content, space = asdict(plan), Path(plan.space).read_text()
    (folder / SIGNATURE).write_text(Signer.new().sign({"plan": content, "space": space}))
    (folder / _SPACE_FILE).write_text(space)
    (folder / _PLAN_FILE).write_text(json.dumps(content, indent=1))
    return plan


def _create_mlflow_run(plan: SweepPlan, folder: Storage) -> None:
    varied = [*load_space(plan.space, plan.tree), *(["seed"] if plan.seeds > 1 else [])]
    options = {"search": plan.search, "scheduler": plan.scheduler, "seeds": plan.seeds}
    with _record(plan, folder) as record:
        record.open(
            plan.config.tracking.experiment,
            plan.name,
            params={"trials": total_trials(plan), "space": plan.space} | options,
            tags={"rlx.kind": "sweep", "rlx.folder": folder.path, "rlx.space": json.dumps(varied)}
            | {f"rlx.{key}": str(value) for key, value in options.items()},
        )


def saved_sweep(storage: Storage, name: str | None, *, trust: bool = False) -> SweepPlan:
    """Returns the plan of a sweep by name, or of the newest one.

    Args:
        trust: run the code of its search space, and take its settings, whoever wrote them.

    Raises:
        ConfigError: there is no such sweep, its record is damaged, or somebody else wrote it.
    """
    folder = find_sweep(storage, name)
    try:
        content, space = (folder / _PLAN_FILE).read_json(), (folder / _SPACE_FILE).read_text()
        plan = TypeAdapter(SweepPlan).validate_python(content)
        if plan.name != folder.name:
            raise ValueError(plan.name)
    except (TypeError, ValueError, RecursionError, FileNotFoundError):
        raise ConfigError(f"sweep {folder.path} is damaged: it is not what rlx wrote") from None
    signed = {"plan": content, "space": space}
    if trust:
        (folder / SIGNATURE).write_text(Signer.new().sign(signed))
    elif not signatures.is_own_folder(folder, signed):
        raise ConfigError(
            f"this user did not write sweep {folder.name!r}, whose search space is code: read {_SPACE_FILE} and "
            f"{_PLAN_FILE} in {folder.path}; --trust runs them"
        )
    copy = Path(tempfile.mkdtemp(prefix="rlx-space-"), Path(plan.space).name)  # the original may be on another machine
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    copy.write_text(space)
    return replace(plan, space=str(copy))


def find_sweep(storage: Storage, name: str | None) -> Storage:
    """Returns the folder of a sweep, or of the newest one.

    Raises:
        ConfigError: there is no such sweep.
    """
    sweeps = storage / "sweeps"
    names = [each for each in sweeps.names() if (sweeps / each / _PLAN_FILE).exists()]
    if not names or (name and name not in names):
        raise ConfigError(f"no sweep {name or ''} in {sweeps.path}{nearest(name or '', names)}")
    newest = max(names, key=lambda each: sweeps.filesystem.get_file_info((sweeps / each / _PLAN_FILE).path).mtime)
    return sweeps / (name or newest)


def restart_failed(plan: SweepPlan, storage: Storage, *, from_scratch: bool = False) -> list[str]:
    """Makes the failed trials run again at the next resume; returns their names.

    Args:
        from_scratch: from step 0, as new runs; otherwise from their newest complete checkpoints.
    """
    folder = storage / "sweeps" / plan.name
    records = TrialRecords(folder)
    failed = {name: record for name, record in records.all().items() if record.state is TrialState.FAILED}
    for name, record in failed.items():
        newest = newest_attempt(folder, name)
        forgive(folder / "runs" / newest)
        if from_scratch:
            attempts = attempt_number(newest) + exists(folder / "runs" / newest)
            records.write(name, TrialRecord(settings=record.settings, attempts=attempts))
        else:
            records.write(name, record.model_copy(update={"state": TrialState.OPEN, "message": ""}))
    records.flush()
    return list(failed)


# ---------------------------------------------------------------------------------------------------------------------
# The run of a sweep


def run_sweep(plan: SweepPlan, storage: Storage, *, resume: bool = False, watch: Watch) -> dict[str, TrialRecord]:
    """Runs a recorded sweep, or its remaining trials, to the end; returns the record of each trial by name.

    The cluster must be connected. Ends the sweep's MLflow run.

    Raises:
        KeyboardInterrupt: the sweep was interrupted; a resume continues it.
    """
    folder = storage / "sweeps" / plan.name
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `failures` says why trials failed
    if resume:
        with _record(plan, folder) as record:
            record.open(plan.config.tracking.experiment, plan.name, params={}, tags={})
    try:
        SweepCallback.watch, SweepCallback.interrupted = watch, False
        with _no_loggers():
            make_tuner(plan, storage).fit()
        results = _results(plan, folder)
        _send_pending(plan.tracking, folder)
        return results
    except BaseException as error:  # otherwise Tune's callback has ended the MLflow run
        with _record(plan, folder) as record:
            record.end(RunStatus.KILLED if isinstance(error, KeyboardInterrupt) else RunStatus.FAILED)
        raise


@contextmanager
def _no_loggers() -> Iterator[None]:
    """Tune writes no CSV, JSON and TensorBoard files: nobody would read them, and they cost 6 ms a report."""
    before = os.environ.get(_LOGGERS_OFF)
    os.environ[_LOGGERS_OFF] = "1"
    try:
        yield
    finally:
        os.environ.pop(_LOGGERS_OFF)
        os.environ |= {_LOGGERS_OFF: before} if before is not None else {}


@contextmanager
def _record(plan: SweepPlan, folder: Storage) -> Iterator[OutboxTracker]:
    """Gives the tracker of the sweep's own MLflow run, and waits until it has sent everything."""
    tracker = OutboxTracker(plan.tracking, folder, "driver")
    try:
        yield tracker
    finally:
        tracker.close(_PATIENCE_S)


def _results(plan: SweepPlan, folder: Storage) -> dict[str, TrialRecord]:
    """Returns the trials' records; raises KeyboardInterrupt if not all of them ran to their ends."""
    if SweepCallback.interrupted:
        raise KeyboardInterrupt  # Tune takes the signal, ends its trials and returns normally
    results = TrialRecords(folder).all()
    if len(results) < total_trials(plan) or not all(record.is_over for record in results.values()):
        raise KeyboardInterrupt  # the signal came while no trial ran, so that no callback noticed it
    return results


def _send_pending(service: TrackingService, folder: Storage) -> None:
    """Sends the records that trials could not send, until the tracking service takes no more."""
    for attempt in (folder / "runs").names():
        if not launch.send_pending(service, folder / "runs" / attempt, _LOG.warning):
            return


def failures(results: Mapping[str, TrialRecord]) -> list[str]:
    """Returns one line for each failed trial: its name and why it failed."""
    return [f"{name}: {record.message}" for name, record in results.items() if record.state is TrialState.FAILED]


def make_tuner(plan: SweepPlan, storage: Storage) -> tune.Tuner:
    """Returns the Tuner of a recorded sweep, or of its remaining trials. The cluster must be connected."""
    folder, space = storage / "sweeps" / plan.name, load_space(plan.space, plan.tree)
    records = TrialRecords(folder)
    known = {name: _with_newest_settings(folder, name, record) for name, record in records.all().items()}
    _check_settings(known, space, folder)
    models = models_of(plan, space)
    shared, room = replace(shared_inputs(plan, space, models), known=known), Room(plan, models)
    source = _trial_source(plan, records, space, known, room)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(200, total_trials(plan)))  # `concurrency` is the limit
    return tune.Tuner(
        trainable(plan, storage, shared, most_at_once(plan)),
        tune_config=tune.TuneConfig(
            metric=DEFAULT_METRIC,
            mode=MODE,
            num_samples=-1,
            scheduler=SCHEDULERS[plan.scheduler](_schedule(plan, space, known)),
            search_alg=source,
            reuse_actors=plan.reuse != "none",
            trial_name_creator=source.name_of,
            trial_dirname_creator=source.name_of,
        ),
        run_config=tune.RunConfig(
            name=_tune_folder(folder),
            storage_path=folder.path,
            storage_filesystem=storage.filesystem,
            callbacks=[SweepCallback(plan, TrialLog(plan.tracking, folder, records), Helpers(shared.mailbox, room))],
            failure_config=tune.FailureConfig(max_failures=plan.config.scaling.max_failures),
            verbose=0,
        ),
    )


def _check_settings(known: Mapping[str, TrialRecord], space: Space, folder: Storage) -> None:
    """Raises ConfigError if trials have settings that the sweep does not vary: their records are not signed."""
    for name, record in known.items():
        damaged = f"{folder.path}/trials/{name}.json is damaged: the sweep does not"
        if others := set(record.settings) - {*space, "seed"}:
            raise ConfigError(f"{damaged} vary {min(others)}")
        for key in set(record.settings) & set(run_folder.POWERFUL):
            if record.settings[key] not in extremes(space[key]):
                raise ConfigError(f"{damaged} have {key} {record.settings[key]!r}")


def _tune_folder(folder: Storage) -> str:
    """Returns the name of the folder for Tune's own records, which a resume begins anew: tune, tune-2, ..."""
    count = sum(name.partition("-")[0] == _TUNE_FOLDER for name in folder.names())
    return f"{_TUNE_FOLDER}-{count + 1}" if count else _TUNE_FOLDER


def shared_inputs(plan: SweepPlan, space: Space, models: Sequence[NeededModel]) -> SharedInputs:
    """Returns what is made here once for all trials: the prompts and the model, unless the space varies them.

    Args:
        models: those of `models_of`, which every node gets.
    """
    common = SharedInputs(nodes.reachable(plan.tracking), start_mailbox(), Signer.new())
    for model in models:
        nodes.bring_folder(*model)
    if any(key.startswith("model.") for key in space):
        return common
    path = models[0].path
    if any(key.startswith(("data.", "eval.")) for key in space):
        return replace(common, model_path=path)
    return replace(common, model_path=path, tables=preflight.prompt_tables(plan.config, path))


def models_of(plan: SweepPlan, space: Space) -> list[NeededModel]:
    """Returns the models that trials need: first the policies to start with, then reward models."""
    policies = [str(path) for path in _choices(space, "model.path", plan.config.model.path)]
    rewards = [str(path) for path in _choices(space, "reward.model", plan.config.reward.model) if path]
    folders = [preflight.model_folder(path, plan.config.storage) for path in policies]
    return [NeededModel(path, "model.path") for path in folders] + [
        NeededModel(path, "reward.model") for path in rewards
    ]


def _choices(space: Space, key: str, default: str | None) -> list[Any]:
    """Returns the values of a setting that trials may have."""
    varied = space.get(key, default)
    return list(varied.categories) if isinstance(varied, Categorical) else [varied]


def _schedule(plan: SweepPlan, space: Space, known: Mapping[str, TrialRecord] | None = None) -> Schedule:
    steps_done = {name.removeprefix("trial_"): record.step for name, record in (known or {}).items()}
    return Schedule(plan.config.train.steps, plan.config.eval.every, space, steps_done)


def _trial_source(
    plan: SweepPlan, records: TrialRecords, space: Space, known: Mapping[str, TrialRecord], room: Room
) -> TrialSource:
    seed = plan.config.seed
    first_of_each_setting = [known[name].settings for name in sorted(known)][:: plan.seeds]
    options = TrialOptions(
        count=plan.trials,
        seeds=[seed + i for i in range(plan.seeds)] if plan.seeds > 1 else [],
        limit=None if plan.scheduler in PAUSING else room.trials,
        replays=plan.scheduler in REPLAYING,
        pausing=plan.scheduler in PAUSING,
    )
    search = searchers.searcher(plan.search, space, plan.trials, seed, first_of_each_setting)
    return TrialSource(search, space, records, options, known)


def _with_newest_settings(folder: Storage, name: str, record: TrialRecord) -> TrialRecord:
    """Returns a trial's record with the settings of its newest run: a kill may have come before they were recorded."""
    newest = folder / "runs" / newest_attempt(folder, name)
    if attempt_number(newest.name) == 1 or record.is_over:
        return record
    saved = flatten(from_tree(saved_config(newest)))
    return record.model_copy(update={"settings": {key: saved[key] for key in record.settings}})
