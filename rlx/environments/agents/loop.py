"""A foreign agent as an environment: its requests are observations, the policy's turns are its answers.

The agent runs as it would against any server. Each of its requests is what the environment says next, and when it
returns, the episode has ended with what it returned. Left out: the server (endpoint), and isolation
(rlx.environments.pool).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from rlx.environments.agents.endpoint import Endpoint
from rlx.environments.agents.wire import Answer
from rlx.environments.base import Answered, Said
from rlx.environments.tools import finite
from rlx.types import TaskRow, TurnLength


class AgentLoop:
    """Derive from it and write `play`; the class is then an environment, named module:Class."""

    threads_per_episode: ClassVar[int] = 3
    """threads that an episode starts at most, whose stacks `environment.memory_mb` leaves out: that of `play`, and two
    that `play` starts itself, as OpenAI's `async` client starts one; a class may have its own number"""
    _agent: AgentThread | None = None  # None: it has not begun
    _endpoint: Endpoint | None = None

    @property
    def offered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools of the agent's requests, as JSON schemas: the policy is told of them."""
        return self._endpoint.tools if self._endpoint else ()

    @property
    def drawn_calls(self) -> int:
        """How many calls of these tools the policy's newest turn has."""
        return self._endpoint.drawn_calls if self._endpoint else 0

    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float | Awaitable[float]:
        """Plays an episode and returns its reward. It may be `async`; it has a thread of its own.

        Args:
            row: the prompt that the episode is of.
            seed: equal for all episodes that are compared with one another.
            base_url: of an OpenAI-compatible server, whose model is "policy"; for this episode alone.
            api_key: its key.
        """
        raise NotImplementedError(f"{type(self).__name__} has no play(row, seed, base_url, api_key)")

    async def reset(self, row: TaskRow, seed: int) -> Said:
        """Starts the agent; returns the messages of its first request.

        Raises:
            ValueError: it returned without one.
            TypeError: `play` takes other arguments.
        """
        name = type(self).__name__
        try:
            with suppress(ValueError):  # it has no signature
                # A decorator that supplies arguments is what is called, not what it wraps.
                inspect.signature(self.play, follow_wrapped=False).bind(row, seed, "", "")
        except TypeError as error:
            raise TypeError(f"{name}.play takes (row, seed, base_url, api_key): {error}") from None
        endpoint = self._endpoint = await Endpoint.open()
        agent = self._agent = AgentThread(self.play, (row, seed, endpoint.base_url, endpoint.api_key))
        said, _, is_over = await self._next(endpoint, agent)
        if is_over:
            raise ValueError(f"{name}.play returned before its first request")
        return said

    async def step(self, action: str, version: int, length: TurnLength) -> Answered:
        """Answers the agent's request; returns the messages of its next one, or its reward.

        Raises:
            TypeError: `play` has returned what is no number, or a `reset` of a subclass has not started it.
        """
        if not (self._endpoint and self._agent):
            name = type(self).__name__
            raise TypeError(f"{name}.reset has to return what AgentLoop's does: await super().reset(row, seed)")
        self._endpoint.answer(Answer(action, version, length))
        return await self._next(self._endpoint, self._agent)

    async def close(self) -> None:
        """Refuses what the agent asks for, and returns when it has ended, and then the server."""
        if not self._endpoint:
            return
        self._endpoint.end()
        try:
            if self._agent:
                self._agent.cancel()
                await self._agent.wait()
        finally:
            await self._endpoint.close()

    async def _next(self, endpoint: Endpoint, agent: AgentThread) -> Answered:
        asked = asyncio.ensure_future(endpoint.asked())
        try:
            await agent.wait(asked)
        finally:
            asked.cancel()
        if not agent.result.done():
            return asked.result(), 0.0, False
        return (), finite(agent.result.result(), f"{type(self).__name__}.play"), True


class AgentThread:
    """A thread that plays an episode, with an event loop of its own if `play` is `async`.

    So an agent that blocks its loop holds nobody up, and one that ends its process ends its episode alone. Nobody waits
    for the thread when the process ends.
    """

    def __init__(self, play: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Starts it. Whatever `play` raises is in `result`, of the loop that runs here."""
        self._home = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._home.create_future()
        self.result.add_done_callback(lambda result: result.exception())  # an episode that was cut asks for no result
        self._task: asyncio.Task[Any] | None = None
        threading.Thread(target=self._run, args=(play, arguments), daemon=True, name="agent").start()

    def cancel(self) -> None:
        """Cancels an `async` play."""
        if self._task:
            with suppress(RuntimeError):  # its loop has ended
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def wait(self, *others: asyncio.Future[Any]) -> None:
        """Waits until the agent has ended, or one of the others has.

        Where this is cancelled, the call took too long: while the agent goes on, the call has not ended either.
        """
        try:
            await asyncio.wait({self.result, *others}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait({self.result})
            raise

    def _run(self, play: Callable[..., Any], arguments: Sequence[Any]) -> None:
        try:
            value = play(*arguments)
            value = asyncio.run(self._awaited(value)) if inspect.isawaitable(value) else value
            settle = partial(self.result.set_result, value)
        except BaseException as error:  # SystemExit would end the loop that gets it, and no future takes StopIteration
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            settle = partial(self.result.set_exception, error if is_plain else RuntimeError(repr(error)))
        with suppress(RuntimeError):  # the loop is closed, nobody waits
            self._home.call_soon_threadsafe(settle)

    async def _awaited(self, value: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        return await value
