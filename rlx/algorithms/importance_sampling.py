"""TODO rlx.algorithms.importance_sampling."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlx.algorithms.kl import MAX_LOG_RATIO, _unchanged
from rlx.algorithms.masking import apply_mask, lookup

# --- importance weights


def _none(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.ones_like(ratio)


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(max=high)


def _drop(ratio: Tensor, low: float, high: float) -> Tensor:
    return apply_mask(ratio, (ratio >= low) & (ratio <= high))


def _whole_response(log_ratio: Tensor) -> Tensor:
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


IMPORTANCE_WEIGHTS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": _none,
    "tis": _truncate,
    "mask": _drop,
}
IMPORTANCE_LEVELS: dict[str, Callable[[Tensor], Tensor]] = {"token": _unchanged, "sequence": _whole_response}


def importance_weights(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, kind: str, low: float, high: float, level: str = "token"
) -> Tensor:
    """Weight old / rollout of each token, which corrects for a sampler that differs from the trainer; detached.

    kind: `none` 1, `tis` the ratio truncated to at most `high` (`low` unused), `mask` the ratio inside [low, high] and
    0 outside. level: `token`, or `sequence` for the ratio of the whole response (the product over its masked-in
    tokens) on each of its tokens. Log-ratios are clamped to +-20; 1 where mask is 0. Raises ValueError for another
    kind or level. Sources: truncation: Ionides 2008, "Truncated Importance Sampling"; for LLMs: Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    weigh = lookup(IMPORTANCE_WEIGHTS, kind, "importance weight")
    spread = lookup(IMPORTANCE_LEVELS, level, "importance level")
    log_ratio = spread(apply_mask((old_logp - rollout_logp).detach(), mask))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(mask.bool(), weigh(ratio, low, high), 1.0)
