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


def exact_match(given: str, expected: str) -> float:
    """1 if both are the same text, white space at the ends aside."""
    return float(given.strip() == expected.strip())


def numeric(given: str, expected: str) -> float:
    """1 if both are the same number: "1,000", "1000.0" and "+1e3" are alike."""
    try:
        return float(math.isclose(_number(given), _number(expected), rel_tol=1e-9))
    except ValueError:
        return 0.0


REWARDS: dict[str, Reward] = {"exact_match": exact_match, "numeric": numeric}


def extract_answer(text: str, pattern: re.Pattern[str] | None) -> str:
    """The part of a completion that is its answer: the last match's first group, or all of it without a pattern."""
    if pattern is None:
        return text.strip()
    found = list(pattern.finditer(text))
    if not found:
        return ""
    return (found[-1].group(1) if pattern.groups else found[-1].group()).strip()


def score(
    texts: list[str],
    answers: list[str],
    entries: list[int | None],
    function: str,
    checker: Checker,
    pattern: re.Pattern[str] | None,
) -> list[float]:
    """One score per completion; `function` is a key of REWARDS, or "task" for the task's own checker."""
    given = [extract_answer(text, pattern) for text in texts]
    if function == "task":
        return [checker(*row) for row in zip(given, answers, entries, strict=True)]
    return [REWARDS[function](*row) for row in zip(given, answers, strict=True)]


def _number(text: str) -> float:
    return float(text.replace(",", "").strip())
