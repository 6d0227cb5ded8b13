"""Compares two answers mathematically with the package math-verify, in a child process.

A policy may write 9^9^9^9, whose computation never ends and takes all memory inside one call of a C function. During
the call no thread can be stopped, no signal handler runs, and the lock that the call holds stops the whole process.
Therefore the kernel ends the child process, and the next question starts another. Left out: which answers count as
equal; math-verify decides that.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?: |\\,|\\ |\{,\})(?=\d{3}(?!\d))")  # separates thousands in LaTeX
_DELIMITED = re.compile(r"\$|\\[(\[]|\\boxed")  # LaTeX that marks where it begins
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_MEMORY_LIMIT = 4 << 30  # bytes, of the child process


@dataclass
class MathVerifier:
    """Asks a child process, which starts with the first question, whether two answers are mathematically equal."""

    seconds: float = 5.0  # of computing, not of waiting: a busy machine changes no score
    lock: Lock = field(default_factory=Lock)
    process: subprocess.Popen[bytes] | None = None
    pipe: Connection | None = None

    def are_equal(self, answer: str, expected: str) -> bool:
        """Whether the answers are mathematically equal; false if the comparison takes too long.

        Raises:
            RuntimeError: the child process does not start.
        """
        with self.lock:
            pipe = self.pipe or self._start()
            try:
                pipe.send((answer, expected))
                return bool(pipe.recv())
            except (EOFError, OSError):
                self.close()
                return False

    def _start(self) -> Connection:
        self.pipe, child_end = multiprocessing.Pipe()
        with child_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(child_end.fileno()), str(self.seconds)],
                pass_fds=[child_end.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C does not reach it: it ends when the pipe is closed
            )
        try:
            self.pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise RuntimeError("reward math_verify: its process did not start; is math-verify installed?") from None
        return self.pipe

    def close(self) -> None:
        """Ends the child process; the next question starts another."""
        assert self.pipe and self.process
        self.pipe.close()
        self.process.wait()
        self.pipe = None


def _serve(pipe: Connection, seconds: float) -> None:
    """Runs in the child process: answers questions until the other end of the pipe is closed."""
    import logging

    from math_verify import parse, verify  # type: ignore[import-untyped]  # takes seconds to import

    def parsed(text: str) -> Any:
        text = _THOUSANDS_SPACE.sub("", text.strip())
        complete = _DELIMITED.search(text) or ("\\" not in text and _PROSE.search(text))
        return parse(text if complete else f"${text}$", parsing_timeout=None)

    logging.disable()  # math-verify warns that it has no timeouts
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    pipe.send("ready")
    while True:
        try:
            answer, expected = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        equal = verify(parsed(expected), parsed(answer), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(equal)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), seconds=float(sys.argv[2]))
