"""The mean of a table of seeds and questions, its 95 % interval, and how much of its chance is due to which.

The model has crossed random effects: value = mean + seed + question + rest, all of them independent. Seeds stand for
all seeds that training could have had, questions for all questions of their kind, so that the interval speaks of other
seeds *and* other questions. In a table without gaps the mean squares of the analysis of variance say all that there is
to know (Searle, Casella and McCulloch 1992, "Variance Components", chapter 4). The variance of the mean is that of the
means of seeds, plus what questions add to it. Each of the two has a half width of its own, with the quantile of its own
degrees of freedom, and the half width is the root of the sum of their squares (Howe 1974, "Approximate confidence
limits on the mean of X + Y", Journal of the American Statistical Association 69). It is exact where questions add
nothing, and where all is due to questions; between them it is somewhat too wide. The means of simulated tables (2 to 8
seeds, 64 to 2048 questions, any variances) are held by 0.95 to 0.975, with 2 seeds up to 0.99 where questions differ
much.

Tried and left: Satterthwaite's degrees of freedom (1946, Biometrics Bulletin 2) with negative components counted as 0,
which hold 0.98 where seeds differ little, 0.92 where seeds and questions differ much, and with 2 seeds 0.87; the same
without counting them as 0 (down to 0.92, or 0.87), the rest as the least that the mean square of seeds can be (0.99),
generalized intervals (Weerahandi 1993; 0.99 where the rest is that least), and seeds that count only as far as they are
seen to differ (0.91, or 0.86). That seeds differ little cannot be seen with three of them, so an interval that is to
hold for all variances has to be the one of the t-test over seeds where questions add nothing.

Left out: tables with gaps (`pairs` takes the seeds and questions that both settings have).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import stdtrit

from rlx.analysis.statistics import LEVEL, resolution, share_of_look

Table = NDArray[np.float64]
_LEAST = -80.0  # the logarithm of a chance below which one counts as 0


class Spread(NamedTuple):
    """The variances of the effects; NaN for that of a single seed, or of a single question."""

    seed: float
    question: float
    rest: float  # of a seed on a question: what seeds change there, and what sampling does

    def of_mean(self, seeds: int, questions: int) -> Spread:
        """What each effect adds to the variance of the mean of a table of this size."""
        return Spread(self.seed / seeds, self.question / questions, self.rest / seeds / questions)


class Component(NamedTuple):
    """A part of the variance of a mean, and how well it is known; numbers, or arrays of many tables."""

    variance: Table | float
    degrees: int  # of freedom


class CrossedMean(NamedTuple):
    """A mean, half the width of its 95 % interval, and what that is made of."""

    value: float
    half_width: float
    parts: Sequence[Component]
    spread: Spread

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval."""
        return self.value - self.half_width, self.value + self.half_width

    @property
    def error(self) -> float:
        """The standard error."""
        return math.sqrt(sum(float(part.variance) for part in self.parts))

    @property
    def chance(self) -> float:
        """The chance of a mean that is as far from 0, on either side, if the true one is 0: one minus the level of the
        interval that just reaches 0; 1 if all values are 0."""
        if math.isnan(self.half_width) or not self.value:
            return math.nan if math.isnan(self.half_width) else 1.0

        def beyond(log_chance: float) -> float:
            return float(half_width(self.parts, math.exp(log_chance))) - abs(self.value)

        return math.exp(brentq(beyond, _LEAST, 0.0, xtol=1e-9)) if beyond(_LEAST) > 0 else 0.0


def after_looks(found: CrossedMean, looks: int) -> tuple[CrossedMean, float]:
    """A mean, and its chance, that was looked at so often until it seemed to differ from 0: with a wider interval and a
    larger chance."""
    share = share_of_look(looks)
    wide = found._replace(half_width=float(half_width(found.parts, share * (1 - LEVEL))))
    return wide, min(1.0, found.chance / share)  # NaN stays


