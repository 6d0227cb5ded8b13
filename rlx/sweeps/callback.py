"""Ray Tune's callback: shows the trials as they run, records how they end, and closes the MLflow runs of killed ones.

Left out: which trials there are (`trial_source`) and what a trial does (`trainable`).
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray import tune
from ray.autoscaler.sdk import request_resources
from ray.tune.experiment import Trial

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections.base import flatten
from rlx.config.sweep import DEFAULT_METRIC, PROGRESS
from rlx.runs import run_folder
from rlx.runs.preflight import absolute_paths
from rlx.runs.train_run import RunLostError
from rlx.storage.filesystem import Storage
from rlx.sweeps.records import SweepPlan, TrialRecords, TrialState, resuming
from rlx.sweeps.room import Room
from rlx.sweeps.schedulers.schedule import Schedule
from rlx.sweeps.trainable import Attempt, attempt_config, newest_attempt, tags_of
from rlx.tracking.base import RunStatus, TrackingService
from rlx.tracking.parameters import params_of
from rlx.tracking.tracker import OutboxTracker
from rlx.types import has_evaluation

_LOG = logging.getLogger("rlx")
_PATIENCE_S = 10.0  # longest wait for the tracking service, in a thread
_WRITING_S = 1.0  # longest wait for the storage after an evaluation
_KILLED = re.compile(  # in what Ray says of a lost actor
    r"ray\.exceptions\.Actor|worker process has died|node has died|^The actor \w+ is unavailable"
)
_OF_RUN = re.compile(r"Run(Lost)?Error")
_FAILURE = re.compile(r"^Failure # \d+ .*$", re.MULTILINE)  # with which each failure begins in a trial's error file

Watch = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], None]
"""(trial, its settings, its newest metrics, "running" or its `TrialState`), called whenever one of them changes"""


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Makes a method's error a warning: Tune ends a sweep whose callback fails."""

    @functools.wraps(method)
    def guarded(*args: Any) -> None:
        try:
            method(*args)
        except Exception as error:
            _LOG.warning("the sweep goes on: %s: %s", type(error).__name__, error)

    return guarded


def _show_nothing(trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], state: str) -> None: ...


class DriverState:
    """What lives in this process as long as a sweep runs: the room, who watches, how it was left.

    Tune pickles its callbacks; a copy has nothing of it.
    """

    def __init__(self, room: Room | None = None, is_copy: bool = False) -> None:
        self.room, self.is_copy = room, is_copy
        self.watch: Watch = _show_nothing
        self.interrupted = False  # the sweep, before all trials had ended
        self._on_interrupt = signal.getsignal(signal.SIGINT)  # Tune replaces it and does not restore it

    def __reduce__(self) -> Any:
        return DriverState, (None, True)

    def end(self) -> None:
        """Gives back what was asked of an autoscaler, and Ctrl-C."""
        request_resources(bundles=[])
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)


