"""TODO rlx.sweeps.callback."""

from __future__ import annotations

import functools
import logging
import re
import signal
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from rlx.config.sections import DEFAULT_METRIC
from rlx.runs import launch, run_folder
from rlx.storage.filesystem import Storage
from rlx.sweeps.records import SweepPlan, TrialRecords, trial_name
from rlx.sweeps.trainable import newest_attempt
from rlx.tracking.tracker import OutboxTracker

_LOG = logging.getLogger("rlx")

Watch = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], None]
"""(trial, its settings, its newest metrics, its state), called whenever one of them changes"""


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


class SweepCallback(tune.Callback):
    """Shows and records the trials, and closes the records of one that was killed."""

    # Tune keeps its callbacks with the sweep, pickled; what concerns this process alone is no part of that.
    watch: Watch = staticmethod(lambda trial, settings, metrics, state: None)
    interrupted = False

    def __init__(self, sweep: SweepPlan, folder: Storage) -> None:
        self.ends: dict[str, str] = {}  # by trial, how its MLflow run is to end
        self.sweep, self.records = folder, TrialRecords(folder)
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
        SweepCallback.interrupted = waiting or "KILLED" in self.ends.values()

    @_harmless
    def _show(self, trial: Trial, metrics: Mapping[str, Any], state: str) -> None:
        SweepCallback.watch(trial_name(trial), trial.config, metrics, state)

    @_harmless
    def _record_report(self, trial: Trial, result: Mapping[str, Any]) -> None:
        if "time/eval" not in result:
            return
        record = self.records.read(trial_name(trial))
        settings, reports = dict(trial.config), [each for each in record.reports if each[0] < result["step"]]
        new = {"settings": settings, "reports": [*reports, (result["step"], result[DEFAULT_METRIC])]}
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
        if run_folder.exists(self._folder(trial)):
            with self._tracker(trial, "driver") as tracker:  # it also sends what the trial's process has left
                tracker.end(self.ends[trial_name(trial)])

    def _folder(self, trial: Trial) -> Storage:
        """Of a trial's newest run."""
        return self.sweep / "runs" / newest_attempt(self.sweep, trial_name(trial))

    @contextmanager
    def _tracker(self, trial: Trial, writer: str) -> Iterator[OutboxTracker]:
        tracker = OutboxTracker(self.uri, self._folder(trial), writer)
        yield tracker
        tracker.close(1)


def _last_words(trial: Trial) -> str:
    """Why a trial failed, in one line."""
    file = Path(trial.error_file or "")
    lines = file.read_text().strip().splitlines() if file.is_file() else []
    if not lines or ("RunError" not in lines[-1] and "ray.exceptions.Actor" in "".join(lines)):
        return "its process was killed"
    return re.sub(r"^rlx[\w.]*: ", "", lines[-1])[:500]
