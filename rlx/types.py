"""The records that packages hand to one another, and the functions that they call back.

The records are prompts, completions, responses, scores and weights. Left out: behaviour beyond what a record needs.
Imports no other package of rlx, neither Ray nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


Notify = Callable[[str], None]
"""shows a person a message that is not a metric, e.g. that an engine died, or a `Phase`"""
OnReport = Callable[[dict[str, Any], str | None], None]
"""(metrics of a step, path of a checkpoint), called after each step

The checkpoint is the one that became complete since the step before. It may be of an earlier step, because checkpoints
are written while training continues. None: none became complete. The path has no scheme such as s3://.
"""


def has_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Whether the metrics of a step are from an evaluation of their own: reports repeat the newest one."""
    return "time/eval" in metrics


SYSTEM_ROLES = ("system", "developer")
"""roles of the message that says how to answer"""
Utterance = Mapping[str, str]
"""one message of a chat: its role and its content, and the name of the tool that it is from, if any"""


def sendable(text: str) -> str:
    """A text, also one of a subclass, as Python's own type and without halves of characters.

    JSON and names of files can make such halves; no tokenizer takes them, and nothing that writes UTF-8.
    """
    return str.encode(text, "utf-8", "replace").decode()


class Phase(str):
    """A message that says what a start does from now on; the next one, or the first step, says that it is done."""

    __slots__ = ()


class WeightSyncError(RuntimeError):
    """Weights did not reach an engine, arrived changed, or an engine holds another version than expected."""


FailureKind = Literal["hung", "raised", "died", "unrepeatable"]
"""how an environment failed: a call took too long; it raised, or said what cannot be used; its process ended or did not
answer; it answered something else when actions were repeated"""


class EnvironmentFailed(RuntimeError):
    """An environment failed, also when it was asked again; the text says why, and where if it has raised."""

    def __init__(self, failure: str, kind: FailureKind = "raised", raised_at: str = "") -> None:
        """`raised_at`: file:line; empty if that is not known."""
        failure, raised_at = sendable(failure), sendable(raised_at)  # both are kept, and recorded
        super().__init__(f"{failure} at {raised_at}" if raised_at else failure)
        self.failure, self.kind, self.raised_at = failure, kind, raised_at

    @classmethod
    def unrepeatable(cls) -> EnvironmentFailed:
        """It has answered the same actions in two ways."""
        return cls("it answers differently when its actions are repeated", "unrepeatable")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the training or the held-out set."""

    id: int  # epoch x rows of the prompt table + row; sampling seeds follow from it, so they differ between epochs
    token_ids: tuple[int, ...]  # [P], with the chat template applied
    question: str
    answer: str
    dataset_index: int | None = None  # its index in the reasoning-gym dataset; None for other sources
    source: int = 0  # number of its source among data.sources
    messages: tuple[Utterance, ...] = field(default=(), compare=False)  # as a conversation; kept for environments alone

    @property
    def task(self) -> TaskRow:
        """The prompt as an environment is given it."""
        return TaskRow(self.question, self.answer, self.dataset_index, self.messages)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. Seeds are part of each request."""

    temperature: float
    top_p: float
    top_k: int  # -1: the whole vocabulary
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: bool = True  # whether the engine reports them, which costs time in each decode step
    min_p: float = 0.0  # tokens with a smaller fraction of the largest probability are left out
    min_tokens: int = 0  # no stop token is drawn before, and no stop string looked for
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()  # never drawn
    stop: tuple[str, ...] = ()  # texts that end a completion, which keeps the token that completes one
    options: tuple[tuple[str, Any], ...] = ()  # further ones of vLLM

    @property
    def greedy(self) -> Sampling:
        """The same settings, but the most likely token is always taken; log-probabilities are not reported."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, logprobs=False)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A row of the prompts as an environment is given it."""

    question: str  # of a conversation all of its text
    answer: str
    entry: int | None = None  # its index in the reasoning-gym dataset; None for other sources
    messages: tuple[Utterance, ...] = ()  # of the prompt, its system message first if it has one

    @property
    def asked(self) -> tuple[Utterance, ...]:
        """The messages of the prompt without its system message, which comes first in every episode of it."""
        asked = self.messages[1:] if self.system else self.messages
        return asked or ({"role": "user", "content": self.question},)

    @property
    def system(self) -> tuple[Utterance, ...]:
        """The system message of the prompt, if it has one."""
        return self.messages[:1] if self.messages and self.messages[0]["role"] in SYSTEM_ROLES else ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says at the start of an episode, or in answer to a turn of the policy."""

    messages: tuple[Utterance, ...] = ()
    reward: float = 0.0
    done: bool = False
    calls: int = 0  # of tools, in this turn
    call_errors: int = 0  # of these calls: malformed, of no tool, or the tool raised
    seconds: float = field(default=0.0, compare=False)  # that the environment took
    retries: int = field(default=0, compare=False)  # calls that failed before this answer came
    tools: tuple[Mapping[str, Any], ...] = ()  # at the start: those that an agent offers the policy, as JSON schemas

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Observation:
        """Reads the fields of one, as JSON has them."""
        tools = tuple(values.get("tools", ()))  # files of older versions lack them
        return cls(**{**values, "messages": tuple(values["messages"]), "tools": tools})

    @property
    def text(self) -> str:
        """The contents of its messages, as people read them."""
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class TurnLength:
    """How long a turn of the policy is, which agents are told."""

    read: int = 0  # tokens that the policy read before it
    drawn: int = 0  # tokens of the turn
    is_cut: bool = False  # it ended with neither a stop token nor a stop string


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: what the policy drew, and what the environment made of it."""

    start: int  # index in the completion's `token_ids` of the first token that the policy drew
    stop: int  # index after the last one
    version: int  # of the weights that drew it
    observation: Observation
    context: int = 0  # number of the context that it was drawn in; a new one begins where a template changed tokens


