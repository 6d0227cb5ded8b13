"""Compares answers mathematically with the package math-verify, in child processes.

A policy may write 9^9^9^9, whose computation never ends and takes all memory inside one call of a C function; see
`child`. Left out: which answers count as equal; math-verify decides that.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlx.rewards.child import ChildError, ChildProcess, map_limited

_LOG = logging.getLogger("rlx")
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?: |\\,|\\ |\{,\})(?=\d{3}(?!\d))")  # separates thousands in LaTeX
_DELIMITED = re.compile(r"\$|\\[(\[]|\\boxed")  # LaTeX that marks where it begins
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_CHILDREN = 2
_SECONDS, _BATCH_SECONDS = 5.0, 5.0  # of computing: for one answer; for the slow ones of a batch, in each child

AnswerPair = tuple[str, str]
"""(answer, expected answer)"""


class MathVerifier:
    """Tells of answers whether they are mathematically equal to the expected ones."""

    def __init__(self, seconds: float = _SECONDS, batch_seconds: float = _BATCH_SECONDS) -> None:
        """
        Args:
            seconds: of computing, the most for one answer.
            batch_seconds: of computing, the most for the slow answers of a batch.
        """
        make = functools.partial(_comparer, seconds, batch_seconds)
        self._children = [ChildProcess(make) for _ in range(_CHILDREN)]

    def are_equal(self, pairs: Sequence[AnswerPair]) -> list[bool]:
        """Whether the answers are equal to the expected ones; false where the comparison takes too long.

        Raises:
            RuntimeError: the child processes do not start.
        """
        unique = list(dict.fromkeys(pairs))
        shares = [unique[i::_CHILDREN] for i in range(_CHILDREN)]
        with ThreadPoolExecutor(_CHILDREN) as pool:
            equal = dict[AnswerPair, bool | None]()
            for share, verdicts in zip(shares, pool.map(_ask, self._children, shares), strict=True):
                equal |= zip(share, verdicts, strict=True)
        if given_up := sum(verdict is None for verdict in equal.values()):
            _LOG.warning("math_verify gave up on %d of %d answers: they count as wrong", given_up, len(unique))
        return [bool(equal[pair]) for pair in pairs]

    def close(self) -> None:
        """Ends the child processes."""
        for child in self._children:
            child.close()


def _ask(child: ChildProcess, pairs: list[AnswerPair]) -> list[bool | None]:
    try:
        return list(child.call(pairs)) if pairs else []
    except ChildError as error:
        raise RuntimeError(f"reward math_verify: its process {error}; is math-verify installed?") from None


def _comparer(seconds: float, batch_seconds: float) -> Callable[[list[AnswerPair]], list[bool | None]]:
    """Runs in the child process."""
    from math_verify import parse, verify  # type: ignore[import-untyped]  # takes seconds to import

    logging.disable()  # math-verify warns that it has no timeouts

    def parsed(text: str) -> Any:
        text = _THOUSANDS_SPACE.sub("", text.strip())
        complete = _DELIMITED.search(text) or ("\\" not in text and _PROSE.search(text))
        return parse(text if complete else f"${text}$", parsing_timeout=None)

    def are_equal(pair: AnswerPair) -> bool:
        answer, expected = pair
        return bool(verify(parsed(expected), parsed(answer), timeout_seconds=None))

    are_equal((r"$\frac{1}{2}$", "0.5"))  # what is imported only now counts for no answer

    def compared(pairs: list[AnswerPair]) -> list[bool | None]:
        verdicts = map_limited(are_equal, pairs, seconds, batch_seconds)
        return [None if verdict is None else bool(verdict) for verdict in verdicts]

    return compared
