"""TODO rlx.algorithms.masking."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

_EPSILON = 1e-8  # added to the variance in whitening, as TRL does
_ROUNDING = torch.finfo(torch.float32).eps ** 2  # below this share of the mean square a variance is rounding

Choice = TypeVar("Choice")


def lookup(choices: Mapping[str, Choice], kind: str, what: str) -> Choice:
    if kind not in choices:
        raise ValueError(f"unknown {what} {kind!r}: choose one of {', '.join(choices)}")
    return choices[kind]


# --- masks and moments


def apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is 1, zero elsewhere. A product with the mask would keep nan, and would make nan of inf."""
    return torch.where(mask.bool(), x, 0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the masked-in tokens; a scalar."""
    return apply_mask(x, mask).sum()


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over the masked-in tokens: [3], float64, detached.

    The moments of several ranks or micro-batches add up to those of the whole. A variance taken from them has a
    relative error near 1e-16 * (mean / std)^2: in float64 that is harmless up to |mean| = 1e5 std. Beyond it subtract
    a constant from x first, the same on every rank; neither whitening nor explained variance depends on it.
    """
    kept = apply_mask(x.detach().double(), mask)
    return torch.stack([mask.bool().sum().double(), kept.sum(), kept.square().sum()])


def mean_variance(total: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance from moments; both 0 for no token, variance 0 for one."""
    count, first, second = total.unbind()
    mean = first / count.clamp(min=1)
    return mean, (second - first * mean).clamp(min=0) / (count - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, total: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) on masked-in tokens, zero elsewhere; in x's dtype.

    `total` is the sum of `moments(x, mask)` over everything that is whitened together (the global batch); without it
    this x is the whole. The variance is unbiased (n - 1), and 0 for fewer than two tokens. `shift_mean=False` adds
    the mean back. Source: masked_whiten of TRL.
    """
    mean, variance = mean_variance(moments(x, mask) if total is None else total)
    whitened = (x.double() - mean) * torch.rsqrt(variance + _EPSILON)
    return apply_mask(whitened if shift_mean else whitened + mean, mask).to(x.dtype)


def explained_variance(residual_moments: Tensor, return_moments: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one no better than a constant; a scalar.

    Takes the (all-reduced) `moments` of `returns - values` and of `returns`. Where the returns vary by no more than
    float32 rounding the quotient means nothing, and the answer is 0.
    """
    unexplained = mean_variance(residual_moments)[1]
    variance = mean_variance(return_moments)[1]
    count, _, squares = return_moments.unbind()
    return torch.where(variance * count > _ROUNDING * squares, 1 - unexplained / variance, 0.0)
