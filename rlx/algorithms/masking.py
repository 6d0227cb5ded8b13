"""Sums, moments and whitening over masked tensors, and the look-up of a choice by its name.

The modules of this package build on these functions. Left out: reducing sums over ranks, which is the caller's task.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

_EPSILON = 1e-8  # added to the variance in whitening, as TRL does
_ROUNDING = torch.finfo(torch.float32).eps ** 2  # a variance below this share of the mean square is rounding error

Choice = TypeVar("Choice")


def lookup(choices: Mapping[str, Choice], kind: str, what: str) -> Choice:
    """Returns `choices[kind]`; `what` names the choice in the error.

    Raises:
        ValueError: `kind` is not among the choices.
    """
    if kind not in choices:
        raise ValueError(f"unknown {what} {kind!r}: choose one of {', '.join(choices)}")
    return choices[kind]


def apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Returns x where the mask is 1, and 0 elsewhere; shapes broadcast.

    A product with the mask would keep nan, and would turn inf into nan.
    """
    return torch.where(mask.bool(), x, 0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the tokens where the mask is 1; a scalar."""
    return apply_mask(x, mask).sum()


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over the tokens where the mask is 1: `[3]`, float64, detached.

    The moments of several ranks or micro-batches add up to the moments of all their tokens. A variance computed from
    them has a relative error near 1e-16 * (mean / std)^2: harmless in float64 up to |mean| = 1e5 std. Beyond it,
    subtract a constant from x first, the same on every rank; neither whitening nor explained variance depends on it.
    """
    inside = apply_mask(x.detach().double(), mask)
    return torch.stack([mask.bool().sum().double(), inside.sum(), inside.square().sum()])


def mean_variance(total: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, two scalars, from moments `[3]`; both 0 without tokens, variance 0 for one token."""
    count, first, second = total.unbind()
    mean = first / count.clamp(min=1)
    return mean, (second - first * mean).clamp(min=0) / (count - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) where the mask is 1, and 0 elsewhere; in the dtype of x.

    The variance is unbiased (n - 1), and 0 for fewer than two tokens. Source: masked_whiten of TRL.

    Args:
        total: `[3]`, the sum of `moments(x, mask)` over all tensors that are whitened together (the global batch).
    """
    mean, variance = mean_variance(total)
    whitened = (x.double() - mean) * torch.rsqrt(variance + _EPSILON)
    return apply_mask(whitened, mask).to(x.dtype)


def explained_variance(residual_moments: Tensor, return_moments: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns), a scalar: 1 for a perfect critic, 0 for one no better than a constant.

    Takes the (all-reduced) `moments`, `[3]` each, of `returns - values` and of `returns`. The result is 0 where the
    returns vary by no more than float32 rounding, because the quotient would be rounding error.
    """
    unexplained = mean_variance(residual_moments)[1]
    variance = mean_variance(return_moments)[1]
    count, _, squares = return_moments.unbind()
    return torch.where(variance * count > _ROUNDING * squares, 1 - unexplained / variance, 0.0)
