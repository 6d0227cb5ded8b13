"""How far each setting is behind the best one, from runs of all settings on the same seeds.

Runs with one seed see the same prompts and draw with the same seeds, so their difference has less chance in it than
either of them. A setting is tested against all others at once: its largest mean difference is compared with those that
the same differences would give if they were turned around zero in any other direction of the space of seeds (a rotation
test: Langsrud 2005, "Rotation tests", Statistics and Computing 15). For runs that vary normally it is exact with any
number of seeds and settings, also where variances differ from setting to setting, which they do: bad settings vary
more. It knows how much the comparisons have in common, and that others who are hardly ahead cannot be the reason, so
alpha is not shared among the others as separate tests would have to. With two settings it is the paired t-test.

Tried and left, by simulation: a t-test of each setting against whoever leads on the other seeds (Zhang, Lee and Lei
2024, arXiv 2408.02060) drops the best up to five times too often with 3 to 8 seeds; paired t-tests with Bonferroni's
correction, and rotations of the largest t, find a fifth as much with 3 seeds. The permutation test of AdaStop (Mathieu
et al. 2023, arXiv 2306.10882) assumes no normal distribution, but has 20 arrangements of three seeds against three, and
so no chance below 1/20.

Left out: when to look, and how to share alpha among looks (rlx.sweeps.schedulers.race).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from rlx.analysis.statistics import LEVEL

Values = NDArray[np.float64]

_DIRECTIONS, _EXACT = 10_000, 1e-12


class Deficit(NamedTuple):
    """How far a setting is behind the best of the others; below 0: how far ahead."""

    value: float
    half_width: float  # of its 95 % interval, which holds although several looks may have been taken
    chance: float  # of being as far behind any of the others if the setting is the best: the test's p-value
    leader: int  # which setting that best one is: the one with the highest mean


def deficits(values: Values, looks: int = 1) -> list[Deficit]:
    """How far each setting is behind the best of the others.

    Args:
        values: [settings, seeds], at least two of each; high is good. What they are rounded to, as shares of right
            answers are, counts as chance: otherwise differences that are equal by luck would prove anything.
        looks: how often they may be compared, until something is shown. Intervals are wider by that (repeated
            intervals: Jennison and Turnbull 1989), by about half of what as many independent looks would need, for
            later looks repeat much of the earlier ones: simulated races (bench/racing.py) chose (1 - 0.95) / (looks
            + 1) for each side.
    """
    count = values.shape[1]
    gaps = values - values[:, None]  # [settings, others, seeds]
    means, lengths = gaps.mean(axis=2), np.linalg.norm(gaps, axis=2)
    rounding = _resolution(values) ** 2 / 6  # the variance of a difference of two rounded numbers
    errors = np.sqrt((gaps.var(axis=2, ddof=1) + rounding) / count)
    t = means / np.maximum(errors, np.finfo(float).tiny)
    needed = lengths * t / np.sqrt(t * t + count - 1)  # `means`, but for the rounding
    for table in (means, needed):
        np.fill_diagonal(table, -np.inf)  # a setting is no other
    chances, leaders = _chances(values, needed.max(axis=1)), means.argmax(axis=1)
    quantile = float(stdtrit(count - 1, 1 - (1 - LEVEL) / (looks + 1)))
    return [
        Deficit(float(means[i, leader]), quantile * float(errors[i, leader]), float(chances[i]), int(leader))
        for i, leader in enumerate(leaders)
    ]


def _chances(values: Values, needed: Values) -> Values:
    """For each setting, the share of directions in which the best of the others is ahead by `needed`, [settings]."""
    turned = _directions(values.shape[1]) @ values.T  # [directions, settings]
    two_best = np.partition(turned, -2, axis=1)[:, -2:]
    others = np.where(turned == two_best[:, 1:], two_best[:, :1], two_best[:, 1:])
    return np.asarray((1 + np.count_nonzero(others - turned >= needed - _EXACT, axis=0)) / (1 + _DIRECTIONS))


@functools.cache
def _directions(count: int) -> Values:
    """Directions in a space of `count` dimensions, [directions, count]: always the same ones, so that a resumed sweep
    decides as before. RandomState never changes its numbers, as NumPy promises."""
    drawn = np.random.RandomState(0).standard_normal((_DIRECTIONS, count))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def _resolution(values: Values) -> float:
    """The smallest difference between two values that are not equal; 0 if all are."""
    steps = np.diff(np.unique(values))
    return float(steps.min()) if len(steps) else 0.0
