"""What `import rlx` offers beside the config: train a run, resume a run, run a sweep, load a finished sweep.

Each function is a short path through `rlx.runs`, `rlx.sweeps` or `rlx.analysis`, which it imports when it is called.
Left out: screens and exit codes, which are in `rlx.cli`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from rlx.config.errors import ConfigError, meant
from rlx.config.experiment import with_experiment
from rlx.config.loading import check_overrides, from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sweep import Mode, ReuseName, RungUnit, SchedulerName, SearchName
from rlx.types import OnReport

if TYPE_CHECKING:
    import ray.train
    from ray import tune

    from rlx.analysis.loading import Sweep
    from rlx.storage.filesystem import Storage
    from rlx.sweeps.records import SweepPlan

_LOG = logging.getLogger("rlx")


# ---------------------------------------------------------------------------------------------------------------------
# One run


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves."""

    name: str
    path: str  # the address of its folder
    metrics: dict[str, Any]  # of the last step
    checkpoint: str | None  # the address of its newest complete checkpoint; None if it wrote none
    train: ray.train.Result | None = None  # Ray Train's own result; None if the run had been finished before


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The settings of a YAML file with some of them replaced by dotted key, as the commands read them.

    A config that names no model, or rlx's tiny one, has that model's settings where none are given: those of
    experiments/configs/arithmetic.yaml. `RunConfig(...)` has the settings' own defaults for any model.

    Raises:
        ConfigError: the file cannot be read, a setting or value is wrong, or a path leads only from the file's folder.
    """
    if isinstance(path, Mapping):
        raise ConfigError("load_config: the first argument is a file; give settings as overrides=")
    tree, given = read_yaml(str(path)) if path else {}, overrides or {}
    return from_tree(with_experiment(with_overrides(tree, given)), "overrides", given, "overrides", path)


def train(config: RunConfig, *, on_report: OnReport | None = None, quiet: bool = False) -> TrainResult:
    """Trains to the last step; the run gets a name if the config has none.

    Args:
        quiet: print neither the steps nor what is being started.
        on_report: called after each step with its metrics, and with the path of a checkpoint if one became complete
            since the step before.

    Raises:
        ConfigError: a setting or `on_report` cannot be used, or a run of this name exists.
        RewardError: a reward function fails on the first prompts.
        RunError: training failed.
    """
    from rlx.cluster.resources import naming_ways_out
    from rlx.runs import processes, run_folder

    _check_config(config, "train")
    processes.check_on_report(on_report)
    way_out = naming_ways_out(config.model_dump(exclude_unset=True), in_python=True)
    with way_out, run_folder.new_run(config) as (config, folder):
        return _run(config, folder, resume=False, on_report=on_report, quiet=quiet)


def _check_config(config: object, function: str) -> None:
    if not isinstance(config, RunConfig):
        what = "what rlx.load_config(FILE, overrides=...) returns"
        raise ConfigError(f"{function}: expected {what}, not {type(config).__name__}")


def resume(
    name: str,
    *,
    storage: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
    on_report: OnReport | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Continues a run from its newest checkpoint to its last step; a finished run gives its result at once.

    Args:
        storage: the address where the run is kept; None: the default of the setting `storage`.
        overrides: settings for the rest of the run by dotted key, such as a larger `train.steps`.
        trust: take all of the run's settings, whoever wrote them.
        on_report: as for `train`.
        quiet: as for `train`.

    Raises:
        ConfigError: no such run, none of its checkpoints is left, a setting that a run cannot change once it has begun,
            or settings of another person that name code, models, addresses or patterns.
        RewardError: as for `train`.
        RunError: training failed.
    """
    from rlx.runs import processes, run_folder

    check_overrides(overrides or {})
    processes.check_on_report(on_report)
    storage = storage or RunConfig().storage
    saved = run_folder.saved_run(name, storage, overrides or {}, trust=trust, giver="overrides")
    with saved as (config, folder, metrics):
        if metrics:
            return _result(config.storage, folder, metrics)
        return _run(config, folder, resume=True, on_report=on_report, quiet=quiet)


