"""A sweep: a Tuner whose every trial is one launch.run, under an MLflow parent run; resumable, leaving nothing behind.

A trial is a function trainable that starts a Ray Train run of its own and relays its reports, each with a small pointer
to the newest checkpoint. Tables and figures are analysis's.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.sample import Categorical, Domain
from ray.tune.trainable.function_trainable import wrap_function

from rlx import controller, inputs, launch, report, run_folder
from rlx.config import ConfigError, RunConfig, from_tree, is_setting, nearest, setting_keys, with_overrides
from rlx.storage import Storage

_LOG = logging.getLogger("rlx")
METRIC, MODE = "eval/accuracy", "max"
_RECORD = "sweep.json"
_PLANNED = (
    "scaling.",
    "rollout.engines",
    "rollout.resources_per_engine",
    "reward.model_replicas",
    "reward.resources_per_model",
    "ray_address",
)

Watch = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], None]
"""(trial, its settings, its newest metrics, its state), called whenever one of them changes"""


@dataclass(frozen=True)
class Sweep:
    """What a sweep is made of; kept with it, so that it can be resumed."""

    name: str
    tree: dict[str, Any]  # the config that all trials share
    space: str  # path of the search space
    trials: int = 4
    search: str = "random"
    scheduler: str = "none"
    max_concurrent: int | None = None
    mlflow_run: str = field(default="")


def _fifo(config: RunConfig) -> TrialScheduler:
    return FIFOScheduler()


def _asha(config: RunConfig) -> TrialScheduler:
    """Stops the worse half at each rung; the first rung comes after the first evaluation."""
    steps = config.train.steps
    first = min(steps, config.eval.every or steps)
    return ASHAScheduler(time_attr="step", max_t=steps + 1, grace_period=first, reduction_factor=2)


SCHEDULERS: dict[str, Callable[[RunConfig], TrialScheduler]] = {"none": _fifo, "asha": _asha}


def _random(space: dict[str, Any]) -> dict[str, Any]:
    return space


def _grid(space: dict[str, Any]) -> dict[str, Any]:
    """Every combination of the choices."""
    for key, domain in space.items():
        if isinstance(domain, Domain) and not isinstance(domain, Categorical):
            raise ConfigError(f"--search grid needs a list of values for {key}: use tune.choice")
    return {k: tune.grid_search(d.categories) if isinstance(d, Categorical) else d for k, d in space.items()}


SEARCHES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"random": _random, "grid": _grid}


def load_space(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The search space of a Python file with a function space(), each setting checked against the config tree.

    Raises:
        ConfigError: no such file or function, an unknown setting, or a value that the setting does not take.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--space {path}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "space"):
        raise ConfigError(f"--space {path}: it has no function space()")
    space: dict[str, Any] = module.space()
    for key, domain in space.items():
        if key.startswith(_PLANNED):
            raise ConfigError(
                f"--space {path}: {key} changes what a trial needs of the cluster, which all trials share"
            )
        if not is_setting(key):
            raise ConfigError(f"--space {path}: unknown setting {key}{nearest(key, setting_keys())}")
        for value in _extremes(domain):
            from_tree(with_overrides(dict(config), {key: value}), f"--space {path}")
    return space


def planned(sweep: Sweep) -> int:
    """How many trials it has."""
    if sweep.search != "grid":
        return sweep.trials
    choices = [d for d in _grid(load_space(sweep.space, sweep.tree)).values() if isinstance(d, dict)]
    return math.prod(len(choice["grid_search"]) for choice in choices)


def create_sweep(sweep: Sweep, storage: Storage) -> Sweep:
    """Records a new sweep in its folder and in MLflow; ConfigError if its name is taken."""
    folder = storage / "sweeps" / sweep.name
    if (folder / _RECORD).exists():
        raise ConfigError(f"sweep {sweep.name!r} exists in {folder.path}: --resume {sweep.name} continues it")
    config = from_tree(sweep.tree)
    space = load_space(sweep.space, sweep.tree)
    run_id = report.start_run(
        launch.tracking_uri(config),
        config.tracking.experiment,
        sweep.name,
        parent=None,
        params={"trials": planned(sweep), "search": sweep.search, "scheduler": sweep.scheduler, "space": sweep.space},
        tags={"rlx.kind": "sweep", "rlx.folder": folder.path, "rlx.space": json.dumps(list(space))},
    )
    sweep = Sweep(**asdict(sweep) | {"mlflow_run": run_id})
    (folder / _RECORD).write_text(json.dumps(asdict(sweep), indent=1))
    return sweep


def saved_sweep(storage: Storage, name: str | None) -> Sweep:
    """A recorded sweep by name, or the newest one; ConfigError if there is none."""
    sweeps = storage / "sweeps"
    names = [n for n in sweeps.names() if (sweeps / n / _RECORD).exists()]
    if not names or (name and name not in names):
        raise ConfigError(f"no sweep {name or ''} in {sweeps.path}{nearest(name or '', names)}")
    newest = max(names, key=lambda n: sweeps.filesystem.get_file_info((sweeps / n / _RECORD).path).mtime)
    record = sweeps / (name or newest) / _RECORD
    try:
        return Sweep(**record.read_json())
    except (TypeError, ValueError):
        raise ConfigError(f"{record.path} is damaged: it is not what rlx wrote") from None


def run(sweep: Sweep, storage: Storage, *, resume: bool = False, watch: Watch) -> list[Any]:
    """Runs a recorded sweep, or the rest of it, to the end; Tune's result of each trial.

    The cluster must be connected. Ends the sweep's MLflow run.
    """
    uri, status = launch.tracking_uri(from_tree(sweep.tree)), "FAILED"
    on_interrupt = signal.getsignal(signal.SIGINT)  # Tune puts its own in its place, for good
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial's reason is told by `failures`
    try:
        _Watcher.watch = watch
        tuner = _restored(sweep, storage) if resume else _tuner(sweep, storage)
        _Watcher.interrupted = False
        results = list(tuner.fit())
        if _Watcher.interrupted:
            raise KeyboardInterrupt  # Tune takes the signal, ends its trials and returns as if it were done
        status = "FINISHED" if any(result.error is None for result in results) else "FAILED"
        return results
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        report.end_run(uri, sweep.mlflow_run, status)


def failures(results: Sequence[Any]) -> list[str]:
    """One line for each trial that failed: which, and its last words."""
    failed = [(Path(result.path).name, str(result.error).strip()) for result in results if result.error]
    return [f"{name}: {words.splitlines()[-1] if words else 'it was killed'}" for name, words in failed]


def concurrency(sweep: Sweep) -> int:
    """How many trials run at once: as many whole plans as the cluster has room for. Ray would start more and let them
    wait for ever, each holding what the other needs."""
    room = launch.plan(from_tree(sweep.tree)).fits(launch.nodes())
    return max(1, min(room, sweep.max_concurrent or room))


# ---------------------------------------------------------------------------------------------------------------------
# Trials


def _tuner(sweep: Sweep, storage: Storage) -> tune.Tuner:
    config = from_tree(sweep.tree)
    search = SEARCHES[sweep.search]
    return tune.Tuner(
        _trainable(sweep, storage),
        param_space=search(load_space(sweep.space, sweep.tree)),
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode=MODE,
            num_samples=1 if sweep.search == "grid" else sweep.trials,
            scheduler=SCHEDULERS[sweep.scheduler](config),
            search_alg=BasicVariantGenerator(max_concurrent=concurrency(sweep), random_state=config.seed),
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(
            name=sweep.name,
            storage_path=f"{storage.path}/sweeps",
            storage_filesystem=storage.filesystem,
            callbacks=[_Watcher(sweep, storage)],
            verbose=0,
        ),
    )


def _restored(sweep: Sweep, storage: Storage) -> tune.Tuner:
    """The interrupted sweep's Tuner: finished trials stay as they are, the others go on from their checkpoints."""
    folder = storage / "sweeps" / sweep.name
    if not tune.Tuner.can_restore(folder.path, storage_filesystem=storage.filesystem):
        return _tuner(sweep, storage)  # it ended before its first trial began
    return tune.Tuner.restore(
        folder.path,
        trainable=_trainable(sweep, storage),
        storage_filesystem=storage.filesystem,
        resume_unfinished=True,
        resume_errored=True,
    )


