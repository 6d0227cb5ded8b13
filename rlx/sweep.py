"""A sweep: a Tuner whose every trial is one launch.run, under an MLflow parent run; resumable, leaving nothing behind.

What goes on in a trial's process is trial.py's. Nothing of Tune's own records is used again: see trials.py. Tables and
figures are analysis's.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from rlx import search
from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import flatten
from rlx.runs import folder, launch
from rlx.runs.folder import exists, saved_config
from rlx.runs.resources import nodes, plan
from rlx.schedulers import PAUSING, REPLAYING, SCHEDULERS, first_rung
from rlx.search import ADAPTIVE, METRIC, MODE, Space
from rlx.storage.filesystem import Storage
from rlx.tracking import mlflow
from rlx.tracking.tracker import Tracker
from rlx.trial import leg_number, newest_leg, trainable
from rlx.trials import Record, Records, Sweep, Trials, trial_name

_LOG = logging.getLogger("rlx")
_RECORD = "sweep.json"
_PATIENCE_S = 10.0  # with MLflow
_TUNE = "tune"  # the folder with Tune's own records

Watch = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], None]
"""(trial, its settings, its newest metrics, its state), called whenever one of them changes"""


def checked(sweep: Sweep) -> Sweep:
    """The sweep as it will run.

    Raises:
        ConfigError: its space cannot be used, or its search, scheduler and seeds do not go together.
    """
    space = search.load_space(sweep.space, sweep.tree)
    if sweep.seeds > 1 and "seed" in space:
        raise ConfigError(f"--seeds {sweep.seeds}: {sweep.space} varies the seed already")
    if sweep.scheduler in PAUSING and sweep.max_concurrent:
        raise ConfigError(f"--max-concurrent: the trials of --scheduler {sweep.scheduler} take turns by themselves")
    if sweep.scheduler == "pbt":
        sweep = _population(sweep, space)
    drawn = search.searcher(sweep.search, space, sweep.trials, sweep.config.seed)
    if not isinstance(drawn, search.Listed):
        return sweep
    for settings in drawn.settings:
        from_tree(with_overrides(sweep.tree, search.settled(space, settings)), f"--space {sweep.space}")
    return replace(sweep, trials=len(drawn.settings))


def _population(sweep: Sweep, space: Space) -> Sweep:
    """A sweep by population based training: what is handed on is there as soon as it is asked for, and stays."""
    if sweep.search != "random" or sweep.seeds > 1:
        raise ConfigError("--scheduler pbt changes settings by itself: leave --search and --seeds out")
    if fixed := [key for key in space if folder.is_fixed(key)]:
        raise ConfigError(f"--space {sweep.space}: {fixed[0]} cannot change within a run, as --scheduler pbt would")
    kept = {"checkpoint.every": first_rung(sweep.config), "checkpoint.keep": None, "checkpoint.beside": False}
    return replace(sweep, tree=with_overrides(sweep.tree, kept))


def planned(sweep: Sweep) -> int:
    """How many trials it has."""
    return sweep.seeds * sweep.trials


def create_sweep(sweep: Sweep, storage: Storage) -> Sweep:
    """Records a new sweep in its folder and in MLflow; ConfigError if its name is taken or it cannot be run."""
    folder, sweep = storage / "sweeps" / sweep.name, checked(sweep)
    if (folder / _RECORD).exists():
        raise ConfigError(f"sweep {sweep.name!r} exists in {folder.path}: --resume {sweep.name} continues it")
    config, space = sweep.config, search.load_space(sweep.space, sweep.tree)
    varied = [*space, *(["seed"] if sweep.seeds > 1 else [])]
    asked = {"search": sweep.search, "scheduler": sweep.scheduler, "seeds": sweep.seeds}
    mlflow.check(launch.tracking_uri(config))
    tracker = Tracker(launch.tracking_uri(config), folder, "driver")
    tracker.open(
        config.tracking.experiment,
        sweep.name,
        params={"trials": planned(sweep), "space": sweep.space} | asked,
        tags={"rlx.kind": "sweep", "rlx.folder": folder.path, "rlx.space": json.dumps(varied)}
        | {f"rlx.{key}": str(value) for key, value in asked.items()},
    )
    tracker.close(_PATIENCE_S)
    sweep = replace(sweep, space_fingerprint=search.fingerprint(sweep.space))
    (folder / _RECORD).write_text(json.dumps(asdict(sweep), indent=1))
    return sweep


def saved_sweep(storage: Storage, name: str | None) -> Sweep:
    """A recorded sweep by name, or the newest one; ConfigError if there is none, or its search space has changed."""
    sweeps = storage / "sweeps"
    names = [n for n in sweeps.names() if (sweeps / n / _RECORD).exists()]
    if not names or (name and name not in names):
        raise ConfigError(f"no sweep {name or ''} in {sweeps.path}{nearest(name or '', names)}")
    newest = max(names, key=lambda n: sweeps.filesystem.get_file_info((sweeps / n / _RECORD).path).mtime)
    record = sweeps / (name or newest) / _RECORD
    try:
        sweep = Sweep(**record.read_json())
    except (TypeError, ValueError):
        raise ConfigError(f"{record.path} is damaged: it is not what rlx wrote") from None
    if not Path(sweep.space).is_file():
        raise ConfigError(f"the search space {sweep.space} of sweep {sweep.name} is gone: put it back to resume")
    if search.fingerprint(sweep.space) != sweep.space_fingerprint:
        raise ConfigError(f"the search space {sweep.space} is not what it was when sweep {sweep.name} began")
    return sweep


def begin_again(sweep: Sweep, storage: Storage) -> list[str]:
    """Has the trials that failed run again, from the start, with the next resume; their names."""
    folder = storage / "sweeps" / sweep.name
    records = Records(folder)
    failed = {name: record for name, record in records.all().items() if record.state == "failed"}
    for name, record in failed.items():
        newest = newest_leg(folder, name)
        begun = leg_number(newest) + exists(folder / "runs" / newest)
        records.write(name, Record(settings=record.settings, begun=begun))
    return list(failed)


def run(sweep: Sweep, storage: Storage, *, resume: bool = False, watch: Watch) -> dict[str, Record]:
    """Runs a recorded sweep, or the rest of it, to the end; what came of each trial, by name.

    The cluster must be connected. Ends the sweep's MLflow run.
    """
    status, folder = "FAILED", storage / "sweeps" / sweep.name
    tracker = Tracker(launch.tracking_uri(sweep.config), folder, "driver")
    on_interrupt = signal.getsignal(signal.SIGINT)  # Tune puts its own in its place, for good
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial's reason is told by `failures`
    if resume:
        tracker.open(sweep.config.tracking.experiment, sweep.name, params={}, tags={})
    (folder / _TUNE).delete()
    try:
        _Watcher.watch, _Watcher.interrupted = watch, False
        _tuner(sweep, storage).fit()
        if _Watcher.interrupted:
            raise KeyboardInterrupt  # Tune takes the signal, ends its trials and returns as if it were done
        (folder / _TUNE).delete()
        results = Records(folder).all()
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


def _send_pending(sweep: Sweep, folder: Storage) -> None:
    """What trials could not send to MLflow, as long as it takes something."""
    for leg in (folder / "runs").names():
        if not launch.send_pending(sweep.config, folder / "runs" / leg, _LOG.warning):
            return


def failures(results: Mapping[str, Record]) -> list[str]:
    """One line for each trial that failed: which, and its last words."""
    return [f"{name}: {record.words}" for name, record in results.items() if record.state == "failed"]


def described(sweep: Sweep) -> str:
    """What a sweep is going to do, in one line."""
    there = len(nodes())
    what = f"{sweep.trials} settings x {sweep.seeds} seeds" if sweep.seeds > 1 else f"{sweep.trials} trials"
    return (
        f"sweep {sweep.name}: {what}, {concurrency(sweep)} at once on {there} {'node' if there == 1 else 'nodes'} "
        f"({plan(sweep.config)} each), {sweep.config.train.steps} steps, search {sweep.search}, "
        f"scheduler {sweep.scheduler}"
    )


def _as_it_is(folder: Storage, name: str, record: Record) -> Record:
    """A trial's record with the settings of its newest run, which a kill may have kept from being recorded."""
    newest = folder / "runs" / newest_leg(folder, name)
    if leg_number(newest.name) == 1 or record.is_over:
        return record
    saved = flatten(from_tree(saved_config(newest)))
    return record.model_copy(update={"settings": {key: saved[key] for key in record.settings}})


