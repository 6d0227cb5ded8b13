"""Losses: policy, KL, entropy, value, supervised; and the weights of tokens in them.

Each loss is a masked sum over one denominator, the size of the whole optimizer step, so that losses and gradients of
its parts (micro-batches, ranks) add up. Left out: models, and the sums over ranks that give the denominator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.algorithms.kl import MAX_LOG_RATIO, estimate_kl, k3_unbounded
from rlx.algorithms.masking import apply_mask, lookup, masked_sum, mean_variance

# --- weights of tokens


def _by_tokens(inside: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Every token weighs the same; the size is the number of tokens. Source: DAPO (arXiv 2503.14476) eq. 8."""
    return inside, inside.sum()


def _by_sequences(inside: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The mean over each response, then over responses. Source: GRPO (arXiv 2402.03300) eq. 3."""
    return inside / inside.sum(1, keepdim=True).clamp(min=1), _count_responses(inside)


def _by_length(inside: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The sum over each response / `length`, then the mean over responses. Source: Dr. GRPO (arXiv 2503.20783)."""
    return inside / length, _count_responses(inside)


def _count_responses(inside: Tensor) -> Tensor:
    return inside.any(1).sum().float()


AGGREGATIONS: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "token_mean": _by_tokens,
    "sequence_mean": _by_sequences,
    "constant": _by_length,
}


def token_weights(mask: Tensor, kind: str, length: int) -> tuple[Tensor, Tensor]:
    """The weight of each token in a loss, `[B, T]`, and the size of these responses, a scalar.

    The loss of an optimizer step is the sum of weight * token loss / the sum of the sizes of all its parts. Responses
    without tokens do not count.

    Raises:
        ValueError: unknown kind.
    """
    return lookup(AGGREGATIONS, kind, "loss aggregation")(mask.bool().to(torch.float32), length)


def _mean(total: Tensor, denominator: float) -> Tensor:
    if denominator <= 0:
        raise ValueError(f"denominator is {denominator}: an optimizer step needs at least one response token")
    return total / denominator


# --- policy loss


@dataclass(frozen=True)
class PolicyLossSettings:
    """Which policy loss, and how far the probability ratio may move before it is clipped."""

    kind: str  # a key of POLICY_LOSSES
    clip_low: float  # ratios are clipped below 1 - clip_low
    clip_high: float  # ratios are clipped above 1 + clip_high
    dual_clip: float | None = None  # > 1: bound of the loss of tokens with negative advantage, as a multiple of it
    temperatures: tuple[float, float] = (1.0, 1.05)  # of sapo's gate: for positive advantages, and for the others


class Clipped(NamedTuple):
    """The losses of tokens, `[B, T]`, and what decides them, bool `[B, T]`."""

    losses: Tensor
    by_clip: Tensor  # the clip; the dual clip does not count
    ratio: Tensor  # `[B, T]` that is clipped
    by_dual_clip: Tensor | None = None  # the dual clip, if there is one


def _ppo(logp: Tensor, log_ratio: Tensor, cost: Tensor, mask: Tensor, settings: PolicyLossSettings) -> Clipped:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip, if that is set.

    Sources: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; dual clip: Ye et al. 2019 (arXiv 1912.09729).
    """
    ratio = log_ratio.exp()
    unclipped, clipped = cost * ratio, cost * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = torch.maximum(unclipped, clipped)
    if settings.dual_clip is None:
        return Clipped(losses, clipped > unclipped, ratio)
    limit = cost * settings.dual_clip
    bounded = torch.where(cost > 0, torch.minimum(losses, limit), losses)
    return Clipped(bounded, clipped > unclipped, ratio, (cost > 0) & (losses > limit))


def _gspo(logp: Tensor, log_ratio: Tensor, cost: Tensor, mask: Tensor, settings: PolicyLossSettings) -> Clipped:
    """The loss of ppo with the ratio of the response, exp(mean over its tokens of log r), on each of its tokens.

    Each token keeps the gradient of its own log-ratio: this is GSPO-token, whose gradient is GSPO's when the advantages
    of a response are equal. Source: Zheng et al. 2025, GSPO (arXiv 2507.18071) eq. 5 and 14.
    """
    mean = log_ratio.detach().sum(1, keepdim=True) / mask.bool().sum(1, keepdim=True).clamp(min=1)
    of_response = apply_mask(mean + (log_ratio - log_ratio.detach()), mask)
    return _ppo(logp, of_response, cost, mask, settings)


def _cispo(logp: Tensor, log_ratio: Tensor, cost: Tensor, mask: Tensor, settings: PolicyLossSettings) -> Clipped:
    """-A clip(r, 1 - clip_low, 1 + clip_high) logp with the clipped ratio detached: every token keeps a gradient.

    Source: Chen et al. 2025, MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Clipped(cost * weight * logp, weight != ratio, ratio)


