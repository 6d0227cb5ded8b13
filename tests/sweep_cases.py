"""Sweeps for tests: written to a real MLflow store as real trials write them, or built without a store."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import yaml

from rlx.analysis.loading import WATCHED, SettingValue, Sweep, Trial
from rlx.analysis.statistics import Group, group_trials
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.config.sweep import DEFAULT_METRIC, Mode
from rlx.tracking.services import mlflow

BASE = {
    "train.steps": 4,
    "train.adam_betas": (0.8, 0.9),
    "data.system_prompt": "Answer, don't argue.",
    "storage": "/elsewhere",
}
_STARTS = itertools.count(1_000_000, 100_000)  # ms; the order of starts is the order of calls


@dataclass
class Run:
    """The content of an MLflow run: settings, accuracy by step, status, answers; and its later attempts."""

    settings: dict[str, Any]
    accuracy: dict[int, float] = field(default_factory=dict)
    status: str = "FINISHED"
    tags: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    attempts: tuple["Run", ...] = ()


def config(name: str, settings: Mapping[str, Any]) -> RunConfig:
    return from_tree(with_overrides(over_experiment({}), {**BASE, **settings, "name": name}))


def log_sweep(uri: str, name: str, runs: Sequence[Run], varied: Sequence[str], tags: Mapping[str, str] = {}) -> str:
    """Writes a sweep with a trial per run; returns its id."""
    all_tags, at = {"rlx.kind": "sweep", "rlx.space": json.dumps(list(varied)), **tags}, next(_STARTS)
    params = {"trials": str(len(runs)), "search": "random", "scheduler": "none"}
    parent = open_run(uri, name, "rlx", all_tags, params, at)
    for i, run in enumerate(runs):
        log_run(uri, f"{name}.trial_{i}", run, parent, at=at + 1 + i)
    mlflow.client(uri).set_terminated(parent, "FINISHED", at + 100)
    return parent


def log_run(
    uri: str, name: str, run: Run, parent: str | None = None, experiment: str = "rlx", kind: str = "run", at: int = 0
) -> None:
    """Writes a run as training does: tokens at each step, accuracy where it was evaluated."""
    from mlflow.entities import Metric

    client, resolved = mlflow.client(uri), config(name, run.settings)
    params = {key: str(value) for key, value in flatten(resolved).items() if value is not None}
    tags = {"rlx.kind": kind} | ({"mlflow.parentRunId": parent} if parent else {}) | run.tags
    run_id = open_run(uri, name, experiment, tags, params, at)
    client.log_text(run_id, yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), "config.yaml")
    points = []
    for step in range(min(run.accuracy, default=0), max(run.accuracy, default=-1) + 1):
        metrics = {"tokens/total": 100.0 * step, "kl/ref": float("inf") if step == 1 else 0.1 * step}
        metrics |= {"time/step": 2.0} if step else {}
        metrics |= {DEFAULT_METRIC: run.accuracy[step], "time/eval": 0.5} if step in run.accuracy else {}
        points += [Metric(key, value, at, step) for key, value in metrics.items()]
    client.log_batch(run_id, metrics=points)
    if run.answers:
        rows = [(9, prompt, text, "yes", float(text == "yes")) for prompt, text in run.answers.items()]
        table = {"columns": ["step", "prompt", "completion", "answer", "score"], "data": rows}
        client.log_text(run_id, json.dumps({"columns": table["columns"], "data": []}), "samples/step_000000.json")
        client.log_text(run_id, json.dumps(table), "samples/step_000009.json")
    for i, attempt in enumerate(run.attempts):
        log_run(uri, f"{name}.attempt", attempt, run_id, experiment, "attempt", at + 1000 * (i + 1))
    if run.status != "RUNNING":
        client.set_terminated(run_id, run.status, at + 10_000)


def open_run(uri: str, name: str, experiment: str, tags: Mapping[str, str], params: Mapping[str, str], at: int) -> str:
    from mlflow.entities import Param

    client = mlflow.client(uri)
    existing = client.get_experiment_by_name(experiment)
    folder = uri.removeprefix("sqlite:///").replace("mlflow.db", "mlartifacts")
    experiment_id = existing.experiment_id if existing else client.create_experiment(experiment, f"file://{folder}")
    run_id = str(client.create_run(experiment_id, at, dict(tags), name).info.run_id)
    client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
    return run_id


# ---------------------------------------------------------------------------------------------------------------------
# Without a store


def trial(
    number: int, settings: Mapping[str, SettingValue], curve: Mapping[int, float], status: str = "FINISHED", **more: Any
) -> Trial:
    steps = pd.Index(list(curve), name="step")
    history = pd.DataFrame({name: pd.Series(dtype=float) for name in WATCHED}, index=steps)
    history[DEFAULT_METRIC] = list(curve.values())
    history["tokens/total"] = [100.0 * step for step in curve]
    history["time/step"] = (10.0 + number) / max(1, len(curve))
    more = {"planned_steps": 10, **more}
    return Trial(f"trial_{number:05d}", (str(number),), dict(settings), status, history, **more)


def sweep(*trials: Trial, name: str = "s", num_questions: int | None = None) -> Sweep:
    return Sweep(
        name, "run", tuple(trials[0].settings), WATCHED, trials, {"search": "random", "steps": "10"}, num_questions
    )


def groups_of(found: Sweep, metric: str = DEFAULT_METRIC, mode: Mode = "max", by: str | None = None) -> list[Group]:
    return group_trials(found, metric, mode, by)
