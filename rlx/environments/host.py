"""The environments that live in one process: one instance for each episode, each call with a time limit.

A call of a plain method runs on its instance's thread, one of an `async` method on the event loop. The first can be
given up, but not ended: then the process has to be replaced. Left out: where the process is, and what to do after a
failure (pool).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import resource
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from rlx.actors import BulkActor
from rlx.config.errors import one_line
from rlx.environments.base import has_steps, load_environment, messages_of, threads_of
from rlx.environments.forks import keep_ray_from_children
from rlx.environments.instance import Instance
from rlx.environments.tools import ToolDialogue, finite, score_of
from rlx.types import EnvironmentFailed, Observation, TaskRow, TurnLength

_MIB = 1 << 20
_STACK = 8 * _MIB
"""size of a thread's stack where the system does not limit it"""
_HERE, _PYTHON = Path(__file__).parent, Path(traceback.__file__).parent
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_CANCEL_S = 1.0
"""seconds in which an `async` method that took too long has to end when it is cancelled"""


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
    raised_at: str = ""  # file:line of the environment's, if it has raised
    is_late: bool = False  # the call took longer than it may
    is_stuck: bool = False  # its process has to be replaced: the call goes on for ever, or memory has run out
    is_unknown: bool = False  # no episode has the key: the process was started anew
    is_final: bool = False  # the call would come to the same if it were made again

    @property
    def error(self) -> EnvironmentFailed:
        """The failure as an error."""
        return EnvironmentFailed(self.failure, "hung" if self.is_late else "raised", self.raised_at)


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
        """Ends the process and starts it anew."""
        ...

    async def is_up(self) -> bool:
        """Waits while the process starts anew, if it does; false if it cannot."""
        ...


class EnvironmentHost(BulkActor):
    """Live episodes by key. Its methods are those of an async actor; they raise nothing that an environment raises."""

    def __init__(self, settings: HostSettings) -> None:
        """Raises ConfigError if there is no such environment."""
        keep_ray_from_children()
        self.settings, self._kind = settings, load_environment(settings.name)
        self._live: dict[str, Instance] = {}  # by key
        self._left: list[Instance] = []  # that are closed, as far as `close` still runs
        # Several workers may ask for more calls at the same time: the time limit of one begins once it has room.
        self._room = asyncio.Semaphore(settings.concurrency)
        self._limit = MemoryLimit(settings.memory_mb * _MIB) if settings.memory_mb else None

    async def start(self, key: str, beginning: Beginning) -> Reply:
        """Begins an episode under a key. One that has it is ended first; if that takes too long, none is begun."""
        ended = await self.close(key)
        if ended.failure:
            return ended
        # Known before anything is called, which may fail: the instance is closed all the same.
        live = self._live[key] = Instance()
        if self._limit:
            self._limit.allow_threads(threads_of(self._kind) * (len(self._live) + len(self._left)))
        return await self._timed(live, functools.partial(self._start, live, beginning))

    async def step(self, key: str, action: Action) -> Reply:
        """What the environment answers to a turn."""
        live = self._live.get(key)
        return await self._timed(live, functools.partial(_step, live, action)) if live else _UNKNOWN

    async def finish(self, key: str, answer: str) -> Reply:
        """The score of an episode that was cut, as a reward; `answer`: the last that the policy said."""
        live = self._live.get(key)
        return await self._timed(live, functools.partial(_finish, live, answer)) if live else _UNKNOWN

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

    async def close(self, key: str) -> Reply:
        """Ends an episode, if there is one. The environment's own `close` fails only if it takes too long.

        So many of them that still run as calls may run at the same time are too many: the process is stuck.
        """
        live = self._live.pop(key, None)
        return await self._ended(live) if live else Reply()

    async def forget(self, owner: str) -> list[Reply]:
        """Ends all episodes whose keys begin with that of an owner, which has started anew; replies as `close`.

        Nobody waits for what they answer: an `async` call under way is cancelled, and none that waits is begun.
        """
        old = [self._live.pop(key) for key in list(self._live) if key.startswith(owner)]
        for live in old:
            live.give_up()
        return await asyncio.gather(*map(self._ended, old))

    async def _ended(self, live: Instance) -> Reply:
        reply = await self._timed(live, functools.partial(_close, live), is_end=True)
        live.thread.end()
        if not reply.is_late:
            return Reply()  # it is over, whatever it has said
        self._left = [each for each in (*self._left, live) if each.is_busy]
        is_stuck = len(self._left) >= self.settings.concurrency
        return replace(reply, failure=f"close {reply.failure}", is_stuck=is_stuck)

    async def _timed(
        self, live: Instance, call: Callable[[], Awaitable[Observation]], *, is_end: bool = False
    ) -> Reply:
        async with live.turn, self._room:
            if live.is_given_up and not is_end:
                return _UNKNOWN
            started, task = time.monotonic(), asyncio.ensure_future(call())
            live.task = task
            done, _ = await asyncio.wait([task], timeout=self.settings.timeout_s)
            if not done:
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_S)
                failure = f"took longer than {self.settings.timeout_s:g} s"
                return Reply(failure=failure, is_late=True, is_stuck=live.is_busy)
        if task.cancelled():  # by the environment itself
            return Reply(failure="raised CancelledError")
        error = task.exception()
        if error is not None:
            said = one_line(error, 300)
            failure = f"raised {type(error).__name__}{said and f': {said}'}"
            return Reply(failure=failure, raised_at=_place(error), is_stuck=isinstance(error, MemoryError))
        return Reply(replace(task.result(), seconds=time.monotonic() - started))

    async def _start(self, live: Instance, beginning: Beginning) -> Observation:
        call = live.thread.call
        environment = live.environment = await call(self._kind, **self.settings.params)
        live.tools = None if has_steps(self._kind) else ToolDialogue(environment, call)
        said: Any = None
        if callable(getattr(environment, "reset", None)):
            said = await call(environment.reset, beginning.row, beginning.seed)
        if said is None:
            return Observation(messages_of(beginning.row.asked))
        with _naming("reset", is_of_gymnasium=isinstance(said, tuple) and len(said) == 2):
            return Observation(messages_of(said), tools=_offered(live))


