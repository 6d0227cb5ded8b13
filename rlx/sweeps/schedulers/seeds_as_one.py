"""Shows one of Ray's schedulers each candidate as one trial, whatever the number of its seeds.

The scheduler is told the mean over the seeds, once all of them have reported a step: of the metric, and of what they
have taken by then (steps, tokens or GPU-seconds), which is the scheduler's time. What it decides holds for all of
them: who has reported last stops or pauses at once, the others at their next step, wherever they are by then. Nobody
waits for the other seeds, so a seed that starts much later than another saves less.

Left out: what is decided (Ray), and which of Ray's schedulers there are (`by_name`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from rlx.sweeps.schedulers.pausing import end_paused, next_to_run
from rlx.sweeps.schedulers.schedule import TIME, Schedule

_STATUS = {
    TrialScheduler.CONTINUE: Trial.RUNNING,
    TrialScheduler.PAUSE: Trial.PAUSED,
    TrialScheduler.STOP: Trial.TERMINATED,
}
_ACTION = {status: action for action, status in _STATUS.items()}


class CandidateTrial:
    """A candidate with all its seeds, as what Ray's schedulers take for a trial."""

    is_saving = False  # HyperBand asks for it

    def __init__(self, number: int, schedule: Schedule) -> None:
        self.trial_id = f"candidate_{number:05d}"
        self.status = Trial.RUNNING  # what its trials are to do
        self.is_known = False  # to the scheduler
        self.judged = -1  # the last step of which the scheduler was told
        self._seeds, self._time = schedule.seeds, schedule.rung_by
        self._ended: set[str] = set()  # names of trials
        self._failed: set[str] = set()
        self._values: dict[int, dict[str, tuple[float, float]]] = {}  # amount and metric, by step and name

    def begin(self, trial: str) -> None:
        """A trial starts, or starts again."""
        self._failed.discard(trial)
        self._ended.discard(trial)

    def end(self, trial: str, *, failed: bool = False) -> None:
        (self._failed if failed else self._ended).add(trial)

    @property
    def is_over(self) -> bool:
        """Whether all its trials are."""
        return len(self._ended | self._failed) >= self._seeds

    def add(self, trial: str, step: int, amount: float, value: float) -> None:
        self._values.setdefault(step, {})[trial] = amount, value

    def next_report(self, metric: str) -> dict[str, Any] | None:
        """The mean time and metric of its trials at the next step that all have reported but for those that failed;
        None if there is no such step after the one of which the scheduler was told.

        There are several after a trial has failed that was behind the others."""
        needed = max(1, self._seeds - len(self._failed))
        whole = (step for step, values in self._values.items() if len(values.keys() - self._failed) >= needed)
        if not (new := [step for step in whole if step > self.judged]):
            return None
        self.judged = min(new)
        values = [value for name, value in self._values[self.judged].items() if name not in self._failed]
        amount, mean = np.mean(values, axis=0).tolist()
        return {self._time: amount, metric: mean}


class AsOne(TrialScheduler):
    """One of Ray's schedulers, to which a candidate with all its seeds is one trial."""

    def __init__(self, inner: TrialScheduler, schedule: Schedule) -> None:
        """
        Args:
            inner: its `time_attr` is `schedule.rung_by`.
        """
        super().__init__()
        self.inner, self.schedule, self._shown = inner, schedule, _Candidates(self)
        self._candidates: dict[int, CandidateTrial] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        is_set = super().set_search_properties(metric, mode, **spec)
        return bool(self.inner.set_search_properties(metric, mode, **spec) and is_set)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        candidate = self._candidate(trial)
        candidate.begin(str(trial))
        if not candidate.is_known and candidate.status != Trial.TERMINATED:
            candidate.is_known = True
            self.inner.on_trial_add(self._shown, candidate)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        candidate = self._candidate(trial)
        if self.schedule.is_evaluation(result):
            candidate.add(str(trial), result[TIME], self.schedule.amount(result), result[self.metric])
            while candidate.status == Trial.RUNNING and (report := candidate.next_report(self.metric)):
                candidate.status = _STATUS[self.inner.on_trial_result(self._shown, candidate, report)]
                if candidate.status == Trial.TERMINATED:
                    self.finish(candidate, report)
        return _ACTION[candidate.status]

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Takes the last report as well: Tune shows it here alone."""
        candidate = self._candidate(trial)
        if self.metric in result and self.schedule.is_evaluation(result):
            candidate.add(str(trial), result[TIME], self.schedule.amount(result), result[self.metric])
        self._end(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._end(trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """The candidate goes on with its other seeds, judged at their next report: Tune may try the trial again."""
        self._end(trial, failed=True)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Ends paused trials of candidates that were stopped, too: only here can that be done at any time."""
        end_paused(tune_controller, lambda trial: self._candidate(trial).status == Trial.TERMINATED)
        while chosen := self.inner.choose_trial_to_run(self._shown):
            chosen.status = Trial.RUNNING
        return next_to_run(tune_controller, lambda trial: self._candidate(trial).status == Trial.RUNNING)

    def debug_string(self) -> str:
        return str(self.inner.debug_string())

    def _candidate(self, trial: Trial) -> CandidateTrial:
        number = self.schedule.candidate_of(str(trial))
        return self._candidates.setdefault(number, CandidateTrial(number, self.schedule))

    def _end(self, trial: Trial, *, failed: bool = False) -> None:
        candidate = self._candidate(trial)
        candidate.end(str(trial), failed=failed)
        if candidate.is_over:
            last = candidate.next_report(self.metric)
            while last and candidate.status == Trial.RUNNING and (report := candidate.next_report(self.metric)):
                candidate.status = _STATUS[self.inner.on_trial_result(self._shown, candidate, last)]
                last = last if candidate.status == Trial.TERMINATED else report
            self.finish(candidate, last)

    def finish(self, candidate: CandidateTrial, report: dict[str, Any] | None) -> None:
        """Tells the scheduler once that a candidate is over."""
        if not candidate.is_known:
            return
        candidate.is_known = False
        if report:
            self.inner.on_trial_complete(self._shown, candidate, report)
        else:
            self.inner.on_trial_remove(self._shown, candidate)


class _Candidates:
    """What Ray's schedulers see of Tune: candidates instead of trials."""

    def __init__(self, scheduler: AsOne) -> None:
        self._scheduler = scheduler

    def get_trials(self) -> list[CandidateTrial]:
        return []  # no candidate starts or waits by itself

    def stop_trial(self, candidate: CandidateTrial) -> None:
        """Stops a candidate that is paused: its trials end when they are looked at next."""
        candidate.status = Trial.TERMINATED
        self._scheduler.finish(candidate, None)
