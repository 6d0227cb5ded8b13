"""The plan of a sweep: checks it, records it in the sweep's folder and in MLflow, and reads it back.

Left out: running a plan (`tuner`), and the records of its trials (`records`).
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rlx.cluster.resources import cluster_nodes
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import DEFAULT_METRIC
from rlx.runs import run_folder
from rlx.runs.run_folder import exists
from rlx.storage import signatures
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.sweeps import searchers
from rlx.sweeps.choices import check_choices
from rlx.sweeps.records import PLAN_FILE, SweepPlan, TrialRecord, TrialRecords, TrialState, find_sweep, read_plan
from rlx.sweeps.room import concurrency, total_trials
from rlx.sweeps.schedulers import Schedule
from rlx.sweeps.space import Space, complete_settings, load_space
from rlx.sweeps.trainable import attempt_number, forgive, newest_attempt
from rlx.tracking.tracker import OutboxTracker

_SPACE_FILE = "space.py"
_PATIENCE_S = 10.0  # longest wait for the tracking service

# ---------------------------------------------------------------------------------------------------------------------
# Plans


def check_sweep(plan: SweepPlan) -> SweepPlan:
    """Returns the sweep as it will run: with a grid's own number of trials, and with what its scheduler needs.

    Raises:
        ConfigError: its space cannot be used, or its search, scheduler and seeds do not fit together.
    """
    check_choices(plan)
    space = load_space(plan.space, plan.tree)
    plan = _with_metric(plan)
    if plan.seeds > 1 and "seed" in space:
        raise ConfigError(f"--seeds {plan.seeds}: {plan.space} varies the seed already")
    if plan.scheduler == "pbt":
        plan = _with_population(plan, space)
    search = searchers.searcher(plan.search, space, plan.trials, plan.config.seed)
    if not isinstance(search, searchers.ListSearch):
        return plan
    for settings in search.settings:
        from_tree(with_overrides(plan.tree, complete_settings(space, settings)), f"--space {plan.space}")
    return replace(plan, trials=len(search.settings))


def _with_metric(plan: SweepPlan) -> SweepPlan:
    """Returns a sweep whose trials keep their best checkpoints by its metric, unless its settings say by which."""
    if plan.metric == DEFAULT_METRIC:
        return plan
    checkpoint = {"best_by": plan.metric, "best_mode": plan.mode} | plan.tree.get("checkpoint", {})
    return replace(plan, tree=plan.tree | {"checkpoint": checkpoint})


def _with_population(plan: SweepPlan, space: Space) -> SweepPlan:
    """Returns a sweep by population based training: each evaluation has a checkpoint that is complete and stays."""
    if fixed := [key for key in space if run_folder.is_fixed(key)]:
        raise ConfigError(f"--space {plan.space}: {fixed[0]} cannot change within a run, as --scheduler pbt would")
    first_rung = schedule_of(plan, space).first_rung
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
        + (f", {plan.mode} of {plan.metric}" if plan.metric != DEFAULT_METRIC else "")
    )


def schedule_of(plan: SweepPlan, space: Space, known: Mapping[str, TrialRecord] | None = None) -> Schedule:
    steps_done = {name.removeprefix("trial_"): record.step for name, record in (known or {}).items()}
    return Schedule(plan.config.train.steps, plan.config.eval.every, space, steps_done)


# ---------------------------------------------------------------------------------------------------------------------
# A sweep's folder


def create_sweep(plan: SweepPlan, storage: Storage) -> SweepPlan:
    """Records a new sweep in its folder and in MLflow; returns its checked plan.

    Raises:
        ConfigError: its name is taken, it cannot be run, or MLflow does not answer.
    """
    folder, plan = storage / "sweeps" / plan.name, check_sweep(plan)
    if (folder / PLAN_FILE).exists():
        raise ConfigError(f"sweep {plan.name!r} exists in {folder.path}: --resume {plan.name} continues it")
    plan.tracking.check()
    _create_mlflow_run(plan, folder)
    content, space = asdict(plan), Path(plan.space).read_text()
    (folder / SIGNATURE).write_text(Signer.new().sign({"plan": content, "space": space}))
    (folder / _SPACE_FILE).write_text(space)
    (folder / PLAN_FILE).write_text(json.dumps(content, indent=1))
    return plan


def _create_mlflow_run(plan: SweepPlan, folder: Storage) -> None:
    varied = [*load_space(plan.space, plan.tree), *(["seed"] if plan.seeds > 1 else [])]
    options = {key: getattr(plan, key) for key in ("search", "scheduler", "seeds", "metric", "mode")}
    with record_of(plan, folder) as record:
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
        content, space = (folder / PLAN_FILE).read_json(), (folder / _SPACE_FILE).read_text()
        plan = read_plan(content)
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
            f"{PLAN_FILE} in {folder.path}; --trust runs them"
        )
    copy = Path(tempfile.mkdtemp(prefix="rlx-space-"), Path(plan.space).name)  # the original may be on another machine
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    copy.write_text(space)
    return replace(plan, space=str(copy))


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


@contextmanager
def record_of(plan: SweepPlan, folder: Storage) -> Iterator[OutboxTracker]:
    """Gives the tracker of the sweep's own MLflow run, and waits until it has sent everything."""
    tracker = OutboxTracker(plan.tracking, folder, "driver")
    try:
        yield tracker
    finally:
        tracker.close(_PATIENCE_S)
