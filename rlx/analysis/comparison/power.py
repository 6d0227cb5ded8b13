"""Which difference of two settings a number of seeds and questions can show, and what more of each would show and cost.

A difference is shown if its paired 95 % interval (`crossed`) leaves out 0. The smallest that four of five sweeps of
the same size would show is (t(0.975) + t(0.8)) x its standard error, with the degrees of freedom that Satterthwaite's
formula expects. Left out: corrections for many comparisons, which make a sweep show somewhat less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

from rlx.analysis.comparison.crossed import Spread
from rlx.analysis.statistics import LEVEL

POWER = 0.8
"""the share of sweeps that are to show a difference"""
ASSUMED = Spread(seed=0.02**2, question=0.1**2, rest=0.15)
"""how paired differences are assumed to vary where no sweep has told: by 0.02 from seed to seed (runs of the better
settings of the 12 x 3 sweep in experiments/LOG.md vary by 0.010 to 0.023 each), and as if two runs answered a seventh
of the questions differently by chance"""


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
    parts = spread.of_mean(seeds, questions)
    variance = sum(parts)
    squares = (  # expected mean squares / (seeds x questions), with their degrees of freedom
        (parts.seed + parts.rest, seeds - 1),
        (parts.question + parts.rest, max(1, questions - 1)),
        (parts.rest, (seeds - 1) * max(1, questions - 1)),
    )
    weight = sum(square**2 / degrees for square, degrees in squares)
    degrees = variance**2 / weight if weight else math.inf
    return float(stdtrit(degrees, (1 + LEVEL) / 2) + stdtrit(degrees, POWER)) * math.sqrt(variance)


def options(spread: Spread, seeds: int, questions: int) -> Sequence[Option]:
    """The plan itself, then more seeds, then more questions."""
    sizes = [(seeds, questions), (seeds + 2, questions), (2 * seeds + 2, questions), (seeds, 4 * questions)]
    return [
        Option(some, many, detectable(spread, some, many), some / seeds, some * many / (seeds * questions))
        for some, many in sizes
    ]