async def _step(live: Instance, action: Action) -> Observation:
    if live.tools:
        return await live.tools.step(action.text)
    step, call = live.environment.step, live.thread.call
    known = {"seed": action.seed, "version": action.version, "length": action.length}
    parameters = inspect.signature(step).parameters
    given = {name: value for name, value in known.items() if name in parameters}
    said, reward, done = _answered(await call(step, action.text, **given))
    is_done, own = _truth(done), finite(reward, "step")
    if isinstance(reward, bool) and float(done) not in (0.0, 1.0):
        order = "(observation, reward, whether the episode has ended)"
        raise TypeError(f"step returns {order}: {reward} and {done} are in each other's place")
    final = await score_of(live.environment, action.text, call) if is_done else 0.0
    with _naming("step"):
        messages = messages_of(said)
    calls = live.environment.drawn_calls if _offered(live) else 0
    return Observation(messages, own + final, is_done, calls=calls)


def _offered(live: Instance) -> tuple[Mapping[str, Any], ...]:
    """The tools that an agent offers the policy; what is a set of tools or no agent has none of this kind."""
    return () if live.tools else tuple(getattr(live.environment, "offered_tools", ()))


def _truth(done: Any) -> bool:
    """Whether an episode has ended; a text or None says nothing of it."""
    if not isinstance(done, SupportsFloat) or isinstance(done, str):
        raise TypeError(f"step returns whether the episode has ended as a bool, not {type(done).__name__} {done!r:.80}")
    return bool(done)


@contextmanager
def _naming(method: str, *, is_of_gymnasium: bool = False) -> Iterator[None]:
    """Says which method has returned what is no observation."""
    try:
        yield
    except (TypeError, ValueError) as error:
        hint = "; Gymnasium's info has no place here" if is_of_gymnasium else ""
        raise type(error)(f"{error}, in what {method} has returned{hint}") from None


def _answered(returned: Any) -> tuple[Any, Any, Any]:
    """What `step` has returned; raises TypeError if that is no answer."""
    if isinstance(returned, tuple | list) and len(returned) == 3:
        return returned[0], returned[1], returned[2]
    given = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
    hint = "; Gymnasium's terminated and truncated are one here, and there is no info" if given == "5 values" else ""
    raise TypeError(f"step returns (observation, reward, whether the episode has ended), not {given}{hint}")


async def _finish(live: Instance, answer: str) -> Observation:
    return Observation(reward=await score_of(live.environment, answer, live.thread.call), done=True)


async def _close(live: Instance) -> Observation:
    close = getattr(live.environment, "close", None)
    if close:
        await live.thread.call(close)
    return Observation()


def _place(error: BaseException) -> str:
    """The last line of a user's code that an error came through, else the last line of all, as file:line.

    Empty if that is here, where wrong answers are refused.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    file, line = next((each for each in reversed(frames) if not _is_library(each[0])), frames[-1])
    return "" if Path(file).parent in (_HERE, _HERE / "agents") else f"{file}:{line}"


def _is_library(file: str) -> bool:
    """Whether a file is of Python, of an installed package, or of rlx; `<string>` is no file."""
    path = Path(file)
    is_own = path.is_relative_to(_HERE.parent) or path.is_relative_to(_PYTHON)
    return is_own or file.startswith("<") or not _INSTALLED.isdisjoint(path.parts)


class MemoryLimit:
    """Makes allocations of this process fail once it uses so many bytes more than now, stacks of threads aside."""

    def __init__(self, size: int) -> None:
        with open("/proc/self/status") as status:
            used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
        self._bytes, self._threads = used + size, 0
        self.allow_threads(0)

    def allow_threads(self, count: int) -> None:
        """Allows for the stacks of so many threads of instances, of which little is in use."""
        self._threads = max(self._threads, count)  # not fewer: a thread may take a while to end
        own = resource.getrlimit(resource.RLIMIT_STACK)[0]
        stack = threading.stack_size() or (_STACK if own == resource.RLIM_INFINITY else own)
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        size = self._bytes + self._threads * stack
        resource.setrlimit(resource.RLIMIT_DATA, (size if most == resource.RLIM_INFINITY else min(size, most), most))
