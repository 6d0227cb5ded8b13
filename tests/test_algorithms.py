"""rlx.algorithms against numbers worked out by hand, and against the properties that training relies on."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlx import algorithms as alg

NAN, INF = math.nan, math.inf
few = settings(max_examples=40, deadline=None)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: Any, tolerance: float = 1e-9) -> None:
    expected = expected if isinstance(expected, Tensor) else f64(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def random_batch(seed: int, rows: int = 6, length: int = 5) -> dict[str, Any]:
    """Arguments of policy_loss, ratios spread over both sides of the clip range; row 0 has no response token."""
    make = torch.Generator().manual_seed(seed)
    logp, noise, advantages = torch.randn(3, rows, length, generator=make, dtype=torch.float64).unbind()
    mask = (torch.rand(rows, length, generator=make) < 0.7).long()
    mask[0], mask[1] = 0, 1
    weights = torch.rand(rows, length, generator=make, dtype=torch.float64)
    return {"logp": logp, "old_logp": logp + 0.4 * noise, "advantages": advantages, "mask": mask, "weights": weights}


# --- masks and moments


def test_masked_sum_and_mean_ignore_what_the_mask_hides() -> None:
    x, mask = f64([[1, NAN, 2], [INF, -INF, 6]]), torch.tensor([[1, 0, 1], [0, 0, 1]])
    close(alg.masked_sum(x, mask), 1 + 2 + 6.0)
    close(alg.masked_mean(x, mask.bool()), 9 / 3)


def test_masked_mean_of_nothing_is_zero() -> None:
    close(alg.masked_mean(f64([[NAN, 5]]), torch.zeros(1, 2)), 0.0)


def test_masked_mean_gradient_is_one_over_count_and_zero_where_masked() -> None:
    x = f64([[3, NAN, 7, 1]]).requires_grad_()
    close(gradient(alg.masked_mean(x, torch.tensor([[1, 0, 1, 0]])), x), [[1 / 2, 0, 1 / 2, 0]])


def test_moments_are_count_sum_and_sum_of_squares_in_float64() -> None:
    x = torch.tensor([[1, 2, NAN], [INF, -3, 0]], requires_grad=True)
    total = alg.moments(x, torch.tensor([[1, 1, 0], [0, 1, 1]]))
    close(total, [4, 1 + 2 - 3 + 0, 1 + 4 + 9 + 0])
    assert not total.requires_grad


def test_whiten_by_hand() -> None:
    # mean (1 + 2 + 6) / 3 = 3; unbiased variance (4 + 1 + 9) / 2 = 7
    x, mask = f64([[1, NAN, 2], [6, INF, NAN]]), torch.tensor([[1, 0, 1], [1, 0, 0]])
    scale = 1 / math.sqrt(7 + 1e-8)
    close(alg.masked_whiten(x, mask), [[-2 * scale, 0, -1 * scale], [3 * scale, 0, 0]])
    close(alg.masked_whiten(x, mask, shift_mean=False), [[3 - 2 * scale, 0, 3 - 1 * scale], [3 + 3 * scale, 0, 0]])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e5 + 0.1])  # the last one's variance rounds to below 0
def test_whiten_of_equal_values_is_zero(value: float) -> None:
    close(alg.masked_whiten(f64([[value] * 3]), torch.ones(1, 3)), [[0, 0, 0]], 1e-6)


@pytest.mark.parametrize("mask", [[[0, 0]], [[0, 1]]])
def test_whiten_of_no_token_or_one_is_zero(mask: list[list[int]]) -> None:
    close(alg.masked_whiten(f64([[NAN, 5]]), torch.tensor(mask)), [[0, 0]])


def test_whiten_of_one_local_token_uses_the_global_moments() -> None:
    # global values 5, 1, 3: mean 3, variance (4 + 4 + 0) / 2 = 4
    total = alg.moments(f64([[5, 1, 3]]), torch.ones(1, 3))
    close(alg.masked_whiten(f64([[5, NAN]]), torch.tensor([[1, 0]]), total=total), [[2 / math.sqrt(4 + 1e-8), 0]])


def test_moments_of_four_ranks_add_up_to_global_whitening() -> None:
    make = torch.Generator().manual_seed(1)
    x, mask = torch.randn(8, 6, generator=make, dtype=torch.float64) * 3 + 2, torch.ones(8, 6)
    mask[2:4] = 0  # rank 1 holds no response token at all
    mask[5, 3:] = 0
    ranks = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 8)]
    total = torch.stack([alg.moments(x[rank], mask[rank]) for rank in ranks]).sum(0)
    whitened = torch.cat([alg.masked_whiten(x[rank], mask[rank], total=total) for rank in ranks])

    tokens = x[mask.bool()]
    expected = torch.zeros_like(x)
    expected[mask.bool()] = (tokens - tokens.mean()) / torch.sqrt(tokens.var() + 1e-8)
    close(whitened, expected)
    close(alg.masked_whiten(x, mask), expected)


def test_whiten_keeps_a_small_spread_on_a_large_mean_and_the_dtype() -> None:
    # In float32 a sum of squares near 1e8 could not tell variance 1/4 * 1000 / 999 from 0.
    x = torch.tensor([[1e4 - 0.5, 1e4 + 0.5] * 500])
    whitened = alg.masked_whiten(x, torch.ones_like(x))
    expected = 0.5 / math.sqrt(0.25 * 1000 / 999 + 1e-8)
    close(whitened, torch.tensor([[-expected, expected] * 500]), 1e-6)  # assert_close compares dtypes, too


@few
@given(st.integers(0, 2**31), st.floats(-50, 50), st.floats(0.1, 20))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int, mean: float, std: float) -> None:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 9, generator=make, dtype=torch.float64) * std + mean
    mask = (torch.rand(4, 9, generator=make) < 0.6).long()
    mask[0] = 1
    tokens = alg.masked_whiten(x, mask)[mask.bool()]
    close(tokens.mean(), 0.0, 1e-6)
    close(tokens.var(), 1.0, 1e-5)  # 1e-8 on a variance of about 1e-2, and not 1e-6


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    mask = torch.ones_like(returns)
    return alg.explained_variance(alg.moments(returns - values, mask), alg.moments(returns, mask))


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


# --- KL, rewards, advantages


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [math.log(2), -math.log(2), 0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0]),
        ("k3", [1 / 2 - 1 + math.log(2), 2 - 1 - math.log(2), 0]),  # ref/policy = 1/2, 2, 1
        ("abs", [math.log(2), math.log(2), 0]),
    ],
)
def test_kl_estimators_by_hand(kind: str, expected: list[float]) -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    close(alg.log_ratio_kl(f64([[half, quarter, half]]), f64([[quarter, half, half]]), kind), [expected])


def test_every_kl_estimator_is_tested() -> None:
    assert list(alg.KL_ESTIMATORS) == ["k1", "k2", "k3", "abs"]


def test_unknown_kl_kind_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'k4'.* k1, k2, k3, abs"):
        alg.log_ratio_kl(f64([[0]]), f64([[0]]), "k4")


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_are_unbiased(kind: str) -> None:
    p, q = f64([0.2, 0.5, 0.3]), f64([0.4, 0.4, 0.2])
    expected = 0.2 * math.log(0.2 / 0.4) + 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.2)
    close((p * alg.log_ratio_kl(p.log(), q.log(), kind)).sum(), expected)


def test_k3_keeps_its_digits_near_zero() -> None:
    # exp(-d) - 1 + d = d^2 / 2 - d^3 / 6 + d^4 / 24 - ...; the terms left out are below 1e-22
    d = 1e-4
    kl = alg.log_ratio_kl(f64([[d]]), f64([[0]]), "k3")
    assert kl.item() == pytest.approx(d**2 / 2 - d**3 / 6 + d**4 / 24, rel=1e-10, abs=0)


def test_k3_of_huge_log_ratios_is_finite() -> None:
    logp = torch.tensor([[1000.0, -1000.0]])
    # d = 1000: exp(-1000) - 1 + 1000; d = -1000: cut at exp(20) - 1 - 20
    close(alg.log_ratio_kl(logp, torch.zeros(1, 2), "k3"), torch.tensor([[999.0, math.exp(20) - 21]]), 1e-6)


@few
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.floats(-1, 1))
def test_k3_is_never_negative(logps: list[float], ref: float) -> None:
    logp = f64([logps])
    kl = alg.log_ratio_kl(logp, torch.full_like(logp, ref), "k3")
    assert (kl >= -1e-15).all()  # rounding
    assert (kl[(logp - ref).abs() > 1e-3] > 0).all()


def test_token_rewards_by_hand() -> None:
    kl = f64([[1, 2, 3, NAN], [4, NAN, 5, 6], [NAN, NAN, NAN, NAN], [NAN, 7, INF, NAN]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    expected = [[-0.1, -0.2, -0.3 + 10, 0], [-0.4, 0, -0.5, -0.6 - 20], [0, 0, 0, 0], [0, -0.7 + 1, 0, 0]]
    close(alg.token_rewards(f64([10, -20, NAN, 1]), kl, mask, 0.1), expected)


def test_token_rewards_clip_the_score_and_not_the_kl() -> None:
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    rewards = alg.token_rewards(f64([10, -20, 1]), torch.full((3, 2), 30.0).double(), mask, 0.5, score_clip=5)
    close(rewards, [[-15, -15 + 5], [-15, -15 - 5], [-15 + 1, 0]])


def test_gae_by_hand() -> None:
    # gamma = 1/2, lam = 1/2, so gamma * lam = 1/4
    # t=2: delta = 4 - 3 = 1;             A = 1
    # t=1: delta = 2 + 3/2 - 2 = 3/2;     A = 3/2 + 1/4 = 7/4
    # t=0: delta = 1 + 2/2 - 1 = 1;       A = 1 + 7/16 = 23/16
    advantages, returns = alg.gae(f64([[1, 2, 4]]), f64([[1, 2, 3]]), torch.ones(1, 3), 0.5, 0.5)
    close(advantages, [[23 / 16, 7 / 4, 1]])
    close(returns, [[1 + 23 / 16, 2 + 7 / 4, 3 + 1]])


def test_gae_skips_masked_tokens_wherever_they_are() -> None:
    # The tokens of the test above, with padding before, between and after them that holds anything.
    rewards = f64([[NAN, 1, 50, 2, NAN, 4, INF], [NAN, NAN, NAN, NAN, NAN, NAN, NAN], [9, 9, 9, 5, 9, 9, 9]])
    values = f64([[NAN, 1, NAN, 2, 60, 3, 70], [INF, INF, INF, INF, INF, INF, INF], [9, 9, 9, 2, 9, 9, 9]])
    mask = torch.tensor([[0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
    advantages, returns = alg.gae(rewards, values, mask, 0.5, 0.5)
    nothing = [0] * 7
    close(advantages, [[0, 23 / 16, 0, 7 / 4, 0, 1, 0], nothing, [0, 0, 0, 5 - 2, 0, 0, 0]])
    close(returns, [[0, 39 / 16, 0, 15 / 4, 0, 4, 0], nothing, [0, 0, 0, 5, 0, 0, 0]])


def test_gae_with_lam_zero_is_the_one_step_error() -> None:
    # 1 + 0.9 * 20 - 10 = 9; 2 + 0.9 * 30 - 20 = 9; 3 - 30 = -27
    close(alg.gae(f64([[1, 2, 3]]), f64([[10, 20, 30]]), torch.ones(1, 3), 0.9, 0.0)[0], [[9, 9, -27]])


def test_gae_is_detached() -> None:
    values = f64([[1, 2]]).requires_grad_()
    advantages, returns = alg.gae(f64([[1, 1]]), values, torch.ones(1, 2), 1.0, 1.0)
    assert not advantages.requires_grad and not returns.requires_grad


@few
@given(st.integers(0, 2**31))
def test_gae_without_discount_is_reward_to_go_minus_value(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 8, generator=make, dtype=torch.float64).unbind()
    mask = (torch.rand(3, 8, generator=make) < 0.6).double()
    advantages, returns = alg.gae(rewards, values, mask, 1.0, 1.0)
    to_go = torch.stack([(rewards * mask)[:, t:].sum(1) for t in range(8)], dim=1) * mask
    close(returns, to_go)
    close(advantages, to_go - values * mask)


# --- policy loss


def one_token_policy_loss(ratio: float, advantage: float, **options: Any) -> tuple[float, float, dict[str, Tensor]]:
    """Loss and d loss / d logp of one token with clip range [0.8, 1.3] and denominator 1, and the stats."""
    logp = f64([[math.log(ratio)]]).requires_grad_()
    loss, stats = alg.policy_loss(logp, f64([[0]]), f64([[advantage]]), torch.ones(1, 1), 1, 0.2, 0.3, **options)
    return loss.item(), gradient(loss, logp).item(), stats


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [  # d(-A r) / d logp = -A r; a clipped token has none
        (1.0, 2, -2.0, -2.0, 0),
        (1.2, 2, -2.4, -2.4, 0),  # inside the range
        (1.5, 2, -2.6, 0.0, 1),  # -2 * 1.3
        (0.5, 2, -1.0, -1.0, 0),  # the clipped term, -2 * 0.8, is the smaller one
        (1.5, -2, 3.0, 3.0, 0),  # the clipped term, 2 * 1.3, is the smaller one
        (0.5, -2, 1.6, 0.0, 1),  # 2 * 0.8
        (1.5, 0, 0.0, 0.0, 0),
    ],
)
def test_policy_loss_of_one_token(ratio: float, advantage: float, loss: float, slope: float, clipped: int) -> None:
    actual_loss, actual_slope, stats = one_token_policy_loss(ratio, advantage)
    assert actual_loss == pytest.approx(loss, abs=1e-9)
    assert actual_slope == pytest.approx(slope, abs=1e-9)
    close(stats["clip_fraction"], float(clipped))
    close(stats["ratio"], ratio)
    close(stats["approx_kl"], ratio - 1 - math.log(ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (5.0, -2, 6.0, 0.0),  # not above 2 * 3
        (2.0, -2, 4.0, 4.0),  # below it
        (0.5, -2, 1.6, 0.0),  # the ordinary clip, 2 * 0.8
        (5.0, 2, -2.6, 0.0),  # positive advantages are left alone: -2 * 1.3
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    actual_loss, actual_slope, _ = one_token_policy_loss(ratio, advantage, dual_clip=3.0)
    assert actual_loss == pytest.approx(loss, abs=1e-9)
    assert actual_slope == pytest.approx(slope, abs=1e-9)


def test_policy_loss_of_a_batch_by_hand() -> None:
    logp = f64([[math.log(1.5), NAN, math.log(0.5)], [math.log(1.1), math.log(2), -INF], [NAN, NAN, NAN]])
    old_logp = f64([[0, INF, 0], [0, 0, NAN], [NAN, NAN, NAN]])
    advantages = f64([[2, NAN, -2], [1, -1, INF], [NAN, NAN, NAN]])
    weights = f64([[0.5, NAN, 2], [1, 3, INF], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]])
    # per token: -2 * 1.2 = -2.4 (clipped), 2 * 0.8 = 1.6 (clipped), -1.1, 2
    loss, stats = alg.policy_loss(logp, old_logp, advantages, mask, 10, 0.2, 0.2)
    close(loss.detach(), (-2.4 + 1.6 - 1.1 + 2) / 10)
    close(stats["clip_fraction"], 2.0)
    close(stats["ratio"], 1.5 + 0.5 + 1.1 + 2)
    # the sum of (r - 1) - log r
    close(stats["approx_kl"], 0.5 - 0.5 + 0.1 + 1 - math.log(1.5 * 0.5 * 1.1 * 2))

    weighted, weighted_stats = alg.policy_loss(logp, old_logp, advantages, mask, 10, 0.2, 0.2, weights=weights)
    close(weighted, (0.5 * -2.4 + 2 * 1.6 - 1.1 + 3 * 2) / 10)
    assert weighted_stats == stats


def test_policy_loss_gradient_against_the_formula() -> None:
    # d loss / d logp = -A r w / denominator, but 0 on masked tokens and where the clipped term is the larger one
    batch = random_batch(seed=3)
    logp = batch.pop("logp").requires_grad_()
    loss, _ = alg.policy_loss(logp, **batch, denominator=17, clip_low=0.2, clip_high=0.3)
    ratio, advantages = (logp.detach() - batch["old_logp"]).exp(), batch["advantages"]
    clipped = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.8))
    assert 0 < clipped.sum() < clipped.numel()
    close(gradient(loss, logp), -advantages * ratio * batch["weights"] * batch["mask"] * ~clipped / 17)


def test_policy_loss_gradient_reaches_logp_only() -> None:
    tensors: dict[str, Any] = {
        name: f64([[0.5]]).requires_grad_() for name in ("logp", "old_logp", "advantages", "weights")
    }
    loss, stats = alg.policy_loss(**tensors, mask=torch.ones(1, 1), denominator=1, clip_low=0.2, clip_high=0.2)
    gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    assert [name for name, grad in zip(tensors, gradients, strict=True) if grad is not None] == ["logp"]
    assert not any(stat.requires_grad for stat in stats.values())


def test_policy_loss_gradient_is_zero_not_nan_where_masked() -> None:
    logp = f64([[0.0, NAN, INF], [NAN, -INF, 3]]).requires_grad_()
    loss, _ = alg.policy_loss(
        logp, f64([[0, NAN, INF], [1, 2, NAN]]), f64([[2, NAN, 1], [INF, 1, 1]]), torch.tensor([[1, 0, 0], [0, 0, 0]]),
        4, 0.2, 0.2, weights=f64([[1, INF, NAN], [NAN, 0, 1]]),
    )  # fmt: skip
    close(gradient(loss, logp), [[-2 / 4, 0, 0], [0, 0, 0]])


def test_policy_loss_without_response_tokens_is_zero_and_has_a_gradient() -> None:
    # A rank whose micro-batch is empty must still take part in the backward pass.
    logp = f64([[NAN, 1]]).requires_grad_()
    loss, stats = alg.policy_loss(logp, f64([[0, 0]]), f64([[1, 1]]), torch.zeros(1, 2), 8, 0.2, 0.2)
    close(loss.detach(), 0.0)
    close(gradient(loss, logp), [[0, 0]])
    close(torch.stack(list(stats.values())), [0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_loss_of_huge_log_ratios_is_finite(dtype: torch.dtype, dual_clip: float | None) -> None:
    logp = torch.tensor([[1000, -1000, 1000, -1000]], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([[1, 1, -1, -1]], dtype=dtype)
    loss, stats = alg.policy_loss(
        logp, torch.zeros(1, 4, dtype=dtype), advantages, torch.ones(1, 4), 4, 0.2, 0.2, dual_clip
    )
    # -1.2, -exp(-20), exp(20) or the dual clip, 0.8
    bound = math.exp(20) if dual_clip is None else dual_clip
    close(loss.detach(), torch.tensor((-1.2 - math.exp(-20) + bound + 0.8) / 4, dtype=dtype), 1e-6)
    close(gradient(loss, logp), torch.zeros(1, 4, dtype=dtype))
    # (r - 1) - log r: twice exp(20) - 1 - 20, twice exp(-20) - 1 + 20
    close(stats["approx_kl"], torch.tensor(2 * math.exp(20) + 2 * math.exp(-20) - 4, dtype=dtype), 1e-6)


@pytest.mark.parametrize("denominator", [0, -3])
def test_losses_refuse_a_step_without_tokens(denominator: float) -> None:
    one = f64([[1]])
    with pytest.raises(ValueError, match="denominator"):
        alg.policy_loss(one, one, one, one, denominator, 0.2, 0.2)
    with pytest.raises(ValueError, match="denominator"):
        alg.value_loss(one, one, one, one, denominator, None)


@few
@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), max_size=4), st.randoms(use_true_random=False))
def test_losses_do_not_depend_on_micro_batches_or_padding(seed: int, cuts: list[int], order: Any) -> None:
    batch = random_batch(seed)
    rows = list(range(6))
    order.shuffle(rows)
    edges = [0, *sorted(cuts), 6]
    tokens = float(batch["mask"].sum())

    def losses(part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        policy, stats = alg.policy_loss(**part, denominator=tokens, clip_low=0.2, clip_high=0.3, dual_clip=1.5)
        value, value_stats = alg.value_loss(
            part["logp"], part["old_logp"], part["advantages"], part["mask"], tokens, clip=0.2
        )
        return policy + value, {**stats, "value_clip_fraction": value_stats["clip_fraction"]}

    def padded(tensor: Tensor, chosen: list[int], width: int) -> Tensor:
        filler = NAN if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor[chosen], (0, width), value=filler)

    whole = batch["logp"].clone().requires_grad_()
    whole_loss, whole_stats = losses({**batch, "logp": whole})

    parts = batch["logp"].clone().requires_grad_()
    total, total_gradient, total_stats = f64(0), torch.zeros_like(parts), dict.fromkeys(whole_stats, f64(0))
    for width, (start, end) in enumerate(itertools.pairwise(edges)):
        loss, stats = losses({k: padded(v, rows[start:end], width) for k, v in {**batch, "logp": parts}.items()})
        total += loss.detach()
        total_gradient += gradient(loss, parts)
        total_stats = {name: total_stats[name] + stats[name] for name in total_stats}

    close(total, whole_loss.detach())
    close(total_gradient, gradient(whole_loss, whole))
    for name, stat in whole_stats.items():
        close(total_stats[name], stat)


# --- value loss


def test_value_loss_without_clip_by_hand() -> None:
    values = f64([[1, NAN, 4], [INF, 2, 0]]).requires_grad_()
    returns, old = f64([[3, 1, 3], [NAN, 2, NAN]]), f64([[NAN] * 3] * 2)
    loss, stats = alg.value_loss(values, old, returns, torch.tensor([[1, 0, 1], [0, 1, 0]]), 5, None)
    close(loss.detach(), 0.5 * (4 + 1 + 0) / 5)
    close(gradient(loss, values), [[-2 / 5, 0, 1 / 5], [0, 0, 0]])
    close(stats["clip_fraction"], 0.0)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [  # old value 0, return 2, clip 1: V' = clip(V, -1, 1)
        (0.5, 0.5 * 1.5**2, -1.5, 0),  # inside: V' = V
        (1.5, 0.5 * 1.0**2, 0.0, 1),  # (1 - 2)^2 > (1.5 - 2)^2
        (-3.0, 0.5 * 5.0**2, -5.0, 0),  # (-3 - 2)^2 > (-1 - 2)^2
        (4.0, 0.5 * 2.0**2, 2.0, 0),  # (4 - 2)^2 > (1 - 2)^2
    ],
)
def test_clipped_value_loss_of_one_token(value: float, loss: float, slope: float, clipped: int) -> None:
    values = f64([[value, NAN]]).requires_grad_()
    actual, stats = alg.value_loss(values, f64([[0, NAN]]), f64([[2, NAN]]), torch.tensor([[1, 0]]), 4, 1.0)
    close(actual.detach(), loss / 4)
    close(gradient(actual, values), [[slope / 4, 0]])
    close(stats["clip_fraction"], float(clipped))


def test_value_loss_does_not_count_rounding_as_clipping() -> None:
    # Every change is below the clip, but so much larger than the old value that old + (new - old) rounds.
    old, step = torch.rand(2, 100, 10, generator=torch.Generator().manual_seed(0)).unbind()
    old, new = 0.01 * old, 0.1 * step
    assert (old + (new - old) != new).any()
    _, stats = alg.value_loss(new, old, old + 0.05, torch.ones(100, 10), 1, 0.2)
    close(stats["clip_fraction"], torch.tensor(0.0))


def test_value_loss_gradient_reaches_values_only() -> None:
    values, old, returns = (f64([[x]]).requires_grad_() for x in (0.5, 0.4, 2.0))
    loss, _ = alg.value_loss(values, old, returns, torch.ones(1, 1), 1, 0.2)
    gradients = torch.autograd.grad(loss, [values, old, returns], allow_unused=True)
    assert [grad is not None for grad in gradients] == [True, False, False]


# --- importance weights

RATIOS = f64([[0.5, 1.5, 3.0, NAN], [0.25, NAN, 1.0, 2.0], [NAN, NAN, NAN, NAN]])
RATIO_MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [
        ("none", "token", [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]),
        ("none", "sequence", [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]),
        ("tis", "token", [[0.5, 1.5, 2, 1], [0.25, 1, 1, 2], [1, 1, 1, 1]]),
        ("mask", "token", [[0.5, 1.5, 0, 1], [0, 1, 1, 2], [1, 1, 1, 1]]),
        # whole responses: 0.5 * 1.5 * 3 = 2.25 and 0.25 * 1 * 2 = 0.5
        ("tis", "sequence", [[2, 2, 2, 1], [0.5, 1, 0.5, 0.5], [1, 1, 1, 1]]),
        ("mask", "sequence", [[0, 0, 0, 1], [0.5, 1, 0.5, 0.5], [1, 1, 1, 1]]),
    ],
)
def test_importance_weights_by_hand(kind: str, level: str, expected: list[list[float]]) -> None:
    old_logp = f64([[-1.0] * 4] * 3)
    rollout_logp = old_logp - RATIOS.log()
    high = 2 + 1e-12  # the ratio of 2 above comes out of exp and log
    close(alg.importance_weights(old_logp, rollout_logp, RATIO_MASK, kind, 0.4, high, level=level), expected)


def test_importance_weights_keep_ratios_on_the_bounds() -> None:
    zero = f64([[0, 0]])
    close(alg.importance_weights(zero, zero, torch.ones(1, 2), "mask", 1.0, 1.0), [[1, 1]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "expected"), [("tis", [2.0, math.exp(-20)]), ("mask", [0.0, 0.0])])
def test_importance_weights_of_huge_log_ratios(kind: str, level: str, expected: list[float]) -> None:
    weights = alg.importance_weights(f64([[1000], [-1000]]), f64([[0], [0]]), torch.ones(2, 1), kind, 0.5, 2.0, level)
    close(weights, f64(expected)[:, None], 1e-12)


def test_importance_weights_are_detached() -> None:
    old_logp = f64([[0.1]]).requires_grad_()
    for kind in alg.IMPORTANCE_WEIGHTS:
        assert not alg.importance_weights(old_logp, f64([[0]]), torch.ones(1, 1), kind, 0.5, 2.0).requires_grad


def test_unknown_importance_kind_or_level_names_the_choices() -> None:
    zero = f64([[0]])
    with pytest.raises(ValueError, match=r"'clip'.* none, tis, mask"):
        alg.importance_weights(zero, zero, zero, "clip", 0.5, 2.0)
    with pytest.raises(ValueError, match=r"'word'.* token, sequence"):
        alg.importance_weights(zero, zero, zero, "tis", 0.5, 2.0, level="word")


# --- controllers and schedules


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.6, 1 + 0.1 * 256 / 1000),  # 6.6 / 6 - 1 = 0.1
        (6.0, 1.0),
        (60.0, 1 + 0.2 * 256 / 1000),  # 9, clipped to 0.2
        (0.0, 1 - 0.2 * 256 / 1000),  # -1, clipped to -0.2
    ],
)
def test_adaptive_kl_by_hand(kl: float, factor: float) -> None:
    control = alg.AdaptiveKL(init=0.05, target=6.0, horizon=1000)
    assert control.coef == 0.05
    control.update(kl, 256)
    assert control.coef == pytest.approx(0.05 * factor, rel=1e-12)
    control.update(kl, 256)
    assert control.coef == pytest.approx(0.05 * factor**2, rel=1e-12)


def test_adaptive_kl_without_target_is_fixed() -> None:
    control = alg.AdaptiveKL(init=0.05, target=None, horizon=10)
    control.update(100.0, 10_000)
    assert control.coef == 0.05


def test_adaptive_kl_refuses_a_horizon_that_could_turn_the_sign() -> None:
    control = alg.AdaptiveKL(init=0.05, target=6.0, horizon=100)
    control.update(0.0, 499)
    assert control.coef == pytest.approx(0.05 * (1 - 0.2 * 4.99), rel=1e-9)
    with pytest.raises(ValueError, match="horizon"):
        control.update(0.0, 500)


def test_adaptive_kl_continues_from_its_state() -> None:
    control = alg.AdaptiveKL(init=0.05, target=6.0, horizon=1000)
    control.update(9.0, 100)
    resumed = alg.AdaptiveKL(init=0.7, target=6.0, horizon=1000)
    resumed.load_state_dict(control.state_dict())
    assert resumed == control
    control.update(5.5, 100)
    resumed.update(5.5, 100)
    assert resumed.coef == control.coef != 0.05


@pytest.mark.parametrize(
    ("kind", "expected"),
    [  # 4 steps of warm-up, then 8 steps: progress 0, 1/8, ..., 1, and beyond the end
        ("constant", {0: 1 / 4, 3: 1, 4: 1, 8: 1, 12: 1, 99: 1}),
        ("linear", {0: 1 / 4, 2: 3 / 4, 3: 1, 4: 1, 5: 7 / 8, 8: 1 / 2, 11: 1 / 8, 12: 0, 99: 0}),
        # (1 + cos(pi / 4)) / 2 at progress 1/4, where cos is sqrt(1/2)
        ("cosine", {1: 2 / 4, 4: 1, 6: (1 + math.sqrt(0.5)) / 2, 8: 1 / 2, 10: (1 - math.sqrt(0.5)) / 2, 12: 0, 99: 0}),
    ],
)
def test_lr_scale_by_hand(kind: str, expected: dict[int, float]) -> None:
    assert {step: alg.lr_scale(step, 4, 12, kind) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_lr_scale_without_warmup_starts_at_one() -> None:
    assert [alg.lr_scale(step, 0, 2, "linear") for step in range(3)] == [1, 1 / 2, 0]


def test_lr_scale_with_nothing_but_warmup() -> None:
    assert [alg.lr_scale(step, 2, 2, "cosine") for step in range(4)] == pytest.approx([1 / 2, 1, 1, 0])


def test_unknown_lr_schedule_is_refused_even_during_warmup() -> None:
    with pytest.raises(ValueError, match=r"'step'.* constant, linear, cosine"):
        alg.lr_scale(0, 10, 100, "step")
