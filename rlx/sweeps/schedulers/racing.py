"""Runs a race on Tune: trials pause where they are to wait for others. Left out: who is out (`race`)."""

from __future__ import annotations

from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from rlx.sweeps.records import trial_number
from rlx.sweeps.schedulers.pausing import end_paused, next_to_run
from rlx.sweeps.schedulers.race import Race
from rlx.sweeps.schedulers.schedule import TIME, Schedule


class RaceScheduler(TrialScheduler):
    """Stops the candidates that a race shows to be behind the best, and adds seeds to those that are left.

    A trial pauses at a rung until all candidates that are left have reported it, so trials of few slots take turns.
    Tune reports final failures to the trial source alone, which tells the race.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule, self.race = schedule, Race(schedule)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Nothing: the race knows which trials there are."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        self._take(trial, result)
        if self.race.is_out(_number(trial)):
            return TrialScheduler.STOP
        return TrialScheduler.PAUSE if self.race.waits(_number(trial), result[TIME]) else TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Takes the last report as well: Tune shows it here alone."""
        self._take(trial, result)
        self.race.end(_number(trial))

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self.race.end(_number(trial))

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Nothing: Tune may try the trial again."""

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Ends paused trials that are out, too: only here can that be done at any time."""
        end_paused(tune_controller, lambda trial: self.race.is_out(_number(trial)))
        return next_to_run(tune_controller, self._may_go_on)

    def debug_string(self) -> str:
        return f"race: {len(self.race.live)} of {self.schedule.candidates} settings are left"

    def _may_go_on(self, trial: Trial) -> bool:
        return not self.race.waits(_number(trial), trial.last_result[TIME])

    def _take(self, trial: Trial, result: dict[str, Any]) -> None:
        if self.metric in result and self.schedule.is_evaluation(result):
            self.race.report(_number(trial), result[TIME], result[self.metric])


def _number(trial: Trial) -> int:
    return trial_number(str(trial))
