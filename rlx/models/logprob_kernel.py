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

BLOCK = 4096
"""logits of a row that a program holds at a time: 16 per thread, which it reads 16 bytes at a time"""
_WARPS = 8
_LN2 = tl.constexpr(math.log(2.0))


def score(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities of N tokens from their logits, and what `write_gradient` needs; all `[N]` float32.

    A logit of minus infinity has probability 0 and adds 0 to the entropy, as in the limit.

    Args:
        logits: `[N, V]`, neighbours in a row side by side.
        targets: `[N]` int64, side by side.

    Returns:
        The log-probabilities; the largest logit of each row; L of the module's docstring; the entropy, if asked for.
    """
    logprobs, largest, log_sums = (torch.empty(len(logits), device=logits.device) for _ in range(3))
    entropies = torch.empty_like(logprobs) if entropy else None
    scale = math.log2(math.e) / temperature
    _score[(len(logits),)](
        logits,
        targets,
        logprobs,
        largest,
        log_sums,
        entropies,
        logits.stride(0),
        logits.shape[1],
        scale,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
    return logprobs, largest, log_sums, entropies


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    scores: tuple[Tensor, Tensor, Tensor | None],
    temperature: float,
    upstream: tuple[Tensor, Tensor | None],
) -> None:
    """Replaces the logits `[N, V]` by the gradient of a loss in them.

    With g and h the gradients of the loss in a row's log-probability and entropy H, and t the row's target:

        d log p_t / d z_j = (1[j = t] - p_j) / T
        d H       / d z_j = -p_j (log p_j + H) / T
        gradient of z_j   = (g 1[j = t] - p_j (g + h (log p_j + H))) / T

    Args:
        logits: those that `score` was given.
        targets: likewise.
        scores: `[N]` each, the last three results of `score`.
        upstream: g and h, `[N]` float32, side by side; h is None where the entropy is not in the loss.
    """
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    largest, log_sums, entropies = scores
    _write_gradient[(len(logits) * blocks,)](
        logits,
        targets,
        largest,
        log_sums,
        entropies,
        *upstream,
        logits.stride(0),
        logits.shape[1],
        math.log2(math.e) / temperature,
        1.0 / temperature,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _score(
    logits: tl.tensor,  # [N, V], of any float type; rows are `stride` apart
    targets: tl.tensor,
    logprobs: tl.tensor,
    largest: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,  # None: not asked for
    stride: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,  # c of the module's docstring
    BLOCK: tl.constexpr,
) -> None:
    """One row per program. Sums stay apart for each place in a block until the end, so only the maximum is shared."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    places = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of 2^y with y = c (z - top)
    weighted = tl.zeros((BLOCK,), tl.float32)  # of y 2^y
    for start in range(0, vocabulary, BLOCK):
        z = tl.load(logits + start + places, mask=places < vocabulary - start, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        # While all logits so far are -inf there is nothing to subtract: -inf less -inf is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        y = (z - base) * scale
        power = tl.exp2(y)
        moved = (top - base) * scale  # -inf at first, where both sums are 0
        shrunk = tl.exp2(moved)
        if entropies is not None:
            moved = tl.where(moved == float("-inf"), 0.0, moved)
            weighted = (weighted + total * moved) * shrunk + tl.where(power > 0.0, y * power, 0.0)
        total = total * shrunk + power
        top = higher
    whole = tl.sum(total, 0)
    log_sum = tl.log2(whole)
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < vocabulary)  # else: not a number, rather than what lies elsewhere in memory
    chosen = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(logprobs + row, ((chosen - top) * scale - log_sum) * _LN2)
    tl.store(largest + row, top)
    tl.store(log_sums + row, log_sum)
    if entropies is not None:
        tl.store(entropies + row, (log_sum - tl.sum(weighted, 0) / whole) * _LN2)


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradient(
    logits: tl.tensor,  # [N, V], of any float type; rows are `stride` apart
    targets: tl.tensor,
    largest: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,
    of_logprobs: tl.tensor,
    of_entropies: tl.tensor,  # None: zero
    stride: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,  # c of the module's docstring
    inverse: tl.tensor,  # 1 / T
    BLOCK: tl.constexpr,
) -> None:
    """One block of a row per program: it reads each logit once, and writes over what it alone has read."""
    blocks = tl.cdiv(vocabulary, BLOCK)
    row = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    places = logits + row.to(tl.int64) * stride + columns
    z = tl.load(places, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    log_p = (z - tl.load(largest + row)) * scale - tl.load(log_sums + row)
    p = tl.exp2(log_p)
    of_logprob = tl.load(of_logprobs + row)
    slope = of_logprob
    if of_entropies is not None:
        slope += tl.load(of_entropies + row) * (tl.where(p > 0.0, log_p, 0.0) * _LN2 + tl.load(entropies + row))
    gradient = tl.where(columns == tl.load(targets + row), of_logprob, 0.0) - p * slope
    tl.store(places, gradient * inverse, mask=columns < vocabulary)
