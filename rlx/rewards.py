"""Reward functions: pure, from the text of a completion and the expected answer to a score.

Scores need not lie in [0, 1], but a score of 1 or more counts as right in task/accuracy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from rlx.types import Checker

Reward = Callable[[str, str], float]
"""(answer given, answer expected) -> score"""
_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # of thousands: "1,2" is not 12


def exact_match(given: str, expected: str) -> float:
    """1 if both are the same text, white space at the ends aside."""
    return float(given.strip() == expected.strip())


def numeric(given: str, expected: str) -> float:
    """1 if both are the same number: "1,000", "1000.0" and "+1e3" are alike; 0 if one of them is none."""
    try:
        # The tolerance is for 0.1 + 0.2 alone: a wider one takes long integers that differ by one for the same.
        return float(math.isclose(_number(given), _number(expected), rel_tol=1e-14))
    except ValueError:
        return 0.0


REWARDS: dict[str, Reward] = {"exact_match": exact_match, "numeric": numeric}


def extract_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The part of a completion that is its answer: the last match's first group, or its whole if it has no groups.

    All of the completion without a pattern; None if nothing matches, or the group took no part in the match.
    """
    if pattern is None:
        return text.strip()
    answer: str | None = None
    for match in pattern.finditer(text):
        answer = match.group(1 if pattern.groups else 0)
    return None if answer is None else answer.strip()


def score(
    texts: list[str],
    answers: list[str],
    entries: list[int | None],
    function: str,
    checker: Checker,
    pattern: re.Pattern[str] | None,
) -> list[float]:
    """One score per completion, 0 where it has no answer.

    `function` is a key of REWARDS, or "task" for the task's own checker.
    """
    scores = []
    for text, expected, entry in zip(texts, answers, entries, strict=True):
        given = extract_answer(text, pattern)
        if given is None:
            scores.append(0.0)
        elif function == "task":
            scores.append(checker(given, expected, entry))
        else:
            scores.append(REWARDS[function](given, expected))
    return scores


def _number(text: str) -> float:
    return float(_SEPARATOR.sub("", text))
