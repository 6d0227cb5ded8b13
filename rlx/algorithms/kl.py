"""Estimates of the KL divergence between the policy and the reference, token by token.

KL(policy || reference) is called the reverse KL, KL(reference || policy) the forward one. Left out: where the KL goes
(into the rewards: `advantages.token_rewards`; into the loss: `losses.kl_loss`), and the coefficient that adapts
(`adaptive.AdaptiveKL`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlx.algorithms.masking import lookup

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) is 5e8, far outside any clip range, yet harmless in float32."""


def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio itself: unbiased, often negative."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square of the log-ratio: biased; the expectation of its gradient is the gradient of the KL."""
    return 0.5 * log_ratio.square()


def k3_unbounded(log_ratio: Tensor) -> Tensor:
    """exp(-log_ratio) - 1 + log_ratio: unbiased, never negative. Metrics report it; the penalty is `k3`."""
    # Bounded on the side where exp would overflow. expm1 keeps the digits that exp - 1 loses near 0.
    inverse = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(inverse) - inverse


MAX_K3 = 10.0
"""where `k3` ends"""


def k3(log_ratio: Tensor) -> Tensor:
    """`k3_unbounded` of at most 10, beyond which it has no gradient: at log-ratios below -2.6, or above 11.

    A token 10 nats below the reference would have a gradient of -exp(10), which takes the whole step after the norm is
    clipped. Source of the bound: veRL 0.9, OpenRLHF 0.11 and SkyRL 0.4, whose KL losses end at 10 as well.
    """
    return k3_unbounded(log_ratio).clamp(max=MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs}


def estimate_kl(log_ratio: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats, for tokens that the policy sampled.

    With d the log-ratio, logp - ref_logp: `k1` is d, `k2` is d^2 / 2, `k3` is exp(-d) - 1 + d and at most 10, `abs` is
    |d|. A `+` behind the name keeps the value and replaces the gradient by that of k2, whose expectation over tokens of
    the policy is the gradient of the KL (straight through); the expected gradient of k1 is 0, that of k3 is that of the
    forward KL, KL(reference || policy). Sources: http://joschu.net/blog/kl-approx.html; gradients: Tang & Munos
    2025 (arXiv 2506.09477).

    Raises:
        ValueError: unknown kind.
    """
    value = lookup(KL_ESTIMATORS, kind.removesuffix("+"), "KL estimator")(log_ratio)
    if not kind.endswith("+"):
        return value
    unbiased = k2(log_ratio)
    return value.detach() + (unbiased - unbiased.detach())  # the bracket is 0: the value does not change
