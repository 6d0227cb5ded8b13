"""Whether the numbers of a step are finite, so that weights which are none are neither sent nor saved.

Left out: numbers of rewards, which are checked where they are given (rlx.rewards).
"""

from __future__ import annotations

import math

from rlx.algorithms.masking import masked_sum
from rlx.models import fsdp
from rlx.training.experience import Experience
from rlx.training.stats import UpdateStats
from rlx.training.trainer import Trainer

_KL = "policy/approx_kl"


def check_finite(trainer: Trainer, batch: Experience, stats: UpdateStats) -> None:
    """Checks all numbers of an update at once. A wait for each would leave the GPU idle between optimizer steps.

    A collective call, between the optimizer steps of a step and the moment when their weights are sent.

    Args:
        batch: the experience of the step, with the values of the weights before it.

    Raises:
        FloatingPointError: a gradient norm, the weights or the log-probabilities of a pass are not finite; or those
            of the first pass, or the values, are not: the weights before the step were unusable already.
    """
    weight_norms = {name: fsdp.weight_norm(trainer.models[name].model) for name in stats.grad_norms}
    before = stats.first.sums.get(_KL, 0.0) + masked_sum(batch.values, batch.mask)
    sums = trainer.sum_over_ranks({"before": before, "passes": stats.losses.sums.get(_KL, 0.0)})
    if not math.isfinite(sums["before"]):
        raise FloatingPointError(
            f"step {trainer.step + 1}: the log-probabilities or values of the weights before it are not finite; these "
            "weights are unusable, and so are checkpoints of them: `rlx checkpoints RUN` lists earlier ones, and `rlx "
            "train --from RUN@STEP --checkpoint.init-state all` goes on from one; a lower learning rate may help"
        )
    found = {f"a gradient norm of the {name}": norm for name, norm in stats.grad_norms.items()}
    found |= {f"the norm of the weights of the {name}": norm for name, norm in weight_norms.items()}
    found |= {"the KL of the policy": sums["passes"]}
    for what, number in found.items():
        if not math.isfinite(number):
            raise FloatingPointError(
                f"step {trainer.step + 1}: {what} is not finite; its weights are unusable, and neither sent nor "
                "saved; a lower learning rate may help"
            )
