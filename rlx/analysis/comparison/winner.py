"""What the best setting is worth without the luck that made it look best.

Of many means the best was selected for its luck too, so it falls back when it is run again (the winner's curse). Here
each seed judges the setting that the *other* seeds find best: what it says of that one has no part in the selection,
and the mean over the seeds is what a fresh run of the winner gives, whatever the distribution of settings and runs.
In simulated sweeps (bench/racing.py) it is right to 0.002 on average where the best mean itself is too high by 0.04.
Tried and left: shrinking by a normal or an estimated prior of the settings, which is 0.02 off in either direction,
since a few settings of a sweep are often far behind all others.

The luck, by which the best mean is higher, is right as the mean over sweeps; in a single one it is known no better than
the means themselves. So the interval of the corrected value is that of the winner's own mean, wider by the luck on both
sides: in simulated sweeps it holds the true value in 0.93 to 0.975 with 3 seeds and in 0.875 to 0.955 with 8, least
where all settings are equal. (The spread of what the seeds say, or the winner's own if it is larger: 0.81 to 0.93.)

The luck makes the winner seem further ahead of the others, too. It is off the low ends of their intervals (`pairs`),
not off the differences: these hold the true difference in 0.95 to 0.965 with 3 seeds, plain ones in 0.90 to 0.95; with
8 seeds in 0.925 to 0.955 (0.85 to 0.955). Tried and left, for these: differences and both ends without the luck (0.92
to 0.95 with 3 seeds, 0.89 to 0.955 with 8), the differences of the settings that the other seeds find best (0.90 to
0.95), the same with the larger of both errors (up to 0.98).

Left out: differences themselves (`pairs`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlx.analysis.comparison.crossed import Table, crossed_mean
from rlx.analysis.statistics import Estimate, resolution


class Winner(NamedTuple):
    """The candidate with the best mean."""

    candidate: int  # its index
    seen: float  # its mean
    fresh: Estimate  # its mean over all seeds, without the luck, and the 95 % interval of that; single runs vary more
    luck: float  # how far it seems better than that, never below 0: who is better on the other seeds is worse on this


def corrected_best(values: Table, sign: float) -> Winner:
    """The best candidate and its value without the luck of the selection.

    Args:
        values: [candidates, seeds], at least one candidate and two seeds.
        sign: -1 where low is good.
    """
    count, means = values.shape[1], values.mean(axis=1)
    best = int(np.argmax(sign * means))
    others = (values.sum(axis=1, keepdims=True) - values) / (count - 1)  # the mean over the other seeds
    rated = sign * np.round(others, 12)
    tied = rated == rated.max(axis=0)  # of several that are equally good, no order may choose one
    judged = (values * tied).sum(axis=0) / tied.sum(axis=0)
    luck = sign * float(means[best] - judged.mean())
    own = crossed_mean(values[best][:, None], resolution(values)).half_width
    return Winner(best, float(means[best]), Estimate(float(judged.mean()), own + luck), luck)