def trial_name(trial: Trial) -> str:
    """trial_00003 and the like: it depends on nothing but the trial, so that a restored one finds its folder."""
    return f"trial_{trial.trial_id.rpartition('_')[2]}"


def _trainable(sweep: Sweep, storage: Storage) -> Any:
    """A trial as Tune wants it, with the engines' resources; Train reserves the workers' itself."""
    tables = _shared_tables(sweep)

    def trial(settings: dict[str, Any]) -> None:
        _run_trial(sweep, storage, settings, ray.get(tables) if tables else None)

    class Trainable(wrap_function(trial, name="trial")):  # type: ignore[misc]
        def cleanup(self) -> None:  # Tune calls it when a trial ends, also one that a scheduler stops
            from rlx import controller  # the class is pickled by value: this is the trial process's own module

            controller.abort_running()
            super().cleanup()

    Trainable.__name__ = "trial"
    beside = launch.plan(from_tree(sweep.tree)).beside
    # The trial's own process holds a share of the cluster's memory, as Ray counts it, so that no more trials start than
    # have room for their workers too; those that a resume brings back pass by the search's limit.
    share = ray.cluster_resources()["memory"] / (concurrency(sweep) + 0.5)
    return tune.with_resources(Trainable, tune.PlacementGroupFactory([{"CPU": 0.0, "memory": share}, *beside]))


