"""rlx.algorithms against numbers worked out by hand, and against the properties that training relies on."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlx.algorithms import advantages, kl, losses, masking
from rlx.algorithms.advantages import ADVANTAGES, AdvantageInputs, AdvantageSettings, estimate_advantages, gae
from rlx.algorithms.importance_sampling import IMPORTANCE_LEVELS, IMPORTANCE_WEIGHTS, importance_weights
from rlx.algorithms.kl import log_ratio_kl
from rlx.algorithms.losses import (
    PolicyLossSettings,
    entropy_loss,
    kl_loss,
    policy_loss,
    supervised_loss,
    token_weights,
    value_loss,
)
from rlx.config.algorithm import ESTIMATORS

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


def test_whiten_by_hand() -> None:
    # mean (1 + 2 + 6) / 3 = 3; unbiased variance (4 + 1 + 9) / 2 = 7
    x, mask = f64([[1, NAN, 2], [6, INF, NAN]]), torch.tensor([[1, 0, 1], [1, 0, 0]])
    scale = 1 / math.sqrt(7 + 1e-8)
    close(masking.masked_whiten(x, mask), [[-2 * scale, 0, -1 * scale], [3 * scale, 0, 0]])
    close(masking.masked_whiten(x, mask, shift_mean=False), [[3 - 2 * scale, 0, 3 - 1 * scale], [3 + 3 * scale, 0, 0]])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e5 + 0.1])  # the last one's variance rounds to below 0
def test_whiten_of_equal_values_is_zero(value: float) -> None:
    close(masking.masked_whiten(f64([[value] * 3]), torch.ones(1, 3)), [[0, 0, 0]], 1e-6)


@pytest.mark.parametrize("mask", [[[0, 0]], [[0, 1]]])
def test_whiten_of_no_token_or_one_is_zero(mask: list[list[int]]) -> None:
    close(masking.masked_whiten(f64([[NAN, 5]]), torch.tensor(mask)), [[0, 0]])


def test_whiten_of_one_local_token_uses_the_global_moments() -> None:
    # global values 5, 1, 3: mean 3, variance (4 + 4 + 0) / 2 = 4
    total = masking.moments(f64([[5, 1, 3]]), torch.ones(1, 3))
    close(masking.masked_whiten(f64([[5, NAN]]), torch.tensor([[1, 0]]), total=total), [[2 / math.sqrt(4 + 1e-8), 0]])


def test_moments_of_four_ranks_add_up_to_global_whitening() -> None:
    make = torch.Generator().manual_seed(1)
    x, mask = torch.randn(8, 6, generator=make, dtype=torch.float64) * 3 + 2, torch.ones(8, 6)
    mask[2:4] = 0  # rank 1 holds no response token at all
    mask[5, 3:] = 0
    ranks = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 8)]
    total = torch.stack([masking.moments(x[rank], mask[rank]) for rank in ranks]).sum(0)
    whitened = torch.cat([masking.masked_whiten(x[rank], mask[rank], total=total) for rank in ranks])

    tokens = x[mask.bool()]
    expected = torch.zeros_like(x)
    expected[mask.bool()] = (tokens - tokens.mean()) / torch.sqrt(tokens.var() + 1e-8)
    close(whitened, expected)
    close(masking.masked_whiten(x, mask), expected)


def test_whiten_keeps_a_small_spread_on_a_large_mean_and_the_dtype() -> None:
    # In float32 a sum of squares near 1e8 could not tell variance 1/4 * 1000 / 999 from 0.
    x = torch.tensor([[1e4 - 0.5, 1e4 + 0.5] * 500])
    whitened = masking.masked_whiten(x, torch.ones_like(x))
    expected = 0.5 / math.sqrt(0.25 * 1000 / 999 + 1e-8)
    close(whitened, torch.tensor([[-expected, expected] * 500]), 1e-6)  # assert_close compares dtypes, too


@few
@given(st.integers(0, 2**31), st.floats(-50, 50), st.floats(0.1, 20))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int, mean: float, std: float) -> None:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 9, generator=make, dtype=torch.float64) * std + mean
    mask = (torch.rand(4, 9, generator=make) < 0.6).long()
    mask[0] = 1
    tokens = masking.masked_whiten(x, mask)[mask.bool()]
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


# --- KL, rewards, advantages

LOG2 = math.log(2)
KL_BY_HAND = {  # kind: values and slopes where policy / reference is 2, 1/2, 1
    "k1": ([LOG2, -LOG2, 0], [1, 1, 1]),
    "k2": ([LOG2**2 / 2, LOG2**2 / 2, 0], [LOG2, -LOG2, 0]),
    "k3": ([1 / 2 - 1 + LOG2, 2 - 1 - LOG2, 0], [1 - 1 / 2, 1 - 2, 1 - 1]),
    "abs": ([LOG2, LOG2, 0], [1, -1, 0]),
}


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", KL_BY_HAND)
def test_kl_estimators_by_hand_and_their_straight_through_gradient(kind: str, plus: str) -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    logp = f64([[half, quarter, half]]).requires_grad_()
    kl = log_ratio_kl(logp, f64([[quarter, half, half]]), kind + plus)
    close(kl.detach(), [KL_BY_HAND[kind][0]])
    close(gradient(kl.sum(), logp), [KL_BY_HAND["k2" if plus else kind][1]])


@few
@given(st.sampled_from(list(KL_BY_HAND)), st.lists(st.floats(-1000, 1000, width=32), max_size=8))
def test_straight_through_kl_has_the_plain_value_to_the_last_bit(kind: str, log_ratios: list[float]) -> None:
    logp = torch.tensor([log_ratios])
    plain, through = (kl.log_ratio_kl(logp, torch.zeros_like(logp), name) for name in (kind, kind + "+"))
    close(through, plain, 0.0)


@few
@given(st.integers(0, 2**31))
def test_expected_value_and_gradient_of_each_kl_estimator(seed: int) -> None:
    # Exactly, over all outcomes of a small policy; the gradients are with respect to its logits.
    make = torch.Generator().manual_seed(seed)
    logits, ref_logits = torch.randn(2, 5, generator=make, dtype=torch.float64).unbind()
    logits.requires_grad_()
    logp, ref_logp = logits.log_softmax(0), ref_logits.log_softmax(0)
    kl = (logp.exp() * (logp - ref_logp)).sum()
    reverse_kl = (ref_logp.exp() * (ref_logp - logp)).sum()

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    def expectation(kind: str) -> Tensor:
        return (logp.detach().exp() * log_ratio_kl(logp, ref_logp, kind)).sum()

    for kind in ("k1", "k3", "k1+", "k3+"):
        close(expectation(kind), kl)
    for kind in ("k2", "k1+", "k2+", "k3+", "abs+"):
        close(slope(expectation(kind)), slope(kl))
    close(slope(expectation("k1")), torch.zeros(5).double())
    close(slope(expectation("k3")), slope(reverse_kl))


def test_k3_keeps_its_digits_near_zero() -> None:
    # exp(-d) - 1 + d = d^2 / 2 - d^3 / 6 + d^4 / 24 - ...; the terms left out are below 1e-22
    d = 1e-4
    kl = log_ratio_kl(f64([[d]]), f64([[0]]), "k3")
    assert kl.item() == pytest.approx(d**2 / 2 - d**3 / 6 + d**4 / 24, rel=1e-10, abs=0)


def test_k3_of_huge_log_ratios_is_finite() -> None:
    logp = torch.tensor([[1000.0, -1000.0]])
    # d = 1000: exp(-1000) - 1 + 1000; d = -1000: cut at exp(20) - 1 - 20
    close(kl.log_ratio_kl(logp, torch.zeros(1, 2), "k3"), torch.tensor([[999.0, math.exp(20) - 21]]), 1e-6)


@few
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.floats(-1, 1))
def test_k3_is_never_negative(logps: list[float], ref: float) -> None:
    logp = f64([logps])
    kl = log_ratio_kl(logp, torch.full_like(logp, ref), "k3")
    assert (kl >= -1e-15).all()  # rounding
    assert (kl[(logp - ref).abs() > 1e-3] > 0).all()


def test_token_rewards_by_hand() -> None:
    kl = f64([[1, 2, 3, NAN], [4, NAN, 5, 6], [NAN, NAN, NAN, NAN], [NAN, 7, INF, NAN]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    expected = [[-0.1, -0.2, -0.3 + 10, 0], [-0.4, 0, -0.5, -0.6 - 20], [0, 0, 0, 0], [0, -0.7 + 1, 0, 0]]
    close(advantages.token_rewards(f64([10, -20, NAN, 1]), kl, mask, 0.1), expected)


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [  # at lengths 0, 8, 9, 11, 12, 13, 99 of at most 12; the full penalty is 2
        (4, [0, 0, 2 * 1 / 4, 2 * 3 / 4, 2, 2, 2]),
        (12, [0, 2 * 8 / 12, 2 * 9 / 12, 2 * 11 / 12, 2, 2, 2]),
        (0, [0] * 7),
    ],
)
def test_overlong_penalty_by_hand(buffer: int, expected: list[float]) -> None:
    lengths = torch.tensor([0, 8, 9, 11, 12, 13, 99])
    close(advantages.overlong_penalty(lengths, 12, buffer, 2.0), torch.tensor(expected, dtype=torch.float32), 1e-6)
    assert advantages.overlong_penalty(lengths[:0], 12, buffer, 2.0).shape == (0,)


def test_gae_by_hand() -> None:
    # gamma = 1/2, lam = 1/2, so gamma * lam = 1/4
    # t=2: delta = 4 - 3 = 1;             A = 1
    # t=1: delta = 2 + 3/2 - 2 = 3/2;     A = 3/2 + 1/4 = 7/4
    # t=0: delta = 1 + 2/2 - 1 = 1;       A = 1 + 7/16 = 23/16
    advantages, returns = gae(f64([[1, 2, 4]]), f64([[1, 2, 3]]), torch.ones(1, 3), 0.5, 0.5)
    close(advantages, [[23 / 16, 7 / 4, 1]])
    close(returns, [[1 + 23 / 16, 2 + 7 / 4, 3 + 1]])


def test_gae_skips_masked_tokens_wherever_they_are() -> None:
    # The tokens of the test above, with padding before, between and after them that holds anything.
    rewards = f64([[NAN, 1, 50, 2, NAN, 4, INF], [NAN, NAN, NAN, NAN, NAN, NAN, NAN], [9, 9, 9, 5, 9, 9, 9]])
    values = f64([[NAN, 1, NAN, 2, 60, 3, 70], [INF, INF, INF, INF, INF, INF, INF], [9, 9, 9, 2, 9, 9, 9]])
    mask = torch.tensor([[0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    nothing = [0] * 7
    close(advantages, [[0, 23 / 16, 0, 7 / 4, 0, 1, 0], nothing, [0, 0, 0, 5 - 2, 0, 0, 0]])
    close(returns, [[0, 39 / 16, 0, 15 / 4, 0, 4, 0], nothing, [0, 0, 0, 5, 0, 0, 0]])


def test_gae_with_lam_zero_is_the_one_step_error() -> None:
    # 1 + 0.9 * 20 - 10 = 9; 2 + 0.9 * 30 - 20 = 9; 3 - 30 = -27
    close(advantages.gae(f64([[1, 2, 3]]), f64([[10, 20, 30]]), torch.ones(1, 3), 0.9, 0.0)[0], [[9, 9, -27]])


def test_gae_is_detached() -> None:
    values = f64([[1, 2]]).requires_grad_()
    advantages, returns = gae(f64([[1, 1]]), values, torch.ones(1, 2), 1.0, 1.0)
    assert not advantages.requires_grad and not returns.requires_grad


@few
@given(st.integers(0, 2**31))
def test_gae_without_discount_is_reward_to_go_minus_value(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 8, generator=make, dtype=torch.float64).unbind()
    mask = (torch.rand(3, 8, generator=make) < 0.6).double()
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    to_go = torch.stack([(rewards * mask)[:, t:].sum(1) for t in range(8)], dim=1) * mask
    close(returns, to_go)
    close(advantages, to_go - values * mask)


SCORES, GROUPS = f64([1, 0.1, 3, 0.1, 8, 5, 0.1]), torch.tensor([7, 2, 7, 2, 7, 4, 2])
GREEDY = f64([2, 0.3, 2, 0.3, 2, 6, 0.3])
# Group 7: scores 1, 3, 8 with mean 4 and variance (9 + 1 + 16) / 2 = 13. Group 2: all equal. Group 4: one response.
STD = math.sqrt(13) + 1e-6
ADVANTAGES_BY_HAND = {
    "grpo": [-3 / STD, 0, -1 / STD, 0, 4 / STD, 0, 0],
    "dr_grpo": [1 - 4, 0, 3 - 4, 0, 8 - 4, 0, 0],
    "rloo": [1 - (3 + 8) / 2, 0, 3 - (1 + 8) / 2, 0, 8 - (1 + 3) / 2, 0, 0],
    "reinforce++": [1, 0.1, 3, 0.1, 8, 5, 0.1],
    "reinforce++_baseline": [1 - 4, 0, 3 - 4, 0, 8 - 4, 0, 0],
    "remax": [1 - 2, 0.1 - 0.3, 3 - 2, 0.1 - 0.3, 8 - 2, 5 - 6, 0.1 - 0.3],
}
CENTRED = ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"]
scored = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 3)), max_size=12)  # score and group of each response


def unzip(responses: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    return f64([score for score, _ in responses]), torch.tensor([group for _, group in responses]).long()


def response_advantages(scores: Tensor, groups: Tensor, kind: str, greedy: Tensor | None = None) -> Tensor:
    """`[B]` advantages of responses of one token each, without KL."""
    tokens = torch.zeros(len(scores), 1, dtype=scores.dtype)
    inputs = AdvantageInputs(scores, tokens, tokens, torch.ones_like(tokens), groups, greedy)
    return estimate_advantages(kind, inputs, AdvantageSettings(kl_coef=0.0, gamma=1.0, gae_lambda=0.5))[0][:, 0]


@pytest.mark.parametrize("kind", ADVANTAGES_BY_HAND)
def test_group_advantages_by_hand(kind: str) -> None:
    close(response_advantages(SCORES, GROUPS, kind, GREEDY), ADVANTAGES_BY_HAND[kind])


@pytest.mark.parametrize("kind", CENTRED)
def test_equal_scores_and_groups_of_one_give_exactly_zero(kind: str) -> None:
    # The mean of three times 0.1 is not 0.1, neither in float32 nor in float64.
    for dtype in (torch.float32, torch.float64):
        scores = torch.tensor([0.1, 0.1, 9, 0.1], dtype=dtype)
        close(response_advantages(scores, torch.tensor([0, 0, 1, 0]), kind), torch.zeros(4, dtype=dtype), 0.0)


@pytest.mark.parametrize("kind", ADVANTAGES_BY_HAND)
def test_group_advantages_are_detached(kind: str) -> None:
    scores, greedy = SCORES.clone().requires_grad_(), GREEDY.clone().requires_grad_()
    assert not response_advantages(scores, GROUPS, kind, greedy).requires_grad


@few
@given(scored)
def test_rloo_is_the_score_less_the_mean_of_the_others(responses: list[tuple[int, int]]) -> None:
    expected = []
    for i, (score, group) in enumerate(responses):
        others = [s for j, (s, g) in enumerate(responses) if g == group and j != i]
        expected.append(score - sum(others) / len(others) if others else 0)
    close(response_advantages(*unzip(responses), "rloo"), expected)


@pytest.mark.parametrize("kind", CENTRED)
@few
@given(scored, st.lists(st.integers(-9, 9), min_size=4, max_size=4), st.floats(1, 50))
def test_group_advantages_see_only_differences(
    kind: str, responses: list[tuple[int, int]], shifts: list[int], scale: float
) -> None:
    scores, groups = unzip(responses)
    advantages = response_advantages(scores, groups, kind)
    close(f64([0] * 4).index_add(0, groups, advantages), [0] * 4)
    close(response_advantages(scores + f64(shifts)[groups], groups, kind), advantages)
    factor = 1 if kind == "grpo" else scale  # 2e-5: the epsilon beside a standard deviation of 0.3
    close(response_advantages(scores * scale, groups, kind), advantages * factor, 2e-5)


@pytest.mark.parametrize("kind", ADVANTAGES_BY_HAND)
@few
@given(scored, st.randoms(use_true_random=False))
def test_group_advantages_follow_their_responses(kind: str, responses: list[tuple[int, int]], order: Any) -> None:
    (scores, groups), rows = unzip(responses), list(range(len(responses)))
    order.shuffle(rows)
    advantages, greedy = response_advantages(scores, groups, kind, scores.sin()), scores.sin()
    close(response_advantages(scores[rows], groups[rows], kind, greedy[rows]), advantages[rows])
    close(response_advantages(scores, 99 - 7 * groups, kind, greedy), advantages)  # any number may name a group


def test_remax_needs_the_scores_of_the_greedy_completions() -> None:
    with pytest.raises(ValueError, match="remax needs the scores of the greedy completions"):
        response_advantages(SCORES, GROUPS, "remax")


def test_estimators_need_what_the_settings_check() -> None:
    for need in ("needs_critic", "needs_groups", "needs_greedy"):
        assert [getattr(ADVANTAGES[name], need) for name in ESTIMATORS] == [
            getattr(estimator, need) for estimator in ESTIMATORS.values()
        ]


# Two responses to one prompt, of two tokens and one; kl_coef is 0.1, gamma 0.5, lambda 0.5.
TOKEN_MASK, TOKEN_KL = torch.tensor([[1, 0, 1], [0, 1, 0]]), f64([[1, NAN, 2], [INF, 4, NAN]])
TOKEN_ADVANTAGES_BY_HAND = {
    # values 1 and 2; t=2: 5 - 0.2 - 2 = 2.8; t=0: -0.1 + 0.5 * 2 - 1 + 0.25 * 2.8 = 0.6; the other: 3 - 0.4 - 1
    "gae": [[0.6, 0, 2.8], [0, 1.6, 0]],
    # the KL of each token stays with it: 5 - 0.2, then -0.1 + 0.5 * 4.8
    "reinforce++": [[2.3, 0, 4.8], [0, 2.6, 0]],
    # greedy score 1: 5 - 1 - 0.2, then -0.1 + 0.5 * 3.8
    "remax": [[1.8, 0, 3.8], [0, 1.6, 0]],
    # whole rewards 5 - 0.3 = 4.7 and 3 - 0.4 = 2.6, mean 3.65: half the advantage one token earlier
    "dr_grpo": [[1.05 / 2, 0, 1.05], [0, -1.05, 0]],
    "reinforce++_baseline": [[1.05 / 2, 0, 1.05], [0, -1.05, 0]],
    "rloo": [[2.1 / 2, 0, 2.1], [0, -2.1, 0]],
    "grpo": [
        [0.5 * 1.05 / (1.05 * 2**0.5 + 1e-6), 0, 1.05 / (1.05 * 2**0.5 + 1e-6)],
        [0, -1 / (2**0.5 + 1e-6 / 1.05), 0],
    ],
}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_of_tokens_by_hand(kind: str) -> None:
    values, scores, groups = f64([[1, NAN, 2], [NAN, 1, INF]]), f64([5, 3]), torch.tensor([4, 4])
    inputs = AdvantageInputs(scores, TOKEN_KL, values, TOKEN_MASK, groups, f64([1, 1]))
    advantages, returns = estimate_advantages(kind, inputs, AdvantageSettings(0.1, gamma=0.5, gae_lambda=0.5))
    close(advantages, TOKEN_ADVANTAGES_BY_HAND[kind])
    baseline = values.nan_to_num(0, 0, 0) if kind == "gae" else 0
    close(returns, advantages + baseline)


# --- losses

AGGREGATIONS_BY_HAND: dict[str, tuple[list[list[float]], int]] = {  # weights and size, length 8
    "token_mean": ([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], 3 + 1),
    "sequence_mean": ([[1 / 3, 0, 1 / 3, 1 / 3], [0, 0, 0, 0], [0, 1, 0, 0]], 2),
    "constant": ([[1 / 8, 0, 1 / 8, 1 / 8], [0, 0, 0, 0], [0, 1 / 8, 0, 0]], 2),
}


@pytest.mark.parametrize("kind", AGGREGATIONS_BY_HAND)
def test_token_weights_by_hand(kind: str) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    for same in (mask, mask.bool(), mask.double()):
        weights, size = losses.token_weights(same, kind, 8)
        close(weights.double(), AGGREGATIONS_BY_HAND[kind][0], 1e-7)
        close(size.double(), float(AGGREGATIONS_BY_HAND[kind][1]))
    weights, size = losses.token_weights(mask[:0], kind, 8)
    assert weights.shape == (0, 4) and size == 0


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def policy_loss_alone(kind: str) -> Loss:
    settings = PolicyLossSettings(kind, 0.2, 0.2)
    return lambda x, other, weights, mask, size: losses.policy_loss(x, other, other, mask, size, settings, weights)[0]


LOSSES: dict[str, Loss] = {
    **{kind: policy_loss_alone(kind) for kind in ("ppo", "gspo", "cispo")},
    "kl_loss": lambda x, other, weights, mask, size: losses.kl_loss(x, other, mask, size, "k3", weights),
    "entropy_loss": lambda x, other, weights, mask, size: losses.entropy_loss(x, mask, size, weights),
    "supervised_loss": lambda x, other, weights, mask, size: losses.supervised_loss(x, mask, size),
    "value_loss": lambda x, other, weights, mask, size: losses.value_loss(x, other, other, mask, size, 0.2)[0],
}


@pytest.mark.parametrize("denominator", [0, -3])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_refuse_a_step_without_tokens(name: str, denominator: float) -> None:
    one = f64([[1]])
    with pytest.raises(ValueError, match="denominator"):
        LOSSES[name](one, one, one, one, denominator)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("values", [torch.tensor([[NAN, 1]]).double(), torch.empty(0, 3).double()])
def test_losses_without_response_tokens_are_zero_and_have_a_gradient(name: str, values: Tensor) -> None:
    # A rank whose micro-batch is empty must still take part in the backward pass.
    leaf = values.clone().requires_grad_()
    hidden = torch.full_like(values, INF)
    loss = LOSSES[name](leaf, hidden, hidden, torch.zeros_like(values), 8)
    close(loss.detach(), 0.0)
    close(gradient(loss, leaf), torch.zeros_like(values))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_losses_reach_their_first_argument_only(name: str) -> None:
    tensors = [f64([[x]]).requires_grad_() for x in (0.5, 0.4, 2.0)]
    loss = LOSSES[name](*tensors, torch.ones(1, 1), 1)
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    assert [grad is not None for grad in gradients] == [True, False, False]


def plain_aggregate(rows: list[list[float]], kind: str, length: int) -> float:
    """The formulas of the papers, over the token losses of each response that has any."""
    if kind == "token_mean":  # DAPO eq. 8: 1 / sum_i |o_i| * sum_i sum_t
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if kind == "sequence_mean":  # GRPO eq. 3: 1 / G * sum_i 1 / |o_i| * sum_t
        return statistics.mean(sum(row) / len(row) for row in rows)
    return statistics.mean(sum(row) / length for row in rows)  # Dr. GRPO: 1 / G * sum_i 1 / length * sum_t


@pytest.mark.parametrize("kind", AGGREGATIONS_BY_HAND)
@few
@given(st.integers(0, 2**31))
def test_aggregated_losses_are_those_of_the_papers(kind: str, seed: int) -> None:
    batch = random_batch(seed)
    logp, old, advantages, mask = (batch[name] for name in ("logp", "old_logp", "advantages", "mask"))
    clipped, kl, entropy = [], [], []
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        steps = [(math.exp(logp[i, t] - old[i, t]), advantages[i, t].item()) for t in tokens]
        clipped.append([-min(r * a, min(max(r, 0.8), 1.3) * a) for r, a in steps])
        kl.append([(logp[i, t] - old[i, t]).item() ** 2 / 2 for t in tokens])
        entropy.append([-logp[i, t].item() for t in tokens])
    weights, size = losses.token_weights(mask, kind, 7)
    n = size.item()
    actual = [
        losses.policy_loss(logp, old, advantages, mask, n, PolicyLossSettings("ppo", 0.2, 0.3), weights)[0],
        losses.kl_loss(logp, old, mask, n, "k2", weights),
        losses.entropy_loss(logp, mask, n, weights),
    ]
    expected = [plain_aggregate([row for row in rows if row], kind, 7) for rows in (clipped, kl, entropy)]
    close(torch.stack(actual), expected, 1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS_BY_HAND)
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), max_size=4), st.randoms(use_true_random=False))
def test_losses_do_not_depend_on_micro_batches_or_padding(
    kind: str, aggregation: str, seed: int, cuts: list[int], order: Any
) -> None:
    batch, rows, edges = random_batch(seed), list(range(6)), [0, *sorted(cuts), 6]
    order.shuffle(rows)
    n, tokens = token_weights(batch["mask"], aggregation, 7)[1].item(), float(batch["mask"].sum())

    def losses(part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logp, old, mask = part["logp"], part["old_logp"], part["mask"]
        weights, size = token_weights(mask, aggregation, 7)
        corrected = {**part, "weights": part["weights"] * weights}
        dual_clip = None if kind == "cispo" else 1.5
        policy, stats = policy_loss(**corrected, denominator=n, settings=PolicyLossSettings(kind, 0.1, 0.2, dual_clip))
        value, value_stats = value_loss(logp, old, part["advantages"], mask, tokens, clip=0.2)
        others = kl_loss(logp, old, mask, n, "k3+", weights) + entropy_loss(logp.sin(), mask, n, weights)
        total = policy + value + others + supervised_loss(logp, mask, tokens)
        return total, {**stats, "value_clip_fraction": value_stats["clip_fraction"], "size": size.double()}

    def padded(tensor: Tensor, chosen: list[int], left: int, right: int) -> Tensor:
        filler = NAN if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor[chosen], (left, right), value=filler)

    whole = batch["logp"].clone().requires_grad_()
    whole_loss, whole_stats = losses({**batch, "logp": whole})

    parts = batch["logp"].clone().requires_grad_()
    total, total_gradient, total_stats = f64(0), torch.zeros_like(parts), dict.fromkeys(whole_stats, f64(0))
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        cut = {name: padded(x, rows[start:end], i % 2, i) for name, x in {**batch, "logp": parts}.items()}
        loss, stats = losses(cut)
        total += loss.detach()
        total_gradient += gradient(loss, parts)
        total_stats = {name: total_stats[name] + stats[name] for name in total_stats}

    close(total, whole_loss.detach())
    close(total_gradient, gradient(whole_loss, whole))
    close(total_stats["size"], n)
    for name, stat in whole_stats.items():
        close(total_stats[name], stat)


# --- policy loss


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope", "clipped"),
    [  # clip range [0.8, 1.3]; d(-A r) / d logp = -A r; a clipped token has none
        (1.0, 2, None, -2.0, -2.0, 0),
        (1.2, 2, None, -2.4, -2.4, 0),  # inside the range
        (1.5, 2, None, -2.6, 0.0, 1),  # -2 * 1.3
        (0.5, 2, None, -1.0, -1.0, 0),  # the clipped term, -2 * 0.8, is the smaller one
        (1.5, -2, None, 3.0, 3.0, 0),  # the clipped term, 2 * 1.3, is the smaller one
        (0.5, -2, None, 1.6, 0.0, 1),  # 2 * 0.8
        (1.5, 0, None, 0.0, 0.0, 0),
        (5.0, -2, 3, 6.0, 0.0, 0),  # not above 2 * 3; the dual clip does not count as clipped
        (2.0, -2, 3, 4.0, 4.0, 0),  # below it
        (0.5, -2, 3, 1.6, 0.0, 1),  # the ordinary clip, 2 * 0.8
        (5.0, 2, 3, -2.6, 0.0, 1),  # positive advantages are left alone: -2 * 1.3
    ],
)
def test_clipped_policy_loss_of_one_token(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float, clipped: int, kind: str
) -> None:
    logp, one = f64([[math.log(ratio)]]).requires_grad_(), torch.ones(1, 1)
    settings = PolicyLossSettings(kind, 0.2, 0.3, dual_clip)
    actual, stats = losses.policy_loss(logp, f64([[0]]), f64([[advantage]]), one, 1, settings)
    close(actual.detach(), loss)
    close(gradient(actual, logp), [[slope]])
    close(stats["clip_fraction"], float(clipped))
    close(stats["ratio"], ratio)
    close(stats["approx_kl"], ratio - 1 - math.log(ratio))


# r, A and logp = log r - 1 of each token; the responses' own ratios are sqrt(2 * 4.5) = 3, sqrt(0.5 * 1.62) = 0.9,
# 0.5 and 1.1. The clip range is [0.8, 1.2].
POLICY_RATIOS = f64([[2, NAN, 4.5], [0.5, 1.62, NAN], [INF, NAN, 0.5], [NAN, 1.1, -INF], [NAN, NAN, NAN]])
POLICY_ADVANTAGES = f64([[1, NAN, 1], [2, 2, INF], [NAN, -INF, -2], [NAN, -3, NAN], [NAN, INF, NAN]])
POLICY_MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]])
POLICY_BY_HAND = {  # loss of each token in reading order, slope of each token, tokens clipped
    "ppo": (
        [-1.2, -1.2, -2 * 0.5, -2 * 1.2, 2 * 0.8, 3 * 1.1],
        [[0, 0, 0], [-2 * 0.5, 0, 0], [0, 0, 0], [0, 3 * 1.1, 0], [0, 0, 0]],
        2 + 1 + 1,
    ),
    "gspo": (
        [-1.2, -1.2, -2 * 0.9, -2 * 0.9, 2 * 0.8, 3 * 1.1],
        [[0, 0, 0], [-2 * 0.9, -2 * 0.9, 0], [0, 0, 0], [0, 3 * 1.1, 0], [0, 0, 0]],
        2 + 1,
    ),
    "cispo": (
        [
            -1.2 * (math.log(2) - 1), -1.2 * (math.log(4.5) - 1), -2 * 0.8 * (math.log(0.5) - 1),
            -2 * 1.2 * (math.log(1.62) - 1), 2 * 0.8 * (math.log(0.5) - 1), 3 * 1.1 * (math.log(1.1) - 1),
        ],
        [[-1.2, 0, -1.2], [-2 * 0.8, -2 * 1.2, 0], [0, 0, 2 * 0.8], [0, 3 * 1.1, 0], [0, 0, 0]],
        2 + 2 + 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", POLICY_BY_HAND)
def test_policy_loss_of_a_batch_by_hand(kind: str) -> None:
    losses, slopes, clipped = POLICY_BY_HAND[kind]
    logp = (POLICY_RATIOS.log() - 1).requires_grad_()
    arguments = (logp, f64([[-1, NAN, -1], [-1, -1, INF], [INF, NAN, -1], [NAN, -1, NAN], [NAN, NAN, NAN]]))
    arguments += (POLICY_ADVANTAGES, POLICY_MASK, 10, PolicyLossSettings(kind, 0.2, 0.2))
    loss, stats = policy_loss(*arguments)
    close(loss.detach(), sum(losses) / 10)
    close(gradient(loss, logp), f64(slopes) / 10)
    close(stats["clip_fraction"], float(clipped))
    close(stats["ratio"], 2 + 4.5 + 0.5 + 1.62 + 0.5 + 1.1)
    # the sum of (r - 1) - log r
    close(stats["approx_kl"], 2 + 4.5 + 0.5 + 1.62 + 0.5 + 1.1 - 6 - math.log(2 * 4.5 * 0.5 * 1.62 * 0.5 * 1.1))

    weights = f64([[1, NAN, 2], [3, 4, INF], [NAN, INF, 5], [NAN, 6, NAN], [NAN, NAN, NAN]])
    weighted, weighted_stats = policy_loss(*arguments, weights=weights)
    close(weighted.detach(), sum((i + 1) * loss for i, loss in enumerate(losses)) / 10)
    close(gradient(weighted, logp), weights.nan_to_num(0, 0, 0) * f64(slopes) / 10)
    assert weighted_stats == stats
    assert not any(stat.requires_grad for stat in stats.values())


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
@few
@given(st.integers(0, 2**31))
def test_policy_loss_gradient_against_the_formula(kind: str, seed: int) -> None:
    # ppo: -A r w / denominator, but 0 on masked tokens and where the clipped term is the larger one;
    # cispo: -A clip(r) w / denominator, on tokens outside of the clip range, too
    batch = random_batch(seed)
    logp = batch.pop("logp").requires_grad_()
    loss, stats = losses.policy_loss(logp, **batch, denominator=17, settings=PolicyLossSettings(kind, 0.1, 0.2))
    ratio, advantages = (logp.detach() - batch["old_logp"]).exp(), batch["advantages"]
    if kind == "ppo":
        clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.9))
        slope = -advantages * ratio * ~clipped
    else:
        clipped = (ratio > 1.2) | (ratio < 0.9)
        slope = -advantages * ratio.clamp(0.9, 1.2)
    close(gradient(loss, logp), slope * batch["weights"] * batch["mask"] / 17)
    close(stats["clip_fraction"], (clipped & batch["mask"].bool()).sum().double())


@few
@given(st.integers(0, 2**31))
def test_gspo_is_the_objective_of_its_paper_where_a_response_has_one_advantage(seed: int) -> None:
    batch = random_batch(seed)
    old_logp, mask = batch["old_logp"], batch["mask"]
    advantages = batch["advantages"][:, :1].expand(-1, 5)
    logp = batch["logp"].requires_grad_()
    weights, size = losses.token_weights(mask, "sequence_mean", 5)
    settings = PolicyLossSettings("gspo", 0.1, 0.2)
    loss, _ = losses.policy_loss(logp, old_logp, advantages, mask, float(size), settings, weights)

    objectives = []
    for i in range(len(mask)):
        if mask[i].any():
            ratio = (logp[i] - old_logp[i])[mask[i].bool()].mean().exp()
            objectives.append(torch.minimum(ratio * advantages[i, 0], ratio.clamp(0.9, 1.2) * advantages[i, 0]))
    literal = -torch.stack(objectives).mean()
    close(loss.detach(), literal.detach(), 1e-6)
    close(gradient(loss, logp), gradient(literal, logp), 1e-6)


def test_gspo_scales_each_token_by_its_own_advantage() -> None:
    # ratio sqrt(1.21 * 1) = 1.1 on both tokens
    logp = f64([[math.log(1.21), 0]]).requires_grad_()
    settings = PolicyLossSettings("gspo", 0.2, 0.2)
    loss, _ = losses.policy_loss(logp, f64([[0, 0]]), f64([[1, -3]]), torch.ones(1, 2), 1, settings)
    close(gradient(loss, logp), [[-1.1, 3 * 1.1]])


def test_gspo_gives_every_token_of_a_response_the_same_ratio() -> None:
    # To the last bit: or the clip would take some tokens of a response on its bound and leave others.
    make, one = torch.Generator().manual_seed(0), torch.ones(1, 50)
    logp = (3 * torch.randn(1, 50, generator=make)).requires_grad_()
    loss, _ = losses.policy_loss(logp, 0 * one, one, one, 1, PolicyLossSettings("gspo", 0.9, 9.0))
    slopes = gradient(loss, logp)
    close(slopes, slopes[:, :1].expand(1, 50), 0.0)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_loss_of_huge_log_ratios_is_finite(dtype: torch.dtype, dual_clip: float | None, kind: str) -> None:
    logp = torch.tensor([[1000], [-1000], [1000], [-1000]], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([[1], [1], [-1], [-1]], dtype=dtype)
    settings = PolicyLossSettings(kind, 0.2, 0.2, dual_clip)
    loss, stats = losses.policy_loss(logp, torch.zeros(4, 1, dtype=dtype), advantages, torch.ones(4, 1), 4, settings)
    # -1.2, -exp(-20), exp(20) or the dual clip, 0.8
    bound = math.exp(20) if dual_clip is None else dual_clip
    close(loss.detach(), torch.tensor((-1.2 - math.exp(-20) + bound + 0.8) / 4, dtype=dtype), 1e-6)
    close(gradient(loss, logp), torch.zeros(4, 1, dtype=dtype))
    # (r - 1) - log r: twice exp(20) - 1 - 20, twice exp(-20) - 1 + 20
    close(stats["approx_kl"], torch.tensor(2 * math.exp(20) + 2 * math.exp(-20) - 4, dtype=dtype), 1e-6)


def test_cispo_of_huge_log_ratios_keeps_its_gradient() -> None:
    logp = f64([[1000, -1000, 1000, -1000]]).requires_grad_()
    settings = PolicyLossSettings("cispo", 0.2, 0.3)
    loss, _ = losses.policy_loss(logp, 0 * logp, f64([[1, 1, -2, -2]]), torch.ones(1, 4), 1, settings)
    close(loss.detach(), -1.3 * 1000 + 0.8 * 1000 + 2 * 1.3 * 1000 - 2 * 0.8 * 1000)
    close(gradient(loss, logp), [[-1.3, -0.8, 2 * 1.3, 2 * 0.8]])


# --- KL, entropy and supervised losses

MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
WEIGHTS = f64([[3, NAN, 5], [INF, 7, NAN], [NAN, NAN, NAN]])


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", KL_BY_HAND)
def test_kl_loss_by_hand(kind: str, plus: str) -> None:
    # policy / reference is 2, 1/2, 1, as in KL_BY_HAND
    logp = f64([[LOG2, NAN, -LOG2], [INF, 0, -INF], [NAN, NAN, NAN]]).requires_grad_()
    ref_logp = f64([[0, INF, 0], [NAN, 0, -INF], [NAN, NAN, NAN]])
    (a, b, c), (x, y, z) = KL_BY_HAND[kind][0], KL_BY_HAND["k2" if plus else kind][1]
    loss = losses.kl_loss(logp, ref_logp, MASK, 10, kind + plus)
    close(loss.detach(), (a + b + c) / 10)
    close(gradient(loss, logp), [[x / 10, 0, y / 10], [0, z / 10, 0], [0, 0, 0]])
    weighted = losses.kl_loss(logp, ref_logp, MASK, 10, kind + plus, WEIGHTS)
    close(weighted.detach(), (3 * a + 5 * b + 7 * c) / 10)
    close(gradient(weighted, logp), [[3 * x / 10, 0, 5 * y / 10], [0, 7 * z / 10, 0], [0, 0, 0]])


def test_kl_loss_of_huge_log_ratios_is_finite() -> None:
    logp = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    loss = losses.kl_loss(logp, torch.zeros(1, 2), torch.ones(1, 2), 1, "k3")
    close(loss.detach(), torch.tensor(999 + math.exp(20) - 21), 1e-6)
    close(gradient(loss, logp), torch.tensor([[1.0, 0.0]]))  # 1 - exp(-1000), and 0 where the value is cut


def test_entropy_loss_by_hand() -> None:
    entropy = f64([[1, NAN, 2], [INF, 4, -INF], [NAN, NAN, NAN]]).requires_grad_()
    loss = losses.entropy_loss(entropy, MASK, 10)
    close(loss.detach(), -(1 + 2 + 4) / 10)
    close(gradient(loss, entropy), -MASK.double() / 10)
    weighted = losses.entropy_loss(entropy, MASK, 10, WEIGHTS)
    close(weighted.detach(), -(3 * 1 + 5 * 2 + 7 * 4) / 10)
    close(gradient(weighted, entropy), [[-3 / 10, 0, -5 / 10], [0, -7 / 10, 0], [0, 0, 0]])


def test_supervised_loss_by_hand() -> None:
    logp = f64([[-1, NAN, -2], [INF, -4, -INF], [NAN, NAN, NAN]]).requires_grad_()
    loss = losses.supervised_loss(logp, MASK, 10)
    close(loss.detach(), (1 + 2 + 4) / 10)
    close(gradient(loss, logp), -MASK.double() / 10)


# --- value loss


def test_value_loss_without_clip_by_hand() -> None:
    values = f64([[1, NAN, 4], [INF, 2, 0]]).requires_grad_()
    returns, old = f64([[3, 1, 3], [NAN, 2, NAN]]), f64([[NAN] * 3] * 2)
    loss, stats = losses.value_loss(values, old, returns, torch.tensor([[1, 0, 1], [0, 1, 0]]), 5, None)
    close(loss.detach(), 0.5 * (4 + 1 + 0) / 5)
    close(gradient(loss, values), [[-2 / 5, 0, 1 / 5], [0, 0, 0]])
    close(stats["clip_fraction"], 0.0)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [  # old value 10, return 12, clip 1: V' = clip(V, 9, 11)
        (10.5, 0.5 * 1.5**2, -1.5, 0),  # inside: V' = V
        (11.5, 0.5 * 1.0**2, 0.0, 1),  # (11 - 12)^2 > (11.5 - 12)^2
        (7.0, 0.5 * 5.0**2, -5.0, 0),  # (7 - 12)^2 > (9 - 12)^2
        (14.0, 0.5 * 2.0**2, 2.0, 0),  # (14 - 12)^2 > (11 - 12)^2
    ],
)
def test_clipped_value_loss_of_one_token(value: float, loss: float, slope: float, clipped: int) -> None:
    values = f64([[value, NAN]]).requires_grad_()
    actual, stats = losses.value_loss(values, f64([[10, NAN]]), f64([[12, NAN]]), torch.tensor([[1, 0]]), 4, 1.0)
    close(actual.detach(), loss / 4)
    close(gradient(actual, values), [[slope / 4, 0]])
    close(stats["clip_fraction"], float(clipped))


def test_value_loss_does_not_count_rounding_as_clipping() -> None:
    # Every change is below the clip, but so much larger than the old value that old + (new - old) rounds.
    old, step = torch.rand(2, 100, 10, generator=torch.Generator().manual_seed(0)).unbind()
    old, new = 0.01 * old, 0.1 * step
    assert (old + (new - old) != new).any()
    _, stats = losses.value_loss(new, old, old + 0.05, torch.ones(100, 10), 1, 0.2)
    close(stats["clip_fraction"], torch.tensor(0.0))


# --- importance weights

RATIOS = f64([[0.5, 1.5, 3.0, NAN], [0.25, NAN, 1.0, 2.0], [NAN, NAN, NAN, NAN]])
RATIO_MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])


# old / rollout as in RATIOS; whole responses: 0.5 * 1.5 * 3 = 2.25 and 0.25 * 1 * 2 = 0.5; low 0.4, high 2
ONES = [[1] * 4] * 3
IMPORTANCE_BY_HAND = {
    "none": {"token": ONES, "sequence": ONES},
    "tis": {
        "token": [[0.5, 1.5, 2, 1], [0.25, 1, 1, 2], [1, 1, 1, 1]],
        "sequence": [[2, 2, 2, 1], [0.5, 1, 0.5, 0.5], [1, 1, 1, 1]],
    },
    "mask": {
        "token": [[0.5, 1.5, 0, 1], [0, 1, 1, 2], [1, 1, 1, 1]],
        "sequence": [[0, 0, 0, 1], [0.5, 1, 0.5, 0.5], [1, 1, 1, 1]],
    },
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", IMPORTANCE_BY_HAND)
def test_importance_weights_by_hand(kind: str, level: str) -> None:
    old_logp = f64([[-1.0] * 4] * 3)
    rollout_logp = old_logp - RATIOS.log()
    high = 2 + 1e-12  # the ratio of 2 above comes out of exp and log
    weights = importance_weights(old_logp, rollout_logp, RATIO_MASK, kind, 0.4, high, level)
    close(weights, IMPORTANCE_BY_HAND[kind][level])
    assert importance_weights(old_logp[:0], old_logp[:0], RATIO_MASK[:0], kind, 0.4, high, level).shape == (0, 4)


def test_importance_weights_keep_ratios_on_the_bounds() -> None:
    zero = f64([[0, 0]])
    close(importance_weights(zero, zero, torch.ones(1, 2), "mask", 1.0, 1.0), [[1, 1]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "expected"), [("tis", [2.0, math.exp(-20)]), ("mask", [0.0, 0.0])])
def test_importance_weights_of_huge_log_ratios(kind: str, level: str, expected: list[float]) -> None:
    weights = importance_weights(f64([[1000], [-1000]]), f64([[0], [0]]), torch.ones(2, 1), kind, 0.5, 2.0, level)
    close(weights, f64(expected)[:, None], 1e-12)


def test_importance_weights_are_detached() -> None:
    old_logp = f64([[0.1]]).requires_grad_()
    for kind in IMPORTANCE_WEIGHTS:
        assert not importance_weights(old_logp, f64([[0]]), torch.ones(1, 1), kind, 0.5, 2.0).requires_grad


# --- choices


@pytest.mark.parametrize(
    ("choices", "by_hand"),
    [
        (kl.KL_ESTIMATORS, KL_BY_HAND),
        (ADVANTAGES, {"gae": test_gae_by_hand} | ADVANTAGES_BY_HAND),
        (losses.AGGREGATIONS, AGGREGATIONS_BY_HAND),
        (losses.POLICY_LOSSES, POLICY_BY_HAND),
        (IMPORTANCE_WEIGHTS, IMPORTANCE_BY_HAND),
        *((IMPORTANCE_LEVELS, levels) for levels in IMPORTANCE_BY_HAND.values()),
    ],
)
def test_every_choice_has_a_case_by_hand(choices: dict[str, Any], by_hand: dict[str, Any]) -> None:
    assert set(choices) == set(by_hand)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kl.log_ratio_kl(x, x, "k4"), "KL estimator 'k4': .* k1, k2, k3, abs"),
        (lambda x: losses.kl_loss(x, x, x, 1, "k4+"), "KL estimator 'k4.*': .* k1, k2, k3, abs"),
        (lambda x: kl.log_ratio_kl(x, x, "k1++"), "KL estimator"),
        (
            lambda x: response_advantages(x[0], x[0], "gea"),
            r"'gea': .* gae, grpo, dr_grpo, rloo, reinforce\+\+, reinforce\+\+_baseline, remax",
        ),
        (lambda x: losses.token_weights(x, "mean", 1), "aggregation 'mean': .* token_mean, sequence_mean, constant"),
        (
            lambda x: losses.policy_loss(x, x, x, x, 1, PolicyLossSettings("a2c", 0.2, 0.2)),
            "loss 'a2c': .* ppo, gspo, cispo",
        ),
        (
            lambda x: importance_weights(x, x, x, "clip", 0.5, 2.0),
            "weight 'clip': .* none, tis, mask",
        ),
        (
            lambda x: importance_weights(x, x, x, "tis", 0.5, 2.0, "word"),
            "level 'word': .* token, sequence",
        ),
    ],
)
def test_unknown_kinds_are_refused_by_naming_the_choices(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(f64([[1]]))
