"""A foreign agent as an environment: its requests are observations, the policy's turns are its answers.

The agent runs as it would against any server. Each of its requests is what the environment says next, and when it
returns, the episode has ended with what it returned. Left out: the server (endpoint), and isolation
(rlx.environments.pool).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rlx.environments.agents.endpoint import Endpoint
from rlx.environments.base import Answered, Said
from rlx.types import TaskRow


class AgentLoop:
    """Derive from it and write `play`; the class is then an environment, named module:Class."""

    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float | Awaitable[float]:
        """Plays an episode and returns its reward. It may be `async`; else it has a thread.

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
        """
        self._endpoint = await Endpoint.open()
        arguments = row, seed, self._endpoint.base_url, self._endpoint.api_key
        if inspect.iscoroutinefunction(self.play):
            self._playing: asyncio.Future[Any] = asyncio.ensure_future(self.play(*arguments))
        else:
            self._playing = _on_daemon_thread(lambda: self.play(*arguments))
        try:
            said, _, is_over = await self._next()
            if is_over:
                raise ValueError(f"{type(self).__name__}.play returned before its first request")
            return said
        except BaseException:
            await self.close()
            raise

    async def step(self, action: str, version: int) -> Answered:
        """Answers the agent's request; returns the messages of its next one, or its reward."""
        self._endpoint.answer(action, version)
        return await self._next()

    async def close(self) -> None:
        """Ends the server, and with it an agent that waits for an answer."""
        self._playing.cancel()
        await self._endpoint.close()

    async def _next(self) -> Answered:
        asked = asyncio.ensure_future(self._endpoint.asked())
        try:
            await asyncio.wait({asked, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if self._playing.done():
            return (), float(self._playing.result()), True
        return asked.result(), 0.0, False


def _on_daemon_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """The result of a call on a thread that nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def set_unless_over(setting: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setting(value)

    def run() -> None:
        try:
            value, setting = call(), result.set_result
        except BaseException as error:
            value, setting = error, result.set_exception
        with suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(set_unless_over, setting, value)

    threading.Thread(target=run, daemon=True, name="agent").start()
    return result
