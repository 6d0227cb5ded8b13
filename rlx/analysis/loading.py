"""A sweep, read back from MLflow: its trials, what they set, how they went, what they answered, and their configs.

Everything comes from the tracking store alone, so a sweep can be analysed while it runs and from any machine. Ranking
and statistics are comparison.py's.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.loading import from_tree, parse_yaml, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections import DEFAULT_METRIC
from rlx.tracking import mlflow
from rlx.tracking.metrics import METRICS, meaning

Setting = int | float | str | None

SAMPLE = ("prompt", "completion", "answer", "score")  # columns of a table of answers; older ones have the step, too
WATCHED = (
    *(DEFAULT_METRIC, "eval/reward", "reward/mean", "task/accuracy", "kl/ref", "response/length_mean", "tokens/total"),
    *("time/step", "time/eval"),
)


@dataclass(frozen=True, eq=False)
class Trial:
    """One trial of a sweep: a run, and where population based training has changed it, the runs that it went on in."""

    name: str  # of its MLflow run, without the sweep's own name in front
    runs: tuple[str, ...]  # ids of its MLflow runs, the first one first
    settings: dict[str, Setting]  # the varied ones, as they were in the last of the runs
    status: str  # MLflow's, of the last of the runs: RUNNING, FINISHED, FAILED or KILLED
    history: pd.DataFrame  # a row per step, a column per watched metric, NaN where it was not logged
    stopped: int | None = None  # the step at which a scheduler stopped it
    origins: tuple[str, ...] = ()  # the trials whose checkpoints it went on from, and their steps: trial_00001@6

    def curve(self, metric: str) -> pd.Series[float]:
        """A metric by step, where it was logged."""
        return self.history[metric].dropna()

    @property
    def seconds(self) -> float:
        """What its steps and evaluations took, without the start of its engines; NaN if it logged none."""
        taken = self.history["time/step"].fillna(self.history["time/eval"])  # a step's own holds its evaluation
        return float(taken.sum(min_count=1))


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep and its trials, in the order in which they were started."""

    name: str
    run_id: str
    varied: tuple[str, ...]  # dotted names of the settings that differ between trials, seed among them
    metrics: tuple[str, ...]  # the watched ones
    trials: tuple[Trial, ...]
    asked: dict[str, str] = field(default_factory=dict)  # space, search, scheduler, seeds, trials, steps: what is known
    questions: int | None = None  # held-out ones of an evaluation, the same for all trials; None if it is not known

    def questions_of(self, metric: str) -> int | None:
        """How many held-out questions a metric is the share of right answers to; None if it is something else."""
        return self.questions if metric.startswith("eval/") and metric.endswith("/accuracy") else None


def sweep_names(uri: str, experiment: str) -> list[str]:
    """Names of an experiment's sweeps, newest first; ConfigError if there is no such store, experiment or sweep."""
    return list(dict.fromkeys(str(run.info.run_name) for run in _sweep_runs(uri, experiment)))


def load_sweep(uri: str, experiment: str, name: str | None = None, metrics: Sequence[str] = ()) -> Sweep:
    """Reads a sweep with `metrics` besides the `WATCHED` ones: the newest of that name, the one whose MLflow run has
    that id, or the newest of all.

    ConfigError if a metric is unknown, there is no such store, experiment or sweep, or it has no trials.
    """
    watched = tuple(dict.fromkeys([*WATCHED, *metrics]))
    for metric in metrics:
        check_metric(metric, [metric] if meaning(metric) else list(METRICS))
    sweeps = _sweep_runs(uri, experiment)
    parent = next((run for run in sweeps if name in (None, run.info.run_name, run.info.run_id)), None)
    if parent is None:
        hint = nearest(name or "", [run.info.run_name for run in sweeps])
        raise ConfigError(f"no sweep {name!r} in experiment {experiment!r}{hint}")
    sweep, varied = str(parent.info.run_name), tuple(json.loads(parent.data.tags.get("rlx.space", "[]")))
    door, experiment_id = mlflow.client(uri), parent.info.experiment_id
    children = _search(door, experiment_id, "mlflow.parentRunId", parent.info.run_id)
    if not children:
        raise ConfigError(f"sweep {sweep!r} has no trials yet")
    attempts: dict[str, list[Any]] = {}
    for run in _search(door, experiment_id, "rlx.kind", "attempt"):
        attempts.setdefault(run.data.tags.get("mlflow.parentRunId", ""), []).append(run)
    runs = [[first, *attempts.get(first.info.run_id, [])] for first in children]
    trials = tuple(_trial(door, each, sweep, varied, watched) for each in runs)
    asked, questions = _asked(parent, children[0]), children[0].data.params.get("eval.num_prompts")
    count = None if questions is None else int(questions)
    return Sweep(sweep, str(parent.info.run_id), varied, watched, trials, asked, count)


def check_metric(metric: str, choices: Sequence[str]) -> None:
    """ConfigError if a metric is none of those that there are."""
    if metric not in choices:
        raise ConfigError(f"unknown metric {metric!r}{nearest(metric, choices)}")


