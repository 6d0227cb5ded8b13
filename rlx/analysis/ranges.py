"""The values that a metric can have, and the part of an axis that shows its points. Left out: drawing.

An interval of two runs can be wider than anything that the metric can be: 0.4 ± 1.4 for an accuracy. Figures draw
intervals up to the ends of the metric's range, and choose their axes so that the points stay apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from rlx.analysis.statistics import Group
from rlx.analysis.style import NUM_BANDS
from rlx.tracking.services.mlflow_page import BEST

_MARGIN = 0.04  # of an axis beyond what it shows, so that a mark at its end is drawn in full
_NEAR = 2  # times as far from the points as these are from each other, an interval's end is still shown
_SHARES = ("accuracy", "_fraction")
_COUNTED = re.compile(r"/(avg|pass|maj)_at_\d+$")  # shares of eval.sets
_OF_SOURCE = re.compile(r"(?:(?:eval|eval/ema|task)/(accuracy|reward)|source/(?:fraction|generated))/[^/]+")
"""metrics of one of data.sources, which may have any name"""
_LENGTHS = ("/length", "/length_mean", "/length_min", "/length_max")
_NOT_NEGATIVE = ("/std", "_se", *_LENGTHS, "/grad_norm", "/lr", "/entropy", "/ratio", "/weight_max", "/max_abs")
_AMOUNTS = ("time/", "tokens/", "memory/", "system/", "staleness/")


class Range(NamedTuple):
    """Two ends; infinite where there is none."""

    low: float = -math.inf
    high: float = math.inf

    def clip(self, value: float) -> float:
        """The value itself, or the end beyond which it lies; NaN stays NaN."""
        return value if math.isnan(value) else min(max(value, self.low), self.high)

    def holds(self, value: float) -> bool:
        """Whether a value lies between the ends; NaN does."""
        return math.isnan(value) or self.low <= value <= self.high


def natural_range(metric: str) -> Range:
    """The values that a metric can have at all: [0, 1] for an accuracy or another share."""
    name = metric.removeprefix(BEST)
    if name.startswith("reward/") and name != "reward/std":  # whatever a reward function returns, under any name
        return Range()
    if of_source := _OF_SOURCE.fullmatch(name):
        return Range() if of_source[1] == "reward" else Range(0, 1)
    if name.endswith(_SHARES) or _COUNTED.search(name):
        return Range(0, 1)
    if name.startswith(_AMOUNTS) or name.endswith(_NOT_NEGATIVE):
        return Range(low=0)
    return Range(high=1) if name.endswith("explained_variance") else Range()


def reach(metric: str, mean: float, half_width: float) -> tuple[float, float]:
    """How far a drawn interval reaches below and above its mean; NaN for an interval that is not known."""
    clip = natural_range(metric).clip
    return mean - clip(mean - half_width), clip(mean + half_width) - mean


def axis_range(metric: str, points: Sequence[float], ends: Iterable[float] = ()) -> Range:
    """The part of a metric's axis that a figure shows.

    Args:
        points: all of them are shown; at least one.
        ends: of intervals. They are shown too, as far as the metric can have such values, and no farther from the
            points than twice what the points are from each other.
    """
    low, high = min(points), max(points)
    spread = high - low or abs(high) or 1.0
    near, natural = Range(low - _NEAR * spread, high + _NEAR * spread), natural_range(metric)
    shown = [low, high, *(natural.clip(near.clip(end)) for end in ends if not math.isnan(end))]
    margin = _MARGIN * (max(shown) - min(shown) or spread)
    return Range(min(shown) - margin, max(shown) + margin)


def axis_of_values(groups: Sequence[Group], metric: str) -> Range:
    """The part of the axis with the values of all runs of the groups, and with the groups' intervals."""
    values = [value for group in groups for value in group.values]
    return axis_range(metric, values, [end for group in groups for end in group.ends])


def axis_of_curves(curves: Sequence[pd.DataFrame], metric: str) -> Range:
    """The part of the axis with all curves of `mean_curve`, best first, and with the intervals that are drawn."""
    means = [float(mean) for curve in curves for mean in curve["mean"]]
    drawn = [end for curve in curves[:NUM_BANDS] for end in (*curve["low"], *curve["high"])]
    return axis_range(metric, means, [float(end) for end in drawn])
