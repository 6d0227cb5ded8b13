"""A sweep: a Tuner whose every trial is one launch.run, under an MLflow parent run; resumable, leaving nothing behind.

What goes on in a trial's process is trial.py's. Nothing of Tune's own records is used again: see trials.py. Tables and
figures are analysis's.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from ray import tune

from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import DEFAULT_METRIC, flatten
from rlx.runs import launch, run_folder
from rlx.runs.resources import nodes, plan_resources
from rlx.runs.run_folder import exists, saved_config
from rlx.storage.filesystem import Storage
from rlx.sweeps import searchers, space
from rlx.sweeps.callback import SweepCallback, Watch
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialRecords, trial_name
from rlx.sweeps.schedulers import PAUSING, REPLAYING, SCHEDULERS, first_rung
from rlx.sweeps.searchers import ADAPTIVE
from rlx.sweeps.space import MODE, Space, complete_settings, load_space, space_fingerprint
from rlx.sweeps.trainable import attempt_number, newest_attempt, trainable
from rlx.sweeps.trial_source import TrialSource
from rlx.tracking.tracker import OutboxTracker, service_at

_LOG = logging.getLogger("rlx")
_RECORD = "sweep.json"
_PATIENCE_S = 10.0  # with MLflow
_TUNE = "tune"  # the folder with Tune's own records


def check_sweep(sweep: SweepPlan) -> SweepPlan:
    """The sweep as it will run.

    Raises:
        ConfigError: its space cannot be used, or its search, scheduler and seeds do not go together.
    """
    space = load_space(sweep.space, sweep.tree)
    if sweep.seeds > 1 and "seed" in space:
        raise ConfigError(f"--seeds {sweep.seeds}: {sweep.space} varies the seed already")
    if sweep.scheduler in PAUSING and sweep.max_concurrent:
        raise ConfigError(f"--max-concurrent: the trials of --scheduler {sweep.scheduler} take turns by themselves")
    if sweep.scheduler == "pbt":
        sweep = _population(sweep, space)
    drawn = searchers.searcher(sweep.search, space, sweep.trials, sweep.config.seed)
    if not isinstance(drawn, searchers.ListSearch):
        return sweep
    for settings in drawn.settings:
        from_tree(with_overrides(sweep.tree, complete_settings(space, settings)), f"--space {sweep.space}")
    return replace(sweep, trials=len(drawn.settings))


def _population(sweep: SweepPlan, space: Space) -> SweepPlan:
    """A sweep by population based training: what is handed on is there as soon as it is asked for, and stays."""
    if sweep.search != "random" or sweep.seeds > 1:
        raise ConfigError("--scheduler pbt changes settings by itself: leave --search and --seeds out")
    if fixed := [key for key in space if run_folder.is_fixed(key)]:
        raise ConfigError(f"--space {sweep.space}: {fixed[0]} cannot change within a run, as --scheduler pbt would")
    kept = {"checkpoint.every": first_rung(sweep.config), "checkpoint.keep_last": None, "checkpoint.async_save": False}
    return replace(sweep, tree=with_overrides(sweep.tree, kept))


def planned(sweep: SweepPlan) -> int:
    """How many trials it has."""
    return sweep.seeds * sweep.trials


def create_sweep(sweep: SweepPlan, storage: Storage) -> SweepPlan:
    """Records a new sweep in its folder and in MLflow; ConfigError if its name is taken or it cannot be run."""
    folder, sweep = storage / "sweeps" / sweep.name, check_sweep(sweep)
    if (folder / _RECORD).exists():
        raise ConfigError(f"sweep {sweep.name!r} exists in {folder.path}: --resume {sweep.name} continues it")
    config, space = sweep.config, load_space(sweep.space, sweep.tree)
    varied = [*space, *(["seed"] if sweep.seeds > 1 else [])]
    asked = {"search": sweep.search, "scheduler": sweep.scheduler, "seeds": sweep.seeds}
    service_at(launch.tracking_uri(config)).check()
    tracker = OutboxTracker(launch.tracking_uri(config), folder, "driver")
    tracker.open(
        config.tracking.experiment,
        sweep.name,
        params={"trials": planned(sweep), "space": sweep.space} | asked,
        tags={"rlx.kind": "sweep", "rlx.folder": folder.path, "rlx.space": json.dumps(varied)}
        | {f"rlx.{key}": str(value) for key, value in asked.items()},
    )
    tracker.close(_PATIENCE_S)
    sweep = replace(sweep, space_fingerprint=space_fingerprint(sweep.space))
    (folder / _RECORD).write_text(json.dumps(asdict(sweep), indent=1))
    return sweep


def saved_sweep(storage: Storage, name: str | None) -> SweepPlan:
    """A recorded sweep by name, or the newest one; ConfigError if there is none, or its search space has changed."""
    sweeps = storage / "sweeps"
    names = [n for n in sweeps.names() if (sweeps / n / _RECORD).exists()]
    if not names or (name and name not in names):
        raise ConfigError(f"no sweep {name or ''} in {sweeps.path}{nearest(name or '', names)}")
    newest = max(names, key=lambda n: sweeps.filesystem.get_file_info((sweeps / n / _RECORD).path).mtime)
    record = sweeps / (name or newest) / _RECORD
    try:
        sweep = SweepPlan(**record.read_json())
    except (TypeError, ValueError):
        raise ConfigError(f"{record.path} is damaged: it is not what rlx wrote") from None
    if not Path(sweep.space).is_file():
        raise ConfigError(f"the search space {sweep.space} of sweep {sweep.name} is gone: put it back to resume")
    if space.space_fingerprint(sweep.space) != sweep.space_fingerprint:
        raise ConfigError(f"the search space {sweep.space} is not what it was when sweep {sweep.name} began")
    return sweep


def begin_again(sweep: SweepPlan, storage: Storage) -> list[str]:
    """Has the trials that failed run again, from the start, with the next resume; their names."""
    folder = storage / "sweeps" / sweep.name
    records = TrialRecords(folder)
    failed = {name: record for name, record in records.all().items() if record.state == "failed"}
    for name, record in failed.items():
        newest = newest_attempt(folder, name)
        begun = attempt_number(newest) + exists(folder / "runs" / newest)
        records.write(name, TrialRecord(settings=record.settings, begun=begun))
    return list(failed)


def run_sweep(sweep: SweepPlan, storage: Storage, *, resume: bool = False, watch: Watch) -> dict[str, TrialRecord]:
    """Runs a recorded sweep, or the rest of it, to the end; what came of each trial, by name.

    The cluster must be connected. Ends the sweep's MLflow run.
    """
    status, folder = "FAILED", storage / "sweeps" / sweep.name
    tracker = OutboxTracker(launch.tracking_uri(sweep.config), folder, "driver")
    on_interrupt = signal.getsignal(signal.SIGINT)  # Tune puts its own in its place, for good
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial's reason is told by `failures`
    if resume:
        tracker.open(sweep.config.tracking.experiment, sweep.name, params={}, tags={})
    (folder / _TUNE).delete()
    try:
        SweepCallback.watch, SweepCallback.interrupted = watch, False
        _tuner(sweep, storage).fit()
        if SweepCallback.interrupted:
            raise KeyboardInterrupt  # Tune takes the signal, ends its trials and returns as if it were done
        (folder / _TUNE).delete()
        results = TrialRecords(folder).all()
        if len(results) < planned(sweep) or not all(record.is_over for record in results.values()):
            raise KeyboardInterrupt  # it came while no trial was there to tell of it
        _send_pending(sweep, folder)
        status = "FINISHED" if any(record.state != "failed" for record in results.values()) else "FAILED"
        return results
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        tracker.end(status)
        tracker.close(_PATIENCE_S)


def _send_pending(sweep: SweepPlan, folder: Storage) -> None:
    """What trials could not send to MLflow, as long as it takes something."""
    for leg in (folder / "runs").names():
        if not launch.send_pending(sweep.config, folder / "runs" / leg, _LOG.warning):
            return


def failures(results: Mapping[str, TrialRecord]) -> list[str]:
    """One line for each trial that failed: which, and its last words."""
    return [f"{name}: {record.words}" for name, record in results.items() if record.state == "failed"]


def described(sweep: SweepPlan) -> str:
    """What a sweep is going to do, in one line."""
    there = len(nodes())
    what = f"{sweep.trials} settings x {sweep.seeds} seeds" if sweep.seeds > 1 else f"{sweep.trials} trials"
    return (
        f"sweep {sweep.name}: {what}, {concurrency(sweep)} at once on {there} {'node' if there == 1 else 'nodes'} "
        f"({plan_resources(sweep.config)} each), {sweep.config.train.steps} steps, search {sweep.search}, "
        f"scheduler {sweep.scheduler}"
    )


def _as_it_is(folder: Storage, name: str, record: TrialRecord) -> TrialRecord:
    """A trial's record with the settings of its newest run, which a kill may have kept from being recorded."""
    newest = folder / "runs" / newest_attempt(folder, name)
    if attempt_number(newest.name) == 1 or record.is_over:
        return record
    saved = flatten(from_tree(saved_config(newest)))
    return record.model_copy(update={"settings": {key: saved[key] for key in record.settings}})