def _run(config: RunConfig, folder: Storage, *, resume: bool, on_report: OnReport | None, quiet: bool) -> TrainResult:
    from rlx.cluster import connection
    from rlx.runs import launch, preflight, run_folder
    from rlx.tracking import console
    from rlx.tracking.services.reachable import check_tracking

    with ExitStack() as stack:
        shown = None if quiet else stack.enter_context(console.RunProgress(config.train.steps))

        def on_step(metrics: dict[str, Any], checkpoint: str | None) -> None:
            if shown:
                shown.step(metrics, checkpoint)
            if on_report:
                on_report(metrics, checkpoint)

        notify = shown.message if shown else None
        if not resume:  # a resume keeps its records until the server answers
            check_tracking(config.tracking, config.storage)
            run_folder.check_start(config)
        with run_folder.keeping_details(folder):
            prepared = preflight.prepare(config, shown.warm_start if shown else None)
        connection.connect(config, prepared.resources, notify)
        result = launch.run(prepared, folder, resume=resume, on_report=on_step, notify=notify)
    return _result(config.storage, folder, result.metrics, result.train)


def _result(
    storage: str, folder: Storage, metrics: dict[str, Any], train: ray.train.Result | None = None
) -> TrainResult:
    from rlx.storage import checkpoint_catalog
    from rlx.storage.addresses import join_address

    path, checkpoints = join_address(storage, "runs", folder.name), checkpoint_catalog.complete_checkpoints(folder)
    newest = join_address(path, checkpoints[-1].name) if checkpoints else None
    return TrainResult(folder.name, path, metrics, newest, train)


# ---------------------------------------------------------------------------------------------------------------------
# A sweep


class SweepOptions(TypedDict, total=False):
    """What `tuner` takes beside the config and the space, each as the option of `rlx sweep` with its name."""

    trials: int  # settings to try, 4 by default; a grid has its own number
    seeds: int  # runs of each setting
    max_seeds: int | None  # of a race, which adds seeds up to this number; None: it adds none
    alpha: float  # of a race: its chance of dropping the best setting
    search: SearchName  # how settings are chosen
    scheduler: SchedulerName  # which trials are stopped early
    max_concurrent: int | None  # at most so many trials at once; None: as many as the cluster has room for
    interleave: int  # so many trials share the GPUs that one would have, 1 by default
    reuse: ReuseName  # what stays for the next trial: "engines", "engines and workers" as "workers", or "none"
    metric: str  # by which trials are compared; one that every evaluation measures, such as "eval/reward"
    mode: Mode  # whether high or low values of it are good
    rung_by: RungUnit  # of which trials have taken the same where a scheduler compares them, "steps" by default
    budget: str | None  # as many settings as 500steps, 2Mtokens or 8gpu-h pay for; None: all


