"""Calls of a Ray actor with a deadline, one or many at a time, and the errors that they can raise.

`wait_for` is for any actor. `get_result` is for engines: its errors say what the caller may do next. `BulkCalls` makes
many small calls at the same time, whose results come as they are there. Left out: repeating calls.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import ray
from ray import cloudpickle

from rlx.config.errors import message_of

_CALL_S = 0.5
"""Ray answers at once for an actor that it will not start again"""
_UNFETCHED_S = 600.0
"""after which nobody will fetch results: their caller has died or given up"""


class CallError(RuntimeError):
    """A call of an actor gave no result; the text names the actor and the cause."""


class CallTimeoutError(CallError):
    """The actor did not answer in time."""


class CallFailedError(CallError):
    """The called method raised an error."""

    def __init__(self, actor: str, cause: BaseException) -> None:
        super().__init__(actor, cause)  # what it is made of: it is pickled where a worker raises it
        self.cause = cause

    def __str__(self) -> str:
        actor, cause = self.args
        return f"{actor} failed: {message_of(cause)}"


class ActorDiedError(CallError):
    """The process of the actor ended, or could not start."""


class RolloutError(RuntimeError):
    """Completions could not be generated; the text names the engine."""


class PromptRefusedError(RolloutError, ValueError):
    """An engine refuses a prompt, and would refuse it again."""


class EngineLostError(RolloutError):
    """An engine died or failed: it gets no more requests until it has received the weights again."""


class EngineTimeoutError(EngineLostError):
    """An engine did not answer in time. It may hang, so its process has to be replaced."""

    @classmethod
    def of(cls, engine: int) -> EngineTimeoutError:
        """The error of the engine with this index."""
        return cls(f"engine {engine} did not answer in time")


def is_dead(actor: Any) -> bool:
    """Whether an actor is dead and Ray will not replace it, such as one that could not start."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=_CALL_S)
    except ray.exceptions.ActorDiedError:
        return True
    except (ray.exceptions.RayError, TimeoutError):
        pass
    return False


class Lifeline:
    """A call of an engine that does not return, and fails when the engine's process ends.

    It tells a process that ended, which Ray is replacing, from one that hangs: both do not answer other calls.
    """

    def __init__(self, engine: Any) -> None:
        self._call = engine.lives.remote()

    @property
    def is_broken(self) -> bool:
        """Whether the process has ended since."""
        if not ray.wait([self._call], timeout=0)[0]:
            return False
        try:
            ray.get(self._call)
        except ray.exceptions.RayActorError:
            return True
        return False


def is_done(call: Any, deadline: float) -> bool:
    """Whether a call has returned or its deadline, a time of `time.monotonic()`, has passed."""
    return bool(ray.wait([call], timeout=0)[0]) or time.monotonic() >= deadline