def concurrency(sweep: SweepPlan) -> int:
    """How many trials can run at once: as many whole plans as the cluster has room for."""
    most = min(planned(sweep), sweep.max_concurrent or planned(sweep))
    return max(1, plan_resources(sweep.config).fits(nodes(), most))


# ---------------------------------------------------------------------------------------------------------------------
# Trials


def _tuner(sweep: SweepPlan, storage: Storage) -> tune.Tuner:
    folder, config, space = storage / "sweeps" / sweep.name, sweep.config, load_space(sweep.space, sweep.tree)
    records = TrialRecords(folder)
    known = {name: _as_it_is(folder, name, record) for name, record in records.all().items()}
    # Trials that Tune starts side by side; those that take turns are all there from the start.
    side_by_side = planned(sweep) if sweep.scheduler in PAUSING else concurrency(sweep)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(side_by_side)
    begun = {name.removeprefix("trial_"): record.step for name, record in known.items()}
    first_of_each = [known[name].settings for name in sorted(known)][:: sweep.seeds]
    trials = TrialSource(
        searchers.searcher(sweep.search, space, sweep.trials, config.seed, first_of_each),
        space,
        records,
        known=known,
        count=sweep.trials,
        seeds=[config.seed + i for i in range(sweep.seeds)] if sweep.seeds > 1 else [],
        limit=concurrency(sweep) if sweep.search in ADAPTIVE else sweep.max_concurrent,
        replays=sweep.scheduler in REPLAYING,
        take_turns=sweep.scheduler in PAUSING,
    )
    return tune.Tuner(
        trainable(sweep, storage),
        tune_config=tune.TuneConfig(
            metric=DEFAULT_METRIC,
            mode=MODE,
            num_samples=-1,
            scheduler=SCHEDULERS[sweep.scheduler](config, space, begun),
            search_alg=trials,
            reuse_actors=True,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(
            name=_TUNE,
            storage_path=folder.path,
            storage_filesystem=storage.filesystem,
            callbacks=[SweepCallback(sweep, folder)],
            verbose=0,
        ),
    )
