"""Whether an address holds a password, key or token, which would be kept with a run: one check for all addresses.

Left out: which addresses there are, and what an error says; the settings and the storage know that.
"""

from __future__ import annotations

import re
import urllib.parse

_SECRET = re.compile(
    r"passw|secret|credential|signature|token$|(access|api|private)[_-]?key|(^|[^a-z])(key|token|auth|sig|pwd)($|[^a-z])",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"://[^@/]*:(?!\d+/)[^@]*@")  # databases take one with "/" in it, which is no part of a host
_WEB = ("http", "https", "ws", "wss")  # a lone user there is a token; a database's user is a name


def holds_secret(address: str) -> bool:
    """Whether an address has a password or token before its host, or an option whose name says that it is a secret.

    Text that is no address holds none. `postgresql://USER@host/db` holds none: it names a user.
    """
    if _PASSWORD.search(address):
        return True
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        return "@" in address
    user, at, _ = parts.netloc.rpartition("@")
    if at and (":" in urllib.parse.unquote(user) or parts.scheme in _WEB):
        return True
    options = [pair for text in (parts.query, parts.fragment) for pair in urllib.parse.parse_qsl(text, True)]
    return any(_names_secret(name) or "@" in value for name, value in options)


def _names_secret(option: str) -> bool:
    return bool(_SECRET.search(option)) and not option.startswith("ssl")  # sslkey is the path of a file
