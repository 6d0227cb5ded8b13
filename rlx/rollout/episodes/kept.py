"""Environments of steps that are done again: what they said the first time is taken from what the run has kept.

An answer follows from how the episode begins, from seeds and from actions. As long as the policy says what it said
before, it gets the answers that were kept, and no environment is asked. Where it says something else, an environment
begins, gets the actions so far, and answers from there on. Left out: which episodes a run has kept (rlx.samples).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.player import Environments
from rlx.types import EnvironmentFailed, Episode, KeptEpisode, Observation, TaskRow, TurnLength


@dataclass
class _Repeated:
    """An open episode that has repeated a kept one so far."""

    token_ids: Sequence[int]  # of the completion that was kept
    episode: Episode
    beginning: tuple[TaskRow, int, bool]  # what `start` was told
    actions: list[tuple[str, int, int, TurnLength]] = field(default_factory=list)  # what `step` was told

    @property
    def answers(self) -> list[Observation]:
        """The kept answers to the beginning and to the actions so far."""
        turns = self.episode.turns[: len(self.actions)]
        return [self.episode.start, *(turn.observation for turn in turns)]

    def goes_on_with(self, action: str, version: int, length: TurnLength, dialogue: Dialogue) -> bool:
        """Whether the next turn of the policy is what it was."""
        turns, number = self.episode.turns, len(self.actions)
        if number == len(turns):
            return False
        turn = turns[number]
        generated = self.token_ids[turn.start : turn.stop]
        return (turn.version, len(generated)) == (version, length.drawn) and dialogue.decode(generated) == action

    @property
    def final(self) -> Observation | None:
        """The score after the last turn; None if not all turns were repeated, or rounding has hidden it in the sum."""
        episode = self.episode
        rewards = sum(turn.observation.reward for turn in episode.turns)
        reward = episode.score - rewards
        is_known = len(self.actions) == len(episode.turns) and reward + rewards == episode.score
        return Observation(reward=reward) if is_known else None


class KeptEnvironments:
    """The environments of a rank, which are asked only for what is not known of kept episodes.

    Args:
        environments: those that are asked.
        kept: gives what was kept, by `EpisodeSeeds.digest`, without what has failed; called when the first one begins.
        dialogue: of the episodes' thread.
    """

    def __init__(
        self, environments: Environments, kept: Callable[[], MutableMapping[str, KeptEpisode]], dialogue: Dialogue
    ) -> None:
        self._environments, self._read, self._dialogue = environments, kept, dialogue
        self._open: dict[str, _Repeated] = {}

    @cached_property
    def _kept(self) -> MutableMapping[str, KeptEpisode]:
        return self._read()

    async def start(self, key: str, row: TaskRow, seed: int, check: bool = False) -> Observation:
        """See `Environments.start`."""
        kept = self._kept.pop(key.rpartition(".")[0], None)  # each begins once, and large ones need memory
        if kept is None:
            return await self._environments.start(key, row, seed, check)
        repeated = self._open[key] = _Repeated(kept.token_ids, kept.episode, (row, seed, check))
        return _untimed(repeated.episode.start)

    async def step(self, key: str, action: str, seed: int, version: int, length: TurnLength) -> Observation:
        """See `Environments.step`; also fails if the environment does not repeat what it has said before."""
        repeated = self._open.get(key)
        if repeated and repeated.goes_on_with(action, version, length, self._dialogue):
            repeated.actions.append((action, seed, version, length))
            return _untimed(repeated.answers[-1])
        await self._leave(key)
        return await self._environments.step(key, action, seed, version, length)

    async def finish(self, key: str, answer: str) -> Observation:
        """See `Environments.finish`; fails as `step`."""
        repeated = self._open.get(key)
        if repeated and (final := repeated.final):
            return final
        await self._leave(key)
        return await self._environments.finish(key, answer)

    async def close(self, key: str, check: bool = False) -> bool:
        """See `Environments.close`; an episode that was repeated to its end is not checked."""
        return self._open.pop(key, None) is not None or await self._environments.close(key, check)

    async def _leave(self, key: str) -> None:
        """Begins the episode in the environment, with the actions so far; from then on the environment is asked."""
        repeated = self._open.pop(key, None)
        if repeated is None:
            return
        answers = [await self._environments.start(key, *repeated.beginning)]
        for action in repeated.actions:
            answers.append(await self._environments.step(key, *action))
        if answers != repeated.answers:
            raise EnvironmentFailed.unrepeatable()


def _untimed(kept: Observation) -> Observation:
    """An answer that took no time now."""
    return replace(kept, seconds=0.0, retries=0)
