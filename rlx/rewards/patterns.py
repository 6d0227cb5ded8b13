"""Regular expressions of users on texts of policies, with time limits: some take exponential time on some texts.

The package regex can end a search; Python's re cannot, and holds the interpreter's lock meanwhile. A text whose search
takes too long does not match. Limits are of the processor time of the searching thread, so that a text does not match
or not by what else the process computes, unless that takes eight times as much. Left out: which part of a completion is
searched.
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
_NEARLY, _MOST = 0.9, 8.0  # of the time that a search was allowed: regex looks at its clock now and then


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
        seconds = max(_LEAST_SECONDS, min(_SECONDS, left))
        try:
            found, used = _searched(search, text, seconds)
        except TimeoutError:
            late, found, used = late + 1, otherwise, seconds
        left -= used
        yield found
    if late:
        _LOG.warning("pattern %s took too long on %d of %d completions: they do not match", pattern, late, len(texts))


def _searched(search: Callable[[str, float], T], text: str, seconds: float) -> tuple[T, float]:
    """What a search finds within so many seconds of this thread's processor time, and how many it took.

    The package regex counts the time of all threads. Where others have used it, the text is searched again, with as
    much more as they took, but at most `_MOST` times the seconds. Attempts that others have cut short do not count as
    taken: the texts after this one would have less time, and would match or not by what else the process computes.

    Raises:
        TimeoutError: it takes longer.
    """
    allowed = seconds
    while True:
        started = time.thread_time()
        try:
            found = search(text, allowed)
        except TimeoutError:
            used = time.thread_time() - started
            if used >= _NEARLY * seconds or allowed >= _MOST * seconds:
                raise
            allowed = seconds * min(_MOST, allowed / max(used, seconds / _MOST))
            continue
        used = time.thread_time() - started
        if used > seconds:  # the others have stopped on the way
            raise TimeoutError
        return found, used
