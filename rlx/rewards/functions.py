"""The built-in reward functions, in the table `REWARDS`, and the part of a completion that is its answer.

A new reward function is a function and an entry here, and its name in `rlx.config`. Left out: functions of the user
(custom), rewards that other processes compute (reward_model, remote), and the sum over functions (scoring).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from rlx.config.sections import RewardConfig
from rlx.rewards.math_verifier import MathVerifier
from rlx.types import Response

RewardFunction = Callable[[Response, RewardConfig], float]
_THOUSANDS_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # "1,2" is not 12


# --- the answer in a completion, and its comparison with the expected one


def extract_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """Returns the answer in a completion: the first group of the last match, or all of it without groups.

    Without a pattern the whole completion is the answer. None: nothing matches, or the group is not part of the match.
    """
    if pattern is None:
        return text.strip()
    answer: str | None = None
    for match in pattern.finditer(text):
        answer = match.group(1 if pattern.groups else 0)
    return None if answer is None else answer.strip()


def exact_match(answer: str, expected: str) -> float:
    """1 if both are the same text, apart from white space at the ends, else 0."""
    return float(answer.strip() == expected.strip())


def numeric(answer: str, expected: str) -> float:
    """1 if both are the same number ("1,000", "1000.0" and "+1e3" are), else 0; 0 if one of them is not a number.

    Every digit counts, of numbers of any size. Infinity and NaN are no numbers.
    """
    first, second = _number(answer), _number(expected)
    return float(first is not None and first == second)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(_THOUSANDS_SEPARATOR.sub("", text))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def math_verify(answer: str, expected: str) -> float:
    r"""1 if both are mathematically equal ("1/2", "0.5" and "$\frac{1}{2}$" are), else 0; 0 if one cannot be parsed.

    LaTeX needs no $ around it. An answer that takes more than 5 seconds of computing, like 9^9^9^9, scores 0.
    """
    return float(numeric(answer, expected) == 1.0 or _math_verifier_of_process().are_equal(answer, expected))


@functools.cache
def _math_verifier_of_process() -> MathVerifier:
    """The verifier that all scorers of this process share: a child process takes seconds to start."""
    return MathVerifier()


# --- the table


def format_match(response: Response, config: RewardConfig) -> float:
    """1 if reward.format_pattern matches the completion from start to end, else 0; a dot matches any character."""
    assert config.format_pattern is not None  # RewardConfig checks it
    return float(re.fullmatch(config.format_pattern, response.text, re.DOTALL) is not None)


def length_penalty(response: Response, config: RewardConfig) -> float:
    """Minus the distance to reward.length_target tokens, as a fraction of the target; at least -1."""
    assert config.length_target is not None
    return max(-1.0, -abs(response.num_tokens - config.length_target) / config.length_target)


def _of_answer(compare: Callable[[str, str], float]) -> RewardFunction:
    """The reward function that compares the answer with the expected one; 0 for a completion without an answer."""
    return lambda response, _: 0.0 if response.answer is None else compare(response.answer, response.prompt.answer)


REWARDS: dict[str, RewardFunction] = {
    "exact_match": _of_answer(exact_match),
    "numeric": _of_answer(numeric),
    "math_verify": _of_answer(math_verify),
    "format": format_match,
    "length": length_penalty,
}
