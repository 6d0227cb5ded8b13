"""Which difference of two settings a number of seeds and questions can show, and what more of each would show and cost.

A difference is shown if its paired 95 % interval (`crossed`) leaves out 0. The smallest that four of five sweeps of
the same size would show is found with intervals that are drawn as such sweeps would have them: their width is known no
better than few seeds tell. Left out: corrections for many comparisons, which make a sweep show somewhat less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from rlx.analysis.comparison.crossed import Spread, half_width, parts_of_mean

POWER = 0.8
"""the share of sweeps that are to show a difference"""
ASSUMED = Spread(seed=0.02**2, question=0.1**2, rest=0.15)
"""how paired differences are assumed to vary where no sweep has told: by 0.02 from seed to seed (runs of the better
settings of the 12 x 3 sweep in experiments/LOG.md vary by 0.010 to 0.023 each), and as if two runs answered a seventh
of the questions differently by chance"""


_DRAWN = 20_000  # intervals: the difference is right to about 1 %


class Option(NamedTuple):
    """A number of seeds and questions, what it shows, and what it costs."""

    seeds: int
    questions: int
    shows: float  # the smallest difference
    training: float  # steps of training, of those of the first option
    answers: float  # to questions of an evaluation, of all runs, of those of the first option


def detectable(spread: Spread, seeds: int, questions: int) -> float:
    """The smallest difference that is shown with a chance of `POWER`; infinite for one seed, whose luck is not known.

    Args:
        spread: the variances of the differences of two settings by seed and question.
    """
    if seeds < 2:
        return math.inf
    deviation = math.sqrt(sum(spread.of_mean(seeds, questions)))
    if not deviation:
        return 0.0
    widths = _half_widths(spread, seeds, questions) / deviation

    def lacking(difference: float) -> float:
        """The chance that is lacking, for a difference in standard deviations."""
        return POWER - float(np.mean(ndtr(difference - widths) + ndtr(-difference - widths)))

    return deviation * brentq(lacking, 0.0, float(widths.max()) + 10.0, xtol=1e-6)


def _half_widths(spread: Spread, seeds: int, questions: int) -> np.ndarray:
    """Half widths of the intervals (`crossed.crossed_mean`) of so many sweeps, `[_DRAWN]`; always the same ones."""
    parts, generator = spread.of_mean(seeds, questions), np.random.default_rng(0)
    others = max(1, questions - 1)
    degrees = (seeds - 1, others, (seeds - 1) * others)
    expected = (parts.seed + parts.rest, parts.question + parts.rest, parts.rest)  # mean squares / (seeds x questions)
    squares = [
        square * generator.chisquare(free, _DRAWN) / free for square, free in zip(expected, degrees, strict=True)
    ]
    return half_width(parts_of_mean(squares, (seeds - 1, others)))


def options(spread: Spread, seeds: int, questions: int) -> Sequence[Option]:
    """The plan itself, then more seeds, then more questions."""
    sizes = [(seeds, questions), (seeds + 2, questions), (2 * seeds + 2, questions), (seeds, 4 * questions)]
    return [
        Option(some, many, detectable(spread, some, many), some / seeds, some * many / (seeds * questions))
        for some, many in sizes
    ]
