"""The sums that an update counts on one rank. Left out: the metrics that all ranks' sums give (metrics)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Sums = dict[str, float | Tensor]
"""statistics of this rank by name, those that apply to the step; summed over ranks before anything is divided"""


@dataclass
class LossStats:
    """The losses of some passes on this rank, by metric name; no entry for a model that did not learn."""

    sums: Sums = field(default_factory=dict)  # shares of losses; all else is summed over tokens
    tokens: float | Tensor = 0.0  # that the losses counted

    def add(self, more: LossStats) -> None:
        """Adds the losses of further passes."""
        add_sums(self.sums, more.sums)
        self.tokens = self.tokens + more.tokens


@dataclass
class UpdateStats:
    """What the update of a step has done on this rank."""

    losses: LossStats = field(default_factory=LossStats)  # of all passes
    first: LossStats = field(default_factory=LossStats)  # of the pass before the first optimizer step
    grad_norms: Sums = field(default_factory=dict)  # before clipping, by model; summed over optimizer steps
    passes: int = 0  # over a mini-batch each
    optimizer_steps: int = 0
    positions: int = 0  # of the rows of an epoch, padding included

    @property
    def policy_learned(self) -> bool:
        """False while the critic warms up."""
        return "policy" in self.grad_norms


def add_sums(sums: Sums, more: Mapping[str, float | Tensor]) -> None:
    """Adds numbers to the sums of the same names."""
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def check_finite(step: int, before: float, numbers: Mapping[str, float | Tensor]) -> None:
    """Checks numbers of an update before its weights are sent.

    Args:
        before: a sum, a scalar, of what the weights before the update gave: log-probabilities and values.
        numbers: scalars of the update by what they are, in words.

    Raises:
        FloatingPointError: one of them is not finite. The weights are unusable then, and are neither sent nor saved;
            but those from before the update were.
    """
    if not math.isfinite(before):
        raise FloatingPointError(
            f"step {step}: the log-probabilities or values of the weights before it are not finite; these weights are "
            "unusable, and so are checkpoints of them: `rlx checkpoints RUN` lists earlier ones, and `rlx train "
            "--from RUN@STEP --checkpoint.init-state all` goes on from one; a lower learning rate may help"
        )
    for what, number in numbers.items():
        if not math.isfinite(number):
            raise FloatingPointError(
                f"step {step}: {what} is not finite; its weights are unusable, and neither sent nor saved; a lower "
                "learning rate may help"
            )
