"""The plan of a sweep: checks it, records it in the sweep's folder and in MLflow, and reads it back.

Left out: running a plan (`tuner`), and the records of its trials (`records`).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rlx.analysis.comparison.cost import Amount, Cost, on_top, run_cost
from rlx.analysis.comparison.evidence import known_spread
from rlx.analysis.comparison.outcomes import Judged
from rlx.analysis.comparison.power import ASSUMED, options
from rlx.analysis.comparison.wording import plan_lines
from rlx.analysis.ranges import natural_range
from rlx.cluster.resources import cluster_nodes
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections.algorithm import AlgorithmConfig
from rlx.config.sections.base import flatten
from rlx.config.sections.data import EvalConfig
from rlx.config.sections.records import CheckpointConfig
from rlx.config.sweep import DEFAULT_METRIC, OF_THE_MACHINE
from rlx.runs import run_folder
from rlx.runs.run_folder import holds_run
from rlx.storage import signatures
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import read_checkpoint
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import SIGNATURE, Signer
from rlx.sweeps import searchers
from rlx.sweeps.choices import refuse_choices, refuse_many, tell_few, tell_unscheduled
from rlx.sweeps.records import (
    PLAN_FILE,
    SPACE_FILE,
    SweepPlan,
    TrialRecord,
    TrialRecords,
    TrialState,
    find_sweep,
    plan_content,
    read_plan,
    record_of,
    refuse_existing,
    signed_content,
)
from rlx.sweeps.room import concurrency, most_at_once
from rlx.sweeps.schedulers.schedule import Schedule
from rlx.sweeps.space import Space, check_candidates, check_resources, load_space, values_of, varied_keys, with_task
from rlx.sweeps.trainable import attempt_number, forgive, newest_attempt
from rlx.tracking import outbox
from rlx.tracking.base import MetricPoint
from rlx.tracking.services import mlflow

_SIZES = ("train.prompts_per_step", "train.samples_per_prompt", "rollout.max_tokens")
"""settings whose product is the most tokens of a step"""
_ROUNDS = ("algorithm.advantage", "algorithm.filter_groups", "algorithm.filter_rounds")  # of answers in a step
_TIMED_BY = ("model.path", *_SIZES)
"""settings on which the duration of a step and the length of its answers depend most"""

# ---------------------------------------------------------------------------------------------------------------------
# Plans


def check_sweep(plan: SweepPlan) -> SweepPlan:
    """Returns the sweep as it will run: with a grid's own number of candidates, and with what its scheduler needs.

    Call it once: of a checked plan, `candidates` counts what a grid within a random search has multiplied already.

    Raises:
        ConfigError: its space or prompts in it cannot be used, or its search, scheduler and seeds do not fit together.
    """
    refuse_choices(plan)  # whoever has begun the sweep was warned of the others
    space = load_space(plan.space, plan.tree, plan)
    check_resources(space, plan.space, plan.tree, plan.resources)
    plan = _with_metric(plan)
    if plan.seeds > 1 and "seed" in space:
        raise ConfigError(f"--seeds {plan.seeds}: {plan.space} varies the seed already")
    if plan.scheduler == "pbt":
        plan = _with_population(plan, space)
    if plan.scheduler == "race":
        plan = _with_checkpoints_at_rungs(plan, space)
    search = searchers.searcher(plan.search, space, plan.candidates, plan.config.seed)
    if isinstance(search, searchers.ListSearch):
        refuse_many(plan := replace(plan, candidates=len(search.candidates)))
    check_candidates(searchers.known_settings(search, space), plan.space, plan.tree)
    return _within_budget(plan, space)


def _within_budget(plan: SweepPlan, space: Space) -> SweepPlan:
    """Returns a sweep with its candidates, or with as many as its budget pays for.

    Raises:
        ConfigError: it pays for none, or not for all of a grid.
    """
    if not plan.budget:
        return plan
    amount = Amount.of(plan.budget)
    affordable = amount.affords(planned_cost(replace(plan, candidates=1), space))
    if plan.search == "grid" and affordable < plan.candidates:
        raise ConfigError(f"--budget {plan.budget} pays for {affordable} settings, the grid has {plan.candidates}")
    return replace(plan, candidates=min(plan.candidates, affordable))


def planned_cost(plan: SweepPlan, space: Space) -> Cost:
    """Returns what all trials of a sweep cost at most, with all seeds that a race may add; but see `on_top`.

    Each trial counts as one with the largest numbers of the space; a step takes so much longer as it has more tokens.
    """
    config, start = plan.config, first_step(plan.config.checkpoint)
    steps = config.train.steps - start
    own = {key: flatten(config)[key] for key in _SIZES}
    prompts, samples, tokens = (max(map(int, values_of(space, key, value))) for key, value in own.items())
    answers = prompts * max(each.most_completions(samples) for each in _algorithms(plan, space))
    least = config.train.prompts_per_step * config.algorithm.most_completions(config.train.samples_per_prompt)
    longer = max(1.0, tokens / config.rollout.max_tokens)
    step, evaluation = _newest_times(plan) if plan.gpus else (math.nan, math.nan)
    pauses = longer * evaluation * _evaluations(config.eval, start, config.train.steps) / steps
    run = run_cost(steps, answers, tokens, plan.gpus, longer * max(1.0, answers / least) * step + pauses)
    return run.times(plan.candidates * (plan.max_seeds or plan.seeds))


def _algorithms(plan: SweepPlan, space: Space) -> list[AlgorithmConfig]:
    """Returns the settings of the algorithm that trials may have, as far as they change how many answers a step has."""
    varied = {key: values_of(space, key, None) for key in _ROUNDS if key in space}
    trees = [with_overrides(plan.tree, dict(zip(varied, each, strict=True))) for each in product(*varied.values())]
    return [AlgorithmConfig.model_validate(tree.get("algorithm", {})) for tree in trees]


def first_step(settings: CheckpointConfig) -> int:
    """Returns the step that new runs go on from: that of the checkpoint of which they take all state, otherwise 0.

    The name of a checkpoint that is no longer there still tells it.
    """
    if not settings.init_from or settings.init_state != "all":
        return 0
    return max(0, read_checkpoint(open_storage(settings.init_from, create=False)).step)


def _evaluations(settings: EvalConfig, start: int, steps: int) -> int:
    """Returns how often a run that goes on from a step evaluates: also before the first step, and after the last."""
    every = {settings.every, *(settings.of(each).every for each in settings.sets)} - {0}
    due = (step for step in range(start + 1, steps) if any(step % each == 0 for each in every))
    return (start == 0) + sum(1 for _ in due) + 1


def _newest_times(plan: SweepPlan) -> tuple[float, float]:
    """Returns how long the last step of the newest run of the same experiment with the same model and batch took,
    without the pauses for its checkpoint and its evaluation, and how long the last evaluation; NaN without a run."""
    same = {key: str(value) for key, value in flatten(plan.config).items() if key in _TIMED_BY}
    try:
        experiment = mlflow.find_experiment(plan.tracking_uri, plan.config.tracking.experiment)
        runs = mlflow.find_runs(plan.tracking_uri, experiment)
    except ConfigError:  # nothing was recorded yet
        return math.nan, math.nan
    found = [run.id for run in runs if "time/step" in run.metrics and same.items() <= run.params.items()]
    if not found:
        return math.nan, math.nan
    last, *pauses = (_last_point(plan, found[-1], f"time/{each}") for each in ("step", "checkpoint", "eval"))
    return last.value - sum(each.value for each in pauses if each.step == last.step), pauses[-1].value


def _last_point(plan: SweepPlan, run_id: str, metric: str) -> MetricPoint:
    """Returns the value of a metric at its last step; 0 at no step if it has none."""
    points = mlflow.history(plan.tracking_uri, run_id, metric)
    return max(points, key=lambda point: (point.step, point.at_ms), default=MetricPoint(-1, 0.0, 0))


def prospects(plan: SweepPlan) -> list[str]:
    """Returns what a sweep costs and what it can show, in a few lines."""
    budget = f" of a budget of {plan.budget}" if plan.budget else ""
    lines = [f"at most {planned_cost(plan, load_space(plan.space, plan.tree))}{budget}{on_top(plan.scheduler)}"]
    judged = Judged.of(plan.metric)
    evaluation = plan.config.eval
    own = [each.num_prompts for each in evaluation.sets if judged and each.name == judged.name and each.num_prompts]
    experiment = plan.config.tracking.experiment
    spread = known_spread(plan.tracking_uri, experiment, plan.metric)
    if not judged or (judged.quantity in ("reward", "length") and not spread):
        return lines  # what is assumed is of shares of right answers
    questions = own[0] if own else evaluation.num_prompts
    ends = natural_range(plan.metric)
    lines += plan_lines(options(spread or ASSUMED, plan.seeds, questions), spread is None, ends.high - ends.low)
    return [*lines, f"at most {questions} questions: one that repeats counts once, and fewer show less"]


def _with_metric(plan: SweepPlan) -> SweepPlan:
    """Returns a sweep whose trials keep their best checkpoints by its metric, unless its settings say which are."""
    best = {"best_by": plan.metric, "best_mode": plan.mode}
    given = plan.tree.get("checkpoint", {})
    if plan.metric == DEFAULT_METRIC or best.keys() & given.keys():  # the mode is of a metric
        return plan
    return replace(plan, tree=plan.tree | {"checkpoint": given | best})


def _with_population(plan: SweepPlan, space: Space) -> SweepPlan:
    """Returns a sweep by population based training: each evaluation has a checkpoint that is complete and stays."""
    if fixed := [key for key in varied_keys(space) if run_folder.is_fixed(key)]:
        raise ConfigError(f"--space {plan.space}: {fixed[0]} cannot change within a run, as --scheduler pbt would")
    first_rung = schedule_of(plan, space).first_rung
    checkpoints = {"checkpoint.every": first_rung, "checkpoint.keep_last": None, "checkpoint.async_save": False}
    return replace(plan, tree=with_overrides(plan.tree, checkpoints))


def _with_checkpoints_at_rungs(plan: SweepPlan, space: Space) -> SweepPlan:
    """Returns a race, whose trials pause at rungs: there each has a checkpoint that is complete when it pauses."""
    first_rung, every = schedule_of(plan, space).first_rung, plan.config.checkpoint.every
    fits = every > 0 and first_rung % every == 0
    checkpoints = {"checkpoint.every": every if fits else first_rung, "checkpoint.async_save": False}
    return replace(plan, tree=with_overrides(plan.tree, checkpoints))


def describe(plan: SweepPlan) -> str:
    """Returns what a sweep is going to do, in one line."""
    found = cluster_nodes()
    where = f"{len(found)} {'node' if len(found) == 1 else 'nodes'}"
    seeds = f"{plan.seeds} to {plan.max_seeds}" if plan.max_seeds else f"{plan.seeds}"
    trials = f"{plan.candidates} settings x {seeds} seeds" if plan.seeds > 1 else f"{plan.candidates} trials"
    return (
        f"sweep {plan.name}: {trials}, {concurrency(plan, found)} at once on {where} "
        f"({plan.resources} each), {plan.config.train.steps} steps, search {plan.search}, scheduler {plan.scheduler}"
        + (f" with rungs in {plan.rung_by}" if plan.rung_by != "steps" else "")
        + (f", {plan.mode} of {plan.metric}" if plan.metric != DEFAULT_METRIC else "")
    )


def schedule_of(plan: SweepPlan, space: Space, known: Mapping[str, TrialRecord] | None = None) -> Schedule:
    """Returns what the scheduler is told of a sweep; `known`: records of trials before a resume, by name."""
    return Schedule(
        steps=plan.config.train.steps,
        eval_every=plan.config.eval.every_of(plan.metric),
        space=space,
        known=known or {},
        candidates=plan.candidates,
        seeds=plan.seeds,
        max_seeds=plan.max_seeds or plan.seeds,
        alpha=plan.alpha,
        mode=plan.mode,
        rung_by=plan.rung_by,
        gpus=plan.gpus,
        seed=plan.config.seed,
        tree=plan.tree,
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sweep's folder


def check_can_begin(plan: SweepPlan) -> None:
    """Returns if a new sweep may begin. The cluster must be connected.

    Raises:
        ConfigError: its trials cannot run at once as its scheduler needs, or MLflow does not answer.
    """
    most_at_once(plan)
    for service in plan.tracking:
        service.check(plan.config.tracking.experiment)


def create_sweep(plan: SweepPlan, storage: Storage) -> None:
    """Keeps a new sweep, as `check_sweep` has returned it, in its folder, which takes its name.

    Raises:
        ConfigError: its name is taken.
    """
    folder = storage / "sweeps" / plan.name
    refuse_existing(folder)
    for left in ("run.json", "outbox"):  # by a start of an older rlx that was killed before its plan was written
        (folder / left).delete()
    space = load_space(plan.space, plan.tree, tells=True)
    tell_unscheduled(plan, varied_keys(space))
    search = searchers.searcher(plan.search, space, plan.candidates, plan.config.seed)
    is_list = isinstance(search, searchers.ListSearch)
    tell_few(plan, searchers.known_settings(search, space)[: plan.candidates] if is_list else [])
    content, code = plan_content(plan), Path(plan.space).read_text()
    (folder / SIGNATURE).write_text(Signer.new().sign({"plan": content, "space": code}))
    (folder / SPACE_FILE).write_text(code)
    (folder / PLAN_FILE).write_text(json.dumps(content, indent=1))


def open_record(plan: SweepPlan, folder: Storage) -> None:
    """Begins the run of a sweep in the tracking services, or says there that it goes on."""
    params, tags = ({}, {}) if outbox.run_id(folder) else _description(plan, folder)
    with record_of(plan.tracking, folder) as record:
        record.open(plan.config.tracking.experiment, plan.name, params=params, tags=tags)


def _description(plan: SweepPlan, folder: Storage) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the parameters and tags of a sweep's run."""
    space = load_space(plan.space, plan.tree)
    varied = [*space, *(["seed"] if plan.seeds > 1 else [])]
    is_known = plan.scheduler in ("asha", "race") and plan.rung_by == "steps"
    rungs = schedule_of(plan, space).rungs if is_known else []
    of_race = ("max_seeds", "alpha") if plan.scheduler == "race" else ()
    options = {key: getattr(plan, key) for key in ("search", "scheduler", "seeds", "metric", "mode", *of_race)}
    options |= {"budget": plan.budget} if plan.budget else {}
    options |= {"rung_by": plan.rung_by} if plan.rung_by != "steps" else {}
    tags = {"rlx.kind": "sweep", "rlx.folder": folder.path, "rlx.space": json.dumps(varied)}
    tags |= {"rlx.rungs": json.dumps(rungs)} if rungs else {}
    tags |= {"rlx.planned": json.dumps(planned_cost(plan, space)._asdict() | {"gpus": plan.gpus})}
    tags |= {f"rlx.{key}": str(value) for key, value in options.items()}
    original = (folder / PLAN_FILE).read_json()["space"]  # a resume has a copy, which ends with its process
    return {"trials": plan.total_trials, "space": original} | options, tags