def tuner(
    config: RunConfig,
    *,
    space: Mapping[str, Any] | str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[SweepOptions],
) -> tune.Tuner:
    """A sweep over a search space as Ray's Tuner, ready for `fit`; `config.name` names it.

    Joins or starts a Ray cluster if this process has none. The sweep is recorded as `rlx sweep` records it: `rlx sweep
    --resume NAME` continues it, `rlx.load_sweep(NAME)` reads it back. In its ResultGrid, the checkpoint of a result is
    a folder with the address of the trial's newest complete checkpoint; `rlx.load_model` loads what it points to.

    Args:
        config: the settings that all trials share.
        space: domains such as `tune.loguniform(1e-6, 1e-4)` by dotted key, or a Python file with a function space().
        quiet: `fit` does not print what trials do.
        options: see `SweepOptions`.

    Raises:
        ConfigError: an argument is wrong or does not go with the others, the name is taken, or no trial has room.
    """
    from rlx.cluster.resources import naming_ways_out
    from rlx.runs import preflight
    from rlx.storage import claims
    from rlx.storage.addresses import local_folder, open_storage
    from rlx.sweeps.choices import check_quickly
    from rlx.sweeps.plans import check_sweep
    from rlx.sweeps.records import refuse_existing
    from rlx.sweeps.space import space_file
    from rlx.sweeps.tuner import make_tuner

    _check_config(config, "tuner")
    _check_options(options)
    sizes = preflight.lengths(config.data, config.rollout, config.model.path)
    tree = with_overrides(config.model_dump(mode="json", exclude_unset=True), preflight.absolute_paths(config) | sizes)
    storage = open_storage(config.storage)
    with ExitStack() as stack:
        claim = stack.enter_context(claims.take_new(storage / "sweeps", tree.pop("name", None), "sweep", "sweep"))
        refuse_existing(claim.folder)
        with space_file(space, claim.folder.name, local_folder(config.storage) / "search_spaces") as file:
            plan = _plan(claim.folder.name, tree, file, options)
            with naming_ways_out(plan.tree, in_python=True):
                check_quickly(plan)
                plan = check_sweep(plan)
                _connect(plan)
                made = make_tuner(plan, storage)
        made.hold(stack.pop_all().close)
        made.quiet = quiet
    return made


