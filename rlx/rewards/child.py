"""Calls code that others wrote in a child process, so that the run survives whatever it does.

Such code may never end, hold the interpreter's lock in a C function, take all memory, or end its process. In a thread
nothing of that can be stopped; a child process can be ended, and the next call starts another. Code that evaluates what
a policy wrote runs within walls, too (`map_limited`).
Left out: which code that is, and what a failure means for the run.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Lock
from typing import Any

from rlx.rewards.sandbox import walls

_START_S = 600.0  # for what the code imports and loads
_END_S = 1.0  # for a process that ends by itself once its pipe is closed
_LEFT_S = 5.0  # the same, where its caller has ended and waits for nothing
_MEMORY_LIMIT = 4 << 30  # bytes, of one forked process
_SHORT_S = 0.1  # of the first attempt at an item
_WAITING = 10  # an item may take so many times longer by the clock than it may compute
_LATE_S = 5.0  # after which a forked process is ended that has switched off its own clock
_LONGEST = 100  # bytes of a result
LONGEST_WAIT_S = 1e6
"""no wait is longer: pipes and sockets count milliseconds in 32 bits"""

Function = Callable[[Any], Any]
Score = Callable[[Any], float]


class ChildError(Exception):
    """The child process gave no answer. The text says why, and continues a sentence about the function."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace  # of what the function raised


class ChildTimeout(ChildError):
    """The child process took too long, and was ended."""


class ChildProcess:
    """A process that calls one function. It starts at once; after it has ended, the next call starts another."""

    def __init__(self, make: Callable[[], Function]) -> None:
        """
        Args:
            make: called in the child process, returns the function; it is pickled.
        """
        self._make, self._lock = make, Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self._pipe, child_end = multiprocessing.Pipe()
        watch_end, self._watched = multiprocessing.Pipe(duplex=False)
        with child_end, watch_end:
            ends = [child_end.fileno(), watch_end.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, ends)],
                pass_fds=ends,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C does not reach it: it ends when the pipe is closed
            )
        self._pipe.send(self._make)
        self._is_ready = False

    def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        """Returns the function's result.

        Args:
            timeout_s: the longest wait once the process has started, at most 1e6; None: for ever.

        Raises:
            ChildError: the function raised, took too long, or ended its process.
        """
        if timeout_s is not None:
            timeout_s = min(timeout_s, LONGEST_WAIT_S)
        with self._lock:
            if self._process is None:
                self._start()
            try:
                if not self._is_ready:
                    self._receive(_START_S)
                    self._is_ready = True
                self._pipe.send(argument)
                return self._receive(timeout_s)
            except (EOFError, OSError):
                raise ChildError(f"ended its process ({self._end()})") from None

    def _receive(self, timeout_s: float | None) -> Any:
        if not self._pipe.poll(timeout_s):
            self._end()
            raise ChildTimeout(f"took longer than {timeout_s:g} s")
        is_good, result = self._pipe.recv()
        if not is_good:
            if not self._is_ready:  # it had no function to call
                self._end()
            raise ChildError(f"raised {result[0]}", trace=result[1])
        return result

    def _end(self) -> str:
        """Ends the process and what it has started; returns how it ended."""
        assert self._process
        self._pipe.close()
        self._watched.close()
        with suppress(ChildProcessError, ProcessLookupError):  # somebody else has waited for it
            _wait_for_end(self._process.pid, _END_S)
            os.kill(self._process.pid, signal.SIGKILL)
            os.killpg(self._process.pid, signal.SIGTERM)
        code = self._process.wait()
        _end_group(self._process.pid, _END_S)
        self._process = None
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._process:
                self._end()


def _wait_for_end(process: int, seconds: float) -> None:
    """Waits until a child process has ended, or so long. It is not reaped, so its number stays that of its group."""
    end = time.monotonic() + seconds
    while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < end:
        time.sleep(0.01)


def _end_group(group: int, seconds: float) -> None:
    """Ends the processes of a group once so long has passed or no other one runs; this one too, if it is of the group.

    Python's resource tracker takes no SIGTERM: it ends by itself, once it has removed the shared memory of the others.
    """
    end = time.monotonic() + seconds
    while _is_running(group) and time.monotonic() < end:
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _is_running(group: int) -> bool:
    """Whether a process of a group runs that is not this one.

    One that has ended may still be there for long, until PID 1 of a container waits.
    """
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, its_group, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX" and file.parent.name != str(os.getpid()):
                return True
    return False


def _serve(pipe: Connection) -> None:
    """Runs in the child process: calls the function until the other end of the pipe is closed."""
    # Called after what the function registers and after pools and managers have ended their processes, which they may
    # not survive otherwise; before multiprocessing waits for the processes that are left.
    Finalize(None, _end_others, exitpriority=0)
    with suppress(EOFError, OSError):
        is_good, made = _outcome(pipe.recv())
        pipe.send((is_good, None if is_good else made))
        while is_good:
            pipe.send(_outcome(made, pipe.recv()))