class SweepCallback(tune.Callback):
    """Shows and records the trials of a sweep."""

    def __init__(self, plan: SweepPlan, log: TrialLog, driver: DriverState) -> None:
        self.statuses: dict[str, RunStatus] = {}  # by trial, the status with which its MLflow run is to end
        self.plan, self.steps, self.log, self.driver = plan, plan.config.train.steps, log, driver
        self.resuming = resuming(plan)

    def setup(self, **info: Any) -> None:
        """Raises ConfigError in a Tuner that Ray restored: it knows nothing of the sweep's own records."""
        if self.driver.is_copy:
            raise ConfigError(
                f"Tuner.restore reads the results of sweep {self.log.folder.name!r} alone: {self.resuming}.fit() "
                "continues it"
            )

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if iteration == 0:  # Tune has installed its signal handler by now
            _confirm_interrupts()
        self._look_at_nodes(trials)

    @_harmless
    def _look_at_nodes(self, trials: list[Trial]) -> None:
        if self.driver.room and self.driver.room.is_due:
            self.driver.room.trials(sum(not trial.is_finished() for trial in trials))

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.statuses[str(trial)] = RunStatus.KILLED  # until another end is recorded
        self._show(trial, {}, "running")

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self.log.add_report(trial, result)
        self._show(trial, result, "running")

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.statuses[str(trial)] = RunStatus.FINISHED
        is_done = trial.last_result.get("step", 0) >= self.steps
        state = TrialState.FINISHED if is_done else TrialState.STOPPED
        self.log.end_trial(trial, state)
        if state is TrialState.STOPPED:  # its process cannot tell that from a pause or an interrupt
            self.log.end_mlflow_run(trial, RunStatus.FINISHED)
        self._show(trial, trial.last_result, state)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._tell_lost(trial)

    @_harmless
    def _tell_lost(self, trial: Trial) -> None:
        """Says that a trial was lost. One that has failed by itself fails again at once, and is shown then."""
        message, is_lost = _failure(trial)
        if is_lost:
            _LOG.warning("%s: %s - it is started again, from its newest checkpoint if it has one", trial, message)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.statuses[str(trial)] = RunStatus.FAILED
        message, _ = _failure(trial)
        self.log.end_trial(trial, TrialState.FAILED, message)
        self.log.fail_mlflow_run(trial, self.plan, message)
        self._show(trial, trial.last_result, TrialState.FAILED)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Ends the MLflow runs; all trials' processes are gone, also those of an interrupted sweep.

        Tune makes no other call for the trials of an interrupted sweep.
        """
        for trial in trials:
            if status := self.statuses.get(str(trial)):
                self.log.end_mlflow_run(trial, status)
        waiting = any(trial.status in (Trial.PENDING, Trial.PAUSED) for trial in trials)
        self.driver.interrupted = waiting or RunStatus.KILLED in self.statuses.values()
        states = {record.state for record in self.log.records.all().values()}  # also of trials before a resume
        ended = RunStatus.FAILED if states == {TrialState.FAILED} else RunStatus.FINISHED
        self.driver.end()
        self.log.end_sweep(RunStatus.KILLED if self.driver.interrupted else ended)
        self.log.flush()

    @_harmless
    def _show(self, trial: Trial, metrics: Mapping[str, Any], state: str) -> None:
        self.driver.watch(str(trial), trial.config, metrics, state)


class TrialLog:
    """Records what trials report and how they end: in the sweep's folder and in the tracking service.

    Writing to either may take seconds, so threads do it. Tune pickles it with its callback; a copy records nothing in
    tracking services, which may be actors of this cluster.
    """

    def __init__(
        self,
        tracking: Sequence[TrackingService],
        folder: Storage,
        records: TrialRecords,
        schedule: Schedule,
        metric: str = DEFAULT_METRIC,
        of_trials: Sequence[TrackingService] | None = None,
    ) -> None:
        """
        Args:
            tracking: where the sweep's own records go.
            of_trials: where those of trials go, if by another way.
        """
        self.tracking, self.of_trials = tracking, tracking if of_trials is None else of_trials
        self.folder, self.records = folder, records
        self.schedule, self.metric = schedule, metric
        self._thread, self._patience_s = ThreadPoolExecutor(1, "trial-log"), _PATIENCE_S

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return kept | dict.fromkeys(("tracking", "of_trials"), ())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @_harmless
    def add_report(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """Records the sweep's metric of a report that comes with an evaluation which measures it."""
        if not has_evaluation(result) or not self.schedule.is_evaluation(result):
            return
        record = self.records.read(str(trial))
        earlier = [report for report in record.reports if report[0] < result["step"]]
        new: dict[str, Any] = {
            "settings": dict(trial.config),
            "reports": [*earlier, (result["step"], result[self.metric])],
        }
        if self.schedule.rung_by != "steps":
            taken = result.get(PROGRESS[self.schedule.rung_by], 0.0)
            new["progress"] = {**record.progress, result["step"]: taken}
        self.records.write(str(trial), record.model_copy(update=new))
        # The trial goes on when this returns. Were the driver killed before it is written, a checkpoint could be newer.
        self.records.flush(_WRITING_S)

    @_harmless
    def end_trial(self, trial: Trial, state: TrialState, message: str = "") -> None:
        """Records how a trial ended, unless that is known already."""
        record = self.records.read(str(trial))
        if not record.is_over:
            if state is TrialState.STOPPED:
                tags = {"rlx.stopped": str(trial.last_result["step"])}
                self._later(trial, "sweep", lambda log: log.set_tags(tags))
            self.records.write(str(trial), record.model_copy(update={"state": state, "message": message}))

    def end_mlflow_run(self, trial: Trial, status: RunStatus) -> None:
        """Ends the MLflow run of a trial's newest run, and sends what the trial's process has not sent."""
        self._later(trial, "driver", lambda log: log.end(status))

    def fail_mlflow_run(self, trial: Trial, plan: SweepPlan, error: str) -> None:
        """Ends the MLflow run of a trial that failed; opens one first if its run has not begun, so that its settings
        and the error are known there, too."""
        attempt, settings = Attempt(str(trial), str(trial)), dict(trial.config)

        def fail(log: OutboxTracker) -> None:
            if not run_folder.holds_run(log.folder):
                name = f"{plan.name}.{attempt.name}"
                log.open(
                    plan.config.tracking.experiment,
                    name,
                    params=params_of(_tracked_settings(plan, settings, attempt)),
                    tags={"rlx.kind": "run", "rlx.folder": log.folder.path, **tags_of(plan.name, attempt)},
                    parent=self.folder,
                )
            log.end(RunStatus.FAILED, error)

        self._later(trial, "driver", fail, begun=False)

    def end_sweep(self, status: RunStatus) -> None:
        """Ends the MLflow run of the sweep."""
        self._thread.submit(self._write, self.tracking, self.folder, "driver", lambda log: log.end(status))

    def flush(self) -> None:
        """Waits until everything is written or sent."""
        self._thread.submit(self.records.flush).result()

    def _later(self, trial: Trial, writer: str, what: Callable[[OutboxTracker], None], *, begun: bool = True) -> None:
        self._thread.submit(self._write_run, str(trial), writer, what, begun)

    @_harmless
    def _write_run(self, name: str, writer: str, what: Callable[[OutboxTracker], None], begun: bool) -> None:
        """Writes to a trial's newest run; if `begun`, only to one that has begun."""
        run = self.folder / "runs" / newest_attempt(self.folder, name)
        if not begun or run_folder.holds_run(run):
            self._write(self.of_trials, run, writer, what)

    @_harmless
    def _write(
        self, tracking: Sequence[TrackingService], run: Storage, writer: str, what: Callable[[OutboxTracker], None]
    ) -> None:
        tracker = OutboxTracker(tracking, run, writer)
        what(tracker)
        tracker.close(self._patience_s)
        self._patience_s = 0.0 if tracker.is_away else _PATIENCE_S  # where a service does not answer, one waits for all


