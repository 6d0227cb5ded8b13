"""The arithmetic of PPO on language models: KL estimates, advantages, losses, importance weights.

Every function takes tensors and plain numbers and gives tensors back, on any device. Left out on purpose: models,
the configuration, communication, and what changes from step to step (adaptive.py). Whatever must agree over all ranks
(moments, denominators, stats) is a sum here, which the caller all-reduces.

Conventions: B responses, T positions. Tensors are [B, T] unless stated. `mask` (bool or 0/1) is 1 on response tokens;
what another tensor holds where the mask is 0, nan and inf included, never reaches a result or a gradient.
Log-probabilities are natural logarithms, in float32 or wider.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside any clip range, yet harmless in float32
_EPSILON = 1e-8  # added to the variance in whitening, as TRL does
_GROUP_EPSILON = 1e-6  # added to a group's standard deviation, as veRL does
_ROUNDING = torch.finfo(torch.float32).eps ** 2  # below this share of the mean square a variance is rounding

_Choice = TypeVar("_Choice")


def _choose(choices: Mapping[str, _Choice], kind: str, what: str) -> _Choice:
    if kind not in choices:
        raise ValueError(f"unknown {what} {kind!r}: choose one of {', '.join(choices)}")
    return choices[kind]


# --- masks and moments


def _inside(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is 1, zero elsewhere. A product with the mask would keep nan, and would make nan of inf."""
    return torch.where(mask.bool(), x, 0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the masked-in tokens; a scalar."""
    return _inside(x, mask).sum()


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over the masked-in tokens: [3], float64, detached.

    The moments of several ranks or micro-batches add up to those of the whole. A variance taken from them has a
    relative error near 1e-16 * (mean / std)^2: in float64 that is harmless up to |mean| = 1e5 std. Beyond it subtract
    a constant from x first, the same on every rank; neither whitening nor explained variance depends on it.
    """
    kept = _inside(x.detach().double(), mask)
    return torch.stack([mask.bool().sum().double(), kept.sum(), kept.square().sum()])


def _mean_variance(total: Tensor) -> tuple[Tensor, Tensor]:
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
    mean, variance = _mean_variance(moments(x, mask) if total is None else total)
    whitened = (x.double() - mean) * torch.rsqrt(variance + _EPSILON)
    return _inside(whitened if shift_mean else whitened + mean, mask).to(x.dtype)


def explained_variance(residual_moments: Tensor, return_moments: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one no better than a constant; a scalar.

    Takes the (all-reduced) `moments` of `returns - values` and of `returns`. Where the returns vary by no more than
    float32 rounding the quotient means nothing, and the answer is 0.
    """
    unexplained = _mean_variance(residual_moments)[1]
    variance = _mean_variance(return_moments)[1]
    count, _, squares = return_moments.unbind()
    return torch.where(variance * count > _ROUNDING * squares, 1 - unexplained / variance, 0.0)


# --- KL, rewards, advantages


def _unchanged(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # Bounded on the side where exp would overflow; expm1 keeps the digits that exp - 1 loses near 0.
    inverse = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(inverse) - inverse


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _unchanged, "k2": _k2, "k3": _k3, "abs": torch.abs}


def _kl(log_ratio: Tensor, kind: str) -> Tensor:
    value = _choose(KL_ESTIMATORS, kind.removesuffix("+"), "KL estimator")(log_ratio)
    if not kind.endswith("+"):
        return value
    unbiased = _k2(log_ratio)
    return value.detach() + (unbiased - unbiased.detach())  # the bracket is 0: the value stays as it is


def log_ratio_kl(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats, for tokens that the policy sampled.

    With d = logp - ref_logp: `k1` d, `k2` d^2 / 2, `k3` exp(-d) - 1 + d (never negative; -d is cut at 20 so that it
    stays finite), `abs` |d|. With a `+` after it the value is that of the estimator and the gradient that of k2, whose
    expectation is the gradient of the KL (straight through): k1's is 0, k3's that of the reverse KL. Raises ValueError
    for another kind. Sources: http://joschu.net/blog/kl-approx.html; gradients: Tang & Munos 2025 (arXiv 2506.09477).
    """
    return _kl(logp - ref_logp, kind)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of each token: -kl_coef * kl, plus the response's score [B] on its last masked-in token.

    Zero where mask is 0; a row without response tokens is all zero, its score dropped.
    Source: Ziegler et al. 2019 (arXiv 1909.08593) eq. 2, KL spread over tokens.
    """
    inside = mask.bool()
    remaining = inside.flip(1).cumsum(1).flip(1)  # response tokens from here to the end
    last = inside & (remaining == 1)
    return _inside(-kl_coef * kl, mask) + _inside(scores[:, None], last)


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
    return _inside(advantages, mask), _inside(advantages + values, mask)


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
    estimator = _choose(ESTIMATORS, kind, "advantage estimator")
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


# --- losses


def _by_tokens(inside: Tensor, length: int) -> Tensor:
    return inside


def _by_sequences(inside: Tensor, length: int) -> Tensor:
    return inside / inside.sum(1, keepdim=True).clamp(min=1)


def _by_length(inside: Tensor, length: int) -> Tensor:
    return inside / length


AGGREGATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "token_mean": _by_tokens,
    "sequence_mean": _by_sequences,
    "constant": _by_length,
}


def token_weights(mask: Tensor, kind: str, length: int) -> tuple[Tensor, Tensor]:
    """How much each token counts in a loss, and the size (a scalar) of these responses: the loss of an optimizer step
    is the sum of weight * token loss / the sum of the sizes of all its parts.

    kind: `token_mean` every token alike, size: tokens (DAPO, arXiv 2503.14476 eq. 8); `sequence_mean` the mean over
    each response, then over responses, size: responses (GRPO, arXiv 2402.03300 eq. 3); `constant` the sum over each
    response / `length`, mean over responses (Dr. GRPO, arXiv 2503.20783). Responses without tokens do not count.
    Raises ValueError for another kind.
    """
    inside = mask.bool().to(torch.float32)
    weights = _choose(AGGREGATIONS, kind, "loss aggregation")(inside, length)
    return weights, inside.sum() if kind == "token_mean" else inside.any(1).sum().float()


def _mean(total: Tensor, denominator: float) -> Tensor:
    if denominator <= 0:
        raise ValueError(f"denominator is {denominator}: an optimizer step needs at least one response token")
    return total / denominator


def entropy_loss(entropy: Tensor, mask: Tensor, denominator: float, weights: Tensor | None = None) -> Tensor:
    """Minus the mean entropy (scalar): -masked sum of weights * entropy / `denominator`, as in `policy_loss`.

    Source: the entropy bonus of Schulman et al. 2017 (arXiv 1707.06347) eq. 9.
    """
    kept = _inside(entropy, mask)
    return _mean(-(kept if weights is None else kept * _inside(weights.detach(), mask)).sum(), denominator)


Clipped = tuple[Tensor, Tensor]
"""(loss of each token, whether the clip decided it)"""


def _ppo(logp: Tensor, log_ratio: Tensor, cost: Tensor, low: float, high: float, dual: float | None) -> Clipped:
    ratio = log_ratio.exp()
    unclipped, clipped = cost * ratio, cost * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    if dual is not None:
        losses = torch.where(cost > 0, torch.minimum(losses, cost * dual), losses)
    return losses, clipped > unclipped


def _cispo(logp: Tensor, log_ratio: Tensor, cost: Tensor, low: float, high: float, dual: float | None) -> Clipped:
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return cost * weight * logp, weight != ratio


POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, float, float, float | None], Clipped]] = {
    "ppo": _ppo,
    "gspo": _ppo,  # on the ratio of the whole response
    "cispo": _cispo,
}


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    kind: str = "ppo",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss (scalar, to be minimized) and its stats; the gradient reaches `logp` only.

    With r = exp(logp - old_logp), the log-ratio clamped to +-20, per token:
    `ppo` max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip (> 1), if given.
    `gspo` the same with the response's ratio, exp(mean over its tokens of log r), on each of its tokens; each token's
    gradient is then that ratio * A * grad logp (GSPO-token, which is GSPO when a response's advantages are equal).
    `cispo` -A clip(r, 1 - clip_low, 1 + clip_high) logp, the clipped ratio detached: no token's gradient is dropped.
    All times `weights` [B, T] (importance weights, token weights), if given. The loss is the masked sum /
    `denominator`, the size of the whole optimizer step (see `token_weights`; all ranks, all micro-batches), so that
    the losses and gradients of its parts add up. ValueError unless it is positive, or for another kind.

    Stats are detached sums over masked-in tokens, unweighted; add them over parts, then divide by the tokens:
    `clip_fraction` tokens whose clipped term decides (the dual clip does not count), `approx_kl` (r - 1) - log r with
    the token's own r, the k3 estimate of KL(old || current), `ratio` the token's own r.
    Sources: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; dual clip: Ye et al. 2019 (arXiv 1912.09729); Zheng et al.
    2025, GSPO (arXiv 2507.18071) eq. 5 and 14; Chen et al. 2025, MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    choose = _choose(POLICY_LOSSES, kind, "policy loss")
    own = _inside(logp - old_logp.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_ratio = _of_response(own, mask) if kind == "gspo" else own
    cost = -_inside(advantages.detach(), mask)
    losses, clipped = choose(_inside(logp, mask), log_ratio, cost, clip_low, clip_high, dual_clip)
    if weights is not None:
        losses = losses * _inside(weights.detach(), mask)
    stats = {
        "clip_fraction": masked_sum(clipped.to(losses.dtype), mask),
        "approx_kl": _k3(-own.detach()).sum(),  # zero where masked out: the log-ratio is
        "ratio": masked_sum(own.detach().exp(), mask),
    }
    return _mean(losses.sum(), denominator), stats


def _of_response(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The mean log-ratio of the response on each of its tokens, with the gradient of the token's own."""
    mean = log_ratio.detach().sum(1, keepdim=True) / mask.bool().sum(1, keepdim=True).clamp(min=1)
    return _inside(mean + (log_ratio - log_ratio.detach()), mask)


def kl_loss(
    logp: Tensor, ref_logp: Tensor, mask: Tensor, denominator: float, kind: str, weights: Tensor | None = None
) -> Tensor:
    """KL to the reference as a loss (scalar): the masked sum of weights * `log_ratio_kl` / `denominator`.

    The gradient reaches `logp` only; denominator and weights as in `policy_loss`.
    Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300) eq. 3 and 4.
    """
    kl = _kl(_inside(logp - ref_logp.detach(), mask), kind)
    return _mean(kl.sum() if weights is None else (kl * _inside(weights.detach(), mask)).sum(), denominator)


def supervised_loss(logp: Tensor, mask: Tensor, denominator: float) -> Tensor:
    """Mean negative log-likelihood of the masked-in tokens (scalar): -masked sum of logp / `denominator`.

    Source: the pretraining term of Ouyang et al. 2022 (arXiv 2203.02155) eq. 2 (PPO-ptx).
    """
    return _mean(-masked_sum(logp, mask), denominator)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, denominator: float, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss (scalar, to be minimized) and its stats; the gradient reaches `values` only.

    Per token 0.5 * max((V - R)^2, (V' - R)^2), V' being V kept within `clip` of the old value; None: 0.5 * (V - R)^2.
    The loss is the masked sum / `denominator`, as in `policy_loss`. Stats: `clip_fraction`, the number of tokens whose
    clipped square is the larger one. Source: the clipped value loss of OpenAI Baselines' ppo2.
    """
    values, old_values, returns = (_inside(x, mask) for x in (values, old_values.detach(), returns.detach()))
    unclipped = (values - returns).square()
    # Clamped against bounds, not old + clamp(difference): within them V' is then V to the last bit.
    clipped = unclipped if clip is None else (values.clamp(old_values - clip, old_values + clip) - returns).square()
    stats = {"clip_fraction": (clipped > unclipped).to(values.dtype).sum()}
    return _mean(0.5 * torch.maximum(unclipped, clipped).sum(), denominator), stats


# --- importance weights


def _none(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.ones_like(ratio)


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(max=high)


def _drop(ratio: Tensor, low: float, high: float) -> Tensor:
    return _inside(ratio, (ratio >= low) & (ratio <= high))


def _whole_response(log_ratio: Tensor) -> Tensor:
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


IMPORTANCE_WEIGHTS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": _none,
    "tis": _truncate,
    "mask": _drop,
}
IMPORTANCE_LEVELS: dict[str, Callable[[Tensor], Tensor]] = {"token": _unchanged, "sequence": _whole_response}


def importance_weights(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, kind: str, low: float, high: float, level: str = "token"
) -> Tensor:
    """Weight old / rollout of each token, which corrects for a sampler that differs from the trainer; detached.

    kind: `none` 1, `tis` the ratio truncated to at most `high` (`low` unused), `mask` the ratio inside [low, high] and
    0 outside. level: `token`, or `sequence` for the ratio of the whole response (the product over its masked-in
    tokens) on each of its tokens. Log-ratios are clamped to +-20; 1 where mask is 0. Raises ValueError for another
    kind or level. Sources: truncation: Ionides 2008, "Truncated Importance Sampling"; for LLMs: Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    weigh = _choose(IMPORTANCE_WEIGHTS, kind, "importance weight")
    spread = _choose(IMPORTANCE_LEVELS, level, "importance level")
    log_ratio = spread(_inside((old_logp - rollout_logp).detach(), mask))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(mask.bool(), weigh(ratio, low, high), 1.0)