def _start_watch(caller: Connection, pipe: Connection) -> None:
    """Starts a process that ends the group of this one after the caller, whatever the function does.

    No thread and no signal handler would: a function may hold the interpreter's lock for ever.

    Args:
        caller: closed at its other end when the caller ends.
        pipe: which only this process keeps, so that the caller sees its end.
    """
    with caller:
        if starter := os.fork():
            os.waitpid(starter, 0)  # the other one is not a child of this process, in which a function may wait for all
            return
        try:
            if not os.fork():
                pipe.close()
                _watch(caller)
        finally:
            os._exit(0)


def _watch(caller: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the others get first
    caller.poll(None)
    _end_group(os.getpgrp(), _LEFT_S)


def _end_others() -> None:
    """Ends what the function has started: it would hold the output of the run open, and nobody else may be left."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this one goes on, and writes what it has in buffers
    os.killpg(0, signal.SIGTERM)


def _outcome(function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """(True, the result), or (False, (what was raised and where, in one line; the traceback))."""
    try:
        return True, function(*arguments)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which no signal brings here
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return False, (f"{_text_of(error)[:300]} at {frame.filename}:{frame.lineno}", traceback.format_exc())


def _text_of(error: BaseException) -> str:
    """The repr of an error in one line, or its type where that raises in turn."""
    try:
        return " ".join(repr(error).split())
    except Exception:
        return type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Within a child process: many items, each with a limit


def map_limited(score: Score, items: Sequence[Any], seconds: float, batch_seconds: float) -> list[float | None]:
    """Scores each item in forked processes, which can do nothing but compute; None for one that computes too long.

    All items get a tenth of a second first. Those that need more get it while the batch has some left, so a slow item
    takes nothing from the others. None, too, for an item that raises, ends its process or has no finite score. Time is
    that of computing, not of waiting: a busy machine changes no score.

    Args:
        score: returns a number; it may evaluate an item as a program.
        seconds: of computing, the most for one item.
        batch_seconds: of computing, the most for all items that need a second attempt.
    """
    done = _attempt(score, items, range(len(items)), min(seconds, _SHORT_S))
    for i in range(len(items)):
        if i not in done and batch_seconds > 0 and seconds > _SHORT_S:
            before, started = _computed(), time.monotonic()
            done |= _attempt(score, items, [i], min(seconds, batch_seconds))
            waited_s = time.monotonic() - started
            batch_seconds -= max(_computed() - before, waited_s / _WAITING)  # an item may wait instead
    return [done.get(i) for i in range(len(items))]


def _attempt(score: Score, items: Sequence[Any], which: Sequence[int], seconds: float) -> dict[int, float | None]:
    done: dict[int, float | None] = {}
    while which:
        results = _forked(score, [items[i] for i in which], seconds)
        done |= zip(which, results, strict=False)
        which = which[len(results) + 1 :]  # the one after the last result has ended the process
    return done


def _forked(score: Score, items: Sequence[Any], seconds: float) -> list[float | None]:
    """The results of the first items, up to one that ends the process that computes them."""
    results_end, end = multiprocessing.Pipe(duplex=False)
    if not (child := os.fork()):
        try:
            _compute(score, items, seconds, end)
        finally:
            os._exit(0)  # no cleaning up of the process that was forked
    end.close()
    results = list[float | None]()
    with results_end, suppress(EOFError, OSError):  # OSError: a longer message than any of ours
        while len(results) < len(items) and results_end.poll(_WAITING * seconds + _LATE_S):
            results.append(_number(results_end.recv_bytes(_LONGEST)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return results


def _number(message: bytes) -> float | None:
    """The number in a result, which an item may have written itself; None if it is none."""
    try:
        value = json.loads(message)
    except ValueError:
        return None
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _compute(score: Score, items: Sequence[Any], seconds: float, end: Connection) -> None:
    most = {resource.RLIMIT_AS: _MEMORY_LIMIT, resource.RLIMIT_CPU: int(seconds * len(items)) + 1}
    for limit, value in most.items():
        resource.setrlimit(limit, (value, value))
    walls.shut_in(end.fileno())
    for kind in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(kind, signal.SIG_DFL)  # the default action ends the process
    for item in items:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _WAITING * seconds)
        end.send_bytes(json.dumps(score(item)).encode())


def _computed() -> float:
    """Seconds that ended children of this process have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    serve_end, watch_end = (Connection(int(file)) for file in sys.argv[1:])
    _start_watch(watch_end, serve_end)
    _serve(serve_end)
