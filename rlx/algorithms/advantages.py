"""Advantage estimators: from scores, KL and values to the advantage and return of each token.

`ADVANTAGES` has one callable per estimator. What each needs (a critic, groups, greedy completions) is in the table
`ESTIMATORS` of rlx.config.sections.algorithm, so no other module compares estimator names. A new estimator is an entry
in both. Left out: normalising scores and whitening advantages, which need sums over all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.algorithms.masking import apply_mask, lookup

_GROUP_EPSILON = 1e-6  # added to the standard deviation of a group, as veRL does

# --- rewards of tokens


def token_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, turn_rewards: Tensor | None = None
) -> Tensor:
    """Reward of each token: -kl_coef * kl, plus the score `[B]` of the response on its last token.

    Turn rewards, `[B, T]`, stay on the last token of their turn; the rest of the score goes on the last token.

    Zero where the mask is 0. A row without response tokens is all zero: its score is dropped.
    Source: Ziegler et al. 2019 (arXiv 1909.08593) eq. 2, KL spread over tokens.
    """
    inside = mask.bool()
    remaining = inside.flip(1).cumsum(1).flip(1)  # response tokens from here to the end
    last = inside & (remaining == 1)
    if turn_rewards is None:
        return apply_mask(-kl_coef * kl, mask) + apply_mask(scores[:, None], last)
    earlier = apply_mask(turn_rewards, mask)
    return apply_mask(-kl_coef * kl, mask) + earlier + apply_mask((scores - earlier.sum(1))[:, None], last)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """What soft overlong punishment subtracts from the scores of responses of `lengths` tokens: `[B]` from `[B]`.

    0 up to max_tokens - buffer, from there linear up to `penalty` at max_tokens and beyond; 0 with buffer 0.
    Source: Yu et al. 2025, DAPO (arXiv 2503.14476) eq. 13.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape, device=lengths.device)
    return penalty * ((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


# --- what estimators take and return


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use of B responses. Estimators return detached tensors."""

    scores: Tensor  # [B] reward of the whole response, without KL
    kl: Tensor  # [B, T] KL to the reference, per token
    values: Tensor  # [B, T] of the critic; read by estimators that need a critic
    mask: Tensor  # [B, T]
    groups: Tensor  # [B] int64, equal for responses to the same prompt
    greedy_scores: Tensor  # [B] score of the greedy completion of the prompt; read by estimators that need one
    counted: Tensor  # [B] 1, or 0 for what its group is not compared with
    turn_rewards: Tensor | None = None  # [B, T] the parts of the scores that turns were given; None: all at the end


@dataclass(frozen=True)
class AdvantageSettings:
    """The numbers that estimators share."""

    kl_coef: float  # weight of the KL in the rewards; 0 where the KL is part of the loss
    gamma: float  # discount per token
    gae_lambda: float  # read by gae alone


AdvantagesAndReturns = tuple[Tensor, Tensor]
"""(advantages `[B, T]`, returns `[B, T]`), zero where the mask is 0"""


AdvantageEstimator = Callable[[AdvantageInputs, AdvantageSettings], AdvantagesAndReturns]


def estimate_advantages(kind: str, inputs: AdvantageInputs, settings: AdvantageSettings) -> AdvantagesAndReturns:
    """Advantages and returns of each token, `[B, T]` each, by the estimator of that name; detached, not whitened.

    `gae` needs a critic. The others compute one number for the whole response, its score minus a baseline; the
    advantage of a token is the discounted sum of that number and of the KL rewards from the token on.

    Raises:
        ValueError: unknown kind.
    """
    return lookup(ADVANTAGES, kind, "advantage estimator")(inputs, settings)


# --- with a critic


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> AdvantagesAndReturns:
    """Generalized advantage estimates and the returns (advantages + values); detached, zero where the mask is 0.

    The steps of the process are the tokens where the mask is 1. Tokens between them where it is 0 (tool output) are
    skipped and not discounted: the value after a token is that of the next token with mask 1, and 0 after the last.
    Source: Schulman et al. 2015 (arXiv 1506.02438) eq. 16.
    """
    inside = mask.bool()
    rewards, values = rewards.detach(), values.detach()
    deltas = torch.where(inside, rewards + gamma * _next_inside(values, inside) - values, 0.0)
    advantages = discounted_sums(deltas, torch.full_like(values, gamma * lam).masked_fill(~inside, 1.0))
    return apply_mask(advantages, mask), apply_mask(advantages + values, mask)


def discounted_sums(terms: Tensor, factors: Tensor) -> Tensor:
    """`[B, T]` sums s with s[t] = terms[t] + factors[t] * s[t + 1], and 0 after the last column.

    A loop over tokens would be thousands of small kernels. This one doubles the span that each sum covers, so it takes
    log2(T) rounds. A sum does not depend on how many columns of zeros follow.
    Source: Hillis and Steele 1986, "Data parallel algorithms", Communications of the ACM 29 (12).
    """
    span, width = 1, terms.shape[1]
    while span < width:
        terms = terms + factors * pad(terms[:, span:], (0, span))
        factors = factors * pad(factors[:, span:], (0, span))
        span *= 2
    return terms


def _next_inside(values: Tensor, inside: Tensor) -> Tensor:
    """`[B, T]` the value of the next token inside, 0 after the last one."""
    width = values.shape[1]
    columns = torch.where(inside, torch.arange(width, device=values.device), width)  # T: none
    following = pad(columns.flip(1).cummin(1).values.flip(1), (0, 1), value=width)[:, 1:]
    return pad(values, (0, 1)).gather(1, following)


def _gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> AdvantagesAndReturns:
    rewards = token_rewards(inputs.scores, inputs.kl, inputs.mask, settings.kl_coef, inputs.turn_rewards)
    return gae(rewards, inputs.values, inputs.mask, settings.gamma, settings.gae_lambda)


# --- without a critic


def _rewards_to_go(
    scores: Tensor, inputs: AdvantageInputs, gamma: float, kl_coef: float, turn_rewards: Tensor | None = None
) -> AdvantagesAndReturns:
    """The discounted sum of the rewards from each token on: what gae gives with values 0 and lambda 1."""
    rewards = token_rewards(scores, inputs.kl, inputs.mask, kl_coef, turn_rewards)
    return gae(rewards, torch.zeros_like(rewards), inputs.mask, gamma, lam=1.0)


def _reinforce(inputs: AdvantageInputs, settings: AdvantageSettings) -> AdvantagesAndReturns:
    """The score s itself: the caller whitens, which subtracts the mean of the batch.

    Source: Hu et al. 2025, REINFORCE++ (arXiv 2501.03262).
    """
    return _rewards_to_go(inputs.scores, inputs, settings.gamma, settings.kl_coef, inputs.turn_rewards)


def _remax(inputs: AdvantageInputs, settings: AdvantageSettings) -> AdvantagesAndReturns:
    """s - the score of the greedy completion. Source: Li et al. 2023, ReMax (arXiv 2310.10505) alg. 1."""
    return _rewards_to_go(inputs.scores - inputs.greedy_scores, inputs, settings.gamma, settings.kl_coef)


@dataclass(frozen=True)
class _Groups:
    """The scores of responses and the moments of those that count in the group of each; every tensor `[B]`, float64."""

    scores: Tensor
    count: Tensor  # at least 1
    mean: Tensor
    mean_by_length: Tensor  # each score weighted by the tokens of its response
    std: Tensor  # unbiased; 0 for a group of one


def _group_moments(scores: Tensor, lengths: Tensor, groups: Tensor, left_out: Tensor) -> _Groups:
    """`[B]` scores, response lengths in tokens, group numbers of any value and order, and bools: not in the moments."""
    exact = scores.detach().double()
    index = groups.unique(return_inverse=True)[1]
    size = int(index.max()) + 1 if len(index) else 0

    def sum_over_group(x: Tensor) -> Tensor:
        return x.new_zeros(size).index_add(0, index, x.masked_fill(left_out, 0.0))[index]

    count = sum_over_group(torch.ones_like(exact)).clamp(min=1)
    compared = exact.masked_fill(left_out, torch.inf)
    lowest = exact.new_full((size,), torch.inf).scatter_reduce(0, index, compared, "amin")[index]
    mean = lowest + sum_over_group(exact - lowest) / count  # exactly the score where all scores of a group are equal
    variance = sum_over_group((exact - mean).square()) / (count - 1).clamp(min=1)
    tokens = lengths.double()
    mean_by_length = lowest + sum_over_group(tokens * (exact - lowest)) / sum_over_group(tokens).clamp(min=1)
    return _Groups(exact, count, mean, mean_by_length, variance.sqrt())


def _grpo(groups: _Groups) -> Tensor:
    """(s - mean of the group) / (std of the group + 1e-6).

    Sources: Shao et al. 2024, GRPO (arXiv 2402.03300) sec. 4.1.2; Yu et al. 2025, DAPO (arXiv 2503.14476) eq. 9.
    """
    return (groups.scores - groups.mean) / (groups.std + _GROUP_EPSILON)


def _minus_mean(groups: _Groups) -> Tensor:
    """s - mean of the group.

    Sources: Liu et al. 2025, Dr. GRPO (arXiv 2503.20783) sec. 3.2; Hu et al. 2025, REINFORCE++ with a baseline (arXiv
    2501.03262).
    """
    return groups.scores - groups.mean


def _rloo(groups: _Groups) -> Tensor:
    """s - mean of the others in the group, from the mean of all.

    Source: Ahmadian et al. 2024, RLOO (arXiv 2402.14740) eq. 7.
    """
    return (groups.scores - groups.mean) * groups.count / (groups.count - 1).clamp(min=1)


def _opo(groups: _Groups) -> Tensor:
    """s - mean of the group, weighted by response length. Source: Hao et al. 2025, OPO (arXiv 2505.23585)."""
    return groups.scores - groups.mean_by_length


def _within_groups(compare: Callable[[_Groups], Tensor]) -> AdvantageEstimator:
    """An estimator that compares the whole rewards of a group, s - kl_coef * the KL of the response.

    It gives 0 where all rewards of a group are equal, for a group of one, and for a response that does not count, as if
    that were not there.

    Args:
        compare: gives the advantage of each response, `[B]` float64.
    """

    def estimate(inputs: AdvantageInputs, settings: AdvantageSettings) -> AdvantagesAndReturns:
        rewards = inputs.scores - settings.kl_coef * apply_mask(inputs.kl, inputs.mask).sum(1)
        left_out = inputs.counted == 0
        groups = _group_moments(rewards, inputs.mask.sum(1), inputs.groups, left_out)
        advantages = compare(groups).masked_fill(left_out, 0.0).to(rewards.dtype)
        return _rewards_to_go(advantages, inputs, settings.gamma, kl_coef=0.0)

    return estimate


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "gae": _gae,
    "grpo": _within_groups(_grpo),
    "dapo": _within_groups(_grpo),
    "dr_grpo": _within_groups(_minus_mean),
    "rloo": _within_groups(_rloo),
    "opo": _within_groups(_opo),
    "reinforce++": _reinforce,
    "reinforce++_baseline": _within_groups(_minus_mean),
    "remax": _remax,
}
