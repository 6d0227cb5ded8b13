"""The error of a setting that cannot be used, and helpers for one-line messages.

Left out: what is checked and when; each package raises ConfigError for the settings that it uses.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line for the person who typed the setting."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # keys and paths may contain line breaks


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The message of an error without line breaks, or its first `limit` characters."""
    return " ".join(str(error).split())[:limit]


def printable(text: str) -> str:
    """A text in one line; what controls terminals is shown, not sent to one."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def nearest(word: str, choices: Sequence[str]) -> str:
    """A hint for a mistyped word: "; nearest: X", or an empty text when no choice is similar."""
    similar = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"; nearest: {similar[0]}" if similar else ""
