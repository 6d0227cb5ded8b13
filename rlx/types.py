"""The records that travel between the layers. No behaviour beyond what a record needs, no Ray, no vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # whoever only passes prompts on does not pay for importing torch
    import torch
    from torch import Tensor

Checker = Callable[[str, str, int | None], float]
"""(answer given, answer expected, entry in the dataset) -> score, 1 is right"""


class WeightSyncError(RuntimeError):
    """Weights did not reach an engine, or not as they were sent, or it holds others than it was asked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the training or the held-out set."""

    id: int  # epoch x rows of the prompt table + row: sampling seeds follow from it, so no two draws of it are alike
    token_ids: tuple[int, ...]  # [P], the chat template applied
    question: str
    answer: str
    entry: int | None = None  # index in the reasoning-gym dataset it came from


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Seeds are not here: they belong to each request."""

    temperature: float
    top_p: float
    top_k: int  # -1: the whole vocabulary
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def greedy(self) -> Sampling:
        """The same, always the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine drew for one prompt."""

    prompt: Prompt
    sample: int  # 0 .. samples_per_prompt - 1
    token_ids: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T], of each token under the distribution it was drawn from
    finished: bool  # drew a stop token, rather than running into max_tokens
    version: int  # weight version it was drawn with


@dataclass(frozen=True, slots=True)
class Response:
    """A completion as the reward functions see it."""

    prompt: Prompt
    text: str  # the whole completion without special tokens
    given: str | None  # the part of it that is its answer; None if it has none
    tokens: int  # its length, the stop token included
    finished: bool  # drew a stop token, rather than running into max_tokens


Scorer = Callable[[Sequence[Response]], Sequence[float]]
"""one score per response, in their order"""


@dataclass(frozen=True, slots=True)
class Judged:
    """A completion and what the reward functions say of it."""

    completion: Completion
    score: float  # their weighted sum
    right: bool  # whether its answer is
    parts: dict[str, float]  # each function's own score
    greedy: float = 0.0  # score of the prompt's greedy completion, where the estimator asks for it


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor on its way to the engines."""

    name: str  # as Hugging Face names it
    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]  # what it is made of, as this rank holds it: FSDP shards, or tensors in full
    join: Callable[..., Tensor] | None = None  # makes it of its parts in full; None: it is the only part


@dataclass(frozen=True)
class Experience:
    """One rank's rollouts as tensors; B completions, prompt and response left-aligned in `ids`.

    `[B, T]` tensors are over response tokens: column t is the t-th token after the prompt. They are zero where
    `mask` is zero. The last six are all zero until the steps of the loop fill them in.
    """

    ids: Tensor  # [B, L] int64, prompt then response then padding
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B, T] float, 1 on response tokens
    rollout_logprobs: Tensor  # [B, T] as the engine reports them
    place: Tensor  # [B] int64, which of the rank's completions it is
    groups: Tensor  # [B] int64, the same for completions of the same prompt
    scores: Tensor  # [B] reward of the whole completion
    greedy: Tensor  # [B] reward of the prompt's greedy completion, 0 where the estimator asks for none
    logprobs: Tensor  # [B, T] the policy's before the update ("old"), as algorithm.old_logprobs has them
    ref_logprobs: Tensor  # [B, T]
    values: Tensor  # [B, T] the critic's before the update ("old")
    entropy: Tensor  # [B, T] the policy's before the update, in nats, or minus the logprobs, of which it is the mean
    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]

    @property
    def columns(self) -> dict[str, Tensor]:
        """All of the above by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """What the models score: `ids`, `prompt_lengths`, `mask`, `places`."""
        return self.ids, self.prompt_lengths, self.mask, self.places

    @functools.cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """[N] each, rows and columns of the response tokens; a GPU is waited for, when this is first asked for."""
        rows, columns = self.mask.nonzero(as_tuple=True)
        return rows, columns

    @property
    def widths(self) -> Tensor:
        """[B] the length of each response: to the last 1 of its mask, as zeros may lie between."""
        return self.mask.cumsum(1).argmax(1) + 1

    def rows(self, chosen: slice | Tensor) -> Experience:
        """Some of the completions, cut to the longest among them."""
        cut = {name: column[chosen] for name, column in self.columns.items()}
        widths = self.widths[chosen]
        width, length = int(widths.max()), int((cut["prompt_lengths"] + widths).max())
        grids = {name: part[:, :width] for name, part in cut.items() if part.ndim == 2}
        return replace(self, **(cut | grids | {"ids": cut["ids"][:, :length]}))

    def to(self, device: torch.device) -> Experience:
        return replace(self, **{name: column.to(device) for name, column in self.columns.items()})
