"""Whether an address holds a password, key or token, which would be kept with a run: one check for all addresses.

Left out: which addresses there are, and what an error says; the settings and the storage know that.
"""

from __future__ import annotations

import re
import urllib.parse

_SECRET = re.compile(r"(?<!ssl)(?<!ssl_)key|secret|token|passw|pwd|credential|signature", re.IGNORECASE)
_WEB = ("http", "https", "ws", "wss")  # a lone user there is a token; a database's user is a name


def holds_secret(address: str) -> bool:
    """Whether an address has a password or token before its host, or an option whose name says that it is a secret.

    Text that is no address holds none. `postgresql://USER@host/db` holds none: it names a user.
    """
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        return "@" in address
    user, at, _ = parts.netloc.rpartition("@")
    if at and (":" in urllib.parse.unquote(user) or parts.scheme in _WEB):
        return True
    options = [pair for text in (parts.query, parts.fragment) for pair in urllib.parse.parse_qsl(text, True)]
    return any(_SECRET.search(name) or "@" in value for name, value in options)
