"""TODO rlx.config.errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """A setting that cannot be used; the text is one line for the person who typed it."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.splitlines()))  # keys and paths may hold line breaks


def one_line(error: BaseException, limit: int | None = None) -> str:
    """An error's text without line breaks, or the first `limit` characters of it."""
    return " ".join(str(error).split())[:limit]


def nearest(word: str, choices: Sequence[str]) -> str:
    """A hint: "; nearest: X", or nothing when no choice is close."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else ""
