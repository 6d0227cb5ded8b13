"""How a sweep went on: the best value after each trial that ended, and which trials a scheduler stopped at which step.

A rung is a step at which the scheduler stopped a trial, or at which it judged trials, as the sweep has recorded, and
stopped none; or, if it compared trials at equal amounts, one of 1, 2, 4, 8, ... tokens or GPU-seconds. Stops are read
from the trials, so that they hold for every scheduler. Left out: drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pandas as pd

from rlx.analysis.comparison.rungs import by_amount, curve_by_amount, rung_of_stop, rung_text, rungs_passed, value_at
from rlx.analysis.loading import Sweep, Trial
from rlx.analysis.statistics import final_value, has_ended, rank_trials
from rlx.analysis.style import short_names
from rlx.analysis.tables import with_settings
from rlx.config.sweep import Mode


@dataclass(frozen=True)
class Finish:
    """A trial that ended, its last value, and the best one of all trials that had ended by then."""

    trial: Trial
    value: float
    best: float


@dataclass(frozen=True)
class Rung:
    """A point at which trials were judged: how many had a value there, finite or not, and how many were stopped."""

    at: int  # steps, tokens or GPU-seconds
    reached: int
    stopped: int


def best_so_far(sweep: Sweep, metric: str, mode: Mode) -> list[Finish]:
    """The trials that have ended with the metric, in the order in which they ended."""
    ended = [trial for trial in sweep.trials if has_ended(trial, metric)]
    ended.sort(key=lambda trial: math.inf if trial.end_ms is None else trial.end_ms)
    values = [final_value(trial, metric) for trial in ended]
    bests = accumulate(values, max if mode == "max" else min)
    return [Finish(*each) for each in zip(ended, values, bests, strict=True)]


def find_rungs(sweep: Sweep, metric: str) -> list[Rung]:
    """The rungs of a sweep that a trial with the metric has reached, first rung first."""
    if sweep.rung_by != "steps":
        return _rungs_by_amount(sweep, metric)
    steps = [set(trial.logged(metric).index) for trial in sweep.trials]
    stops = [rung for trial in sweep.trials if (rung := rung_of_stop(sweep, trial, metric))]
    found = (
        Rung(step, sum(step in each for each in steps), stops.count(step)) for step in sorted({*stops, *sweep.rungs})
    )
    return [rung for rung in found if rung.reached]


def _rungs_by_amount(sweep: Sweep, metric: str) -> list[Rung]:
    passed = {trial: rungs_passed(by_amount(sweep, trial, trial.logged(metric))) for trial in sweep.trials}
    stops = [max(passed[trial]) for trial in sweep.trials if trial.was_stopped and passed[trial]]
    rungs = sorted(set[int]().union(*passed.values()))
    return [Rung(rung, sum(rung in each for each in passed.values()), stops.count(rung)) for rung in rungs]


def rung_table(sweep: Sweep, metric: str, mode: Mode) -> pd.DataFrame:
    """One row per trial, those that went farthest first: its settings, its value at each rung, its last step and value,
    and the step at which it was stopped."""
    rungs = [rung.at for rung in find_rungs(sweep, metric)]
    ranked = sorted(rank_trials(sweep, metric, mode), key=lambda trial: -trial.last_step)
    rows = [
        {"trial": trial.name}
        | dict(zip(short_names(trial.settings), trial.settings.values(), strict=True))
        | _at_rungs(sweep, trial, metric, rungs)
        | {"final": final_value(trial, metric), "steps": trial.last_step, "stopped": trial.stopped_at}
        for trial in ranked
    ]
    return with_settings(pd.DataFrame(rows), short_names(sweep.varied))


def _at_rungs(sweep: Sweep, trial: Trial, metric: str, rungs: Sequence[int]) -> dict[str, float]:
    if sweep.rung_by == "steps":
        return {f"at {step}": float(trial.curve(metric).get(step, math.nan)) for step in rungs}
    curve = curve_by_amount(sweep, trial, metric)
    return {f"at {rung_text(rung, sweep.rung_by)}": value_at(curve, rung) for rung in rungs}
