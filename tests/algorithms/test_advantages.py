"""Rewards of tokens, and every advantage estimator, by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import INF, NAN, close, f64, few
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlx.algorithms import advantages
from rlx.algorithms.advantages import ADVANTAGES, AdvantageInputs, AdvantageSettings, estimate_advantages, gae
from rlx.config.sections.algorithm import ESTIMATORS, Estimator


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
    "dapo": [-3 / STD, 0, -1 / STD, 0, 4 / STD, 0, 0],
    "dr_grpo": [1 - 4, 0, 3 - 4, 0, 8 - 4, 0, 0],
    "rloo": [1 - (3 + 8) / 2, 0, 3 - (1 + 8) / 2, 0, 8 - (1 + 3) / 2, 0, 0],
    "opo": [1 - 4, 0, 3 - 4, 0, 8 - 4, 0, 0],  # responses of equal length
    "reinforce++": [1, 0.1, 3, 0.1, 8, 5, 0.1],
    "reinforce++_baseline": [1 - 4, 0, 3 - 4, 0, 8 - 4, 0, 0],
    "remax": [1 - 2, 0.1 - 0.3, 3 - 2, 0.1 - 0.3, 8 - 2, 5 - 6, 0.1 - 0.3],
}
CENTRED = ["grpo", "dapo", "dr_grpo", "rloo", "opo", "reinforce++_baseline"]
scored = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 3)), max_size=12)  # score and group of each response


def unzip(responses: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    return f64([score for score, _ in responses]), torch.tensor([group for _, group in responses]).long()


def response_advantages(scores: Tensor, groups: Tensor, kind: str, greedy: Tensor | None = None) -> Tensor:
    """`[B]` advantages of responses of one token each, without KL."""
    tokens = torch.zeros(len(scores), 1, dtype=scores.dtype)
    greedy = torch.zeros_like(scores) if greedy is None else greedy
    inputs = AdvantageInputs(scores, tokens, tokens, tokens + 1, groups, greedy, torch.ones_like(scores))
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


@pytest.mark.parametrize("kind", CENTRED)
def test_what_does_not_count_is_not_compared_with(kind: str) -> None:
    """Such as episodes whose environment failed: of three groups one goes on with two, one with one, one with none."""
    scores, groups = f64([1, 3, 0, 5, 9, 7, 8]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    counted = torch.tensor([1.0, 1, 0, 1, 0, 0, 0])
    scale = {"grpo": 1 / (2**0.5 + 1e-6), "dapo": 1 / (2**0.5 + 1e-6), "rloo": 2.0}.get(kind, 1.0)
    tokens = torch.zeros(7, 2, dtype=scores.dtype)
    inputs = AdvantageInputs(scores, tokens, tokens, torch.ones_like(tokens), groups, scores, counted)
    advantages = estimate_advantages(kind, inputs, AdvantageSettings(0.0, 1.0, 1.0))[0]
    close(advantages[:, 0], [-scale, scale, 0, 0, 0, 0, 0])
    # Three right episodes and one that failed: without it they are alike.
    inputs = replace(inputs, scores=f64([1, 1, 1, 0, 2, 2, 2]), groups=torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    inputs = replace(inputs, counted=torch.tensor([1.0, 1, 1, 0, 1, 1, 1]))
    close(estimate_advantages(kind, inputs, AdvantageSettings(0.0, 1.0, 1.0))[0], torch.zeros_like(tokens), 0.0)


def test_the_mean_by_length_is_of_those_that_count() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])  # (2 * 4 + 1 * 1) / 3 = 3; the third is longer and does not count
    tokens = torch.zeros(3, 2, dtype=torch.float64)
    scores, counted = f64([4, 1, 100]), torch.tensor([1.0, 1.0, 0.0])
    inputs = AdvantageInputs(scores, tokens, tokens, mask, torch.zeros(3).long(), scores, counted)
    close(estimate_advantages("opo", inputs, AdvantageSettings(0.0, 1.0, 1.0))[0][:, 0], [1, -2, 0])


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
    factor = 1 if kind in ("grpo", "dapo") else scale  # 2e-5: the epsilon beside a standard deviation of 0.3
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


@pytest.mark.parametrize(("kind", "needs"), ESTIMATORS.items())
def test_estimators_read_what_the_settings_say_they_need(kind: str, needs: Estimator) -> None:
    scores, groups, greedy = f64([5, 3, 7]), torch.tensor([4, 4, 4]), f64([1, 1, 2])
    tokens, values = f64([[0], [0], [0]]), f64([[1], [2], [3]])
    inputs = AdvantageInputs(scores, tokens, values, torch.ones(3, 1), groups, greedy, torch.ones(3))

    def matters(**changed: Tensor) -> bool:
        settings = AdvantageSettings(kl_coef=0.0, gamma=1.0, gae_lambda=0.5)
        before, after = (estimate_advantages(kind, x, settings)[0] for x in (inputs, replace(inputs, **changed)))
        return not torch.equal(before, after)

    assert matters(values=values + 1) == needs.needs_critic
    assert matters(groups=torch.tensor([4, 4, 5])) == needs.needs_groups
    assert matters(greedy_scores=greedy + 1) == needs.needs_greedy


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
    # of two tokens and of one: the mean by length is (2 * 4.7 + 2.6) / 3 = 4
    "opo": [[0.7 / 2, 0, 0.7], [0, -1.4, 0]],
    "grpo": [
        [0.5 * 1.05 / (1.05 * 2**0.5 + 1e-6), 0, 1.05 / (1.05 * 2**0.5 + 1e-6)],
        [0, -1 / (2**0.5 + 1e-6 / 1.05), 0],
    ],
}
TOKEN_ADVANTAGES_BY_HAND["dapo"] = TOKEN_ADVANTAGES_BY_HAND["grpo"]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_of_tokens_by_hand(kind: str) -> None:
    values, scores, groups = f64([[1, NAN, 2], [NAN, 1, INF]]), f64([5, 3]), torch.tensor([4, 4])
    inputs = AdvantageInputs(scores, TOKEN_KL, values, TOKEN_MASK, groups, f64([1, 1]), torch.ones(2))
    advantages, returns = estimate_advantages(kind, inputs, AdvantageSettings(0.1, gamma=0.5, gae_lambda=0.5))
    close(advantages, TOKEN_ADVANTAGES_BY_HAND[kind])
    baseline = values.nan_to_num(0, 0, 0) if kind == "gae" else 0
    close(returns, advantages + baseline)