def samples(uri: str, trial: Trial) -> pd.DataFrame:
    """A trial's newest answers to held-out prompts: prompt, completion, answer, score; empty if it has none."""
    door = mlflow.client(uri)
    for run_id in reversed(trial.runs):
        tables = sorted(file.path for file in door.list_artifacts(run_id, "samples"))
        if tables:
            return pd.DataFrame(**json.loads(_text(door, run_id, tables[-1])))[list(SAMPLE)]
    return pd.DataFrame(columns=list(SAMPLE))


def run_config(uri: str, trial: Trial) -> RunConfig:
    """The config that a trial ran with, or that its last run went on with.

    ConfigError if MLflow has none, or one that this version of rlx does not take.
    """
    door = mlflow.client(uri)
    if not any(file.path == "config.yaml" for file in door.list_artifacts(trial.runs[0])):
        raise ConfigError(f"{trial.name} has no config.yaml in MLflow")
    tree = parse_yaml(_text(door, trial.runs[0], "config.yaml"))
    changed = trial.settings if trial.origins else {}
    return from_tree(with_overrides(tree, changed), f"config.yaml of {trial.name}")


def _text(door: Any, run_id: str, path: str) -> str:
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with tempfile.TemporaryDirectory() as folder:
        return Path(door.download_artifacts(run_id, path, folder)).read_text()


def _sweep_runs(uri: str, experiment: str) -> list[Any]:
    """The parent runs of an experiment's sweeps, newest first."""
    path = uri.removeprefix("sqlite:///")
    if path != uri and not Path(path).is_file():  # MLflow would make an empty database
        raise ConfigError(f"no MLflow database {path}")
    try:
        found = {each.name: each.experiment_id for each in mlflow.client(uri).search_experiments()}
    except Exception as error:  # each kind of store has its own
        raise ConfigError(f"tracking store {uri}: {one_line(error, 300)}") from None
    if experiment not in found:
        raise ConfigError(f"no experiment {experiment!r} in {uri}{nearest(experiment, list(found))}")
    sweeps = _search(mlflow.client(uri), found[experiment], "rlx.kind", "sweep")[::-1]
    if not sweeps:
        raise ConfigError(f"no sweep in experiment {experiment!r}: experiments/ppo_sweep.py makes one")
    return sweeps


def _search(door: Any, experiment_id: str, tag: str, value: str) -> list[Any]:
    """All runs with a tag in the order in which they were started; MLflow's own is the opposite."""
    return list(door.search_runs([experiment_id], f"tags.`{tag}` = '{value}'", max_results=50_000))[::-1]


def _asked(parent: Any, first: Any) -> dict[str, str]:
    """What a sweep was asked to do, of which older ones have recorded less."""
    known = {key: parent.data.params.get(key) for key in ("space", "search", "scheduler")}
    known |= {"seeds": parent.data.tags.get("rlx.seeds"), "trials": parent.data.params.get("trials")}
    known |= {"steps": first.data.params.get("train.steps")}
    return {key: str(value) for key, value in known.items() if value is not None}


def _trial(door: Any, runs: Sequence[Any], sweep: str, varied: Sequence[str], metrics: Sequence[str]) -> Trial:
    first, last = runs[0], runs[-1]
    params: dict[str, str] = {}
    history = pd.DataFrame(columns=list(metrics), dtype=float)
    for run in runs:
        params |= run.data.params
        history = _gone_on(history, _history(door, run, metrics), run.data.tags.get("rlx.from"))
    stopped = last.data.tags.get("rlx.stopped", first.data.tags.get("rlx.stopped"))
    return Trial(
        name=str(first.info.run_name).removeprefix(f"{sweep}."),
        runs=tuple(str(run.info.run_id) for run in runs),
        settings={key: _setting(params.get(key)) for key in varied},
        status=str(last.info.status),
        history=history,
        stopped=None if stopped is None else int(stopped),
        origins=tuple(str(run.data.tags["rlx.from"]) for run in runs if "rlx.from" in run.data.tags),
    )


def _gone_on(before: pd.DataFrame, after: pd.DataFrame, origin: str | None) -> pd.DataFrame:
    """A history up to the step that a later run went on from, and that run's own."""
    if origin is None:
        return after
    step = int(origin.rpartition("@")[2])
    return after.combine_first(before[before.index <= step]).rename_axis("step")


def _history(door: Any, run: Any, metrics: Sequence[str]) -> pd.DataFrame:
    columns = {}
    for metric in metrics:
        logged = door.get_metric_history(run.info.run_id, metric) if metric in run.data.metrics else []
        # What is not finite cannot be ranked or drawn; MLflow's databases give the largest float for infinity.
        finite = {entry.step: entry.value for entry in logged if abs(entry.value) < sys.float_info.max}
        columns[metric] = pd.Series(finite, dtype=float)
    return pd.DataFrame(columns).sort_index().rename_axis("step")


def _setting(text: str | None) -> Setting:
    """The number that a text spells, or the text itself."""
    try:
        value = None if text is None else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text
