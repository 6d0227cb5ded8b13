"""Walls around a forked process of this program that is about to evaluate what a policy wrote.

Some scorers of other packages evaluate an answer as Python. They cannot run in a sandbox of their own, which would have
to import them for each batch. Within these walls a process computes and writes its results to one open file, and that
is all. Where the kernel has no Landlock, files can still be read, changed and deleted.
Left out: limits on time and memory, which the caller sets.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from rlx.rewards.sandbox import kernel, landlock, namespaces, seccomp


def shut_in(result: int) -> None:
    """Takes files, networks, other processes and privileges from this process, for ever.

    Python and its packages stay readable: a scorer may import something late.

    Args:
        result: file descriptor that stays open; all others are closed, and 0, 1 and 2 lead nowhere.
    """
    _close_all_but(result)
    with suppress(OSError):
        kernel.bound_capabilities()
        kernel.drop_capabilities()
    if landlock.version():
        landlock.shut_files([*namespaces.visible(), *_packages()], [])
    with suppress(OSError):  # a machine whose system calls are not known here
        seccomp.filter_calls(alone=True)


def _packages() -> list[str]:
    """The folders of installed packages; the working folder, which may be in sys.path too, is none."""
    return sorted({sys.prefix, *(path for path in sys.path if path.endswith("-packages"))})


def _close_all_but(result: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.closerange(3, result)
    os.closerange(result + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
