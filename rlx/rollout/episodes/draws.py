"""Episodes with the engines of a rank's pool: turns travel together, and none waits for another to be drawn.

An episode stays with its engine, which may have its prefix in the cache. Left out: single completions, which are asked
for by the hundred (rlx.rollout.engine_pool).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlx.actors import BulkCalls, CallError, EngineLostError, EngineTimeoutError, engine_errors
from rlx.rollout.base import PendingRollout, Request
from rlx.rollout.engine_pool import PATIENCE_S, EnginePool
from rlx.rollout.episodes.episode import GeneratedTurn
from rlx.rollout.episodes.player import NoEngineError, Player
from rlx.types import Prompt, Sampling

_LOOK_S = 0.01
_SPARE = 8
"""turns that an engine may draw more than twice those of another before its episodes change the engine"""


@dataclass
class EngineDraws:
    """Asks the engines of a pool for turns; `hold` and `release` are for another thread than that of the episodes."""

    pool: EnginePool
    version: int = 0  # of the weights that the engines hold
    _is_open: bool = field(default=True, init=False)
    _running: dict[int, int] = field(default_factory=dict, init=False)  # turns that each engine draws
    _calls: list[BulkCalls] = field(default_factory=list, init=False)  # of each engine

    def __post_init__(self) -> None:
        self._calls = [BulkCalls(engine, f"engine {index}") for index, engine in enumerate(self.pool.engines)]

    def hold(self) -> None:
        """No turn begins until `release`: the engines get weights."""
        self._is_open = False

    def release(self, version: int) -> None:
        """Turns may begin; the engines have weights of this version."""
        self.version, self._is_open = version, True

    async def __call__(self, request: Request, engine: int | None) -> GeneratedTurn:
        """Draws a turn.

        Args:
            engine: that has drawn the turn before.

        Raises:
            NoEngineError: none is left.
            PromptRefusedError: an engine refuses the request.
        """
        while True:
            while not self._is_open:
                await asyncio.sleep(_LOOK_S)
            alive = self.pool.alive
            if not alive:
                raise NoEngineError
            chosen = self._chosen(alive, engine)
            version = self.version
            try:
                return await self._generate(request, chosen, version)
            except EngineLostError as error:
                if (version == self.version and self._is_open) or isinstance(error, EngineTimeoutError):
                    self.pool.mark_lost(chosen, error)

    def _chosen(self, alive: Sequence[int], engine: int | None) -> int:
        """The engine of the episode unless another one has much less to do."""
        turns = {each: (turn - self.pool.rank) % len(alive) for turn, each in enumerate(alive)}
        least = min(alive, key=lambda each: (self._running.get(each, 0), turns[each]))
        if (
            engine is not None
            and engine in alive
            and self._running.get(engine, 0) <= 2 * self._running.get(least, 0) + _SPARE
        ):
            return engine
        return least

    async def _generate(self, request: Request, engine: int, version: int) -> GeneratedTurn:
        self._running[engine] = self._running.get(engine, 0) + 1
        try:
            call = self._calls[engine].call(
                "generate", [request], version, timeout_s=self.pool.timeout_s, works=self._stepping(engine)
            )
            with engine_errors(engine):
                outputs, seconds = await call
        finally:
            self._running[engine] -= 1
        return GeneratedTurn(outputs[0], version, engine, seconds)

    def _stepping(self, engine: int) -> Callable[[], Awaitable[bool]]:
        """Tells whether an engine answers, and has made a step since it was asked the last time."""
        before: int | None = None

        async def has_stepped() -> bool:
            nonlocal before
            last = before
            try:
                before = int(await self._calls[engine].call("steps", timeout_s=PATIENCE_S))
            except CallError:
                return False
            return before != last

        return has_stepped


@dataclass
class Episodes:
    """A rank's rollouts of episodes, with the calls that a pool has for single completions."""

    draws: EngineDraws
    player: Player

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """Begins an episode of each prompt by each sampling; does not wait."""
        self.draws.version = version
        return self.player.begin(prompts, samplings, version)

    def finish(self, pending: PendingRollout, version: int) -> None:
        """Waits until all episodes are over. If no engine is left, the others are continued by the next call.

        Raises:
            PromptRefusedError: an engine refused a turn.
        """
        self.draws.version = version
        self.player.finish(pending)

    def hold(self) -> None:
        """See `EngineDraws.hold`."""
        self.draws.hold()

    def release(self, version: int) -> None:
        """See `EngineDraws.release`."""
        self.draws.release(version)

    def close(self) -> None:
        """Ends the thread of the episodes."""
        self.player.loop.close()