def resume_tuner(
    name: str | None = None,
    *,
    storage: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> tune.Tuner:
    """What is left of a sweep that was interrupted, as Ray's Tuner, ready for `fit`: as `rlx sweep --resume`.

    Trials go on from their newest checkpoints; schedulers and searches are as they were. The ResultGrid has those that
    were left; `load_sweep` has all. `Tuner.restore` reads the results of a sweep, but cannot continue it.

    Args:
        name: None: the newest sweep.
        storage: the address where the sweep is kept; None: the default of the setting `storage`.
        overrides: settings that depend on the machine by dotted key: `ray_address`, `tracking.uri` and the like.
        trust: run the code of its search space, and take its settings, whoever wrote them.
        quiet: as for `tuner`.

    Raises:
        ConfigError: no such sweep, a finished one, another person's, or a setting that a resume cannot change.
    """
    from rlx.runs import run_folder
    from rlx.storage import claims
    from rlx.storage.addresses import open_storage
    from rlx.sweeps import plans, records
    from rlx.sweeps.tuner import make_tuner

    check_overrides(overrides or {})
    place = open_storage(address := storage or RunConfig().storage)
    folder = records.find_sweep(place, name)
    run_folder.check_stays(f"sweep {folder.name!r}", address, overrides or {})
    with ExitStack() as stack:
        stack.enter_context(claims.take(folder, f"sweep {folder.name!r}"))
        today = {**(overrides or {}), "storage": address}
        plan = plans.continued_sweep(place, folder.name, today, trust=trust, giver="overrides")
        of_all = f"rlx.load_sweep({plan.name!r}) has the results of all trials"
        ended = plans.ended_trials(plan, place)
        if plans.is_finished(plan, ended):
            raise ConfigError(f"sweep {plan.name!r} is finished: no trial is left to run; {of_all}")
        if ended:
            _LOG.warning("%d trials have ended before, and will not be in the ResultGrid: %s", ended, of_all)
        _connect(plan)
        made = make_tuner(plan, place)
        made.hold(stack.pop_all().close)
        made.quiet = quiet
    return made


def _connect(plan: SweepPlan) -> None:
    """Joins or starts the cluster of a sweep, once the settings of its trials are checked."""
    from rlx.cluster import connection
    from rlx.runs import preflight

    prepared = preflight.prepare(plan.config)
    connection.connect(prepared.config, prepared.resources)


_AS_RAY_SAYS = {
    "num_samples": "it is called trials",
    "max_concurrent_trials": "it is called max_concurrent",
    "search_alg": "it is called search, and takes a name",
    "param_space": "it is called space",
    "reuse_actors": "it is called reuse",
    "stop": "train.steps of the config says when runs end, scheduler which ones end earlier",
    "scaling_config": "it is made of scaling.* of the config",
    "run_config": "it is made of the config: name, storage, scaling.max_failures and checkpoint.*",
    "failure_config": "it is made of scaling.max_failures of the config",
    "checkpoint_config": "it is made of checkpoint.* of the config",
    "tune_config": "its parts are options of their own: metric, mode, trials, search, scheduler, max_concurrent, reuse",
    "callbacks": "MLflow has every number while a sweep runs; trackers of one's own are in docs/extending.md",
}
"""what rlx has instead of an argument of Ray's"""


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that `tuner` does not take, or an object where it takes a name."""
    names = list(SweepOptions.__annotations__)
    for key in sorted(set(options) - set(names)):
        hint = f": {_AS_RAY_SAYS[key]}" if key in _AS_RAY_SAYS else meant(key, names)
        raise ConfigError(f"no option {key!r}{hint}")
    for key in ("search", "scheduler"):
        if not isinstance(value := options.get(key, ""), str):
            raise ConfigError(f"{key}: it takes a name, see `rlx sweep --help`, not a value of {type(value).__name__}")


def _plan(name: str, tree: dict[str, Any], space: Path, options: SweepOptions) -> SweepPlan:
    """Returns the plan of a new sweep over the search space of a file."""
    from rlx.cluster.resources import sharing_gpus
    from rlx.sweeps.records import read_plan

    others = dict(options)
    runs = others.pop("interleave", 1)
    if not isinstance(runs, int) or runs < 1:
        raise ConfigError(f"interleave {runs}: at least 1")
    if runs > 1:
        config = from_tree(tree)
        tree = with_overrides(tree, sharing_gpus(runs, config.scaling, config.rollout, config.reward))
    return read_plan({"name": name, "tree": tree, "space": str(space.resolve()), **others})


def load_model(
    checkpoint: str | Path | ray.train.Checkpoint | tune.Checkpoint, *, storage: str | None = None
) -> tuple[Any, Any]:
    """The policy in a checkpoint as a model of transformers, in float32, and its tokenizer.

    Args:
        checkpoint: a folder or address, or NAME, NAME@STEP or NAME@best of a run; or a checkpoint of Ray, as
            `Result.checkpoint` has it, of a run or of a trial.
        storage: the address of the storage of a run that is named, and of the tiny model; None: the one that the
            checkpoint lies in, or else the default of the setting `storage`.

    Raises:
        ConfigError, StorageError: there is no such complete checkpoint.
    """
    from rlx.runs import export, run_folder
    from rlx.storage.addresses import storage_above
    from rlx.storage.filesystem import Storage

    if isinstance(checkpoint, str | Path):
        address, entry = run_folder.checkpoint_of(str(checkpoint), storage or RunConfig().storage)
    elif not hasattr(checkpoint, "filesystem"):
        what = "a folder, an address, NAME, NAME@STEP or NAME@best of a run, or a checkpoint of Ray"
        raise ConfigError(f"load_model: expected {what}, not {type(checkpoint).__name__}")
    else:
        entry = run_folder.pointed_checkpoint(Storage(checkpoint.filesystem, checkpoint.path))
        address = entry.folder.path if entry.folder.is_local else ""
    return export.exported_model(entry, storage or storage_above(address) or RunConfig().storage)


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
    from rlx.tracking.services import mlflow

    defaults = RunConfig()
    folder = local_folder(storage or defaults.storage)
    if not tracking_uri and not folder.is_dir():
        raise ConfigError(f"no storage folder {folder}")
    uri = tracking_uri or mlflow.default_uri(folder)
    return loading.load_sweep(uri, experiment or defaults.tracking.experiment, name, metrics)
