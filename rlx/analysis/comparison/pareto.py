"""Which settings no other one beats in everything: the Pareto front of result, cost and length. Left out: drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.analysis.statistics import Group


def front(points: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each point is on the Pareto front: no other one is at least as low in all coordinates and lower in one.

    A point with a coordinate that is not known (NaN) is on no front and beats nobody.
    """
    known = [not any(map(math.isnan, point)) for point in points]
    return [
        is_known and not any(_beats(points[j], point) for j, each in enumerate(known) if each)
        for point, is_known in zip(points, known, strict=True)
    ]


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def mean_length(group: Group) -> float:
    """The mean length in tokens of the answers at the end of the group's runs; NaN if it was not logged."""
    curves = [trial.history["response/length_mean"].dropna() for trial in group.ended]
    ends = [float(curve.iloc[-1]) for curve in curves if len(curve)]
    return sum(ends) / len(ends) if ends else math.nan