def _shared_tables(sweep: Sweep) -> Any:
    """The prompt tables in the object store, prepared once for all trials; None if the trials differ in prompts."""
    config = from_tree(sweep.tree)
    apart = ("data.", "eval.", "model.")
    if any(key.startswith(apart) for key in load_space(sweep.space, sweep.tree)):
        return None
    return ray.put(inputs.prompt_tables(config, inputs.model_folder(config)))


def _run_trial(sweep: Sweep, storage: Storage, settings: dict[str, Any], tables: Any) -> None:
    """In the trial's own process: one run, its reports passed on to Tune."""
    name = tune.get_context().get_trial_name()
    config = from_tree(with_overrides(sweep.tree, settings | {"name": f"{sweep.name}.{name}"}))
    folder = storage / "sweeps" / sweep.name / "runs" / name

    def relay(metrics: dict[str, Any], checkpoint: str | None) -> None:
        if checkpoint is None:
            tune.report(metrics)
            return
        with tempfile.TemporaryDirectory() as pointer:  # restoring a trial asks for a checkpoint of Tune's own
            Path(pointer, "pointer.json").write_text(json.dumps({"checkpoint": checkpoint}))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(pointer))

    launch.connect(config)
    resume = (folder / "run.json").exists()
    launch.run(config, folder, resume=resume, parent=sweep.mlflow_run, tables=tables, on_report=relay)


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Makes an error a warning: Tune ends a sweep whose callback fails."""

    @functools.wraps(method)
    def guarded(*args: Any) -> None:
        try:
            method(*args)
        except Exception as error:
            _LOG.warning("the sweep goes on: %s: %s", type(error).__name__, error)

    return guarded


class _Watcher(tune.Callback):
    """Shows trials, and clears away what a trial that was stopped or killed could not clear itself."""

    # Tune keeps its callbacks with the sweep, pickled; what concerns this process alone is no part of that.
    watch: Watch = staticmethod(lambda trial, settings, metrics, state: None)
    interrupted = False

    def __init__(self, sweep: Sweep, storage: Storage) -> None:
        self.ends: dict[str, str] = {}  # by trial id, how its MLflow run is to end
        self.runs = storage / "sweeps" / sweep.name / "runs"
        self.uri = launch.tracking_uri(from_tree(sweep.tree))

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ends[trial.trial_id] = "KILLED"  # unless it comes to another end
        self._show(trial, {}, "running")

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self._show(trial, result, "running")

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ends[trial.trial_id] = "FINISHED"  # what it holds it gives back itself: Tune is only about to stop it
        self._show(trial, trial.last_result, "finished")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ends[trial.trial_id] = "FAILED"
        self._clear(trial)
        self._show(trial, trial.last_result, "failed")

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """All trials' processes are gone: those of an interrupted sweep too, of which Tune tells no more than this."""
        for trial in trials:
            if trial.trial_id in self.ends:
                self._clear(trial)
        pending = any(trial.status == Trial.PENDING for trial in trials)
        _Watcher.interrupted = pending or "KILLED" in self.ends.values()

    @_harmless
    def _show(self, trial: Trial, metrics: Mapping[str, Any], state: str) -> None:
        _Watcher.watch(trial_name(trial), trial.config, metrics, state)

    @_harmless
    def _clear(self, trial: Trial) -> None:
        folder = self.runs / trial_name(trial)
        controller.remove_leftovers(folder.path)
        if (folder / "run.json").exists():
            report.settle_run(self.uri, run_folder.mlflow_run(folder), self.ends[trial.trial_id])


def _extremes(domain: Any) -> list[Any]:
    """Values that show whether a setting takes what a domain gives."""
    if isinstance(domain, Categorical):
        return list(domain.categories)
    if isinstance(domain, Domain):
        return [domain.lower, domain.upper] if hasattr(domain, "lower") else [domain.sample()]
    if isinstance(domain, dict) and "grid_search" in domain:
        return list(domain["grid_search"])
    return [domain]
