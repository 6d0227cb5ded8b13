"""What a process that an environment forks must not have of its host: the host's connections to Ray.

Ray takes a process for alive while its socket is open anywhere, so a child that lives on would hide the host's death
for as long. Left out: programs that are executed, which inherit none of these.
"""

from __future__ import annotations

import functools
import os
import socket
from contextlib import suppress

_RAYLET, _STORE = "raylet", "plasma_store"
"""what Ray calls the files of its sockets on a node, which may be followed by numbers"""


@functools.cache
def keep_ray_from_children() -> None:
    """Processes that this one forks from now on have /dev/null where its connections to Ray's node were."""
    os.register_at_fork(after_in_child=_leave_ray)


def _leave_ray() -> None:
    """The numbers of the files stay taken: what Ray has left in the child would write to whatever came there."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself, which is closed, and of files that are no sockets
            if _is_of_ray(int(name)):
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _is_of_ray(file: int) -> bool:
    connection = socket.socket(fileno=file)
    try:
        peer = connection.getpeername()
    finally:
        connection.detach()
    return isinstance(peer, str) and os.path.basename(peer).startswith((_RAYLET, _STORE))