def _tracked_settings(plan: SweepPlan, settings: Mapping[str, Any], attempt: Attempt) -> dict[str, Any]:
    """Returns the settings of a trial by dotted key, as a run that begins records them, so that the analysis knows the
    seeds of one candidate; those that do not go together are as the search has chosen them."""
    try:
        config = attempt_config(plan, settings, attempt)
        return flatten(from_tree(with_overrides(config.model_dump(exclude_unset=True), absolute_paths(config))))
    except ConfigError:
        return {**flatten(plan.config), **settings, "name": f"{plan.name}.{attempt.name}"}


def _confirm_interrupts() -> None:
    """Makes Ctrl-C print a message before Tune's own handler runs, which takes ten seconds."""
    on_interrupt = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: types.FrameType | None) -> None:
        _LOG.warning("interrupted: ending the trials, which takes some seconds; interrupt again to end at once")
        if callable(on_interrupt):
            on_interrupt(number, frame)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handle)


def _failure(trial: Trial) -> tuple[str, bool]:
    """Returns why a trial failed, in one line, and whether it was lost by no error of its own.

    Tune's file has each of its failures; the last one counts.
    """
    file = Path(trial.error_file or "")
    text = _FAILURE.split(file.read_text())[-1].strip() if file.is_file() else ""
    last = text.rpartition("\n")[2]
    if not text or (not _OF_RUN.search(last) and _KILLED.search(text)):
        return "its process was killed", True  # also with its node
    return re.sub(r"^rlx[\w.]*: ", "", last)[:500], RunLostError.__name__ in last
