"""Plays episodes: policy and environment in turn, all episodes of a rank at once, on a thread with an event loop.

While some episodes wait for their environments, the engines draw turns of the others. An episode that loses its engine
stays where it is and is continued by another engine. Left out: which engine draws (draws), and what an environment is
(rlx.environments).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlx.rollout.base import PendingRollout, Request
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits, EpisodeSeeds, GeneratedTurn, OpenEpisode
from rlx.types import EnvironmentFailed, Observation, Prompt, Sampling, TaskRow, TurnLength


class NoEngineError(Exception):
    """No engine is left; the episode can be continued later."""


Draw = Callable[[Request, int | None], Awaitable[GeneratedTurn]]
"""(request, the engine that has drawn the turn before) -> the turn; raises NoEngineError"""


class Environments(Protocol):
    """The environments of a rank; `rlx.environments.pool.EnvironmentPool` is one."""

    async def start(self, key: str, row: TaskRow, seed: int, check: bool = False) -> Observation:
        """Begins an episode; returns its first messages; raises EnvironmentFailed.

        Args:
            key: `EpisodeSeeds.digest`, a dot and a number.
            check: a second instance gets the same actions, so that `close` can compare.
        """
        ...

    async def step(self, key: str, action: str, seed: int, version: int, length: TurnLength) -> Observation:
        """The answer to a turn that weights of this version drew; raises EnvironmentFailed."""
        ...

    async def finish(self, key: str, answer: str) -> Observation:
        """The score of an episode that was cut, as a reward; raises EnvironmentFailed."""
        ...

    async def close(self, key: str, check: bool = False) -> bool:
        """Ends an episode; with `check` false says that a second instance answered differently."""
        ...


@dataclass
class PendingEpisodes(PendingRollout):
    """A rollout of which each completion is an episode."""

    open: list[OpenEpisode] = field(default_factory=list)  # those of each prompt together
    playing: Future[None] | None = None

    def collect(self) -> None:
        """Makes completions of the episodes once all are over."""
        if not self.is_complete and all(episode.is_over for episode in self.open):
            count = len(self.samplings)
            done = [episode.completion() for episode in self.open]
            self.groups = [done[start : start + count] for start in range(0, len(done), count)]
            self.unassigned, self.open = [], []


@dataclass
class Player:
    """Plays the episodes of one rank."""

    draw: Draw
    environments: Environments
    dialogue: Dialogue
    limits: EpisodeLimits
    run_seed: int
    checked_share: float = 0.0  # of the episodes: their environments are checked for determinism
    loop: EventLoopThread = field(default_factory=lambda: EventLoopThread("episodes"))
    _count: Iterator[int] = field(default_factory=itertools.count, init=False)

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], step: int) -> PendingEpisodes:
        """Begins an episode of each prompt by each sampling; does not wait."""
        pending = PendingEpisodes.of(prompts, samplings, step)
        seeds = [
            (EpisodeSeeds(self.run_seed, step, prompt, number), sampling)
            for prompt in prompts
            for number, sampling in enumerate(samplings)
        ]
        pending.open = [
            OpenEpisode(f"{each.digest}.{next(self._count)}", each, sampling, self.limits, self.dialogue)
            for each, sampling in seeds
        ]
        self.go_on(pending)
        return pending

    def go_on(self, pending: PendingEpisodes) -> None:
        """Plays the episodes that are not over, unless they are being played; does not wait."""
        if pending.playing is None or pending.playing.done():
            pending.playing = self.loop.run(self._play_all(pending))

    def finish(self, pending: PendingRollout) -> None:
        """Waits until all episodes are over or no engine is left.

        Raises:
            PromptRefusedError: an engine refused a turn.
            ConfigError: an agent offers tools, which the model's chat template cannot be used for.
        """
        if not isinstance(pending, PendingEpisodes) or pending.is_complete:
            return
        self.go_on(pending)
        assert pending.playing
        pending.playing.result()
        pending.collect()

    async def _play_all(self, pending: PendingEpisodes) -> None:
        tasks = [asyncio.ensure_future(self._play(each, pending)) for each in pending.open if not each.is_over]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _play(self, episode: OpenEpisode, pending: PendingEpisodes) -> None:
        """Plays an episode until it is over or no engine is left."""
        try:
            if episode.start is None:
                await self._start(episode)
            while not episode.is_over:
                if episode.unanswered:
                    await self._observe(episode, episode.unanswered.version)
                else:
                    turn = await self.draw(episode.request(), episode.engine)
                    episode.add_turn(turn)
                    pending.seconds += turn.seconds / len(pending.open)
        except NoEngineError:
            return
        check = not episode.failed and episode.seeds.is_among(self.checked_share)
        if not await self.environments.close(episode.key, check):
            episode.fail(EnvironmentFailed.unrepeatable())

    async def _start(self, episode: OpenEpisode) -> None:
        seeds, check = episode.seeds, episode.seeds.is_among(self.checked_share)
        try:
            episode.begin(await self.environments.start(episode.key, seeds.prompt.task, seeds.of_start, check))
        except EnvironmentFailed as error:
            episode.begin_without_environment(error)

    async def _observe(self, episode: OpenEpisode, version: int) -> None:
        action, seed = episode.action, episode.seeds.of_answer(len(episode.turns))
        try:
            answered = await self.environments.step(episode.key, action, seed, version, episode.length)
            episode.add_observation(answered)
            if episode.is_over and not episode.is_done:
                episode.add_score(await self.environments.finish(episode.key, action))
        except EnvironmentFailed as error:
            episode.fail(error)


class EventLoopThread:
    """An event loop on a thread of its own, which begins with the first coroutine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Starts a coroutine on the loop; does not wait."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name=self._name).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends the thread once its present callback has returned."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
