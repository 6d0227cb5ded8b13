"""Importance weights. They correct for tokens whose sampler has other weights than the trainer, or rounds differently.

Left out: the ratio of PPO itself (current / old policy), which is part of `losses.policy_loss`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlx.algorithms.kl import MAX_LOG_RATIO
from rlx.algorithms.masking import apply_mask, lookup


def _no_correction(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.ones_like(ratio)


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(max=high)


def _drop(ratio: Tensor, low: float, high: float) -> Tensor:
    return apply_mask(ratio, (ratio >= low) & (ratio <= high))


def _of_token(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _of_response(log_ratio: Tensor) -> Tensor:
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


IMPORTANCE_WEIGHTS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": _no_correction,
    "tis": _truncate,
    "mask": _drop,
}
IMPORTANCE_LEVELS: dict[str, Callable[[Tensor], Tensor]] = {"token": _of_token, "sequence": _of_response}


def importance_weights(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, kind: str, low: float, high: float, level: str = "token"
) -> Tensor:
    """Weight old / rollout of each token, for a sampler that differs from the trainer; detached, 1 where mask is 0.

    Log-ratios are clamped to +-20. Sources: truncation: Ionides 2008, "Truncated Importance Sampling"; for language
    models: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    Args:
        old_logp: of the trainer's policy before the update.
        rollout_logp: of the policy that sampled the tokens, as the engine reports them.
        kind: `none` is 1; `tis` is the ratio truncated to at most `high` (`low` is unused); `mask` is the ratio inside
            [low, high], and 0 outside.
        level: `token`, or `sequence`: the ratio of the whole response (the product over its tokens) on each of them.

    Raises:
        ValueError: unknown kind or level.
    """
    weigh = lookup(IMPORTANCE_WEIGHTS, kind, "importance weight")
    at_level = lookup(IMPORTANCE_LEVELS, level, "importance level")
    log_ratio = at_level(apply_mask((old_logp - rollout_logp).detach(), mask))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(mask.bool(), weigh(ratio, low, high), 1.0)
