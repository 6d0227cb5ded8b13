"""The mean of a table of seeds and questions, its 95 % interval, and how much of its chance is due to which.

The model has crossed random effects: value = mean + seed + question + rest, all of them independent. Seeds stand for
all seeds that training could have had, questions for all questions of their kind, so that the interval speaks of other
seeds *and* other questions. In a table without gaps the mean squares of the analysis of variance say all that there is
to know (Searle, Casella and McCulloch 1992, "Variance Components", chapter 4), and Satterthwaite's degrees of freedom
keep the intervals honest with the two or three seeds that a sweep has (Satterthwaite 1946, Biometrics Bulletin 2). A
component that comes out negative counts as 0, which makes intervals rather too wide than too narrow.

Left out: tables with gaps (`pairs` takes the seeds and questions that both settings have).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from rlx.analysis.statistics import LEVEL

Table = NDArray[np.float64]


class Spread(NamedTuple):
    """The variances of the effects; NaN for that of a single seed, or of a single question."""

    seed: float
    question: float
    rest: float  # of a seed on a question: what seeds change there, and what sampling does

    def of_mean(self, seeds: int, questions: int) -> Spread:
        """What each adds to the variance of the mean of a table of this size."""
        return Spread(self.seed / seeds, self.question / questions, self.rest / seeds / questions)


class CrossedMean(NamedTuple):
    """A mean, half the width of its 95 % interval, and what that is made of."""

    value: float
    half_width: float
    error: float  # standard error
    degrees: float  # of freedom
    spread: Spread

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval."""
        return self.value - self.half_width, self.value + self.half_width

    @property
    def chance(self) -> float:
        """Of a mean that is as far from 0 if the true one is 0, on either side; 1 if all values are 0."""
        if not self.error:
            return 1.0 if not self.value else 0.0
        return 2.0 * float(stdtr(self.degrees, -abs(self.value) / self.error))


def crossed_mean(table: Table) -> CrossedMean:
    """The mean of a table, [seeds, questions].

    With one seed the interval speaks of other questions alone: of these runs, not of the setting. With one question,
    such as the mean over all of them, it speaks of other seeds alone. With one of each there is no interval (NaN).
    """
    seeds, questions = table.shape
    mean = float(table.mean())
    if 1 in table.shape:
        variance = float(table.var(ddof=1)) if table.size > 1 else math.nan
        spread = Spread(math.nan, variance, 0.0) if seeds == 1 else Spread(variance, math.nan, 0.0)
        return _estimate(mean, variance / table.size, max(1, table.size - 1), spread)
    by_seed, by_question = table.mean(axis=1), table.mean(axis=0)
    of_questions = seeds * float(np.sum((by_question - mean) ** 2)) / (questions - 1)
    of_seeds = questions * float(np.sum((by_seed - mean) ** 2)) / (seeds - 1)
    rest = float(np.sum((table - by_seed[:, None] - by_question + mean) ** 2)) / ((seeds - 1) * (questions - 1))
    spread = Spread(max(0.0, (of_seeds - rest) / questions), max(0.0, (of_questions - rest) / seeds), rest)
    squares = ((of_seeds, seeds - 1), (of_questions, questions - 1), (rest, (seeds - 1) * (questions - 1)))
    total = sum(spread.of_mean(seeds, questions)) * seeds * questions
    weight = sum(square**2 / degrees for square, degrees in squares)
    return _estimate(mean, total / (seeds * questions), total**2 / weight if weight else math.inf, spread)


def _estimate(mean: float, variance: float, degrees: float, spread: Spread) -> CrossedMean:
    quantile, error = float(stdtrit(degrees, (1 + LEVEL) / 2)), math.sqrt(variance)
    return CrossedMean(mean, quantile * error, error, degrees, spread)


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
