"""What processes use, read from /proc: time of the processor, memory, how many there are, and whether they wait.

Left out: which limits there are, and what happens when one is reached.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_BUSY = (b"R", b"D")  # computes or waits for a processor; waits for a disk


class Usage(NamedTuple):
    """What some processes use together."""

    cpu_s: float  # of theirs, and of their ended children that they have waited for
    memory: int  # bytes
    tasks: int  # threads of all processes
    is_busy: bool  # one of them computes, or would if it had a processor


def others() -> list[int]:
    """All processes of this PID namespace except this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def usage(processes: Iterable[int]) -> Usage:
    """What these processes use now; those that have ended use nothing."""
    cpu, memory, tasks, is_busy = 0, 0, 0, False
    for process in processes:
        with suppress(OSError):
            fields = _stat(f"/proc/{process}")  # from the third field of proc_pid_stat(5) on
            cpu += sum(int(field) for field in fields[11:15])
            tasks += int(fields[17])
            memory += int(fields[21]) * _PAGE
            is_busy = is_busy or fields[0] in _BUSY or (int(fields[17]) > 1 and _has_busy_thread(process))
    return Usage(cpu / _TICKS, memory, tasks, is_busy)


def _has_busy_thread(process: int) -> bool:
    folder = f"/proc/{process}/task"
    return any(_stat(f"{folder}/{thread}")[0] in _BUSY for thread in os.listdir(folder))


def _stat(folder: str) -> list[bytes]:
    with open(f"{folder}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
