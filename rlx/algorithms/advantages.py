"""TODO rlx.algorithms.advantages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.algorithms.masking import apply_mask, lookup

_GROUP_EPSILON = 1e-6  # added to a group's standard deviation, as veRL does


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of each token: -kl_coef * kl, plus the response's score [B] on its last masked-in token.

    Zero where mask is 0; a row without response tokens is all zero, its score dropped.
    Source: Ziegler et al. 2019 (arXiv 1909.08593) eq. 2, KL spread over tokens.
    """
    inside = mask.bool()
    remaining = inside.flip(1).cumsum(1).flip(1)  # response tokens from here to the end
    last = inside & (remaining == 1)
    return apply_mask(-kl_coef * kl, mask) + apply_mask(scores[:, None], last)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """What soft overlong punishment takes off the scores of responses of `lengths` tokens, [B] -> [B].

    0 up to max_tokens - buffer, from there in a straight line to `penalty` at max_tokens and beyond; 0 with no buffer.
    Source: Yu et al. 2025, DAPO (arXiv 2503.14476) eq. 13.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape, device=lengths.device)
    return penalty * ((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates and the returns (advantages + values); detached, zero where mask is 0.

    The steps of the process are the masked-in tokens: those masked out between them (tool output) are skipped and cost
    no discount, so the value after a token is that of the next masked-in one, and 0 after the last.
    Source: Schulman et al. 2015 (arXiv 1506.02438) eq. 16.
    """
    inside = mask.bool()
    rewards, values = rewards.detach(), values.detach()
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(inside[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(inside[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return apply_mask(advantages, mask), apply_mask(advantages + values, mask)


@dataclass(frozen=True)
class _Group:
    """What an estimator may compare a score with; every tensor [B], float64."""

    count: Tensor  # completions of the same prompt
    mean: Tensor
    std: Tensor  # unbiased; 0 for one completion
    greedy: Tensor  # score of the greedy completion


def _grpo(scores: Tensor, group: _Group) -> Tensor:
    return (scores - group.mean) / (group.std + _GROUP_EPSILON)


def _group_mean(scores: Tensor, group: _Group) -> Tensor:
    return scores - group.mean


def _rloo(scores: Tensor, group: _Group) -> Tensor:
    # score - mean of the others, written without their sum
    return (scores - group.mean) * group.count / (group.count - 1).clamp(min=1)


def _batch(scores: Tensor, group: _Group) -> Tensor:
    return scores


def _remax(scores: Tensor, group: _Group) -> Tensor:
    return scores - group.greedy


ESTIMATORS: dict[str, Callable[[Tensor, _Group], Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _group_mean,
    "rloo": _rloo,
    "reinforce++": _batch,
    "reinforce++_baseline": _group_mean,
    "remax": _remax,
}


def group_advantages(scores: Tensor, groups: Tensor, kind: str, greedy: Tensor | None = None) -> Tensor:
    """Advantage of each whole response, [B], detached: its score [B] against a baseline.

    `groups` [B] says which responses answer the same prompt. kind: `grpo` (s - mean) / (std + 1e-6) of its group, std
    unbiased; `dr_grpo` and `reinforce++_baseline` s - mean; `rloo` s - mean of the others; `remax` s - `greedy` [B],
    the score of the prompt's greedy response; `reinforce++` s, its baseline being the batch's mean when the token
    advantages are whitened. Where all scores of a group are equal the first four give 0, as for a group of one.
    Raises ValueError for another kind, or remax without `greedy`.
    Sources: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300) sec. 4.1.2; Liu et al. 2025, Dr. GRPO (arXiv 2503.20783)
    sec. 3.2; Ahmadian et al. 2024, RLOO (arXiv 2402.14740) eq. 7; Hu et al. 2025, REINFORCE++ (arXiv 2501.03262);
    Li et al. 2023, ReMax (arXiv 2310.10505) alg. 1.
    """
    estimator = lookup(ESTIMATORS, kind, "advantage estimator")
    if kind == "remax" and greedy is None:
        raise ValueError("remax needs the scores of the greedy responses")
    exact = scores.detach().double()
    index = groups.unique(return_inverse=True)[1]
    size = int(index.max()) + 1 if len(index) else 0

    def over_group(x: Tensor) -> Tensor:
        return x.new_zeros(size).index_add(0, index, x)[index]

    count = over_group(torch.ones_like(exact))
    lowest = exact.new_full((size,), torch.inf).scatter_reduce(0, index, exact, "amin")[index]
    mean = lowest + over_group(exact - lowest) / count  # exactly the scores where these are equal
    variance = over_group((exact - mean).square()) / (count - 1).clamp(min=1)
    baseline = torch.zeros_like(exact) if greedy is None else greedy.detach().double()
    return estimator(exact, _Group(count, mean, variance.sqrt(), baseline)).to(scores.dtype)
