"""An instance of an environment, and the thread that its plain methods run on.

It is one thread from the constructor to `close`: what belongs to the thread that made it, as a connection of sqlite3
or a browser of Playwright does, can be used. Left out: time limits (host).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlx.environments.tools import ToolDialogue

_NO_THREAD = "can't start new thread"
"""the text of Python's RuntimeError"""


class OwnThread:
    """Calls methods of one instance: plain ones on a thread, one after another, those that are `async` on the loop."""

    def __init__(self) -> None:
        self.is_busy = False
        """whether a plain method runs; it cannot be ended"""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="environment")

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What a method returns; raises what it raises, and RuntimeError where that would end the event loop.

        Python's error that no thread can be started is a MemoryError here: there is no memory for its stack.
        """
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*args, **kwargs)
            call = self._executor.submit(self._on_thread, method, *args, **kwargs)
            returned = await asyncio.wrap_future(call)
            return await returned if inspect.isawaitable(returned) else returned
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(repr(error)) from None
        except RuntimeError as error:
            if str(error) != _NO_THREAD:
                raise
            raise MemoryError(_NO_THREAD).with_traceback(error.__traceback__) from None

    def end(self) -> None:
        """Ends the thread once the method has returned that runs there, if any; does not wait."""
        self._executor.shutdown(wait=False)

    def _on_thread(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.is_busy = True
        try:
            return method(*args, **kwargs)
        except StopIteration:  # a future takes none: its call would seem to hang
            raise RuntimeError("StopIteration") from None
        finally:
            self.is_busy = False


@dataclass
class Instance:
    """What an open episode has in its process."""

    thread: OwnThread = field(default_factory=OwnThread)
    environment: Any = None  # None: its constructor has not returned
    tools: ToolDialogue | None = None  # None: it answers turns itself
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the call under way: its end waits for it
    task: asyncio.Future[Any] | None = None  # the last call
    is_given_up: bool = False  # nobody waits for its answers: it has to be closed alone

    @property
    def is_busy(self) -> bool:
        """Whether a call runs: after its time limit one that cannot be ended."""
        return self.thread.is_busy or not (self.task is None or self.task.done())

    def give_up(self) -> None:
        """Cancels an `async` call under way, and lets no other begin; a plain one cannot be ended."""
        self.is_given_up = True
        if self.task and not self.thread.is_busy:
            self.task.cancel()
