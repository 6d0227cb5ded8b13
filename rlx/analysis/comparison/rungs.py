"""How settings stood at each rung of a sweep: how far each was behind the best of the others, on the same seeds.

It is worked out from what the trials logged, with the statistics of a race (rlx.analysis.paired), for every scheduler.
The intervals of a race are those that it states.
Rungs are steps; or 1, 2, 4, 8, ... tokens or GPU-seconds, where a trial's value is on the straight line between its
evaluations before and after.
Left out: the race's own decisions, which also depend on alpha.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from rlx.analysis.comparison.pairs import Looks, one_look
from rlx.analysis.loading import Sweep, Trial
from rlx.analysis.paired import deficits
from rlx.analysis.statistics import SEED, Group
from rlx.config.sweep import PROGRESS, Mode, RungUnit

Curves = Mapping[Trial, "pd.Series[float]"]
"""the metric of each trial by what it had taken, see `curve_by_amount`"""
_UNITS: Mapping[RungUnit, str] = {"steps": "steps", "tokens": "tokens", "gpu-seconds": "GPU-seconds"}


class RungStanding(NamedTuple):
    """A setting at a rung."""

    group: Group
    at: int  # steps, tokens or GPU-seconds
    seeds: int
    mean: float
    behind: float  # the best of the others; below 0: ahead of them
    ends: tuple[float, float]  # of the 95 % interval
    is_out: bool  # all its trials end here, and others go on


def rung_standings(sweep: Sweep, groups: Sequence[Group], metric: str, mode: Mode) -> list[RungStanding]:
    """The settings at each rung that two of them have reached with the same two seeds at least, first rung first."""
    curves = {trial: curve_by_amount(sweep, trial, metric) for trial in sweep.trials}
    if sweep.rung_by != "steps":
        rungs = sorted(set[int]().union(*map(rungs_passed, curves.values())))
        return [standing for rung in rungs for standing in _at_amount(groups, curves, mode, rung)]
    stops = {trial: rung_of_stop(sweep, trial, metric) for trial in sweep.trials}
    ends = {trial: stops[trial] or trial.last_step for trial in sweep.trials}
    steps = sorted({*sweep.rungs, *filter(None, stops.values()), max(ends.values(), default=0)})
    return [standing for step in steps for standing in _at(groups, curves, mode, step, ends, sweep.looks)]


def rung_of_stop(sweep: Sweep, trial: Trial, metric: str) -> int | None:
    """The step at which a trial was judged when a scheduler stopped it; None if it was not, or never was evaluated.

    A setting stops with all its seeds, and those that are further by then end at whatever step they are at.
    """
    steps = [int(step) for step in trial.logged(metric).index if step > 0 and trial.was_stopped]
    return max([step for step in steps if step in sweep.rungs] or steps, default=None)


def _at(
    groups: Sequence[Group], curves: Curves, mode: Mode, step: int, ends: Mapping[Trial, int], looks: Looks
) -> list[RungStanding]:
    goes_on = max(ends.values(), default=0) > step
    out = [group for group in groups if goes_on and all(ends[trial] <= step for trial in group.trials)]
    rows = {group: _by_seed(group, [curves[trial].get(step, math.nan) for trial in group.trials]) for group in groups}
    return _standings(rows, out, mode, step, looks)


def _at_amount(groups: Sequence[Group], curves: Curves, mode: Mode, rung: int) -> list[RungStanding]:
    out = [
        group
        for group in groups
        if all(trial.was_stopped for trial in group.trials)
        and all(max(rungs_passed(curves[trial]), default=0) <= rung for trial in group.trials)
    ]
    rows = {group: _by_seed(group, [value_at(curves[trial], rung) for trial in group.trials]) for group in groups}
    return _standings(rows, out, mode, rung)


def _standings(
    rows: Mapping[Group, Mapping[str, float]], out: Sequence[Group], mode: Mode, at: int, looks: Looks = one_look
) -> list[RungStanding]:
    """Compares the settings that have come to a rung with two of the same seeds; `out`: those that were stopped."""
    reached = [group for group in rows if len(rows[group]) > 1]
    seeds = sorted(set.intersection(*(set(rows[group]) for group in reached))) if reached else []
    if len(reached) < 2 or len(seeds) < 2:
        return []
    values = np.array([[rows[group][seed] for seed in seeds] for group in reached])
    found = deficits((1.0 if mode == "max" else -1.0) * values, looks(at, len(seeds)))
    return [
        RungStanding(group, at, len(seeds), float(row.mean()), deficit.value, deficit.ends, group in out)
        for group, row, deficit in zip(reached, values, found, strict=True)
    ]


def _by_seed(group: Group, values: Sequence[float]) -> dict[str, float]:
    """The values of a setting's trials by seed, without those that have none, or an infinite one."""
    seeds = [str(trial.settings.get(SEED)) for trial in group.trials]
    return {seed: float(value) for seed, value in zip(seeds, values, strict=True) if math.isfinite(value)}


# ---------------------------------------------------------------------------------------------------------------------
# Rungs in tokens and GPU-seconds


def rung_below(amount: float) -> int:
    """The last of the rungs 1, 2, 4, 8, ... that so many tokens or GPU-seconds reach; 0: none."""
    return 2 ** (math.frexp(amount)[1] - 1) if amount >= 1 else 0


def rungs_passed(curve: pd.Series[float]) -> set[int]:
    """The rungs at which a trial with such a curve by amount was judged: of several in a row, the last."""
    return {rung_below(float(amount)) for amount in curve.index} - {0}


def curve_by_amount(sweep: Sweep, trial: Trial, metric: str) -> pd.Series[float]:
    """A metric of a trial by what it had taken by then: steps, tokens or GPU-seconds, as the sweep's rungs are."""
    return by_amount(sweep, trial, trial.curve(metric))


def by_amount(sweep: Sweep, trial: Trial, curve: pd.Series[float]) -> pd.Series[float]:
    """Values of a trial by step as values by what it had taken by then, see `curve_by_amount`."""
    if sweep.rung_by == "steps":
        return curve
    taken = trial.history[PROGRESS[sweep.rung_by]].ffill().fillna(0.0)  # nothing before the first step
    gpus = sweep.planned.get("gpus", 1.0) if sweep.rung_by == "gpu-seconds" else 1.0
    return pd.Series(curve.to_numpy(), index=pd.Index(gpus * taken[curve.index].to_numpy()))


def value_at(curve: pd.Series[float], at: float) -> float:
    """The value of a curve by amount, on the line between two of its points; NaN outside of them."""
    return float(np.interp(at, curve.index, curve, left=math.nan, right=math.nan)) if len(curve) else math.nan


def rung_text(at: float, unit: RungUnit) -> str:
    """A rung in words: step 4, 4,096 tokens."""
    return f"step {at:g}" if unit == "steps" else f"{at:,.0f} {_UNITS[unit]}"