@dataclass(frozen=True, slots=True)
class Episode:
    """The turns of a completion that a policy and an environment made together."""

    start: Observation  # the first messages
    turns: tuple[Turn, ...]
    contexts: tuple[int, ...] = ()  # indices in `token_ids` at which a context begins that does not extend the tokens
    score: float = 0.0  # sum of all rewards
    failure: str = ""  # why the environment failed; empty if it did not
    kind: FailureKind | None = field(default=None, compare=False)  # of the failure; files of older versions lack it
    begun_with: str = field(default="", compare=False)  # `EpisodeSeeds.digest`; files of older versions lack it
    raised_at: str = field(default="", compare=False)  # file:line of the failure, which differs between machines

    def as_json(self) -> str:
        """The episode as text, which `of_json` reads."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def of_json(cls, text: str) -> Episode:
        """Reads an episode; raises ValueError, TypeError or KeyError if the text is none."""
        given = json.loads(text)
        turns = [Turn(**turn | {"observation": Observation.of(turn["observation"])}) for turn in given["turns"]]
        if not given.pop("is_repeatable", True):  # so files of older versions say it
            given["kind"] = "unrepeatable"
        own = {"start": Observation.of(given["start"]), "turns": tuple(turns), "contexts": tuple(given["contexts"])}
        return cls(**given | own)

    @property
    def told_failure(self) -> str:
        """The failure and where it was raised, as people read them; empty if there is none."""
        return str(EnvironmentFailed(self.failure, raised_at=self.raised_at))

    @property
    def seconds(self) -> float:
        """Seconds that the environment took."""
        return self.start.seconds + sum(turn.observation.seconds for turn in self.turns)

    @property
    def retries(self) -> int:
        """Calls of the environment that failed and were answered when they were made again."""
        return self.start.retries + sum(turn.observation.retries for turn in self.turns)


@dataclass(frozen=True, slots=True)
class KeptEpisode:
    """An episode as a file has it: a run may keep many, of which few are read."""

    token_ids: Sequence[int]  # [T] of its completion, an array
    text: str  # `Episode.as_json`

    @property
    def episode(self) -> Episode:
        """What was said in it."""
        return Episode.of_json(self.text)


@dataclass(frozen=True)
class Replay:
    """How steps that a run has done are done again."""

    until: int  # the last of them
    attributes_gradient: bool = False  # of the prompts of that step, keep the shares of the gradient
    evaluated: frozenset[int] = frozenset()  # steps at which all is evaluated, whether it is due or not
    known_episodes: Callable[[Mapping[bytes, bytes], Notify], dict[str, KeptEpisode]] | None = None
    """`KnownEpisodes.read` of those whose environments are not asked again"""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine has sampled for one prompt, or what a policy and an environment have said in turn."""

    prompt: Prompt
    sample: int  # 0 .. samples_per_prompt - 1
    token_ids: tuple[int, ...]  # [T], the stop token included; of an episode with the environment's tokens in between
    logprobs: tuple[float, ...]  # [T], of each token in the distribution that it was sampled from; or not reported: ()
    finished: bool  # ended with a stop token or string, not at max_tokens; an episode: the environment has ended it
    version: int  # version of the weights that sampled it; of several the oldest
    episode: Episode | None = None  # None: an answer of one turn, without an environment

    @property
    def has_failed(self) -> bool:
        """Whether its environment has failed: it says nothing of the policy."""
        return bool(self.episode and self.episode.failure)

    @property
    def drawn(self) -> list[bool]:
        """Whether the policy drew each token, `[T]`; the others are an environment's."""
        if self.episode is None:
            return [True] * len(self.token_ids)
        inside = [False] * len(self.token_ids)
        for turn in self.episode.turns:
            inside[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        return inside

    @property
    def by_turn(self) -> tuple[list[float], list[int]]:
        """Of each token `[T]`: the reward of the turn that ends there, and the number of its context in the episode."""
        assert self.episode
        rewards, contexts = [0.0] * len(self.token_ids), [0] * len(self.token_ids)
        for turn in self.episode.turns:
            rewards[turn.stop - 1] = turn.observation.reward
        for number, begin in enumerate(self.episode.contexts, 1):
            contexts[begin:] = [number] * (len(self.token_ids) - begin)
        return rewards, contexts

    @property
    def num_drawn(self) -> int:
        """How many tokens the policy drew."""
        if self.episode is None:
            return len(self.token_ids)
        return sum(turn.stop - turn.start for turn in self.episode.turns)

    @property
    def said(self) -> tuple[int, ...]:
        """The tokens that reward functions read: of an episode those of its last turn, else all."""
        if self.episode is None:
            return self.token_ids
        last = self.episode.turns[-1]
        return self.token_ids[last.start : last.stop]


@dataclass(frozen=True, slots=True)
class Response:
    """A completion as reward functions see it."""

    prompt: Prompt
    text: str  # the whole completion without special tokens; of an episode its last turn
    answer: str | None  # the part of the text that is the answer; None: it contains no answer
    num_tokens: int  # tokens that the policy drew, the stop token included
    finished: bool  # ended with a stop token or string, not at max_tokens
    environment_score: float | None = None  # what the environment gave the episode; None: there is none


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """An answer that a checker judges."""

    given: str
    expected: str
    entry: int | None  # the prompt's index in the reasoning-gym dataset; None for other sources


Checker = Callable[[Sequence[GivenAnswer]], list[float]]
"""a score for each answer; 1 is correct"""


@dataclass(frozen=True, slots=True)
class MarkedScores:
    """Scores of a batch of responses, and what else is reported of each response."""

    scores: list[float]
    marks: dict[str, list[float]]  # by name, see rlx.config.sections.reward.MARKS


AnswerCheck = Callable[[str], None]
"""raises ValueError if a prompt's answer cannot be used"""
Scorer = Callable[[Sequence[Response]], Sequence[float] | MarkedScores]
"""one score per response, in their order"""


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion and its scores."""

    completion: Completion
    score: float  # weighted sum of the scores of all reward functions
    is_correct: bool  # whether the answer is correct; not where the environment has failed
    scores_by_function: dict[str, float]  # the unweighted score of each reward function
    greedy_score: float = 0.0  # score of the prompt's greedy completion, where the advantage estimator needs it
    text: str = ""  # of the completion without special tokens, as reward functions see it
    answer: str | None = None  # the part of the text that is the answer; None: it contains no answer


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A weight of the policy, as it is sent to engines and written to files."""

    name: str  # as Hugging Face names it
    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]
    """the tensors that it is computed from, as this rank holds them: FSDP shards, or full tensors"""
    join: Callable[..., Tensor] | None = None  # computes it from the full parts; None: it is the only part
