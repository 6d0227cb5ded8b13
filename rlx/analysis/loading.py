"""Reads a sweep back from MLflow: its trials, their settings, metric histories, samples and configs.

Everything comes from the tracking store, so a sweep can be analyzed while it runs and from any machine. Left out:
ranking and statistics (statistics.py).
"""

from __future__ import annotations

import json
import math
import sys
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from rlx.config.errors import ConfigError, nearest, printable
from rlx.config.loading import from_tree, parse_yaml, setting_at, with_overrides
from rlx.config.run import RunConfig, valid_name
from rlx.config.sections.base import flatten
from rlx.config.sweep import DEFAULT_METRIC, PROGRESS, Mode, RungUnit
from rlx.tracking.base import ERROR_TAG, RunStatus, TrackedRun
from rlx.tracking.metrics import METRICS, meaning
from rlx.tracking.parameters import setting_of
from rlx.tracking.services import mlflow
from rlx.tracking.services.mlflow_page import run_address

SettingValue = int | float | str | None
"""the value of a setting, as MLflow has it"""

SAMPLE_COLUMNS = ("prompt", "completion", "answer", "score")  # older sample tables also have the step
RACE_FILE = "race.txt"
"""the artifact of a sweep with the lines of its race"""
WATCHED = (
    DEFAULT_METRIC,
    "eval/reward",
    "reward/mean",
    "task/accuracy",
    "kl/ref",
    "response/length_mean",
    "tokens/total",
    "time/step",
    "time/eval",
)
"""the metrics that are always loaded"""


