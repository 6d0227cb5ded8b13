"""Trials that wait for others: which runs next, and which end. Left out: who has to wait, and who is out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.tune.experiment import Trial


def end_paused(tune_controller: Any, is_out: Callable[[Trial], bool]) -> None:
    """Ends the paused trials that are out."""
    for trial in [each for each in tune_controller.get_trials() if each.status == Trial.PAUSED]:
        if is_out(trial):
            tune_controller.stop_trial(trial)


def next_to_run(tune_controller: Any, may_go_on: Callable[[Trial], bool]) -> Trial | None:
    """A trial that has not begun, or else a paused one that may go on; None if there is neither."""
    trials = tune_controller.get_trials()
    pending = [trial for trial in trials if trial.status == Trial.PENDING]
    paused = (trial for trial in trials if trial.status == Trial.PAUSED and may_go_on(trial))
    return next(iter([*pending, *paused]), None)
