"""The environments that live in one process: one instance for each episode, each call with a time limit.

A call of a plain method runs on a thread, one of an `async` method on the event loop. The first can be given up, but
not ended: then the process has to be replaced. Left out: where the process is, and what to do after a failure (pool).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from rlx.actors import BulkActor
from rlx.config.errors import one_line
from rlx.environments.base import has_steps, load_environment, messages_of
from rlx.environments.tools import Called, ToolDialogue, finite, score_of
from rlx.types import Observation, TaskRow, TurnLength

_MIB = 1 << 20
_CANCEL_S = 1.0
"""in which an `async` method that took too long has to end when it is cancelled"""


@dataclass(frozen=True, slots=True)
class Action:
    """A turn of the policy as an environment is told it."""

    text: str
    seed: int
    version: int = 0  # of the weights that drew it
    length: TurnLength = field(default_factory=TurnLength)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What an episode begins with."""

    row: TaskRow
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a call."""

    observation: Observation | None = None
    failure: str = ""  # why there is no observation
    is_late: bool = False  # the call took longer than it may
    is_stuck: bool = False  # its process has to be replaced: the call goes on for ever, or memory has run out
    is_unknown: bool = False  # no episode has the key: the process was started anew


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host is started with."""

    name: str  # of the environment
    params: Mapping[str, Any]
    timeout_s: float  # of a call
    concurrency: int  # calls at the same time
    memory_mb: int | None = None  # that the process may use beyond what it starts with


_UNKNOWN = Reply(failure="its process was started anew", is_unknown=True)


class HostLost(Exception):
    """A host died or did not answer; the text says which."""


class Host(Protocol):
    """The process of a host, as a pool uses it."""

    async def call(self, method: str, *args: Any) -> Any:
        """What a method of `EnvironmentHost` returns.

        Raises:
            HostLost: the process ended or does not answer.
        """
        ...

    def replace(self) -> None:
        """Has the process ended and started anew."""
        ...

    async def is_up(self) -> bool:
        """Waits while the process starts anew, if it does; false if it cannot."""
        ...


