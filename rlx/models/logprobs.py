"""What a model's output layer says of given tokens, without ever holding the logits of all of them.

Left out: losses that are fused with the output layer; some need all tokens of a response before any of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 2**27
"""logits at a time: 512 MiB in float32, of which a few copies"""
KEPT = 2**30
"""logits that may wait for the backward pass instead of being computed again: 4 GiB in float32"""

LogitScorer = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]
"""(logits, targets, temperature, whether entropy is wanted) -> log-probabilities, entropy"""


def score_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each of N tokens, `[N]`, and if asked for the entropy in nats, from their logits, `[N, V]`."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    every = torch.log_softmax(scaled, dim=-1)
    # Not `gather`: compiled, its gradient is a table that is filled by atomics; this one's is fused away.
    logprobs = -nn.functional.nll_loss(every, targets, reduction="none")
    return logprobs, -(every.exp() * every).sum(-1) if entropy else None


def kept_on_gpu(share: float) -> int:
    """As KEPT, for a process that has such a share of its GPU: a sixteenth of that memory in float32."""
    memory: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(memory * min(1.0, share)) // 16 // 4


def token_logprobs(
    head: nn.Module,
    vocabulary: int,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    scores: LogitScorer = score_logits,
    kept: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each of N tokens, `[N]`, and if asked for the entropy in nats of what it is drawn from, `[N]`.

    Of several chunks all but the last few are computed again in the backward pass: one more pass of the head.

    Args:
        head: from hidden states to logits.
        vocabulary: V, how many logits it gives.
        hidden: `[N, H]`, the hidden state before each token.
        targets: `[N]`, the tokens.
        temperature: logits are divided by it.
        scores: what to do with logits; this, or the same compiled.
        kept: logits at most, or logits and as many of their entropies, that are not computed again.
    """
    size = max(1, CHUNK // vocabulary)

    def scored(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return scores(head(states), tokens, temperature, entropy)

    if len(hidden) <= size:
        return scored(hidden, targets)
    again = partial(checkpoint, scored, use_reentrant=False, preserve_rng_state=False)
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    # The last ones: they are the first that the backward pass is done with.
    recomputed = len(chunks) - kept // (2 if entropy else 1) // (size * vocabulary)
    parts = [(again if number < recomputed else scored)(*chunk) for number, chunk in enumerate(chunks)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None
