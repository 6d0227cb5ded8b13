"""A limit of time and memory for what a model's chat template does: it is a program, and may come from anywhere.

Left out: limits for rewards, whose programs run in processes of their own (rlx.rewards.child).
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


@contextmanager
def limited(what: str, seconds: float, memory: int) -> Iterator[None]:
    """Ends the block when it takes too long or too much. Works in the main thread, where Ray's tasks run too.

    Args:
        what: the subject of the error.
        memory: bytes that the process may take in addition to what it has.

    Raises:
        ValueError: it took more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> NoReturn:
        raise ValueError(f"{what} took longer than {seconds:g} s")

    handler, (soft, hard) = signal.signal(signal.SIGALRM, end), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_most(memory, soft), hard))
    outer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except MemoryError:
        raise ValueError(f"{what} took more than {memory >> 20} MiB") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *outer)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most(memory: int, soft: int) -> int:
    """The size that this process may have, in bytes; a limit that it has already stays."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + memory
    return size if soft == resource.RLIM_INFINITY else min(size, soft)
