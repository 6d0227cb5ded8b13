"""The arithmetic of PPO on language models: KL estimates, advantages, losses, controllers and schedules.

Every function takes tensors and plain numbers and gives tensors back, on any device. Left out on purpose: models,
the configuration, and communication. Whatever must agree over all ranks (moments, denominators, stats) is a sum here,
which the caller all-reduces.

Conventions: B responses, T positions. Tensors are [B, T] unless stated. `mask` (bool or 0/1) is 1 on response tokens;
what another tensor holds where the mask is 0, nan and inf included, never reaches a result or a gradient.
Log-probabilities are natural logarithms, in float32 or wider.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside any clip range, yet harmless in float32
_EPSILON = 1e-8  # added to the variance in whitening, as TRL does
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


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over the masked-in tokens; a scalar, 0 when there is none."""
    return masked_sum(x, mask) / mask.bool().sum().clamp(min=1)


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


def log_ratio_kl(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats, for tokens that the policy sampled.

    With d = logp - ref_logp: `k1` d, `k2` d^2 / 2, `k3` exp(-d) - 1 + d (never negative; -d is cut at 20 so that it
    stays finite), `abs` |d|. Raises ValueError for another kind. Source: http://joschu.net/blog/kl-approx.html.
    """
    return _choose(KL_ESTIMATORS, kind, "KL estimator")(logp - ref_logp)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, score_clip: float | None = None) -> Tensor:
    """Reward of each token: -kl_coef * kl, plus the response's score [B] on its last masked-in token.

    The score is clipped to [-score_clip, score_clip] if that is given. Zero where mask is 0; a row without response
    tokens is all zero, its score dropped. Source: Ziegler et al. 2019 (arXiv 1909.08593) eq. 2, KL spread over tokens.
    """
    if score_clip is not None:
        scores = scores.clamp(-score_clip, score_clip)
    inside = mask.bool()
    remaining = inside.flip(1).cumsum(1).flip(1)  # response tokens from here to the end
    last = inside & (remaining == 1)
    return _inside(-kl_coef * kl, mask) + _inside(scores[:, None], last)


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


# --- losses


def _per_token(total: Tensor, denominator: float) -> Tensor:
    if denominator <= 0:
        raise ValueError(f"denominator is {denominator}: an optimizer step needs at least one response token")
    return total / denominator


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped PPO loss (scalar, to be minimized) and its stats; the gradient reaches `logp` only.

    With r = exp(logp - old_logp), the log-ratio clamped to +-20: per token max(-A r, -A clip(r, 1 - clip_low,
    1 + clip_high)); where A < 0 at most -A dual_clip (> 1), if given; times `weights` (importance weights), if given.
    The loss is the masked sum / `denominator`, the number of response tokens in the whole optimizer step (all ranks,
    all micro-batches), so that the losses and gradients of its parts add up. ValueError unless it is positive.

    Stats are detached sums over masked-in tokens, unweighted; add them over parts, then divide by the tokens:
    `clip_fraction` tokens whose clipped term exceeds the unclipped one (the dual clip does not count), `approx_kl`
    (r - 1) - log r, the k3 estimate of KL(old || current), `ratio` r.
    Sources: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; dual clip: Ye et al. 2019 (arXiv 1912.09729).
    """
    log_ratio = _inside(logp - old_logp.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    cost = -_inside(advantages.detach(), mask)
    unclipped, clipped = cost * ratio, cost * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        losses = torch.where(cost > 0, torch.minimum(losses, cost * dual_clip), losses)
    if weights is not None:
        losses = losses * _inside(weights.detach(), mask)
    stats = {
        "clip_fraction": (clipped > unclipped).to(losses.dtype).sum(),
        "approx_kl": _k3(-log_ratio.detach()).sum(),  # zero where masked out: the log-ratio is
        "ratio": masked_sum(ratio.detach(), mask),
    }
    return _per_token(losses.sum(), denominator), stats


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
    return _per_token(0.5 * torch.maximum(unclipped, clipped).sum(), denominator), stats


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


# --- controllers and schedules


@dataclass
class AdaptiveKL:
    """KL coefficient that steers the measured KL towards `target`; with target None it stays at `init`.

    `target` is in the unit of the KL given to `update`, `horizon` in that of its `n`; a larger horizon reacts more
    slowly. Source: Ziegler et al. 2019 (arXiv 1909.08593) sec. 2.2.
    """

    init: InitVar[float]
    target: float | None
    horizon: float
    coef: float = field(init=False)

    def __post_init__(self, init: float) -> None:
        self.coef = init

    def update(self, kl: float, n: float) -> None:
        """coef *= 1 + clip(kl / target - 1, +-0.2) * n / horizon, after `n` more samples with mean KL `kl`.

        Raises ValueError if n >= 5 * horizon: one update could then bring the coefficient to 0 or below, for good.
        """
        if self.target is None:
            return
        if n >= 5 * self.horizon:
            raise ValueError(f"n = {n} is not below 5 * horizon = {5 * self.horizon}: choose a longer horizon")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps; target and horizon are settings and come from the caller."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from the coefficient of `state_dict`."""
        self.coef = state["coef"]


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


LR_SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def lr_scale(step: int, warmup_steps: int, total_steps: int, kind: str) -> float:
    """Multiplier in [0, 1] of the learning rate at optimizer step `step`, counted from 0.

    (step + 1) / warmup_steps in the warm-up; then, from 1, `constant`, or `linear` or `cosine` down to 0 at
    total_steps, and 0 beyond. Raises ValueError for another kind.
    Source of cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983) eq. 5.
    """
    schedule = _choose(LR_SCHEDULES, kind, "learning-rate schedule")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return schedule(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