def crossed_mean(table: Table, step: float = 0.0) -> CrossedMean:
    """The mean of a table, [seeds, questions].

    With one seed the interval speaks of other questions alone: of these runs, not of the setting. With one question,
    such as the mean over all of them, it speaks of other seeds alone. With one of each there is no interval (NaN).

    Args:
        step: what the values are rounded to, where more is known of it than the table tells: in one whose values are
            all equal nothing is seen of it. Unset: the smallest difference between two values of the table, or 0 if it
            has one seed or one question.
    """
    if 1 in table.shape:
        return _mean_of_one(table, step)
    seeds, questions = table.shape
    mean = float(table.mean())
    by_seed, by_question = table.mean(axis=1), table.mean(axis=0)
    of_questions = seeds * float(np.sum((by_question - mean) ** 2)) / (questions - 1)
    of_seeds = questions * float(np.sum((by_seed - mean) ** 2)) / (seeds - 1)
    rest = float(np.sum((table - by_seed[:, None] - by_question + mean) ** 2)) / ((seeds - 1) * (questions - 1))
    spread = Spread(max(0.0, (of_seeds - rest) / questions), max(0.0, (of_questions - rest) / seeds), rest)
    squares = [square / table.size for square in (of_seeds, of_questions, rest)]
    rounding = ((step or resolution(table)) / max(table.shape)) ** 2 / 12 / min(table.shape)
    return _estimate(mean, parts_of_mean(squares, (seeds - 1, questions - 1), rounding), spread)


def _mean_of_one(table: Table, step: float) -> CrossedMean:
    """The mean over a single seed or question: that of the t-test.

    Means over all questions can be equal by luck, so what they are rounded to is added to their variance. Single
    questions are many, and their variance has it already, unless all have the same value.
    """
    seeds, _ = table.shape
    variance, rounding = float(table.var(ddof=1)) if table.size > 1 else math.nan, step**2 / 12
    spread = Spread(math.nan, variance, 0.0) if seeds == 1 else Spread(variance, math.nan, 0.0)
    of_value = max(variance, rounding) if seeds == 1 else variance + rounding
    return _estimate(float(table.mean()), [Component(of_value / table.size, max(1, table.size - 1))], spread)


def parts_of_mean(squares: Sequence[Table | float], degrees: tuple[int, int], rounding: float = 0.0) -> list[Component]:
    """The parts of the variance of a table's mean: what has fewer degrees of seeds and questions as it is, the other
    without the rest, which is in both; not below 0.

    Args:
        squares: the mean squares of seeds, of questions, and of the rest, each divided by the number of values;
            numbers, or arrays of many tables.
        degrees: of freedom of seeds and of questions.
        rounding: the variance of the mean that is due to rounding. Shares of right answers can be equal by luck, and
            would prove anything: of equal settings with 2 seeds and 64 questions, 3 % at a level of 0.001.
    """
    of_seeds, of_questions, rest = squares
    few, many = Component(of_seeds, degrees[0]), Component(of_questions, degrees[1])
    if few.degrees > many.degrees:
        few, many = many, few
    return [
        Component(few.variance + rounding, few.degrees),
        Component(np.maximum(0.0, many.variance - rest), many.degrees),
    ]


def half_width(parts: Sequence[Component], chance: float = 1 - LEVEL) -> Table:
    """Half the width of the interval that leaves out the true mean with such a chance (Howe 1974)."""
    return np.sqrt(sum(stdtrit(part.degrees, chance / 2) ** 2 * part.variance for part in parts))


def _estimate(mean: float, parts: Sequence[Component], spread: Spread) -> CrossedMean:
    return CrossedMean(mean, float(half_width(parts)), parts, spread)


def sampling_variance(shares: Table, samples: int) -> float:
    """The part of the rest that is due to sampling: the mean over shares of right answers, [seeds, questions], of the
    variance that a share of so many samples has, p (1 - p) / (samples - 1) with the p that was seen; NaN for one."""
    if samples < 2:
        return math.nan
    return float(np.mean(shares * (1 - shares))) / (samples - 1)


def holm(chances: Sequence[float]) -> list[float]:
    """The chances of several comparisons, corrected so that the chance of any false difference stays below the level
    (Holm 1979, Scandinavian Journal of Statistics 6); one that is not known (NaN) stays so."""
    known = [index for index in np.argsort(chances, kind="stable") if not math.isnan(chances[index])]
    corrected, largest = [math.nan] * len(chances), 0.0
    for rank, index in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * chances[index]))
        corrected[index] = largest
    return corrected
