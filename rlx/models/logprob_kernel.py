"""Scores of tokens from their logits on a GPU, by Triton: one pass over the logits forward, and one backward in place.

It is what `logprobs.InPlaceScores` calls. Arithmetic is in float32, and no float32 copy of the logits is made. Left
out: autograd, chunks, and the choice between this and torch's operations (logprobs). Importing it needs Triton.

Of a row of logits z with temperature T the largest, m, and L = log2 sum_j 2^(c (z_j - m)) with c = log2(e) / T are
kept apart. Their sum, the usual logsumexp, would lose the digits of L where logits are large. With p = softmax(z / T):

    log2 p_j = c (z_j - m) - L
    log p_j  = ln(2) log2 p_j
    entropy  = -sum_j p_j log p_j = ln(2) (L - sum_j p_j c (z_j - m))
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped,import-not-found]
import triton.language as tl  # type: ignore[import-untyped,import-not-found]
from torch import Tensor

_BLOCK = tl.constexpr(4096)
"""logits of a row that a program holds at a time: 16 per thread, which it reads 16 bytes at a time"""
_WARPS = 8
_LN2 = tl.constexpr(math.log(2.0))


def token_scores(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Tensor:
    """What N tokens' logits say of them, a row for each: `[3, N]` float32, or `[4, N]` with entropy.

    A logit of minus infinity has probability 0 and adds 0 to the entropy, as in the limit.

    Args:
        logits: `[N, V]`, neighbours in a row side by side.
        targets: `[N]` int64, side by side.

    Returns:
        The largest logit; L of the module's docstring; the log-probability; the entropy, if asked for.
    """
    scores = torch.empty(4 if entropy else 3, len(logits), device=logits.device)
    scale = math.log2(math.e) / temperature
    _score[(len(logits),)](logits, targets, scores, logits.stride(0), logits.shape[1], scale, entropy, num_warps=_WARPS)
    return scores


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    scores: Tensor,
    temperature: float,
    upstream: tuple[Tensor, Tensor | None],
) -> None:
    """Replaces the logits `[N, V]` by the gradient of a loss in them.

    With g and h the gradients of the loss in a row's log-probability and entropy H, and t the row's target:

        d log p_t / d z_j = (1[j = t] - p_j) / T
        d H       / d z_j = -p_j (log p_j + H) / T
        gradient of z_j   = (g 1[j = t] - p_j (g + h (log p_j + H))) / T

    Args:
        logits: those that `token_scores` was given.
        targets: likewise.
        scores: the result of `token_scores`.
        upstream: g and h, `[N]` float32, side by side; h is None where the entropy is not in the loss.
    """
    blocks = triton.cdiv(logits.shape[1], _BLOCK.value)
    scale = math.log2(math.e) / temperature
    _write_gradient[(len(logits) * blocks,)](
        logits, targets, scores, *upstream, logits.stride(0), logits.shape[1], scale, num_warps=_WARPS
    )


@triton.jit  # type: ignore[untyped-decorator]
def _score(
    logits: tl.tensor,  # [N, V], of any float type; rows are `stride` apart
    targets: tl.tensor,
    scores: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,  # c of the module's docstring
    ENTROPY: tl.constexpr,
) -> None:
    """One row per program. Sums stay apart for each place in a block until the end, so only the maximum is shared."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    scores += row
    places = tl.arange(0, _BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((_BLOCK,), tl.float32)  # of 2^y with y = c (z - top)
    weighted = tl.zeros((_BLOCK,), tl.float32)  # of y 2^y
    for start in range(0, vocabulary, _BLOCK):
        z = tl.load(logits + start + places, mask=places < vocabulary - start, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        # While all logits so far are -inf there is nothing to subtract: -inf less -inf is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        y = (z - base) * scale
        power = tl.exp2(y)
        moved = (top - base) * scale  # -inf at first, where both sums are 0
        shrunk = tl.exp2(moved)
        if ENTROPY:
            moved = tl.where(moved == float("-inf"), 0.0, moved)
            weighted = (weighted + total * moved) * shrunk + tl.where(power > 0.0, y * power, 0.0)
        total = total * shrunk + power
        top = higher
    whole = tl.sum(total, 0)
    log_sum = tl.log2(whole)
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < vocabulary)  # else: not a number, rather than what lies elsewhere in memory
    chosen = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(scores, top)
    tl.store(scores + tl.num_programs(0), log_sum)
    tl.store(scores + 2 * tl.num_programs(0), ((chosen - top) * scale - log_sum) * _LN2)
    if ENTROPY:
        tl.store(scores + 3 * tl.num_programs(0), (log_sum - tl.sum(weighted, 0) / whole) * _LN2)


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradient(
    logits: tl.tensor,  # [N, V], of any float type; rows are `stride` apart
    targets: tl.tensor,
    scores: tl.tensor,
    of_logprobs: tl.tensor,
    of_entropies: tl.tensor,  # None: zero
    stride: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,  # c of the module's docstring
) -> None:
    """One block of a row per program: it reads each logit once, and writes over what it alone has read."""
    blocks = tl.cdiv(vocabulary, _BLOCK)
    row, rows = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    scores += row
    columns = tl.program_id(0) % blocks * _BLOCK + tl.arange(0, _BLOCK)
    places = logits + row.to(tl.int64) * stride + columns
    z = tl.load(places, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    log_p = (z - tl.load(scores)) * scale - tl.load(scores + rows)
    p = tl.exp2(log_p)
    of_logprob = tl.load(of_logprobs + row)
    slope = of_logprob
    if of_entropies is not None:
        slope += tl.load(of_entropies + row) * (tl.where(p > 0.0, log_p, 0.0) * _LN2 + tl.load(scores + 3 * rows))
    gradient = tl.where(columns == tl.load(targets + row), of_logprob, 0.0) - p * slope
    tl.store(places, gradient * scale * _LN2, mask=columns < vocabulary)
