"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all tokens.

On GPUs with Triton, `logprob_kernel` scores the logits, elsewhere torch's operations. Left out: losses that are fused
with the output layer; some need all tokens of a response before any of their gradients.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 2**27
"""float32 logits that are computed at a time, or as many bytes of another type: 512 MiB; `score_logits` takes copies,
and `kernel_scores`, which takes none, an eighth of what may be stored if that is more"""
STORED_LOGITS = 2**30
"""float32 logits, or as many bytes, that may be stored for the backward pass, which then does not compute them again"""

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


class Passes(Protocol):
    """Both passes over logits of their scores; in use it is the module `logprob_kernel`, which says what is what."""

    def token_scores(self, logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Tensor:
        """Logits `[N, V]` to `[3, N]`, or `[4, N]`: two numbers for the other pass, log-probability, entropy."""

    def write_gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        scores: Tensor,
        temperature: float,
        upstream: tuple[Tensor, Tensor | None],
    ) -> None:
        """Replaces logits `[N, V]` by the gradient in them, from the scores and the gradients `[N]` in these."""


class InPlaceScores(torch.autograd.Function):
    """`score_logits` by two passes, of which the second writes the gradient where the logits are.

    Beside the logits it stores a few numbers per token. It takes the logits over: nobody else may read them after the
    backward pass. Autograd counts their changes and raises RuntimeError if they are needed again, as for a second
    backward pass. Logits that a checkpoint computes again are new each time. Gradients of gradients raise, too.
    """

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, logits: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments after `passes`, and the results, are those of `score_logits`."""
        ctx.set_materialize_grads(False)
        if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:  # rows may share memory
            logits = logits.contiguous()
        targets = targets.contiguous()
        scores = passes.token_scores(logits, targets, temperature, entropy)
        ctx.save_for_backward(logits, targets, scores)
        ctx.passes, ctx.temperature = passes, temperature
        return scores[2].clone(), scores[3].clone() if entropy else None

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The gradient in the logits, `[N, V]`, from those in both results, `[N]`."""
        if torch.is_grad_enabled():
            raise RuntimeError("InPlaceScores has no gradients of gradients: create_graph=True is not supported")
        logits, targets, scores = ctx.saved_tensors
        if of_logprobs is None and of_entropies is None:
            return (None,) * 5
        first = torch.zeros_like(scores[2]) if of_logprobs is None else of_logprobs.contiguous()
        second = None if of_entropies is None else of_entropies.contiguous()
        ctx.passes.write_gradient(logits, targets, scores, ctx.temperature, (first, second))
        torch.autograd.graph.increment_version(logits)
        return None, logits.detach(), None, None, None


def kernel_scores(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """`score_logits` of logits `[N, V]` on a GPU, by Triton. It takes the logits over, see `InPlaceScores`."""
    from rlx.models import logprob_kernel  # imports Triton

    return InPlaceScores.apply(logprob_kernel, logits, targets, temperature, entropy)


@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether it is a GPU, and Triton can be imported and finds the C compiler that it needs to start kernels."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return device.type == "cuda" and find_spec("triton") is not None and any(map(shutil.which, compilers))


def sixteenth_of_gpu(share: float) -> int:
    """How many float32 numbers a sixteenth of its memory holds, for a process that uses this share of its GPU."""
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
    replaced: bool = True,
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
        logit_scorer: `score_logits`, or the same function compiled, or one that makes something else of the logits.
        stored_logits: memory for what is stored for the backward pass, as a number of float32 logits. `score_logits`
            stores one float32 number per logit, two with entropy; `kernel_scores` the logits themselves.
        replaced: on a GPU with Triton, `kernel_scores` replaces the scorer.
    """
    kernel = replaced and runs_kernels(hidden.device)
    scorer, vocabulary = kernel_scores if kernel else logit_scorer, head.weight.shape[0]
    width = hidden.element_size() if kernel else 4  # bytes per logit of what is computed at a time
    size = max(1, 4 * (max(CHUNK, stored_logits // 8) if kernel else CHUNK) // (width * vocabulary))

    def scored(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return scorer(head(states), tokens, temperature, entropy)

    if len(hidden) <= size:
        return scored(hidden, targets)
    recomputed = partial(checkpoint, scored, use_reentrant=False, preserve_rng_state=False)
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    # The last chunks are stored: the backward pass releases them first.
    stored_width = width if kernel or not entropy else 2 * width
    first_stored = len(chunks) - 4 * stored_logits // (stored_width * size * vocabulary)
    parts = [(recomputed if number < first_stored else scored)(*chunk) for number, chunk in enumerate(chunks)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None
