"""TODO rlx.rewards.functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from rlx.config.sections import RewardConfig
from rlx.rewards.math_verifier import Judge
from rlx.types import Response

Reward = Callable[[Response, RewardConfig], float]
_JUDGE = Judge()
_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # of thousands: "1,2" is not 12


# ---------------------------------------------------------------------------------------------------------------------
# The answer within a completion, against the expected one


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


def math_verify(given: str, expected: str) -> float:
    r"""1 if both are the same mathematics: "1/2", "0.5" and "$\frac{1}{2}$" are alike; 0 if one cannot be read.

    LaTeX needs no $ around it. An answer that takes more than 5 seconds of computing, like 9^9^9^9, is wrong.
    """
    return float(numeric(given, expected) == 1.0 or _JUDGE.agree(given, expected))


# ---------------------------------------------------------------------------------------------------------------------
# Scorers by name


def format_match(response: Response, config: RewardConfig) -> float:
    """1 if reward.format_pattern matches the completion as a whole, where a dot is any character, else 0."""
    assert config.format_pattern is not None  # RewardConfig sees to it
    return float(re.fullmatch(config.format_pattern, response.text, re.DOTALL) is not None)


def length_penalty(response: Response, config: RewardConfig) -> float:
    """Minus the distance to reward.length_target tokens as a fraction of it, -1 at worst."""
    assert config.length_target is not None
    return max(-1.0, -abs(response.num_tokens - config.length_target) / config.length_target)


def _of_answer(judge: Callable[[str, str], float]) -> Reward:
    """The reward of an answer given and expected; 0 for a completion that has none."""
    return lambda response, _: 0.0 if response.answer is None else judge(response.answer, response.prompt.answer)


REWARDS: dict[str, Reward] = {
    "exact_match": _of_answer(exact_match),
    "numeric": _of_answer(numeric),
    "math_verify": _of_answer(math_verify),
    "format": format_match,
    "length": length_penalty,
}


def _number(text: str) -> float:
    return float(_SEPARATOR.sub("", text))
