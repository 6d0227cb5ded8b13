"""Successive halving where candidates reach a rung between two of their evaluations: rungs in tokens or GPU-seconds.

Left out: what a candidate with several seeds has taken (`seeds_as_one`), and what Ray decides at a rung.
"""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from rlx.analysis.comparison.rungs import rung_below
from rlx.config.sweep import RungUnit

_LONGEST = 2**62  # more than any run takes


class DoublingRungs(ASHAScheduler):  # type: ignore[misc]
    """Stops the worse half at rungs of 1, 2, 4, 8, ... tokens or GPU-seconds, so nothing need be known of runs before.

    Candidates are evaluated at equal steps, where each has taken another amount. So that they are compared at equal
    amounts, the value at a rung is on the straight line between the evaluations before and after it. Of several rungs
    between two evaluations the last one counts.
    """

    def __init__(self, unit: RungUnit) -> None:
        # A trial that has been judged at a rung is not judged at a lower one any more; Ray calls that so.
        super().__init__(time_attr=unit, max_t=_LONGEST, grace_period=1, reduction_factor=2, stop_last_trials=False)
        self._before: dict[str, tuple[float, float]] = {}  # amount and value of the newest evaluation, by trial

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        at_rung = self._at_rung(trial, result)
        return str(super().on_trial_result(tune_controller, trial, at_rung)) if at_rung else TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if at_rung := self._at_rung(trial, result):
            super().on_trial_complete(tune_controller, trial, at_rung)
        else:
            self.on_trial_remove(tune_controller, trial)

    def _at_rung(self, trial: Any, result: dict[str, Any]) -> dict[str, Any] | None:
        """What a trial would have reported at the last rung that it has passed; None if it was judged there before."""
        amount, value = result[self._time_attr], result[self._metric]
        before, value_before = self._before.get(trial.trial_id, (0.0, value))
        self._before[trial.trial_id] = amount, value
        rung = rung_below(amount)
        if rung < 1 or rung <= before:
            return None
        left = (amount - rung) / (amount - before)  # at a rung itself, the value is to be equal to the last bit
        return {self._time_attr: rung, self._metric: value + left * (value_before - value)}