class EnvironmentHost(BulkActor):
    """Live episodes by key. Its methods are those of an async actor; they raise nothing that an environment raises."""

    def __init__(self, settings: HostSettings) -> None:
        """Raises ConfigError if there is no such environment."""
        self.settings, self._kind = settings, load_environment(settings.name)
        self._live: dict[str, Any] = {}  # dialogues by key
        # Several workers may ask for more calls at the same time: the time limit of one begins once it has room.
        self._room = asyncio.Semaphore(settings.concurrency)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="environment")
        self._thread_calls: WeakKeyDictionary[Any, Future[Any]] = WeakKeyDictionary()  # the newest one of each task
        if settings.memory_mb:
            limit_memory(settings.memory_mb * _MIB)

    async def start(self, key: str, beginning: Beginning) -> Reply:
        """Begins an episode under a key; an episode that has the key ends."""
        await self.close(key)
        return await self._timed(functools.partial(self._start, key, beginning))

    async def step(self, key: str, action: Action) -> Reply:
        """What the environment answers to a turn."""
        live = self._live.get(key)
        return _UNKNOWN if live is None else await self._timed(functools.partial(self._step, live, action))

    async def finish(self, key: str, answer: str) -> Reply:
        """The score of an episode that was cut, as a reward; `answer`: the last that the policy said."""
        live = self._live.get(key)
        return _UNKNOWN if live is None else await self._timed(functools.partial(_finish, live, answer, self._called))

    async def repeat(
        self, key: str, beginning: Beginning, actions: Sequence[Action], answer: str | None = None
    ) -> list[Reply]:
        """Begins an episode and repeats its actions; all replies up to the first that failed.

        `answer`: of an episode that was cut; the last reply is then its score.
        """
        replies = [await self.start(key, beginning)]
        for action in actions:
            if replies[-1].failure:
                break
            replies.append(await self.step(key, action))
        if answer is not None and not replies[-1].failure:
            replies.append(await self.finish(key, answer))
        return replies

    async def close(self, key: str) -> None:
        """Ends an episode, if there is one."""
        await self._ended(self._live.pop(key, None))

    async def forget(self, owner: str) -> None:
        """Ends all episodes whose keys begin with that of an owner, which has started anew."""
        old = [self._live.pop(key) for key in list(self._live) if key.startswith(owner)]
        await asyncio.gather(*map(self._ended, old))

    async def _ended(self, live: Any) -> None:
        close = getattr(getattr(live, "environment", live), "close", None)
        if close is not None:
            async with self._room:
                with contextlib.suppress(Exception, asyncio.CancelledError):  # it is over, whatever it says
                    await asyncio.wait_for(self._called(close), self.settings.timeout_s)

    async def _timed(self, call: Callable[[], Awaitable[Observation]]) -> Reply:
        async with self._room:
            started, task = time.monotonic(), asyncio.ensure_future(call())
            done, _ = await asyncio.wait([task], timeout=self.settings.timeout_s)
            call_on_thread = self._thread_calls.pop(task, None)
            if not done:
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=_CANCEL_S)
                is_stuck = not done or (call_on_thread is not None and call_on_thread.running())
                return Reply(failure=f"took longer than {self.settings.timeout_s:g} s", is_late=True, is_stuck=is_stuck)
        if task.cancelled():  # by the environment itself
            return Reply(failure="raised CancelledError")
        error = task.exception()
        if error is not None:
            failure = f"raised {type(error).__name__}: {one_line(error, 300)}"
            return Reply(failure=failure, is_stuck=isinstance(error, MemoryError))
        return Reply(replace(task.result(), seconds=time.monotonic() - started))

    async def _start(self, key: str, beginning: Beginning) -> Observation:
        environment = await self._called(self._kind, **self.settings.params)
        # Before `reset`, which may fail: the instance is closed all the same.
        self._live[key] = environment if has_steps(self._kind) else ToolDialogue(environment, self._called)
        said: Any = None
        if callable(getattr(environment, "reset", None)):
            said = await self._called(environment.reset, beginning.row, beginning.seed)
        return Observation(messages_of(beginning.row.asked if said is None else said))

    async def _step(self, live: Any, action: Action) -> Observation:
        if isinstance(live, ToolDialogue):
            return await live.step(action.text)
        step = live.step
        known = {"seed": action.seed, "version": action.version, "length": action.length}
        parameters = inspect.signature(step).parameters
        given = {name: value for name, value in known.items() if name in parameters}
        said, reward, done = await self._called(step, action.text, **given)
        final = await score_of(live, action.text, self._called) if done else 0.0
        return Observation(messages_of(said), finite(reward) + final, bool(done))

    async def _called(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What a method returns: on the event loop if it is `async`, else on a thread."""
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*args, **kwargs)
            call = self._threads.submit(_on_thread, method, *args, **kwargs)
            self._thread_calls[asyncio.current_task()] = call
            returned = await asyncio.wrap_future(call)
            return await returned if inspect.isawaitable(returned) else returned
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the event loop
            raise RuntimeError(repr(error)) from None


async def _finish(live: Any, answer: str, called: Called) -> Observation:
    environment = live.environment if isinstance(live, ToolDialogue) else live
    return Observation(reward=await score_of(environment, answer, called), done=True)


def _on_thread(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a method returns. A future takes no StopIteration: its call would seem to hang.

    Raises:
        RuntimeError: the method raised StopIteration.
    """
    try:
        return method(*args, **kwargs)
    except StopIteration:
        raise RuntimeError("StopIteration") from None


def limit_memory(size: int) -> None:
    """Makes allocations of this process fail once it uses so many bytes more than now."""
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + size, used + size))
