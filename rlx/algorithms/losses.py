"""The arithmetic of PPO on language models: KL estimates, advantages, losses, importance weights.

Every function takes tensors and plain numbers and gives tensors back, on any device. Left out on purpose: models,
the configuration, communication, and what changes from step to step (adaptive.py). Whatever must agree over all ranks
(moments, denominators, stats) is a sum here, which the caller all-reduces.

Conventions: B responses, T positions. Tensors are [B, T] unless stated. `mask` (bool or 0/1) is 1 on response tokens;
what another tensor holds where the mask is 0, nan and inf included, never reaches a result or a gradient.
Log-probabilities are natural logarithms, in float32 or wider.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlx.algorithms.kl import MAX_LOG_RATIO, _k3, kl_of
from rlx.algorithms.masking import apply_mask, lookup, masked_sum

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
    weights = lookup(AGGREGATIONS, kind, "loss aggregation")(inside, length)
    return weights, inside.sum() if kind == "token_mean" else inside.any(1).sum().float()


def _mean(total: Tensor, denominator: float) -> Tensor:
    if denominator <= 0:
        raise ValueError(f"denominator is {denominator}: an optimizer step needs at least one response token")
    return total / denominator


def entropy_loss(entropy: Tensor, mask: Tensor, denominator: float, weights: Tensor | None = None) -> Tensor:
    """Minus the mean entropy (scalar): -masked sum of weights * entropy / `denominator`, as in `policy_loss`.

    Source: the entropy bonus of Schulman et al. 2017 (arXiv 1707.06347) eq. 9.
    """
    kept = apply_mask(entropy, mask)
    return _mean(-(kept if weights is None else kept * apply_mask(weights.detach(), mask)).sum(), denominator)


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
    choose = lookup(POLICY_LOSSES, kind, "policy loss")
    own = apply_mask(logp - old_logp.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_ratio = _of_response(own, mask) if kind == "gspo" else own
    cost = -apply_mask(advantages.detach(), mask)
    losses, clipped = choose(apply_mask(logp, mask), log_ratio, cost, clip_low, clip_high, dual_clip)
    if weights is not None:
        losses = losses * apply_mask(weights.detach(), mask)
    stats = {
        "clip_fraction": masked_sum(clipped.to(losses.dtype), mask),
        "approx_kl": _k3(-own.detach()).sum(),  # zero where masked out: the log-ratio is
        "ratio": masked_sum(own.detach().exp(), mask),
    }
    return _mean(losses.sum(), denominator), stats


def _of_response(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The mean log-ratio of the response on each of its tokens, with the gradient of the token's own."""
    mean = log_ratio.detach().sum(1, keepdim=True) / mask.bool().sum(1, keepdim=True).clamp(min=1)
    return apply_mask(mean + (log_ratio - log_ratio.detach()), mask)


def kl_loss(
    logp: Tensor, ref_logp: Tensor, mask: Tensor, denominator: float, kind: str, weights: Tensor | None = None
) -> Tensor:
    """KL to the reference as a loss (scalar): the masked sum of weights * `log_ratio_kl` / `denominator`.

    The gradient reaches `logp` only; denominator and weights as in `policy_loss`.
    Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300) eq. 3 and 4.
    """
    kl = kl_of(apply_mask(logp - ref_logp.detach(), mask), kind)
    return _mean(kl.sum() if weights is None else (kl * apply_mask(weights.detach(), mask)).sum(), denominator)


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
    values, old_values, returns = (apply_mask(x, mask) for x in (values, old_values.detach(), returns.detach()))
    unclipped = (values - returns).square()
    # Clamped against bounds, not old + clamp(difference): within them V' is then V to the last bit.
    clipped = unclipped if clip is None else (values.clamp(old_values - clip, old_values + clip) - returns).square()
    stats = {"clip_fraction": (clipped > unclipped).to(values.dtype).sum()}
    return _mean(0.5 * torch.maximum(unclipped, clipped).sum(), denominator), stats
