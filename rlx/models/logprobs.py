"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all tokens.

Left out: losses that are fused with the output layer; some need all tokens of a response before any of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 2**27
"""logits that are computed at a time: 512 MiB in float32, and a few copies of it"""
STORED_LOGITS = 2**30
"""logits that may be stored for the backward pass, which then does not compute them again: 4 GiB in float32"""

LogitScorer = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]
"""(logits `[N, V]`, targets `[N]`, temperature, whether to compute the entropy) -> logprobs `[N]`, entropy `[N]`"""


def score_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of N tokens, `[N]`, and on demand the entropy in nats, `[N]`, from their logits `[N, V]`."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    distribution = torch.log_softmax(scaled, dim=-1)
    # Not `gather`: compiled, its gradient fills a table by atomic operations; that of nll_loss is fused away.
    logprobs = -nn.functional.nll_loss(distribution, targets, reduction="none")
    return logprobs, -(distribution.exp() * distribution).sum(-1) if entropy else None


def stored_logits_on_gpu(share: float) -> int:
    """`STORED_LOGITS` for a process that uses this share of its GPU: a sixteenth of that memory, in float32."""
    memory: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(memory * min(1.0, share)) // 16 // 4


def token_logprobs(
    head: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    logit_scorer: LogitScorer = score_logits,
    stored_logits: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each of N tokens, `[N]`, and on demand the entropy of its distribution in nats, `[N]`.

    Logits are computed chunk by chunk. The backward pass computes all chunks but the last few again, which costs one
    more pass of the head.

    Args:
        head: linear layer from hidden states to logits, with a `weight` `[V, H]`.
        hidden: `[N, H]`, the hidden state before each token.
        targets: `[N]`, the token ids.
        temperature: logits are divided by it.
        entropy: also compute the entropy.
        logit_scorer: `score_logits`, or the same function compiled.
        stored_logits: at most this many logits, or logits and their entropy terms, are stored for the backward pass.
    """
    vocabulary = head.weight.shape[0]
    size = max(1, CHUNK // vocabulary)

    def scored(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return logit_scorer(head(states), tokens, temperature, entropy)

    if len(hidden) <= size:
        return scored(hidden, targets)
    recomputed = partial(checkpoint, scored, use_reentrant=False, preserve_rng_state=False)
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    # The last chunks are stored: the backward pass releases them first.
    first_stored = len(chunks) - stored_logits // (2 if entropy else 1) // (size * vocabulary)
    parts = [(recomputed if number < first_stored else scored)(*chunk) for number, chunk in enumerate(chunks)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None