def saved_sweep(storage: Storage, name: str | None, *, trust: bool = False) -> SweepPlan:
    """Returns the plan of a sweep by name, or of the newest one.

    Args:
        trust: run the code of its search space, and take its settings, whoever wrote them.

    Raises:
        ConfigError: there is no such sweep, its record is damaged, or somebody else wrote it.
    """
    folder = find_sweep(storage, name)
    try:
        signed = signed_content(folder)
        recorded = read_plan({"defaults": 1} | signed["plan"])
        plan = recorded.with_its_defaults()
        if plan.name != folder.name:
            raise ValueError(plan.name)
    except (TypeError, ValueError, RecursionError, FileNotFoundError):
        raise ConfigError(f"sweep {folder} is damaged: it is not what rlx wrote") from None
    if trust:
        (folder / SIGNATURE).write_text(Signer.new().sign(signed))
    elif not signatures.is_own_folder(folder, signed):
        raise ConfigError(
            f"this user did not write sweep {folder.name!r}, whose search space is code: read {SPACE_FILE} and "
            f"{PLAN_FILE} in {folder}; --trust runs them"
        )
    # The original may be on another machine.
    copy = Path(tempfile.mkdtemp(prefix=f"rlx-space-{os.getpid()}-"), Path(plan.space).name)
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    copy.write_text(signed["space"])
    tree = with_task(plan.tree, str(copy)) if recorded.defaults < 3 else plan.tree
    return replace(plan, tree=tree, space=str(copy))


