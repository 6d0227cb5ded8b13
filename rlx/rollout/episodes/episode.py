"""One episode while it is played: what the policy has drawn, what the environment has said, and who is next.

Everything that has happened is in here, so an episode continues where it is when an engine or an environment is
replaced. Left out: asking engines and environments (player).
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlx.rollout.base import Output, Request, request_seed
from rlx.rollout.episodes.dialogue import Dialogue, Written
from rlx.types import (
    SYSTEM_ROLES,
    Completion,
    EnvironmentFailed,
    Episode,
    Observation,
    Prompt,
    Sampling,
    Turn,
    TurnLength,
    Utterance,
)

_NO_TURN = 1_000_000
"""the number of a turn that no episode has: its seed says whether the episode is among a share"""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How long an episode may be; its tokens in all are `Sampling.max_tokens`."""

    max_turns: int  # of the policy
    turn_tokens: int | None = None  # of one turn of the policy; None: as many as are left
    prompt_tokens: int | None = None  # of the first messages; None: any number


@dataclass(frozen=True)
class EpisodeSeeds:
    """What identifies an episode, and the seeds that follow from that."""

    run_seed: int
    step: int  # of the run, at which the episode was begun
    prompt: Prompt
    sample: int

    @cached_property
    def digest(self) -> str:
        """The digest of what decides an environment's answers to equal actions: the seeds, and the row that it gets."""
        decisive = (self.run_seed, self.step, self.prompt.id, self.sample, self.prompt.task)
        return hashlib.blake2b(repr(decisive).encode(), digest_size=12).hexdigest()

    @property
    def of_start(self) -> int:
        """The seed of the environment's beginning: the same for all episodes of a prompt, whose id has the epoch."""
        return zlib.crc32(f"{self.run_seed}/{self.prompt.id}/{self.prompt.question}".encode())

    def of_turn(self, turn: int) -> int:
        """The seed of the policy's turn with this number."""
        return request_seed(self.run_seed, self.step, self.prompt.id, self.sample, turn)

    def of_answer(self, turn: int) -> int:
        """The seed of the environment's answer to that turn, which fits into 32 bits."""
        return self.of_turn(turn) & 0xFFFF_FFFF

    def is_among(self, share: float) -> bool:
        """Whether the episode is one of this share of all."""
        return self.of_turn(_NO_TURN) % 1_000_003 < share * 1_000_003


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A turn of the policy, as an engine has generated it."""

    output: Output
    version: int  # of the engine's weights
    engine: int
    seconds: float


@dataclass
class OpenEpisode:
    """An episode that is being played."""

    key: str  # names it among those of a rank
    seeds: EpisodeSeeds
    sampling: Sampling  # `max_tokens`: of all contexts together, the environment's tokens included
    limits: EpisodeLimits
    dialogue: Dialogue
    start: Observation | None = None  # None: the environment has not begun
    messages: list[Utterance] = field(default_factory=list)
    read: str = ""  # text of what the policy reads now, see `Written`
    opening: tuple[int, ...] = ()  # tokens of the first messages
    token_ids: list[int] = field(default_factory=list)  # after the opening
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)  # see `Episode.contexts`
    final_reward: float = 0.0  # given after the last turn
    failed: EnvironmentFailed | None = None
    is_done: bool = False  # the environment has ended it
    is_over: bool = False
    engine: int | None = None  # that has drawn the last turn, and may still have its prefix
    unanswered: GeneratedTurn | None = None  # the last turn, until the environment answers

    @property
    def action(self) -> str:
        """The text of the turn that the environment has not answered."""
        assert self.unanswered
        return self.dialogue.decode(self.unanswered.output.token_ids)

    @property
    def length(self) -> TurnLength:
        """How long that turn is."""
        assert self.unanswered
        begin = self.contexts[-1] if self.contexts else -len(self.opening)
        output = self.unanswered.output
        return TurnLength(len(self.token_ids) - begin, len(output.token_ids), not output.finished)

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_tokens - len(self.token_ids)

    def begin(self, start: Observation) -> None:
        """Takes the environment's first messages, which follow the prompt's system message unless they have their own.

        Raises:
            ConfigError: they come with tools, which the model's chat template cannot be used for.
            EnvironmentFailed: they are longer than prompts may be.
        """
        has_own = bool(start.messages) and start.messages[0]["role"] in SYSTEM_ROLES
        messages = [*start.messages] if has_own else [*self.seeds.prompt.task.system, *start.messages]
        self.dialogue = self.dialogue.with_tools(start.tools)
        written, most = self.dialogue.opening(messages), self.limits.prompt_tokens
        opening = written.token_ids
        if most is not None and len(opening) > most:
            raise EnvironmentFailed(
                f"the environment's first messages have {len(opening)} tokens, with the chat template and its tools, "
                f"more than data.max_prompt_tokens ({most})"
            )
        self.start, self.opening, self.messages, self.read = start, opening, messages, written.text

    def begin_without_environment(self, failed: EnvironmentFailed) -> None:
        """Begins with the prompt itself: the environment has failed, and the episode ends after one turn."""
        self.start, self.opening = Observation(), self.seeds.prompt.token_ids
        self.failed = failed

    def request(self) -> Request:
        """What an engine is asked for next."""
        context = self.contexts[-1] if self.contexts else None
        read = (*self.opening, *self.token_ids) if context is None else tuple(self.token_ids[context:])
        most = min(self.tokens_left, self.limits.turn_tokens or self.tokens_left)
        sampling = replace(self.sampling, max_tokens=most, min_tokens=min(most, self.sampling.min_tokens))
        return Request(read, self.seeds.of_turn(len(self.turns)), sampling)

    def add_turn(self, turn: GeneratedTurn) -> None:
        """Takes a turn of the policy."""
        self.engine, self.unanswered = turn.engine, turn
        self.messages.append({"role": "assistant", "content": self.action})
        if self.failed:
            self.add_observation(Observation(done=True))

    def add_observation(self, observation: Observation) -> None:
        """Takes the environment's answer to the last turn; the episode is over if it ends there or has no room."""
        assert self.unanswered
        output, version, start = self.unanswered.output, self.unanswered.version, len(self.token_ids)
        self.unanswered = None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.turns.append(Turn(start, len(self.token_ids), version, observation, len(self.contexts)))
        self.is_done = observation.done and not self.failed
        self.is_over = observation.done or len(self.turns) >= self.limits.max_turns
        if not self.is_over:
            following = self.dialogue.continuation(
                self.read, self.messages, output.token_ids, output.finished, observation.messages
            )
            self.is_over = len(following.token_ids) >= self.tokens_left
            if not self.is_over:
                self.messages += observation.messages
                self._follow(following)

    def add_score(self, scored: Observation) -> None:
        """Takes the score of an episode that was cut; its time and its retries are those of the last turn."""
        last, self.final_reward = self.turns[-1], scored.reward
        seconds, retries = last.observation.seconds + scored.seconds, last.observation.retries + scored.retries
        self.turns[-1] = replace(last, observation=replace(last.observation, seconds=seconds, retries=retries))

    def fail(self, failed: EnvironmentFailed) -> None:
        """Ends the episode after the last turn: the environment gives no answer to it, no score, or two answers."""
        self.failed, self.is_over = failed, True
        if self.unanswered:
            self.add_observation(Observation(done=True))

    def completion(self) -> Completion:
        """The episode as a completion."""
        assert self.is_over and self.start is not None
        score = self.final_reward + sum(turn.observation.reward for turn in self.turns)
        episode = Episode(self.start, tuple(self.turns), tuple(self.contexts), score, begun_with=self.seeds.digest)
        if failed := self.failed:
            episode = replace(episode, failure=failed.failure, kind=failed.kind, raised_at=failed.raised_at)
        return Completion(
            prompt=replace(self.seeds.prompt, token_ids=self.opening),
            sample=self.seeds.sample,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finished=self.is_done,
            version=min(turn.version for turn in self.turns),
            episode=episode,
        )

    def _follow(self, written: Written) -> None:
        """Appends the environment's tokens, which have no log-probability."""
        if written.is_new_context:
            self.contexts.append(len(self.token_ids))
        self.read = written.text
        self.token_ids += written.token_ids
        self.logprobs += [0.0] * len(written.token_ids) if self.sampling.logprobs else []