@dataclass(frozen=True, eq=False)
class Trial:
    """One trial of a sweep.

    Usually one run. Population based training can continue a trial from the checkpoint of another one; such a trial
    has one run for each attempt.
    """

    name: str  # of the first run, without the prefix that names the sweep
    run_ids: tuple[str, ...]  # first attempt first
    settings: dict[str, SettingValue]  # the varied ones, with the values of the last attempt
    status: RunStatus  # of the last attempt
    history: pd.DataFrame  # a row per step, a column per loaded metric, NaN where it was not logged; see `logged`
    stopped_at: int | None = None  # the step at which a scheduler stopped it
    origins: tuple[str, ...] = ()  # the checkpoints that later attempts continued from, e.g. trial_00001@6
    end_ms: int | None = None  # of the last attempt, since the epoch; None while it is running
    error: str = ""  # why it failed, if it did and has said so
    planned_steps: int | None = None  # which it was to do; None if not recorded
    histories: tuple[pd.DataFrame, ...] = ()  # of several attempts, each from the step that it goes on from, or 0

    def curve(self, metric: str) -> pd.Series[float]:
        """A metric by step, without steps that have no finite value, see `logged`."""
        logged = self.logged(metric)
        return logged[logged.abs() < math.inf]

    def logged(self, metric: str) -> pd.Series[float]:
        """A metric by step, up to the one at which a scheduler stopped it; infinite where it was not finite.

        A step that was begun when the decision fell may have been logged, too; nobody was compared by it.
        """
        logged = self.history[metric].dropna()
        return logged if self.stopped_at is None else logged[logged.index <= self.stopped_at]

    @property
    def was_stopped(self) -> bool:
        """Whether a scheduler stopped it."""
        return self.stopped_at is not None

    @property
    def was_cut(self) -> bool:
        """Whether it was interrupted, or waits, before its last step: it may go on."""
        is_open = self.status == RunStatus.KILLED and not self.was_stopped
        return is_open and (self.planned_steps is None or self.last_step < self.planned_steps)

    @property
    def last_step(self) -> int:
        """The last step with a metric, or the one at which a scheduler stopped it; 0 if there is none."""
        logged = int(max(self.history.index, default=0))
        return logged if self.stopped_at is None else min(logged, self.stopped_at)

    @property
    def seconds(self) -> float:
        """The duration of its steps and evaluations, without the start of the engines; NaN if none was logged."""
        durations = self.history["time/step"].fillna(self.history["time/eval"])  # a step includes its evaluation
        return float(durations.sum(min_count=1))


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep and its trials, in the order of their start."""

    name: str
    run_id: str
    varied: tuple[str, ...]  # dotted names of the settings that differ between trials, including the seed
    metrics: tuple[str, ...]  # the loaded ones
    trials: tuple[Trial, ...]
    options: dict[str, str] = field(default_factory=dict)  # space, search, scheduler, seeds, trials, steps, if recorded
    num_questions: int | None = None  # held-out questions of an evaluation, equal in all trials; None if not recorded
    of_sources: Mapping[str, int] = field(default_factory=dict)  # of these those of each of data.sources, by its name
    experiment_id: str = ""  # of MLflow
    planned: Mapping[str, float] = field(default_factory=dict)  # its cost at most, and the GPUs of a run; if recorded
    rungs: tuple[int, ...] = ()  # the steps at which the scheduler judged trials, if it says so beforehand
    rung_by: RungUnit = "steps"  # at equal amounts of which it compared them
    metric: str = DEFAULT_METRIC  # by which it compared its trials
    mode: Mode = "max"

    def looks(self, step: int, seeds: int) -> int:
        """How often a race had compared its settings when it compared them at this step, on so many seeds; 1 for other
        schedulers, which stop whoever is worse, however little."""
        if self.options.get("scheduler") != "race":
            return 1
        first = self.options.get("seeds", "")
        added = max(0, seeds - int(first)) if first.isdigit() else 0
        return 1 + sum(rung < step for rung in self.rungs) + added

    def num_questions_of(self, metric: str) -> int | None:
        """The number of held-out questions, all or those of a source, if the metric is the share of right answers."""
        if metric.startswith(("eval/accuracy/", "eval/ema/accuracy/")):
            return self.of_sources.get(metric.rpartition("/")[2])
        return self.num_questions if metric.startswith("eval/") and metric.endswith("/accuracy") else None


def sweep_names(uri: str, experiment: str) -> list[str]:
    """The names of the sweeps of an experiment, newest first.

    Raises:
        ConfigError: no such store or experiment, or it has no sweep.
    """
    return list(dict.fromkeys(run.name for run in _sweep_runs(uri, experiment)))


def load_sweep(uri: str, experiment: str, name: str | None = None, metrics: Sequence[str] = ()) -> Sweep:
    """Reads a sweep.

    Args:
        name: name of the sweep or id of its MLflow run. Of several sweeps with the name, the newest is read; None
            reads the newest of all.
        metrics: loaded in addition to `WATCHED`, to the sweep's own metric, and to what its rungs are in.

    Raises:
        ConfigError: an unknown metric; no such store, experiment or sweep; the sweep has no trials.
    """
    for metric in metrics:
        check_metric(metric, [metric] if meaning(metric) else list(METRICS))
    sweep_runs = _sweep_runs(uri, experiment)
    parent = next((run for run in sweep_runs if name in (None, run.name, run.id)), None)
    if parent is None:
        hint = nearest(name or "", [run.name for run in sweep_runs])
        raise ConfigError(f"no sweep {name!r} in experiment {experiment!r}{hint}")
    # A folder of its analysis has the name, too.
    if valid_name(parent.name) != parent.name:
        raise ConfigError(f"no sweep of rlx has such a name: {printable(parent.name)}")
    attempts = _attempts_by_trial(uri, parent)
    if not attempts:
        raise ConfigError(f"sweep {parent.name!r} has no trials yet")
    unit, (metric, mode) = _rung_unit(parent), _judged_by(parent)
    counted = [] if unit == "steps" else [PROGRESS[unit]]
    loaded = tuple(dict.fromkeys([*WATCHED, *counted, metric, *metrics]))
    runs = [run for each in attempts for run in each]  # those that failed before they began have measured nothing
    first_params = next((run.params for run in runs if "train.steps" in run.params), {})
    asked = (run.metrics["eval/questions"] for run in runs if "eval/questions" in run.metrics)
    num_questions = next(asked, first_params.get("eval.num_prompts"))  # of before it was measured
    varied = tuple(map(str, _tag(parent, "rlx.space", [])))
    trials = tuple(_trial(uri, parent.name, runs, varied, loaded) for runs in attempts)
    return Sweep(
        name=parent.name,
        run_id=parent.id,
        varied=varied,
        metrics=loaded,
        trials=trials,
        options=_options(parent, first_params.get("train.steps")),
        num_questions=None if num_questions is None else int(num_questions),
        of_sources=_of_sources(uri, trials, num_questions) if first_params.get("data.sources", "()") != "()" else {},
        experiment_id=parent.experiment_id,
        planned=_tag(parent, "rlx.planned", {}),
        rungs=tuple(_tag(parent, "rlx.rungs", [])),
        rung_by=unit,
        metric=metric,
        mode=mode,
    )


def check_metric(metric: str, choices: Sequence[str]) -> None:
    """Refuses an unknown metric.

    Raises:
        ConfigError: the metric is not one of the choices.
    """
    if metric not in choices:
        raise ConfigError(f"unknown metric {metric!r}{nearest(metric, choices)}")


def check_logged(uri: str, sweep: Sweep, metric: str) -> None:
    """Refuses a loaded metric that no trial has logged: a name of one of eval.sets may be any.

    Raises:
        ConfigError: none has logged it.
    """
    if any(trial.history[metric].notna().any() for trial in sweep.trials):
        return
    runs = (mlflow.get_run(uri, run_id) for trial in sweep.trials for run_id in trial.run_ids)
    logged = sorted({name for run in runs for name in run.metrics})
    raise ConfigError(f"no trial of sweep {sweep.name} has logged {metric}{nearest(metric, logged)}")


def samples(uri: str, trial: Trial) -> pd.DataFrame:
    """The newest answers of a trial to held-out prompts, with `SAMPLE_COLUMNS`; empty if it has none."""
    for run_id in reversed(trial.run_ids):
        if tables := mlflow.artifact_names(uri, run_id, "samples"):
            newest = json.loads(mlflow.read_artifact(uri, run_id, tables[-1]))
            return pd.DataFrame(**newest)[list(SAMPLE_COLUMNS)]
    return pd.DataFrame(columns=list(SAMPLE_COLUMNS))


def every_metric(uri: str, trial: Trial) -> pd.DataFrame:
    """Everything that a trial logged: a row per step, a column per metric, NaN where nothing finite was logged."""
    attempts = [mlflow.get_run(uri, run_id) for run_id in trial.run_ids]
    metrics = sorted({metric for run in attempts for metric in run.metrics})
    history = _joined(attempts, [_history(uri, run, metrics) for run in attempts])
    return history.where(history.abs() < math.inf)


def run_config(uri: str, trial: Trial) -> RunConfig:
    """The config of a trial, with the settings of its last attempt.

    Raises:
        ConfigError: MLflow does not have the config, or this version of rlx does not accept it.
    """
    tree = _logged_config(uri, trial, trial.run_ids[0])
    if trial.origins:  # by the file, where lists and the like are not texts
        now = flatten(from_tree(_logged_config(uri, trial, trial.run_ids[-1]), f"config.yaml of {trial.name}"))
        tree = with_overrides(tree, {key: setting_at(now, key) for key in trial.settings})
    return from_tree(tree, f"config.yaml of {trial.name}")


def _of_sources(uri: str, trials: Sequence[Trial], most: float | str | None) -> dict[str, int]:
    """How many held-out questions each of data.sources has at most; empty if no settings can be read any more."""
    for trial in trials:
        with suppress(ConfigError):
            config = run_config(uri, trial)
            return {key: min(n, int(most or n)) for key, n in config.eval.questions_of_sources(config.data).items()}
    return {}


def _logged_config(uri: str, trial: Trial, run_id: str) -> Any:
    if "config.yaml" not in mlflow.artifact_names(uri, run_id):
        raise ConfigError(f"{trial.name} has no config.yaml in MLflow")
    return parse_yaml(mlflow.read_artifact(uri, run_id, "config.yaml"))


def race_text(uri: str, sweep: Sweep) -> str:
    """What a race has decided, a line per setting; empty for other sweeps."""
    is_there = RACE_FILE in mlflow.artifact_names(uri, sweep.run_id)
    return mlflow.read_artifact(uri, sweep.run_id, RACE_FILE).strip() if is_there else ""


def trial_address(uri: str, trial: Trial) -> str | None:
    """The address of the run folder of the last attempt of a trial; None if it was not recorded."""
    asked = [mlflow.get_run(uri, run_id) for run_id in dict.fromkeys((trial.run_ids[0], trial.run_ids[-1]))]
    folder = asked[-1].tags.get("rlx.folder")
    return run_address(folder, asked[0].params.get("storage", "")) if folder else None


def _sweep_runs(uri: str, experiment: str) -> list[TrackedRun]:
    """The parent runs of the sweeps of an experiment, newest first."""
    sweeps = mlflow.find_runs(uri, mlflow.find_experiment(uri, experiment), kind="sweep")
    if not sweeps:
        raise ConfigError(f"no sweep in experiment {experiment!r}: rlx sweep makes one")
    return sweeps[::-1]


def _attempts_by_trial(uri: str, parent: TrackedRun) -> list[list[TrackedRun]]:
    """The runs of each trial of a sweep, first attempt first."""
    trials = mlflow.find_runs(uri, parent.experiment_id, parent=parent.id)
    runs = {trial.id: [trial] for trial in trials}
    for attempt in mlflow.find_runs(uri, parent.experiment_id, kind="attempt"):
        if attempt.parent_id in runs:
            runs[attempt.parent_id].append(attempt)
    return list(runs.values())


def _tag(parent: TrackedRun, name: str, empty: Any) -> Any:
    """What a tag of a sweep says, as JSON of the kind of `empty`, which stands for no tag.

    Raises:
        ConfigError: it says something else.
    """
    try:
        value = json.loads(parent.tags.get(name, json.dumps(empty)))
        is_right = isinstance(value, type(empty))
    except (ValueError, RecursionError):
        value, is_right = empty, False
    parts = value.values() if isinstance(value, dict) else value if is_right else ()
    if not is_right or not all(isinstance(part, str | int | float | None) for part in parts):
        raise ConfigError(f"the record of sweep {parent.name} is damaged: its tag {name}")
    return value


def _rung_unit(parent: TrackedRun) -> RungUnit:
    """The unit of the rungs of a sweep; steps if it does not say.

    Raises:
        ConfigError: it says something else.
    """
    if unit := next((each for each in PROGRESS if each == parent.tags.get("rlx.rung_by", "steps")), None):
        return unit
    raise ConfigError(f"the record of sweep {parent.name} is damaged: its tag rlx.rung_by")


def _judged_by(parent: TrackedRun) -> tuple[str, Mode]:
    """The metric by which a sweep compared its trials, and which end of it is good; the defaults if it does not say.

    Raises:
        ConfigError: it says something else.
    """
    metric, said = parent.tags.get("rlx.metric", DEFAULT_METRIC), parent.tags.get("rlx.mode", "max")
    for mode in typing.get_args(Mode):
        if mode == said and meaning(metric):
            return metric, mode
    wrong = "rlx.mode" if meaning(metric) else "rlx.metric"
    raise ConfigError(f"the record of sweep {parent.name} is damaged: its tag {wrong}")


def _options(parent: TrackedRun, steps: str | None) -> dict[str, str]:
    """The options that a sweep was started with; older sweeps have recorded fewer of them."""
    options = {key: parent.params.get(key) for key in ("space", "search", "scheduler", "budget", "rung_by")}
    options |= {"seeds": parent.tags.get("rlx.seeds"), "trials": parent.params.get("trials"), "steps": steps}
    return {key: value for key, value in options.items() if value is not None}


def _trial(
    uri: str, sweep: str, attempts: Sequence[TrackedRun], varied: Sequence[str], metrics: Sequence[str]
) -> Trial:
    first, last = attempts[0], attempts[-1]
    # Nothing of earlier attempts: a setting that is None now is not recorded, and would have its old value.
    params = next((run.params for run in reversed(attempts) if run.params), {})
    stopped_at = last.tags.get("rlx.stopped", first.tags.get("rlx.stopped"))
    histories = tuple(_history(uri, run, metrics) for run in attempts)
    return Trial(
        name=first.name.removeprefix(f"{sweep}."),
        run_ids=tuple(run.id for run in attempts),
        settings={key: setting_of(params, key) for key in varied},
        status=last.status,
        history=_joined(attempts, histories),
        histories=histories,
        stopped_at=None if stopped_at is None else int(stopped_at),
        origins=tuple(run.tags["rlx.from"] for run in attempts if "rlx.from" in run.tags),
        end_ms=last.end_ms,
        error=printable(last.tags.get(ERROR_TAG, "")) if last.status == RunStatus.FAILED else "",
        planned_steps=int(steps) if (steps := params.get("train.steps", "")).isdecimal() else None,
    )


def _joined(attempts: Sequence[TrackedRun], histories: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The history of a trial: of each attempt up to the step that the next one continues from, if it does."""
    joined = histories[0]
    for run, after in zip(attempts[1:], histories[1:], strict=True):
        step = int(run.tags.get("rlx.from", "@-1").rpartition("@")[2])
        joined = after.combine_first(joined[joined.index <= step]).rename_axis("step")
    return joined


def _history(uri: str, run: TrackedRun, metrics: Sequence[str]) -> pd.DataFrame:
    """One row per step, one column per metric."""
    columns = {}
    for metric in metrics:
        points = mlflow.history(uri, run.id, metric) if metric in run.metrics else []
        columns[metric] = pd.Series({point.step: _or_infinite(point.value) for point in points}, dtype=float)
    return pd.DataFrame(columns).sort_index().rename_axis("step")


def _or_infinite(value: float) -> float:
    """A value, infinite if it is not finite; MLflow's databases store infinity as the largest float."""
    return value if abs(value) < sys.float_info.max else math.copysign(math.inf, value)
