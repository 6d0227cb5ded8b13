"""The records that packages hand to one another, and the functions that they call back.

The records are prompts, completions, responses, scores and weights. Left out: behaviour beyond what a record needs.
Imports no other package of rlx, neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


Notify = Callable[[str], None]
"""shows a person a message that is not a metric, e.g. that an engine died, or a `Phase`"""
OnReport = Callable[[dict[str, Any], str | None], None]
"""(metrics of a step, path of a checkpoint), called after each step

The checkpoint is the one that became complete since the step before. It may be of an earlier step, because checkpoints
are written while training continues. None: none became complete. The path has no scheme such as s3://.
"""


class Phase(str):
    """A message that says what a start does from now on; the next one, or the first step, says that it is done."""

    __slots__ = ()


class WeightSyncError(RuntimeError):
    """Weights did not reach an engine, arrived changed, or an engine holds another version than expected."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the training or the held-out set."""

    id: int  # epoch x rows of the prompt table + row; sampling seeds follow from it, so they differ between epochs
    token_ids: tuple[int, ...]  # [P], with the chat template applied
    question: str
    answer: str
    dataset_index: int | None = None  # its index in the reasoning-gym dataset; None for other sources


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. Seeds are part of each request."""

    temperature: float
    top_p: float
    top_k: int  # -1: the whole vocabulary
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: bool = True  # whether the engine reports them, which costs time in each decode step

    @property
    def greedy(self) -> Sampling:
        """The same settings, but the most likely token is always taken; log-probabilities are not reported."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, logprobs=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine has sampled for one prompt."""

    prompt: Prompt
    sample: int  # 0 .. samples_per_prompt - 1
    token_ids: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T], of each token in the distribution that it was sampled from; or not reported: ()
    finished: bool  # ended with a stop token, not at max_tokens
    version: int  # version of the weights that sampled it


@dataclass(frozen=True, slots=True)
class Response:
    """A completion as reward functions see it."""

    prompt: Prompt
    text: str  # the whole completion without special tokens
    answer: str | None  # the part of the text that is the answer; None: it contains no answer
    num_tokens: int  # length of the completion, the stop token included
    finished: bool  # ended with a stop token, not at max_tokens


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """An answer that a checker judges."""

    given: str
    expected: str
    entry: int | None  # the prompt's index in the reasoning-gym dataset; None for other sources


Checker = Callable[[Sequence[GivenAnswer]], list[float]]
"""a score for each answer; 1 is correct"""

Scorer = Callable[[Sequence[Response]], Sequence[float]]
"""one score per response, in their order"""


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion and its scores."""

    completion: Completion
    score: float  # weighted sum of the scores of all reward functions
    is_correct: bool  # whether the answer is correct
    scores_by_function: dict[str, float]  # the unweighted score of each reward function
    greedy_score: float = 0.0  # score of the prompt's greedy completion, where the advantage estimator needs it


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A weight of the policy, as it is sent to engines and written to files."""

    name: str  # as Hugging Face names it
    shape: tuple[int, ...]
    parts: tuple[
        Tensor, ...
    ]  # the tensors that it is computed from, as this rank holds them: FSDP shards, or full tensors
    join: Callable[..., Tensor] | None = None  # computes it from the full parts; None: it is the only part
