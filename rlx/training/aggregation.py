"""How the numbers of all ranks become one: the kinds of metrics, and their reduction in two collective calls.

Left out: which metrics there are (metrics.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric

from rlx.algorithms import masking
from rlx.mesh import Mesh
from rlx.training.trainer import Trainer

Updates = dict[str, tuple[Any, ...]]
"""by name: how a metric is aggregated (Mean, Ratio, ...), and this rank's values, as its `update` takes them"""

# A nan stays visible: torchmetrics would remove it by default. Weights cannot be given (torchmetrics 1.9 ignores them
# when it does not look for nan): the mean over tokens gets the tokens alone, that of sums over other sums is a Ratio.
Mean = functools.partial(MeanMetric, nan_strategy="disable")
Total = functools.partial(SumMetric, nan_strategy="disable")
Maximum = functools.partial(MaxMetric, nan_strategy="disable")


class _Minimum(MaxMetric):
    """The least of all values, kept as the largest of their negatives: minima travel with maxima."""

    def update(self, values: float | Tensor | Iterable[float]) -> None:
        """Adds values, of any shape."""
        super().update(-torch.as_tensor(values, dtype=torch.float64, device=self.device))

    def compute(self) -> Tensor:
        """A scalar."""
        return -super().compute()


Minimum = functools.partial(_Minimum, nan_strategy="disable")


class Ratio(Metric):
    """The sum of one quantity over the sum of another, of quantities that are summed already."""

    parts: Tensor  # [2]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("parts", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: float | Tensor, denominator: float | Tensor) -> None:
        """Adds to both; scalars."""
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self.device) for part in (numerator, denominator)]
        self.parts = self.parts + torch.stack(parts)

    def compute(self) -> Tensor:
        """A scalar."""
        return self.parts[0] / self.parts[1]


class Excess(Ratio):
    """The share of one quantity by which it exceeds another; 0 if it is less, which only the sums of all ranks tell."""

    def compute(self) -> Tensor:
        """A scalar."""
        return (1 - self.parts[1] / self.parts[0]).clamp(min=0)


class Deviation(Metric):
    """The standard deviation of all values: of all there are, not of a sample (n, not n - 1)."""

    moments: Tensor  # [3]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("moments", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor | Iterable[float]) -> None:
        """Adds values, of any shape."""
        x = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        self.moments = self.moments + masking.moments(x, torch.ones_like(x))

    def compute(self) -> Tensor:
        """A scalar."""
        count, total, squares = self.moments.unbind()
        mean = total / count
        return (squares / count - mean * mean).clamp(min=0).sqrt()


class EffectiveFraction(Deviation):
    """The effective share of n importance weights w: (sum w)^2 / (n sum w^2)."""

    def compute(self) -> Tensor:
        """A scalar."""
        count, total, squares = self.moments.unbind()
        return total * total / (count * squares)


class ExplainedVariance(Metric):
    """What a critic explains of the returns. That of torchmetrics gives 1 where all returns are equal; here it is 0."""

    residual: Tensor  # [3], moments
    returns: Tensor  # [3], moments

    def __init__(self) -> None:
        super().__init__()
        self.add_state("residual", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("returns", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        """Adds the tokens where the mask is 1, `[B, T]` each."""
        self.residual = self.residual + masking.moments(returns - values, mask)
        self.returns = self.returns + masking.moments(returns, mask)

    def compute(self) -> Tensor:
        """A scalar."""
        return masking.explained_variance(self.residual, self.returns)


def largest(mesh: Mesh, values: Tensor, count: int) -> float:
    """The `count`-th largest of all ranks' values, `[N]` float32 of at least 0; the same on every rank.

    If there are fewer, it is the smallest; inf if there are none. A collective call: four counts of 256 bins, digit by
    digit of the bits, which have the order of the numbers. So no rank needs the numbers of others.
    """
    bits, found = values.float().abs().view(torch.int32).long(), 0
    for shift in (24, 16, 8, 0):
        left = bits[bits >> shift + 8 == found]
        bins = mesh.all_reduce_sum(torch.bincount(left >> shift & 255, minlength=256)).flip(0)
        down_to = bins.cumsum(0)  # numbers with this digit or a larger one
        if not down_to[-1]:
            return math.inf
        count = min(count, int(down_to[-1]))
        place = int((down_to >= count).int().argmax())
        count -= int(down_to[place] - bins[place])
        found = found << 8 | 255 - place
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32))


def over_ranks(trainer: Trainer, updates: Updates) -> dict[str, float]:
    """The value of each metric over all ranks, the same bits on every rank; every rank calls it, with equal names.

    A `Ratio` to nothing is left out, and so is what would be computed of no values. Of neighbours, which have the same
    completions, only the first counts, but for a `Maximum`.
    """
    for name, (kind, *values) in updates.items():
        if name not in trainer.aggregates:
            trainer.aggregates[name] = kind().to(trainer.device)
            trainer.aggregates[name].set_dtype(torch.float64)
        trainer.aggregates[name].update(*values)
    metrics = {name: trainer.aggregates[name] for name in updates}
    states, result = reduced_states(trainer, metrics.values()), {}
    for name, metric in metrics.items():
        if _is_of_nothing(metric, states):
            metric.reset()
            continue
        # torchmetrics asks for the states of all ranks; the reduction of the only one in the list is itself.
        metric.dist_sync_fn = lambda state, group: [states[id(state)]]
        result[name] = float(metric.compute())
        metric.reset()
    return result


def _is_of_nothing(metric: Metric, states: Mapping[int, Tensor]) -> bool:
    """Whether a metric would divide by 0: by no values, or by a sum of nothing. `states`: those of `reduced_states`."""
    match metric:
        case Ratio():
            return not states[id(metric.parts)][1]
        case MeanMetric():
            return not states[id(metric.weight)]
        case Deviation():
            return not states[id(metric.moments)][0]
        case ExplainedVariance():
            return not states[id(metric.returns)][0]
    return False


def reduced_states(trainer: Trainer, metrics: Iterable[Metric]) -> dict[int, Tensor]:
    """The sum or maximum over ranks of each state of the metrics, by the id of the state; of any shape, on the CPU.

    torchmetrics by itself makes two or three calls for each state. Here all sums travel in one call and all maxima in
    another, so a step can afford dozens of metrics.
    """
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for metric in metrics:
        (maxima if isinstance(metric, MaxMetric) else sums).extend(metric.metric_state.values())
    reduced: dict[int, Tensor] = {}
    for states, reduce in ((sums, trainer.mesh.all_reduce_sum), (maxima, trainer.mesh.all_reduce_max)):
        if states:
            flat = reduce(torch.cat([state.flatten() for state in states])).cpu()
            parts = flat.split([state.numel() for state in states])
            reduced |= {id(state): part.view(state.shape) for state, part in zip(states, parts, strict=True)}
    return reduced