def _sapo(logp: Tensor, log_ratio: Tensor, cost: Tensor, mask: Tensor, settings: PolicyLossSettings) -> Clipped:
    """-A 4 / t sigmoid(t (r - 1)), where t is the first of `temperatures` if A > 0, else the second.

    Source: Gao et al. 2025, SAPO (arXiv 2511.20347).
    """
    ratio = log_ratio.exp()
    positive, other = settings.temperatures
    temperature = torch.full_like(cost, other).masked_fill(cost < 0, positive)  # a tensor of both waits for the GPU
    gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    return Clipped(cost * gate, torch.zeros_like(ratio, dtype=torch.bool), ratio)


POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, PolicyLossSettings], Clipped]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "clip_cov": _ppo,  # the weights of tokens that were chosen by `covariances` are 0
}


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float,
    settings: PolicyLossSettings,
    weights: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss (scalar, to be minimized) and its statistics; the gradient reaches `logp` only.

    The functions of `POLICY_LOSSES` have the formulas, with A the advantage and r = exp(logp - old_logp), the log-ratio
    clamped to +-20.

    Args:
        denominator: the size of the whole optimizer step, over all ranks and micro-batches (see `token_weights`); the
            loss is the masked sum divided by it.
        weights: `[B, T]`, multiplied into the token losses: importance weights, token weights.

    Returns:
        The loss and detached sums over tokens where the mask is 1, unweighted; add them over the parts of the step,
        then divide by the number of tokens. `clip_fraction`: tokens whose clipped term decides (the dual clip does not
        count). `clip_low_fraction`, `clip_high_fraction`: those of them below and above the clip range.
        `dual_clip_fraction`: tokens whose loss the dual clip bounds. `approx_kl`: k3 of KL(old || current). `ratio`.

    Raises:
        ValueError: denominator <= 0, or unknown kind.
    """
    token_loss = lookup(POLICY_LOSSES, settings.kind, "policy loss")
    log_ratio = _clamped_log_ratio(logp, old_logp, mask)
    cost = -apply_mask(advantages.detach(), mask)
    clipped = token_loss(apply_mask(logp, mask), log_ratio, cost, mask, settings)
    losses = clipped.losses * apply_mask(weights.detach(), mask)
    stats = {
        **_clip_stats(clipped, mask),
        "approx_kl": k3_unbounded(-log_ratio.detach()).sum(),  # zero where the mask is 0: the log-ratio is zero there
        "ratio": masked_sum(log_ratio.detach().exp(), mask),
    }
    return _mean(losses.sum(), denominator), stats


def _clip_stats(clipped: Clipped, mask: Tensor) -> dict[str, Tensor]:
    """How many tokens the clips decide, scalars by name."""
    by = {"clip": clipped.by_clip, "clip_high": clipped.by_clip & (clipped.ratio > 1)}
    if clipped.by_dual_clip is not None:
        by["dual_clip"] = clipped.by_dual_clip
    sums = {f"{name}_fraction": masked_sum(each.to(clipped.losses.dtype), mask) for name, each in by.items()}
    return sums | {"clip_low_fraction": sums["clip_fraction"] - sums["clip_high_fraction"]}


def _clamped_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` log of current / old, within +-20; 0 where the mask is 0."""
    return apply_mask(logp - old_logp.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def covariances(logp: Tensor, advantages: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """How far each token raises the covariance of log-probability and advantage: the product of its two distances from
    the means; 0 where the mask is 0.

    The entropy of a policy falls by the learning rate times that covariance, most of which is that of few tokens.
    Clip-Cov takes a random few of those with a large product out of the policy loss. Source: Cui et al. 2025 (arXiv
    2505.22617), the token-wise centered cross-product.

    Args:
        total: `[2, 3]`, the sums of `masking.moments` of logp and of the advantages over the optimizer step.
    """
    logp_mean, advantage_mean = (mean_variance(each)[0] for each in total)
    products = (logp.detach() - logp_mean) * (advantages.detach() - advantage_mean)
    return apply_mask(products, mask).to(logp.dtype)


# --- the other losses; `denominator` and `weights` are those of `policy_loss`


def kl_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    denominator: float,
    kind: str,
    weights: Tensor,
) -> Tensor:
    """KL to the reference as a loss (scalar): the masked sum of weights * `estimate_kl` / `denominator`.

    The tokens are of the old policy. The kinds with a `+` are weighted by the detached ratio r = exp(logp - old_logp),
    the log-ratio clamped to +-20: the expectation of d r grad logp over tokens of the old policy is the gradient of the
    KL of the current one. The other kinds are as their papers have them, without a weight. The gradient reaches `logp`
    only. Sources: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300) eq. 3 and 4; weight: DeepSeek-V3.2 (arXiv
    2512.02556), "unbiased KL estimate".

    Raises:
        ValueError: the denominator is not positive, or unknown kind.
    """
    kl = estimate_kl(apply_mask(logp - ref_logp.detach(), mask), kind)
    if kind.endswith("+"):
        kl = kl * _clamped_log_ratio(logp, old_logp, mask).detach().exp()
    return _mean((kl * apply_mask(weights.detach(), mask)).sum(), denominator)


def entropy_loss(entropy: Tensor, mask: Tensor, denominator: float, weights: Tensor) -> Tensor:
    """Minus the mean entropy (scalar): minus the masked sum of weights * entropy / `denominator`.

    Source: the entropy bonus of Schulman et al. 2017 (arXiv 1707.06347) eq. 9.

    Raises:
        ValueError: the denominator is not positive.
    """
    return _mean(-(apply_mask(entropy, mask) * apply_mask(weights.detach(), mask)).sum(), denominator)


def supervised_loss(logp: Tensor, mask: Tensor, denominator: float) -> Tensor:
    """Mean negative log-likelihood (scalar): minus the masked sum of logp / `denominator`.

    Source: the pretraining term of Ouyang et al. 2022 (arXiv 2203.02155) eq. 2 (PPO-ptx).

    Raises:
        ValueError: the denominator is not positive.
    """
    return _mean(-masked_sum(logp, mask), denominator)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, denominator: float, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss (scalar, to be minimized) and its statistics; the gradient reaches `values` only.

    The loss of a token is 0.5 * max((V - R)^2, (V' - R)^2), where V' is V kept within `clip` of the old value; with
    clip None it is 0.5 * (V - R)^2. Statistics: `clip_fraction`, the number of tokens whose clipped square is the
    larger one. Source: the clipped value loss of ppo2 in OpenAI Baselines.

    Raises:
        ValueError: the denominator is not positive.
    """
    values, old_values, returns = (apply_mask(x, mask) for x in (values, old_values.detach(), returns.detach()))
    unclipped = (values - returns).square()
    # Clamped against bounds, not old + clamp(difference): V' then equals V to the last bit within the bounds.
    clipped = unclipped if clip is None else (values.clamp(old_values - clip, old_values + clip) - returns).square()
    stats = {"clip_fraction": (clipped > unclipped).to(values.dtype).sum()}
    return _mean(0.5 * torch.maximum(unclipped, clipped).sum(), denominator), stats
