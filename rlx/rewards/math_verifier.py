"""Whether two answers are the same mathematics, as the package math-verify has it, in a process of its own.

A policy may well write 9^9^9^9, which takes for ever and all memory within one call into C: no thread can be stopped in
it, no signal handler runs, and the lock that it holds keeps all of its process from going on. The kernel ends the child
instead, and the next question starts another.
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

_SPACER = re.compile(r"(?<=\d)(?: |\\,|\\ |\{,\})(?=\d{3}(?!\d))")  # what else separates thousands, in LaTeX
_DELIMITED = re.compile(r"\$|\\[(\[]|\\boxed")  # LaTeX that says where it begins
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_BYTES = 4 << 30  # of memory that it may take


@dataclass
class Judge:
    """Asks a child process, started with the first question, whether two answers are the same mathematics."""

    seconds: float = 5.0  # of computing, not waiting: a busy machine changes no score
    lock: Lock = field(default_factory=Lock)
    process: subprocess.Popen[bytes] | None = None
    pipe: Connection | None = None

    def agree(self, given: str, expected: str) -> bool:
        """Whether they are; not if it takes too long. RuntimeError if the child does not start."""
        with self.lock:
            pipe = self.pipe or self._start()
            try:
                pipe.send((given, expected))
                return bool(pipe.recv())
            except (EOFError, OSError):
                self._end()
                return False

    def _start(self) -> Connection:
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(self.seconds)],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C is not for it: it ends with the pipe
            )
        try:
            self.pipe.recv()
        except (EOFError, OSError):
            self._end()
            raise RuntimeError("reward math_verify: its process did not start; is math-verify installed?") from None
        return self.pipe

    def _end(self) -> None:
        assert self.pipe and self.process
        self.pipe.close()
        self.process.wait()
        self.pipe = None


def _judge(pipe: Connection, seconds: float) -> None:
    """The child's part: answers until the other end of the pipe is closed."""
    import logging

    from math_verify import parse, verify  # type: ignore[import-untyped]  # takes seconds

    def read(text: str) -> Any:
        text = _SPACER.sub("", text.strip())
        whole = _DELIMITED.search(text) or ("\\" not in text and _PROSE.search(text))
        return parse(text if whole else f"${text}$", parsing_timeout=None)

    logging.disable()  # it warns that it has no timeouts
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    pipe.send("ready")
    while True:
        try:
            given, expected = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        same = verify(read(expected), read(given), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(same)


if __name__ == "__main__":
    _judge(Connection(int(sys.argv[1])), seconds=float(sys.argv[2]))
