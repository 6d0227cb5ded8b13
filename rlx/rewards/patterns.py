"""Regular expressions of users on texts of policies, with time limits: some take exponential time on some texts.

The package regex can end a search; Python's re cannot, and holds the interpreter's lock meanwhile. A text whose search
takes too long does not match. Left out: which part of a completion is searched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import regex  # type: ignore[import-untyped]

T = TypeVar("T")
_LOG = logging.getLogger("rlx")
_SECONDS, _LEAST_SECONDS = 0.5, 0.05  # for one text; also when the batch has none left
_BATCH_SECONDS = 5.0


def last_matches(pattern: str, texts: Sequence[str]) -> list[str | None]:
    """The first group of the last match in each text, or the whole match of a pattern without groups.

    None: nothing matches, or the group is not part of the match.
    """
    compiled = regex.compile(pattern)
    group = 1 if compiled.groups else 0

    def last(text: str, seconds: float) -> str | None:
        found: str | None = None
        for match in compiled.finditer(text, timeout=seconds):
            found = match.group(group)
        return found

    return list(_limited(pattern, last, texts, None))


def full_matches(pattern: str, texts: Sequence[str]) -> list[bool]:
    """Whether the pattern matches each text from start to end; a dot matches any character."""
    compiled = regex.compile(pattern, regex.DOTALL)

    def matches(text: str, seconds: float) -> bool:
        return compiled.fullmatch(text, timeout=seconds) is not None

    return list(_limited(pattern, matches, texts, False))


def _limited(pattern: str, search: Callable[[str, float], T], texts: Sequence[str], otherwise: T) -> Iterator[T]:
    """What the search gives for each text; `otherwise` for those where it takes too long."""
    left, late = _BATCH_SECONDS, 0
    for text in texts:
        started = time.monotonic()
        try:
            yield search(text, max(_LEAST_SECONDS, min(_SECONDS, left)))
        except TimeoutError:
            late += 1
            yield otherwise
        left -= time.monotonic() - started
    if late:
        _LOG.warning("pattern %s took too long on %d of %d completions: they do not match", pattern, late, len(texts))
