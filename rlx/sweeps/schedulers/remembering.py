"""Makes a scheduler decide on a resume what it decides in a sweep in one go: it is told the same in the same order.

What a scheduler decides depends on whose report came first, and a resume starts the trials in an order of its own. So
all that Tune tells a scheduler is noted in the sweep's folder, and told again before Tune has anything new to tell.
Left out: what is decided, and the file (rlx.sweeps.records).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from rlx.config.sweep import PROGRESS
from rlx.sweeps.records import Told, ToldName, TrialState
from rlx.sweeps.schedulers.schedule import TIME, Schedule


class Remembering(TrialScheduler):
    """A scheduler that knows after a resume all that it knew before.

    The other one is to follow from its calls alone, and to read nothing of a trial but its name.
    """

    def __init__(self, inner: TrialScheduler, schedule: Schedule) -> None:
        super().__init__()
        self.inner, self.schedule = inner, schedule

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Here Tune calls a scheduler first: what was told before a resume is told now."""
        is_set = super().set_search_properties(metric, mode, **spec)
        is_set = bool(self.inner.set_search_properties(metric, mode, **spec) and is_set)
        self._recall()
        return is_set

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        self._tell("add", tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        return str(self._tell("result", tune_controller, trial, result))

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._tell("complete", tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._tell("remove", tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._tell("error", tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        return self.inner.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        return str(self.inner.debug_string())

    def _tell(self, what: ToldName, tune_controller: Any, trial: Trial, *result: dict[str, Any]) -> Any:
        if what != "result" or self.schedule.is_evaluation(*result):
            read = (TIME, PROGRESS[self.schedule.rung_by], self.metric)
            self._note((what, str(trial), {key: float(each[key]) for each in result for key in read if key in each}))
        return getattr(self.inner, f"on_trial_{what}")(tune_controller, trial, *result)

    def _note(self, call: Told) -> None:
        if self.schedule.records:
            self.schedule.records.note(call)

    def _recall(self) -> None:
        calls = self.schedule.records.calls() if self.schedule.records else []
        if not calls:
            calls = list(_calls_of(self.schedule, str(self.metric)))
            for call in calls:
                self._note(call)
        tune_controller = SimpleNamespace(get_trials=list)  # it has none yet
        for what, trial, report in calls:
            result = (report,) if what in ("result", "complete") else ()
            getattr(self.inner, f"on_trial_{what}")(tune_controller, trial, *result)
            self.inner.choose_trial_to_run(tune_controller)  # as Tune does between two calls


def _calls_of(schedule: Schedule, metric: str) -> Iterator[Told]:
    """What a sweep's trials have reported, one trial after another: how it came if nothing was noted yet."""
    known = sorted(schedule.known.items())
    for name, _ in known:
        yield "add", name, {}
    for name, record in known:
        reports = record.as_told(schedule.rung_by, metric)
        for report in reports:
            yield "result", name, report
        if record.is_over:
            yield ("error" if record.state is TrialState.FAILED else "complete"), name, reports[-1] if reports else {}