def continued_sweep(
    storage: Storage, name: str, today: Mapping[str, Any], *, trust: bool = False, giver: str = "command line"
) -> SweepPlan:
    """Returns the saved plan of a sweep with the addresses of today.

    Args:
        today: those of `OF_THE_MACHINE` that differ, by dotted key.
        trust: as `saved_sweep` has it.
        giver: where these come from, for errors.

    Raises:
        ConfigError: as `saved_sweep`; a setting that a resume cannot change; a file of another name.
    """
    if others := sorted(set(today) - set(OF_THE_MACHINE)):
        raise ConfigError(f"{others[0]} cannot change when a sweep is resumed; only {', '.join(OF_THE_MACHINE)} can")
    plan = saved_sweep(storage, name, trust=trust)
    tree = with_overrides(plan.tree, today)
    run_folder.check_resumable(from_tree(tree, f"sweep {name}", today, giver), plan.config)
    return replace(plan, tree=tree)


def ended_trials(plan: SweepPlan, storage: Storage) -> int:
    """Returns how many trials of a sweep have ended."""
    return sum(record.is_over for record in TrialRecords(storage / "sweeps" / plan.name).all().values())


def is_finished(plan: SweepPlan, ended: int) -> bool:
    """Returns whether no trial is left to run where so many have ended; a race may add some, so one can never tell."""
    return plan.scheduler != "race" and ended >= plan.total_trials


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
        next_one = f"{name}.{attempt_number(newest) + 1}"  # it may have failed before it began
        for attempt in (newest, next_one):
            forgive(folder / "runs" / attempt)
        if from_scratch:
            attempts = attempt_number(newest) + holds_run(folder / "runs" / newest)
            records.write(name, TrialRecord(settings=record.settings, attempts=attempts))
        else:
            records.write(name, record.model_copy(update={"state": TrialState.OPEN, "message": ""}))
    records.flush()
    return list(failed)
