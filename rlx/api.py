"""What `import rlx` offers beside the config: train a run, resume a run, run a sweep, load a finished sweep.

Each function is a short path through `rlx.runs`, `rlx.sweeps` or `rlx.analysis`, which it imports when it is called.
Left out: screens and exit codes, which are in `rlx.cli`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections import DEFAULT_METRIC, SchedulerName, SearchName
from rlx.types import OnReport

if TYPE_CHECKING:
    from rlx.analysis.loading import Sweep
    from rlx.storage.filesystem import Storage
    from rlx.sweeps.records import SweepPlan, TrialRecord


# ---------------------------------------------------------------------------------------------------------------------
# One run


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves."""

    name: str
    path: str  # the address of its folder
    metrics: dict[str, Any]  # of the last step
    checkpoint: str | None  # the address of its newest complete checkpoint; None if it wrote none


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The settings of a YAML file, or the defaults, with some of them replaced by dotted key.

    Raises:
        ConfigError: the file cannot be read, a setting is unknown, or a value is not allowed.
    """
    tree = read_yaml(str(path)) if path else {}
    return from_tree(with_overrides(tree, overrides or {}), str(path or "overrides"))


def train(config: RunConfig, *, on_report: OnReport | None = None) -> TrainResult:
    """Trains to the last step; the run gets a name if the config has none.

    Args:
        on_report: called after each step with its metrics, and with the path of a checkpoint if one became complete
            since the step before.

    Raises:
        ConfigError: a setting cannot be used, or a run of this name exists.
        RunError: training failed.
    """
    from rlx.runs import run_folder

    config, folder = run_folder.new_run(config)
    return _run(config, folder, resume=False, on_report=on_report)


def resume(
    name: str,
    *,
    storage: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_report: OnReport | None = None,
) -> TrainResult:
    """Continues a run from its newest checkpoint to its last step; a finished run gives its result at once.

    Args:
        storage: the address where the run is kept; None: the default of the setting `storage`.
        overrides: settings for the rest of the run by dotted key, such as a larger `train.steps`.

    Raises:
        ConfigError: no such run, or a setting that a run cannot change once it has begun.
        RunError: training failed.
    """
    from rlx.runs import run_folder

    config, folder = run_folder.saved_run(name, storage or RunConfig().storage, overrides or {})
    if metrics := run_folder.finished_metrics(folder, config.train.steps):
        return _result(config.storage, name, metrics)
    return _run(config, folder, resume=True, on_report=on_report)


def _run(config: RunConfig, folder: Storage, *, resume: bool, on_report: OnReport | None) -> TrainResult:
    from rlx.runs import launch, preflight

    prepared = preflight.prepare(config)
    launch.connect(config.ray_address, prepared.resources)
    result = launch.run(prepared, folder, resume=resume, on_report=on_report)
    return _result(config.storage, result.name, result.metrics)


def _result(storage: str, name: str, metrics: dict[str, Any]) -> TrainResult:
    from rlx.storage.addresses import join_address, open_storage

    path = join_address(storage, "runs", name)
    return TrainResult(name, path, metrics, _newest_checkpoint(open_storage(storage) / "runs" / name, path))


def _newest_checkpoint(run: Storage, path: str) -> str | None:
    """The address of the newest complete checkpoint in a run's folder, whose own address is `path`."""
    from rlx.storage import checkpoint_catalog
    from rlx.storage.addresses import join_address

    checkpoints = checkpoint_catalog.complete_checkpoints(run)
    return join_address(path, checkpoints[-1].name) if checkpoints else None


# ---------------------------------------------------------------------------------------------------------------------
# A sweep


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial of a sweep."""

    name: str
    config: dict[str, Any]  # the settings that the sweep varies, by dotted key
    metrics: dict[str, Any]  # of its last step; of a trial that was stopped early, the step and the held-out accuracy
    path: str  # the address of the folder of its last run
    checkpoint: str | None  # the address of that run's newest complete checkpoint; None if it wrote none
    error: str | None  # why it failed; None if it did not


class SweepResults:
    """The trials of a finished sweep, in their order: `len`, an index, iteration, and the best one."""

    def __init__(self, name: str, trials: Sequence[TrialResult]) -> None:
        self.name, self.trials = name, list(trials)

    def __len__(self) -> int:
        return len(self.trials)

    def __getitem__(self, index: int) -> TrialResult:
        return self.trials[index]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.trials)

    @property
    def errors(self) -> list[str]:
        """Why trials failed, a line for each."""
        return [f"{trial.name}: {trial.error}" for trial in self if trial.error]

    def get_best_result(self, metric: str = DEFAULT_METRIC, mode: str = "max") -> TrialResult:
        """The trial whose last value of a metric is the largest, or with mode "min" the smallest.

        Raises:
            ValueError: the mode is neither, or no trial has the metric.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"mode {mode!r}: expected max or min")
        known = [trial for trial in self if metric in trial.metrics and not trial.error]
        if not known:
            raise ValueError(f"no trial of sweep {self.name} has the metric {metric}")
        return (max if mode == "max" else min)(known, key=lambda trial: float(trial.metrics[metric]))


