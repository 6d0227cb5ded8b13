"""Masked sums, moments, whitening and explained variance, by hand and over ranks."""

import math

import pytest
import torch
from by_hand import INF, NAN, close, f64, few, gradient
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlx.algorithms import masking


def test_masked_sum_ignores_what_the_mask_hides() -> None:
    x = f64([[1, NAN, 2], [INF, -INF, 6], [NAN, NAN, NAN]]).requires_grad_()
    mask = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0]])
    for same in (mask, mask.bool(), mask.float()):
        total = masking.masked_sum(x, same)
        close(total.detach(), 1 + 2 + 6.0)
        close(gradient(total, x), mask.double())


def test_moments_are_count_sum_and_sum_of_squares_in_float64() -> None:
    x = torch.tensor([[1, 2, NAN], [INF, -3, 0]], requires_grad=True)
    total = masking.moments(x, torch.tensor([[1, 1, 0], [0, 1, 1]]))
    close(total, [4, 1 + 2 - 3 + 0, 1 + 4 + 9 + 0])
    assert not total.requires_grad
    close(masking.moments(x, torch.zeros(2, 3)), [0, 0, 0])


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """A tensor whitened alone."""
    return masking.masked_whiten(x, mask, masking.moments(x, mask))


def test_whiten_by_hand() -> None:
    # mean (1 + 2 + 6) / 3 = 3; unbiased variance (4 + 1 + 9) / 2 = 7
    x, mask = f64([[1, NAN, 2], [6, INF, NAN]]), torch.tensor([[1, 0, 1], [1, 0, 0]])
    scale = 1 / math.sqrt(7 + 1e-8)
    close(whiten(x, mask), [[-2 * scale, 0, -1 * scale], [3 * scale, 0, 0]])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e5 + 0.1])  # the last one's variance rounds to below 0
def test_whiten_of_equal_values_is_zero(value: float) -> None:
    close(whiten(f64([[value] * 3]), torch.ones(1, 3)), [[0, 0, 0]], 1e-6)


@pytest.mark.parametrize("mask", [[[0, 0]], [[0, 1]]])
def test_whiten_of_no_token_or_one_is_zero(mask: list[list[int]]) -> None:
    close(whiten(f64([[NAN, 5]]), torch.tensor(mask)), [[0, 0]])


def test_whiten_of_one_local_token_uses_the_global_moments() -> None:
    # global values 5, 1, 3: mean 3, variance (4 + 4 + 0) / 2 = 4
    total = masking.moments(f64([[5, 1, 3]]), torch.ones(1, 3))
    close(masking.masked_whiten(f64([[5, NAN]]), torch.tensor([[1, 0]]), total), [[2 / math.sqrt(4 + 1e-8), 0]])


def test_moments_of_four_ranks_add_up_to_global_whitening() -> None:
    make = torch.Generator().manual_seed(1)
    x, mask = torch.randn(8, 6, generator=make, dtype=torch.float64) * 3 + 2, torch.ones(8, 6)
    mask[2:4] = 0  # rank 1 holds no response token at all
    mask[5, 3:] = 0
    ranks = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 8)]
    total = torch.stack([masking.moments(x[rank], mask[rank]) for rank in ranks]).sum(0)
    whitened = torch.cat([masking.masked_whiten(x[rank], mask[rank], total) for rank in ranks])

    tokens = x[mask.bool()]
    expected = torch.zeros_like(x)
    expected[mask.bool()] = (tokens - tokens.mean()) / torch.sqrt(tokens.var() + 1e-8)
    close(whitened, expected)
    close(whiten(x, mask), expected)


def test_whiten_keeps_a_small_spread_on_a_large_mean_and_the_dtype() -> None:
    # In float32 a sum of squares near 1e8 could not tell variance 1/4 * 1000 / 999 from 0.
    x = torch.tensor([[1e4 - 0.5, 1e4 + 0.5] * 500])
    whitened = whiten(x, torch.ones_like(x))
    expected = 0.5 / math.sqrt(0.25 * 1000 / 999 + 1e-8)
    close(whitened, torch.tensor([[-expected, expected] * 500]), 1e-6)  # assert_close compares dtypes, too


@few
@given(st.integers(0, 2**31), st.floats(-50, 50), st.floats(0.1, 20))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int, mean: float, std: float) -> None:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 9, generator=make, dtype=torch.float64) * std + mean
    mask = (torch.rand(4, 9, generator=make) < 0.6).long()
    mask[0] = 1
    tokens = whiten(x, mask)[mask.bool()]
    close(tokens.mean(), 0.0, 1e-6)
    close(tokens.var(), 1.0, 1e-5)  # 1e-8 on a variance of about 1e-2, and not 1e-6


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    mask = torch.ones_like(returns)
    return masking.explained_variance(masking.moments(returns - values, mask), masking.moments(returns, mask))


def test_explained_variance_by_hand() -> None:
    returns = f64([[1, 2, 3, 6]])  # mean 3, squares 4 + 1 + 0 + 9 = 14
    close(explained_variance(returns, returns), 1.0)
    close(explained_variance(returns - 10, returns), 1.0)  # a constant offset is no variance
    close(explained_variance(torch.full_like(returns, 9), returns), 0.0)
    # residuals 0, 1, 0, -1: mean 0, squares 2
    close(explained_variance(f64([[1, 1, 3, 7]]), returns), 1 - 2 / 14)
    close(explained_variance(-returns, returns), 1 - 4.0)  # residual 2R: worse than a constant


def test_explained_variance_sees_a_small_spread_of_many_returns() -> None:
    returns = f64([[1e3, 1e3 + 1e-3] * 500])
    close(explained_variance(returns, returns), 1.0)


@pytest.mark.parametrize("returns", [[[0.0] * 99], [[0.1] * 99], [[7.0]], [[]]])
def test_explained_variance_of_returns_that_do_not_vary_is_zero(returns: list[list[float]]) -> None:
    constant = f64(returns)
    close(explained_variance(torch.arange(constant.numel()).double().reshape(1, -1), constant), 0.0)
