"""Completions and scores become padded tensors, and those become mini-batches and micro-batches.

Mini-batch m of a step holds the same completions on any number of ranks, because each rank holds every ranks-th prompt
of the step, in order. No config and no communication here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlx.types import Completion, Experience


def build(completions: Sequence[Completion], scores: Sequence[float], pad_id: int) -> Experience:
    """One rank's completions as `[B, L]` token ids and `[B, T]` response tensors, on the CPU.

    Raises:
        ValueError: a score is not finite; names the prompt.
    """
    for completion, score in zip(completions, scores, strict=True):
        if not math.isfinite(score):
            raise ValueError(f"the score of prompt {completion.prompt.id} ({completion.prompt.question!r}) is {score}")
    ids = [torch.tensor(c.prompt.token_ids + c.token_ids) for c in completions]
    ones = [torch.ones(len(c.token_ids)) for c in completions]
    mask = _padded(ones, 0.0)
    later = ("logprobs", "ref_logprobs", "values", "advantages", "returns")
    return Experience(
        ids=_padded(ids, pad_id),
        prompt_lengths=torch.tensor([len(c.prompt.token_ids) for c in completions]),
        mask=mask,
        rollout_logprobs=_padded([torch.tensor(c.logprobs) for c in completions], 0.0),
        scores=torch.tensor(scores, dtype=torch.float32),
        **{name: torch.zeros_like(mask) for name in later},
    )


def minibatches(experience: Experience, count: int) -> list[Experience]:
    """`count` equal runs of a rank's completions; one optimizer step each.

    Raises:
        ValueError: they cannot be equal.
    """
    rows = len(experience.scores)
    if rows % count:
        raise ValueError(f"{rows} completions do not make {count} equal mini-batches")
    return _runs(experience, count)


def micro_batch_count(experience: Experience, token_budget: int) -> int:
    """How many micro-batches of at most `token_budget` tokens, padding included, an experience is cut into.

    A completion that is longer than the budget is a micro-batch of its own.
    """
    rows, length = experience.ids.shape
    return -(-rows // max(1, token_budget // length))


def micro_batches(experience: Experience, count: int) -> list[Experience]:
    """`count` runs of nearly equal numbers of completions, each cut to its longest; every rank makes as many.

    Raises:
        ValueError: there are fewer completions.
    """
    rows = len(experience.scores)
    if rows < count:
        raise ValueError(f"{rows} completions do not fill {count} micro-batches")
    return _runs(experience, count)


def _runs(experience: Experience, count: int) -> list[Experience]:
    rows = len(experience.scores)
    edges = [rows * i // count for i in range(count + 1)]
    return [experience.rows(start, stop) for start, stop in itertools.pairwise(edges)]


def _padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
