"""How settings stood at each rung of a sweep: how far each was behind the best of the others, on the same seeds.

It is worked out from what the trials logged, with the statistics of a race (rlx.analysis.paired), for every scheduler.
Left out: the race's own decisions, which also depend on alpha and on the number of looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlx.analysis.loading import Sweep
from rlx.analysis.paired import deficits
from rlx.analysis.statistics import SEED, Group
from rlx.config.sweep import Mode


class RungStanding(NamedTuple):
    """A setting at a rung."""

    group: Group
    step: int
    seeds: int
    mean: float
    behind: float  # the best of the others; below 0: ahead of them
    half_width: float  # of the 95 % interval
    is_out: bool  # all its trials end here, and others go on


def rung_standings(sweep: Sweep, groups: Sequence[Group], metric: str, mode: Mode) -> list[RungStanding]:
    """The settings at each rung that two of them have reached with the same two seeds at least, first rung first."""
    last = max((trial.last_step for trial in sweep.trials), default=0)
    steps = sorted({*sweep.rungs, *(trial.stopped_at for trial in sweep.trials if trial.stopped_at), last})
    return [standing for step in steps for standing in _at(groups, metric, mode, step, last)]


def _at(groups: Sequence[Group], metric: str, mode: Mode, step: int, last: int) -> list[RungStanding]:
    rows = {group: _values(group, metric, step) for group in groups}
    reached = [group for group in groups if len(rows[group]) > 1]
    seeds = sorted(set.intersection(*(set(rows[group]) for group in reached))) if reached else []
    if len(reached) < 2 or len(seeds) < 2:
        return []
    values = np.array([[rows[group][seed] for seed in seeds] for group in reached])
    found = deficits((1.0 if mode == "max" else -1.0) * values)
    return [
        RungStanding(
            group,
            step,
            len(seeds),
            float(row.mean()),
            deficit.value,
            deficit.half_width,
            step < last and all((trial.stopped_at or trial.last_step) <= step for trial in group.trials),
        )
        for group, row, deficit in zip(reached, values, found, strict=True)
    ]


def _values(group: Group, metric: str, step: int) -> dict[str, float]:
    """The metric at a step by seed."""
    curves = {str(trial.settings.get(SEED)): trial.curve(metric) for trial in group.trials}
    return {seed: float(curve[step]) for seed, curve in curves.items() if step in curve.index}
