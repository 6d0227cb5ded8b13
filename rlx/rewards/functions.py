"""The built-in reward functions, in the table `REWARDS`, and the part of a completion that is its answer.

A new reward function is a function and an entry here, and its name in `rlx.config`. Left out: functions of the user
(custom), rewards that other processes compute (reward_model, remote), and the sum over functions (scoring).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

from rlx.config.sections.reward import RewardConfig
from rlx.rewards import patterns
from rlx.rewards.math_verifier import MathVerifier
from rlx.rewards.sandbox.reward import code
from rlx.types import Checker, GivenAnswer, MarkedScores, Response

RewardFunction = Callable[[Sequence[Response], RewardConfig], list[float] | MarkedScores]
_WITH_COMMAS = re.compile(r"[-+]?[1-9]\d*(,\d{3})+(\.\d*)?([eE][-+]?\d+)?")  # "1,2" is not 12, nor 0,123 123


# --- the answer in a completion, and its comparison with the expected one


def extract_answers(texts: Sequence[str], pattern: str | None) -> list[str | None]:
    """Returns the answer in each completion: the first group of the last match, or all of it without groups.

    Without a pattern the whole completion is the answer. None: nothing matches, the group is not part of the match, or
    the search takes too long.
    """
    found = texts if pattern is None else patterns.last_matches(pattern, texts)
    return [None if answer is None else answer.strip() for answer in found]


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
    text = text.strip()
    if _WITH_COMMAS.fullmatch(text):
        text = text.replace(",", "")
    try:
        number = Decimal("" if "_" in text else text)  # Python's own reading takes 1_000
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def math_verify(pairs: Sequence[tuple[str, str]]) -> list[float]:
    r"""1 if the answers of a pair are mathematically equal ("1/2", "0.5" and "$\frac{1}{2}$" are), else 0.

    0, too, if one cannot be parsed. LaTeX needs no $ around it. An answer that takes more than 5 seconds of computing,
    like 9^9^9^9, scores 0; many of those in a batch have less time.
    """
    scores = [numeric(*pair) for pair in pairs]
    asked = [pair for pair, score in zip(pairs, scores, strict=True) if not score]
    equal = iter(_math_verifier_of_process().are_equal(asked) if asked else [])
    return [score or float(next(equal)) for score in scores]


@functools.cache
def _math_verifier_of_process() -> MathVerifier:
    """The verifier that all scorers of this process share: a child process takes seconds to start."""
    return MathVerifier()


# --- the table


def format_match(responses: Sequence[Response], config: RewardConfig) -> list[float]:
    """1 if reward.format_pattern matches the completion from start to end, else 0; a dot matches any character."""
    assert config.format_pattern is not None  # RewardConfig checks it
    return [float(found) for found in patterns.full_matches(config.format_pattern, [each.text for each in responses])]


def length_penalty(response: Response, config: RewardConfig) -> float:
    """Minus the distance to reward.length_target tokens, as a fraction of the target; at least -1."""
    assert config.length_target is not None
    return max(-1.0, -abs(response.num_tokens - config.length_target) / config.length_target)


def environment_score(response: Response, config: RewardConfig) -> float:
    """The sum of the rewards that the environment has given in the episode."""
    assert response.environment_score is not None  # RunConfig checks that there is an environment
    return response.environment_score


def each(score: Callable[[Response, RewardConfig], float]) -> RewardFunction:
    """The reward function that scores one response after the other."""
    return lambda responses, config: [score(response, config) for response in responses]


def of_answers(checker: Checker, responses: Sequence[Response]) -> list[float]:
    """What a checker says of each response's answer; 0 for a completion without an answer."""
    given = [
        GivenAnswer(one.answer, one.prompt.answer, one.prompt.dataset_index)
        for one in responses
        if one.answer is not None
    ]
    scores = iter(checker(given) if given else ())
    return [0.0 if one.answer is None else next(scores) for one in responses]


def _comparing(compare: Callable[[Sequence[tuple[str, str]]], list[float]]) -> RewardFunction:
    """The reward function that compares answers with the expected ones."""

    def check(answers: Sequence[GivenAnswer]) -> list[float]:
        return compare([(answer.given, answer.expected) for answer in answers])

    return lambda responses, config: of_answers(check, responses)


REWARDS: dict[str, RewardFunction] = {
    "exact_match": _comparing(lambda pairs: [exact_match(*pair) for pair in pairs]),
    "numeric": _comparing(lambda pairs: [numeric(*pair) for pair in pairs]),
    "math_verify": _comparing(math_verify),
    "code": code,
    "format": format_match,
    "length": each(length_penalty),
    "environment": each(environment_score),
}
