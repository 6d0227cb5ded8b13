"""What a model's output layer says of given tokens, without ever holding the logits of all of them.

Left out: losses that are fused with the output layer; some need all tokens of a response before any of their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 2**26
"""logits at a time: 256 MiB in float32, of which a few copies"""


def token_logprobs(
    head: nn.Module, vocabulary: int, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each of N tokens, `[N]`, and if asked for the entropy in nats of what it is drawn from, `[N]`.

    More than one chunk of them is computed again in the backward pass, which costs one more pass of the head.

    Args:
        head: from hidden states to logits.
        vocabulary: V, how many logits it gives.
        hidden: `[N, H]`, the hidden state before each token.
        targets: `[N]`, the tokens.
        temperature: logits are divided by it.
    """
    size = max(1, CHUNK // vocabulary)
    if len(hidden) <= size:
        return _scored(head, hidden, targets, temperature, entropy)
    parts = [
        checkpoint(_scored, head, h, t, temperature, entropy, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _scored(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    scores = head(hidden).float()
    if temperature != 1.0:
        scores = scores / temperature
    scores = torch.log_softmax(scores, dim=-1)
    logprobs = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(scores.exp() * scores).sum(-1) if entropy else None
