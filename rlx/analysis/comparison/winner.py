"""What the best setting is worth without the luck that made it look best.

Of many means the best was selected for its luck too, so it falls back when it is run again (the winner's curse). Here
each seed judges the setting that the *other* seeds find best: what it says of that one has no part in the selection,
and the mean over the seeds is what a fresh run of the winner gives, whatever the distribution of settings and runs.
In simulated sweeps (bench/racing.py) it is right to 0.002 on average where the best mean itself is too high by 0.04.
Tried and left: shrinking by a normal or an estimated prior of the settings, which is 0.02 off in either direction,
since a few settings of a sweep are often far behind all others.

Left out: intervals of differences (`pairs`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from rlx.analysis.comparison.crossed import Table
from rlx.analysis.statistics import LEVEL, Estimate


class Winner(NamedTuple):
    """The setting with the best mean."""

    setting: int  # its index
    seen: float  # its mean
    fresh: Estimate  # what a fresh run of the winner gives, with the 95 % interval of its mean over all seeds


def corrected_best(values: Table, sign: float = 1.0) -> Winner:
    """The best setting and its value without the luck of the selection.

    Args:
        values: [settings, seeds], at least one setting and two seeds.
        sign: -1 where low is good.
    """
    count, means = values.shape[1], values.mean(axis=1)
    best = int(np.argmax(sign * means))
    others = (values.sum(axis=1, keepdims=True) - values) / (count - 1)  # the mean over the other seeds
    rated = sign * np.round(others, 12)
    tied = rated == rated.max(axis=0)  # of several that are equally good, no order may choose one
    judged = (values * tied).sum(axis=0) / tied.sum(axis=0)
    error = max(float(judged.std(ddof=1)), float(values[best].std(ddof=1))) / math.sqrt(count)
    half_width = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * error
    return Winner(best, float(means[best]), Estimate(float(judged.mean()), half_width))
