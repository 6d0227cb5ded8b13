"""Whether a server can be reached: one quick connection, before libraries try for half a minute.

Left out: what the server says.
"""

from __future__ import annotations

import socket
import threading
import urllib.parse
import urllib.request

ANSWER_S = 2.0
"""longest wait for a server to accept a connection"""
_PORTS = {"http": 80, "https": 443}


def why_silent(address: str) -> str:
    """Why no server accepts a connection at a web address, in a few words; empty if one does.

    Empty too if a proxy stands before it, which alone can know.
    """
    parts = urllib.parse.urlsplit(address)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return ""
    return why_closed(host, port)


_WEB_S = 0.5
"""in which a web server on this or a near machine answers"""


def speaks_http(host: str, port: int) -> bool:
    """Whether a web server answers at a port at once."""
    try:
        with socket.create_connection((host, port), ANSWER_S) as connection:
            connection.settimeout(_WEB_S)
            connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def why_closed(host: str, port: int) -> str:
    """Why nobody accepts a connection at a port, in a few words; empty if somebody does."""
    found: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), ANSWER_S).close()
            found.append("")
        except (OSError, OverflowError) as error:
            found.append(getattr(error, "strerror", None) or str(error))

    # In a thread: to look up a name may take longer, without a limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return found[0] if found else f"no answer within {ANSWER_S:.0f} s"
