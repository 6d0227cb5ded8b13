"""The thread that steps an inference engine, so that its blocking calls leave an async actor free to take requests.

It works with any engine that can be stepped. `DeviceTurn` is for engines on the same GPU that are to step one after
the other. Left out: such an engine (vllm_engine.py).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

_MOMENT_S = 0.005  # between two looks at whose turn it is

Report = Callable[[Mapping[str, Any]], None]
"""(results of jobs, or the exceptions that they failed with, by name): ends them, those of one call at the same time"""


class Stepped(Protocol):
    """An engine whose methods run on the thread alone."""

    turn: DeviceTurn
    """the turn that the engine has while it is busy"""

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests to work on."""
        ...

    def step(self) -> None:
        """Works on the requests for a moment; reports those that have finished."""
        ...


E = TypeVar("E", bound=Stepped)


class EngineThread(Generic[E]):
    """Runs jobs on an engine and steps it in between.

    If the engine raises, all jobs fail and the process ends, so that Ray starts the actor again.
    """

    def __init__(self, make: Callable[[Report], E]) -> None:
        """Starts the thread, which first calls `make`; call it in the actor's event loop."""
        self._make = make
        self._jobs: queue.SimpleQueue[list[Callable[[E], None]]] = queue.SimpleQueue()
        self._submitted: list[Callable[[E], None]] = []  # jobs that the thread has not been given
        self._results: dict[str, asyncio.Future[Any]] = {}  # of the jobs that have not ended, by name
        self._count = 0  # of jobs
        self.steps = 0  # of the busy engine
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._engine: asyncio.Future[E] = self._loop.create_future()
        threading.Thread(target=self._run, daemon=True, name="engine").start()

    async def started(self) -> E:
        """Waits for the engine.

        Raises:
            RuntimeError: it could not start; the error has the cause.
        """
        return await self._engine

    def submit(self, job: Callable[..., None], *args: Any) -> asyncio.Future[Any]:
        """Makes the thread call `job(engine, name, *args)`; the job or a later step reports its result by that name.

        Jobs that are submitted in the same pass of the event loop reach the thread together, so that it does not begin
        a step with the first of them alone.

        Raises:
            RuntimeError: the engine has failed.
        """
        if self._failure:
            raise self._failure
        self._count += 1
        name = str(self._count)
        future = self._results[name] = self._loop.create_future()
        if not self._submitted:
            self._loop.call_soon(self._hand_over)
        self._submitted.append(lambda engine: job(engine, name, *args))
        return future

    def _hand_over(self) -> None:
        jobs, self._submitted = self._submitted, []
        self._jobs.put(jobs)

    def _end_jobs(self, results: Mapping[str, Any]) -> None:
        for name, result in results.items():
            self._end_job(name, result)

    def _end_job(self, name: str, result: Any) -> None:
        future = self._results.pop(name)
        if future.done():  # cancelled by its caller
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _end_process(self) -> None:
        """Fails all jobs, and ends the process when their callers have been told."""
        self._end_jobs(dict.fromkeys(self._results, self._failure))
        self._loop.call_later(1.0, os._exit, 1)

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            engine = self._make(self._report)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._engine.set_exception, _picklable(error))
            return
        self._loop.call_soon_threadsafe(self._engine.set_result, engine)
        try:
            while True:
                if not engine.is_busy:
                    engine.turn.leave()
                self._do_jobs(engine)
                if engine.is_busy:
                    engine.turn.take()
                    self.steps += 1
                engine.step()
        except BaseException as error:
            self._failure = _picklable(error)
            self._loop.call_soon_threadsafe(self._end_process)

    def _do_jobs(self, engine: E) -> None:
        """Does all jobs that have arrived; waits for one when the engine has nothing else to do."""
        if not engine.is_busy:
            self._do_some(engine)
        while not self._jobs.empty():
            self._do_some(engine)

    def _do_some(self, engine: E) -> None:
        for job in self._jobs.get():
            job(engine)

    def _report(self, results: Mapping[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._end_jobs, results)


class DeviceTurn:
    """The turn of one process at a time on a device of this node, such as a GPU.

    It is a lock on a file, which ends with the process that holds it. It only saves time: who has waited for too long
    goes on without it.
    """

    def __init__(self, device: str, patience_s: float | None) -> None:
        """A turn on a device; without patience, it is always this process's turn."""
        self._path = Path(tempfile.gettempdir(), f"rlx-{os.getuid()}-{device}.turn")
        self._patience_s = patience_s
        self._file: IO[str] | None = None  # between `take` and `leave`

    def take(self) -> None:
        """Waits for the turn, unless this process has it already."""
        if self._file or self._patience_s is None:
            return
        self._file = self._path.open("w")
        deadline = time.monotonic() + self._patience_s
        while not _locked(self._file) and time.monotonic() < deadline:
            time.sleep(_MOMENT_S)

    def leave(self) -> None:
        """Lets another process have the turn."""
        if self._file:
            self._file.close()
            self._file = None


def _locked(file: IO[str]) -> bool:
    """Locks a file for this process if no other process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _picklable(error: BaseException) -> RuntimeError:
    """The text of an engine's error as an error: the error itself may contain objects that cannot be pickled."""
    return RuntimeError(f"{type(error).__name__}: {error}")
