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

An interval pays for what makes a setting seem further behind than it is: the looks that were taken until then, since it
stops where it seems far behind, and the luck by which the best of the others was chosen
(rlx.analysis.comparison.winner). In simulated races (bench/racing.py) the intervals hold the true distance in 0.94 to
0.97, those of settings that are out and truly behind in 0.935 to 0.96, without added seeds in 0.85 to 0.95: who is out
seemed far behind (and where runs collapse now and then, in 0.99: they do not vary normally). Tried and left: paying for
all looks that may come, and not for the luck (0.94 to 0.99: too wide for who is out early); Bonferroni's share of the
looks taken instead of the luck (0.94 to 0.97, but 0.915 of those that are out where four are tied), or with it (up to
0.975).

Left out: when to look, and how to share alpha among looks (rlx.sweeps.schedulers.race).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from rlx.analysis.comparison.winner import corrected_best
from rlx.analysis.statistics import LEVEL, resolution, share_of_look

Values = NDArray[np.float64]

_DIRECTIONS, _EXACT = 10_000, 1e-12


class Deficit(NamedTuple):
    """How far a setting is behind the best of the others; below 0: how far ahead."""

    value: float
    half_width: float  # of its 95 % interval, without the luck
    luck: float  # how far the leader seems better than it is, because it was chosen among the others
    chance: float  # of being as far behind any of the others if the setting is the best: the test's p-value
    leader: int  # which setting that best one is: the one with the highest mean

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval; the luck, which only makes the setting seem further behind, is off the low end."""
        return self.value - self.half_width - self.luck, self.value + self.half_width


def deficits(values: Values, looks: int = 1) -> list[Deficit]:
    """How far each setting is behind the best of the others.

    Args:
        values: [settings, seeds], at least two of each; high is good. What they are rounded to, as shares of right
            answers are, counts as chance: otherwise differences that are equal by luck would prove anything.
        looks: how often they have been compared until now. Intervals are wider by that (repeated intervals: Jennison
            and Turnbull 1989), see `share_of_look`.
    """
    count = values.shape[1]
    gaps = values - values[:, None]  # [settings, others, seeds]
    means, lengths = gaps.mean(axis=2), np.linalg.norm(gaps, axis=2)
    rounding = resolution(values) ** 2 / 6  # the variance of a difference of two rounded numbers
    errors = np.sqrt((gaps.var(axis=2, ddof=1) + rounding) / count)
    t = means / np.maximum(errors, np.finfo(float).tiny)
    needed = lengths * t / np.sqrt(t * t + count - 1)  # sqrt(seeds) times `means`, but for the rounding
    for table in (means, needed):
        np.fill_diagonal(table, -np.inf)  # a setting is no other
    chances, leaders = _chances(values, needed.max(axis=1)), means.argmax(axis=1)
    quantile = float(stdtrit(count - 1, 1 - share_of_look(looks) * (1 - LEVEL) / 2))
    widths = quantile * errors
    lucks = [corrected_best(np.delete(values, i, axis=0), 1.0).luck for i in range(len(values))]
    return [
        Deficit(float(means[i, leader]), float(widths[i, leader]), lucks[i], float(chances[i]), int(leader))
        for i, leader in enumerate(leaders)
    ]


def _chances(values: Values, needed: Values) -> Values:
    """The share of directions in which the best of the others is ahead of each setting by `needed`, [settings]."""
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
