"""The records that travel between the layers. No behaviour beyond what a record needs, no Ray, no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    dataset_index: int | None = None  # its index in the reasoning-gym dataset; None for other sources


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
    answer: str | None  # the part of the text that is the answer; None: it contains no answer
    num_tokens: int  # length of the completion, the stop token included
    finished: bool  # drew a stop token, rather than running into max_tokens


Scorer = Callable[[Sequence[Response]], Sequence[float]]
"""one score per response, in their order"""


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion and what the reward functions say of it."""

    completion: Completion
    score: float  # their weighted sum
    is_correct: bool  # whether the answer is correct
    scores_by_function: dict[str, float]  # the unweighted score of each reward function
    greedy_score: float = 0.0  # score of the prompt's greedy completion, where the advantage estimator needs it


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A tensor on its way to the engines."""

    name: str  # as Hugging Face names it
    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]  # what it is made of, as this rank holds it: FSDP shards, or tensors in full
    join: Callable[..., Tensor] | None = None  # makes it of its parts in full; None: it is the only part