class SweepTuner:
    """A sweep that is checked and ready to run.

    `fit` runs it through `rlx.sweeps.tuner` and keeps the records of `rlx sweep`: `rlx sweep --resume NAME` continues
    it and `rlx.load_sweep(NAME)` reads it back.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan

    def fit(self) -> SweepResults:
        """Runs every trial to its end.

        Raises:
            ConfigError: the cluster has no room for a trial, or the name of the sweep is taken.
        """
        from rlx.runs import launch, preflight
        from rlx.storage.addresses import open_storage
        from rlx.sweeps import tuner

        config = self.plan.config
        storage = open_storage(config.storage)
        prepared = preflight.prepare(config)
        launch.connect(config.ray_address, prepared.resources)
        plan = tuner.create_sweep(self.plan, storage)
        records = tuner.run_sweep(plan, storage, watch=lambda trial, settings, metrics, state: None)
        return sweep_results(plan, records)


def tuner(
    config: RunConfig,
    *,
    space: Mapping[str, Any] | str | Path,
    trials: int = 4,
    seeds: int = 1,
    search: SearchName = "random",
    scheduler: SchedulerName = "none",
    max_concurrent: int | None = None,
) -> SweepTuner:
    """A sweep over a search space, checked but not started; `config.name` names it.

    Args:
        config: the settings that all trials share.
        space: domains such as `tune.loguniform(1e-6, 1e-4)` by dotted key, or a Python file with a function space().
        trials: how many settings to try; a grid has its own number.
        seeds: how many runs each setting gets.
        search: how settings are chosen, as `rlx sweep --search`.
        scheduler: which trials are stopped early, as `rlx sweep --scheduler`.
        max_concurrent: at most so many trials at once; None: as many as the cluster has room for.

    Raises:
        ConfigError: the space, the search, the scheduler and the seeds do not go together.
    """
    from rlx.runs import preflight
    from rlx.storage.addresses import local_folder, open_storage
    from rlx.storage.filesystem import free_name
    from rlx.sweeps.records import SweepPlan
    from rlx.sweeps.space import write_space
    from rlx.sweeps.tuner import check_sweep

    _check_choices(search, scheduler, {"trials": trials, "seeds": seeds, "max_concurrent": max_concurrent})
    tree = with_overrides(config.model_dump(mode="json", exclude_unset=True), preflight.absolute_paths(config))
    name = tree.pop("name", None) or free_name(open_storage(config.storage) / "sweeps", "sweep")
    if isinstance(space, Mapping):
        space = write_space(space, name, local_folder(config.storage) / "search_spaces")
    plan = SweepPlan(name, tree, str(Path(space).resolve()), trials, search, scheduler, seeds, max_concurrent)
    check_sweep(plan)
    return SweepTuner(plan)


def load_sweep(
    name: str | None = None,
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    metrics: Sequence[str] = (),
) -> Sweep:
    """Reads a sweep back from MLflow: its trials, their settings and their metrics by step.

    Args:
        name: the newest sweep of this name; None: the newest of all.
        storage: the address where the sweep is kept; None: the default of the setting `storage`.
        tracking_uri: the MLflow server or database; None: the one in the storage.
        experiment: the MLflow experiment; None: the default of the setting `tracking.experiment`.
        metrics: metrics to read beside the usual ones.

    Raises:
        ConfigError: there is no such storage, experiment, sweep or metric.
    """
    from rlx.analysis import loading
    from rlx.storage.addresses import local_folder
    from rlx.tracking import mlflow

    defaults = RunConfig()
    folder = local_folder(storage or defaults.storage)
    if not tracking_uri and not folder.is_dir():
        raise ConfigError(f"no storage folder {folder}")
    uri = tracking_uri or mlflow.default_uri(folder)
    return loading.load_sweep(uri, experiment or defaults.tracking.experiment, name, metrics)


def _check_choices(search: SearchName, scheduler: SchedulerName, counts: Mapping[str, int | None]) -> None:
    from rlx.sweeps.schedulers import SCHEDULERS
    from rlx.sweeps.searchers import SEARCHES

    for option, value, choices in (("search", search, SEARCHES), ("scheduler", scheduler, SCHEDULERS)):
        if value not in choices:
            raise ConfigError(f"{option} {value!r}: choose from {', '.join(choices)}")
    for option, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{option} {count}: at least 1")


def sweep_results(plan: SweepPlan, records: Mapping[str, TrialRecord]) -> SweepResults:
    """The results of a sweep, from the records of its trials and what their last runs left in their folders."""
    from rlx.storage.addresses import open_storage

    sweep = open_storage(plan.config.storage) / "sweeps" / plan.name
    return SweepResults(plan.name, [_trial_result(plan, sweep, *entry) for entry in sorted(records.items())])


def _trial_result(plan: SweepPlan, sweep: Storage, name: str, record: TrialRecord) -> TrialResult:
    from rlx.storage.addresses import join_address
    from rlx.sweeps.records import TrialState
    from rlx.sweeps.trainable import newest_attempt

    attempt = newest_attempt(sweep, name)
    run, path = sweep / "runs" / attempt, join_address(plan.config.storage, "sweeps", plan.name, "runs", attempt)
    file = run / "result.json"
    reported = {"step": record.step, DEFAULT_METRIC: record.reports[-1][1]} if record.reports else {}
    return TrialResult(
        name,
        record.settings,
        metrics=file.read_json() if file.exists() else reported,
        path=path,
        checkpoint=_newest_checkpoint(run, path),
        error=record.message if record.state is TrialState.FAILED else None,
    )
