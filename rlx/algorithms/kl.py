"""TODO rlx.algorithms.kl."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlx.algorithms.masking import lookup

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside any clip range, yet harmless in float32


# --- KL, rewards, advantages


def _unchanged(log_ratio: Tensor) -> Tensor:
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # Bounded on the side where exp would overflow; expm1 keeps the digits that exp - 1 loses near 0.
    inverse = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(inverse) - inverse


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _unchanged, "k2": k2, "k3": _k3, "abs": torch.abs}


def kl_of(log_ratio: Tensor, kind: str) -> Tensor:
    value = lookup(KL_ESTIMATORS, kind.removesuffix("+"), "KL estimator")(log_ratio)
    if not kind.endswith("+"):
        return value
    unbiased = k2(log_ratio)
    return value.detach() + (unbiased - unbiased.detach())  # the bracket is 0: the value stays as it is


def log_ratio_kl(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats, for tokens that the policy sampled.

    With d = logp - ref_logp: `k1` d, `k2` d^2 / 2, `k3` exp(-d) - 1 + d (never negative; -d is cut at 20 so that it
    stays finite), `abs` |d|. With a `+` after it the value is that of the estimator and the gradient that of k2, whose
    expectation is the gradient of the KL (straight through): k1's is 0, k3's that of the reverse KL. Raises ValueError
    for another kind. Sources: http://joschu.net/blog/kl-approx.html; gradients: Tang & Munos 2025 (arXiv 2506.09477).
    """
    return kl_of(logp - ref_logp, kind)