def wait_for(call: Any, actor: str, deadline: float) -> Any:
    """Waits for the result of a call until `deadline`, a time of `time.monotonic()`.

    Args:
        actor: how errors name the actor.

    Raises:
        CallTimeoutError: the actor did not answer in time.
        CallFailedError: the called method raised an error.
        ActorDiedError: the process of the actor ended, or could not start.
    """
    try:
        return ray.get(call, timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise CallTimeoutError(f"{actor} did not answer in time") from None
    except ray.exceptions.RayTaskError as error:
        raise CallFailedError(actor, error.cause) from None
    except ray.exceptions.RayError as error:
        raise ActorDiedError(f"{actor} died: {cause_of_death(error)}") from None


def get_result(call: Any, engine: int, deadline: float) -> Any:
    """Waits for the result of a call of an engine until `deadline`, a time of `time.monotonic()`.

    Args:
        engine: the index of the engine, for the text of errors.

    Raises:
        EngineTimeoutError: the engine did not answer in time.
        EngineLostError: the engine died or failed; the text has the cause.
        PromptRefusedError: the engine refused the request.
    """
    with engine_errors(engine):
        return wait_for(call, f"engine {engine}", deadline)


@contextmanager
def engine_errors(engine: int) -> Iterator[None]:
    """Makes the errors of a call those of an engine, see `get_result`."""
    try:
        yield
    except CallTimeoutError:
        raise EngineTimeoutError.of(engine) from None
    except CallFailedError as error:
        if isinstance(error.cause, ValueError):
            raise PromptRefusedError(f"engine {engine} refused a prompt: {error.cause}") from None
        raise EngineLostError(str(error)) from None
    except ActorDiedError as error:
        raise EngineLostError(str(error)) from None


def cause_of_death(error: ray.exceptions.RayError) -> str:
    """One line of Ray's report. For an actor that did not start it is a traceback, with the cause in its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "unavailable" in lines[0]:  # the actor was killed: Ray reports its connection only
        return "its process ended"
    return f"{lines[0]} {lines[-1] if lines[1:] else ''}".strip()


@dataclass(frozen=True, slots=True)
class BulkCall:
    """One of many calls that travel together."""

    number: int
    method: str
    args: bytes  # packed one by one, so that one that cannot travel fails alone


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What became of a call."""

    number: int
    outcome: bytes  # what it returned, or its error; packed
    is_error: bool


@dataclass
class _Caller:
    """What an actor keeps for one caller."""

    results: list[BulkResult] = field(default_factory=list)  # that it has not fetched
    has_results: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    newest: float = field(default_factory=time.monotonic)  # when the last call began or ended

    @property
    def is_gone(self) -> bool:
        """Whether results have waited for so long that nobody will fetch them."""
        return not self.running and time.monotonic() - self.newest > _UNFETCHED_S


class BulkActor:
    """An async actor that takes many calls of its `async` methods in one, and returns results as they are there."""

    @cached_property
    def _process(self) -> str:
        return uuid.uuid4().hex

    @cached_property
    def _callers(self) -> dict[str, _Caller]:
        return {}

    async def submit(self, caller: str, calls: Sequence[BulkCall]) -> str:
        """Begins calls; returns the name of this process, which `next_results` is asked with."""
        for name in [name for name, other in self._callers.items() if other.is_gone]:
            del self._callers[name]
        own = self._callers.setdefault(caller, _Caller())
        for call in calls:
            own.running.add(asyncio.create_task(self._run(call, own)))
        own.newest = time.monotonic()
        return self._process

    async def next_results(self, caller: str, process: str) -> list[BulkResult]:
        """The results that have come since it was last asked; waits for one.

        Raises:
            LookupError: the calls were made of an earlier process of the actor.
        """
        if process != self._process:
            raise LookupError("it was started again")
        own = self._callers.setdefault(caller, _Caller())
        await own.has_results.wait()
        own.has_results.clear()
        results, own.results = own.results, []
        if not own.running:
            self._callers.pop(caller, None)
        return results

    async def _run(self, call: BulkCall, own: _Caller) -> None:
        try:
            returned = await getattr(self, call.method)(*pickle.loads(call.args))
            result = BulkResult(call.number, _packed(returned), is_error=False)
        except Exception as error:
            result = BulkResult(call.number, _packed_error(error), is_error=True)
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:  # of the method, not of this task
            result = BulkResult(call.number, _packed_error(RuntimeError(repr(error))), is_error=True)
        own.running.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        own.results.append(result)
        own.newest = time.monotonic()
        own.has_results.set()


def _packed(value: Any) -> bytes:
    """A value as bytes. Ray's own pickling knows more kinds of values, and takes ten times as long."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return bytes(cloudpickle.dumps(value))


def _packed_error(error: Exception) -> bytes:
    """An error as bytes, or its text if it cannot be pickled."""
    try:
        packed = _packed(error)
        pickle.loads(packed)
    except Exception:
        return _packed(RuntimeError(f"{type(error).__name__}: {message_of(error)}"))
    return packed


class BulkCalls:
    """Calls of one `BulkActor`, on one event loop.

    A call of an actor costs milliseconds on both sides. Here, calls that are made while others are on their way travel
    together, and so do their results; none waits for another one to end.
    """

    def __init__(self, actor: Any, name: str) -> None:
        """`name`: how errors name the actor."""
        self._actor, self._name = actor, name
        self._caller = uuid.uuid4().hex  # another one after a failure, whose results nobody waits for
        self._numbers = itertools.count()
        self._unsent: list[BulkCall] = []
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def call(
        self, method: str, *args: Any, timeout_s: float, works: Callable[[], Awaitable[bool]] | None = None
    ) -> Any:
        """What a method of the actor returns.

        Args:
            timeout_s: seconds for the answer.
            works: asked when they are over: whether the actor works on it, and gets as many seconds more.

        Raises:
            CallTimeoutError: the actor did not answer in time.
            CallFailedError: the method raised an error, or its arguments cannot travel.
            ActorDiedError: the process of the actor ended, or could not start.
        """
        try:
            call = BulkCall(next(self._numbers), method, _packed(args))
        except Exception as error:
            raise CallFailedError(self._name, error) from None
        if self._loop is not asyncio.get_running_loop():  # the one before was stopped, with what it exchanged
            self._loop = asyncio.get_running_loop()
            self._begin_anew()
        future = self._open[call.number] = self._loop.create_future()
        self._unsent.append(call)
        if not _is_running(self._sending):
            self._sending = asyncio.create_task(self._exchanging(self._send(self._caller)))
        try:
            while not (await asyncio.wait([future], timeout=timeout_s))[0]:
                if works is None or not await works():
                    raise CallTimeoutError(f"{self._name} did not answer in time")
            return future.result()
        finally:
            self._open.pop(call.number, None)

    async def _send(self, caller: str) -> None:
        while self._unsent and caller == self._caller:
            calls, self._unsent = [call for call in self._unsent if call.number in self._open], []
            process = await asyncio.wrap_future(self._actor.submit.remote(caller, calls).future())
            if caller == self._caller and not _is_running(self._receiving):
                self._receiving = asyncio.create_task(self._exchanging(self._receive(caller, process)))

    async def _receive(self, caller: str, process: str) -> None:
        while self._open and caller == self._caller:
            for result in await asyncio.wrap_future(self._actor.next_results.remote(caller, process).future()):
                future = self._open.pop(result.number, None)
                if future is None or future.done():  # its caller waits no more
                    continue
                try:
                    outcome, is_error = pickle.loads(result.outcome), result.is_error
                except Exception as error:
                    outcome, is_error = error, True
                if is_error:
                    future.set_exception(CallFailedError(self._name, outcome))
                else:
                    future.set_result(outcome)

    async def _exchanging(self, exchange: Coroutine[Any, Any, None]) -> None:
        """Runs an exchange with the actor; where it fails, all open calls do."""
        caller, reason = self._caller, "its calls were given up"  # with the event loop
        try:
            await exchange
            reason = ""
        except ray.exceptions.RayTaskError as error:
            reason = str(error.cause)
        except ray.exceptions.RayError as error:
            reason = cause_of_death(error)
        except Exception as error:
            reason = str(error)
        finally:
            if reason and caller == self._caller:
                self._fail(ActorDiedError(f"{self._name} died: {reason}"))

    def _fail(self, error: CallError) -> None:
        for future in self._begin_anew():
            if not future.done():
                future.set_exception(error)

    def _begin_anew(self) -> list[asyncio.Future[Any]]:
        """Forgets the exchange with the actor; returns what was open."""
        self._caller, self._sending, self._receiving = uuid.uuid4().hex, None, None
        futures, self._open, self._unsent = list(self._open.values()), {}, []
        return futures


def _is_running(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