def concurrency(sweep: Sweep) -> int:
    """How many trials can run at once: as many whole plans as the cluster has room for."""
    most = min(planned(sweep), sweep.max_concurrent or planned(sweep))
    return max(1, plan(sweep.config).fits(nodes(), most))


# ---------------------------------------------------------------------------------------------------------------------
# Trials


def _tuner(sweep: Sweep, storage: Storage) -> tune.Tuner:
    folder, config, space = storage / "sweeps" / sweep.name, sweep.config, search.load_space(sweep.space, sweep.tree)
    records = Records(folder)
    known = {name: _as_it_is(folder, name, record) for name, record in records.all().items()}
    # Trials that Tune starts side by side; those that take turns are all there from the start.
    side_by_side = planned(sweep) if sweep.scheduler in PAUSING else concurrency(sweep)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(side_by_side)
    begun = {name.removeprefix("trial_"): record.step for name, record in known.items()}
    first_of_each = [known[name].settings for name in sorted(known)][:: sweep.seeds]
    trials = Trials(
        search.searcher(sweep.search, space, sweep.trials, config.seed, first_of_each),
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
            metric=METRIC,
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
            callbacks=[_Watcher(sweep, folder)],
            verbose=0,
        ),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tune's callback


def _answer_interrupts() -> None:
    """From now on Ctrl-C says that it was heard, and then does what Tune has put there, which takes ten seconds."""
    on_interrupt = signal.getsignal(signal.SIGINT)

    def heard(number: int, frame: types.FrameType | None) -> None:
        _LOG.warning("interrupted: ending the trials, which takes some seconds; again does not wait for them")
        if callable(on_interrupt):
            on_interrupt(number, frame)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, heard)


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
    """Shows and records the trials, and closes the records of one that was killed."""

    # Tune keeps its callbacks with the sweep, pickled; what concerns this process alone is no part of that.
    watch: Watch = staticmethod(lambda trial, settings, metrics, state: None)
    interrupted = False

    def __init__(self, sweep: Sweep, folder: Storage) -> None:
        self.ends: dict[str, str] = {}  # by trial, how its MLflow run is to end
        self.sweep, self.records = folder, Records(folder)
        self.steps, self.uri = sweep.config.train.steps, launch.tracking_uri(sweep.config)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if iteration == 0:  # Tune has put its own there by now
            _answer_interrupts()

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ends[trial_name(trial)] = "KILLED"  # unless it comes to another end
        self._show(trial, {}, "running")

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self._record_report(trial, result)
        self._show(trial, result, "running")

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ends[trial_name(trial)] = "FINISHED"
        state = "finished" if trial.last_result.get("step", 0) >= self.steps else "stopped"
        self._record_end(trial, state, "")
        self._show(trial, trial.last_result, state)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ends[trial_name(trial)] = "FAILED"
        self._record_end(trial, "failed", _last_words(trial))
        self._settle(trial)
        self._show(trial, trial.last_result, "failed")

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """All trials' processes are gone: those of an interrupted sweep too, of which Tune tells no more than this."""
        for trial in trials:
            if trial_name(trial) in self.ends:
                self._settle(trial)
        waiting = any(trial.status in (Trial.PENDING, Trial.PAUSED) for trial in trials)
        _Watcher.interrupted = waiting or "KILLED" in self.ends.values()

    @_harmless
    def _show(self, trial: Trial, metrics: Mapping[str, Any], state: str) -> None:
        _Watcher.watch(trial_name(trial), trial.config, metrics, state)

    @_harmless
    def _record_report(self, trial: Trial, result: Mapping[str, Any]) -> None:
        if "time/eval" not in result:
            return
        record = self.records.read(trial_name(trial))
        settings, reports = dict(trial.config), [each for each in record.reports if each[0] < result["step"]]
        new = {"settings": settings, "reports": [*reports, (result["step"], result[METRIC])]}
        self.records.write(trial_name(trial), record.model_copy(update=new))

    @_harmless
    def _record_end(self, trial: Trial, state: str, words: str) -> None:
        record = self.records.read(trial_name(trial))
        if not record.is_over:
            if state == "stopped":
                with self._tracker(trial, "sweep") as tracker:
                    tracker.set_tags({"rlx.stopped": str(trial.last_result.get("step", 0))})
            self.records.write(trial_name(trial), record.model_copy(update={"state": state, "words": words}))

    @_harmless
    def _settle(self, trial: Trial) -> None:
        if folder.exists(self._folder(trial)):
            with self._tracker(trial, "driver") as tracker:  # it also sends what the trial's process has left
                tracker.end(self.ends[trial_name(trial)])

    def _folder(self, trial: Trial) -> Storage:
        """Of a trial's newest run."""
        return self.sweep / "runs" / newest_leg(self.sweep, trial_name(trial))

    @contextmanager
    def _tracker(self, trial: Trial, writer: str) -> Iterator[Tracker]:
        tracker = Tracker(self.uri, self._folder(trial), writer)
        yield tracker
        tracker.close(1)


def _last_words(trial: Trial) -> str:
    """Why a trial failed, in one line."""
    file = Path(trial.error_file or "")
    lines = file.read_text().strip().splitlines() if file.is_file() else []
    if not lines or ("RunError" not in lines[-1] and "ray.exceptions.Actor" in "".join(lines)):
        return "its process was killed"
    return re.sub(r"^rlx[\w.]*: ", "", lines[-1])[:500]
