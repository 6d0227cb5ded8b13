"""Reward functions: from a completion and the expected answer to a score, several of them at once, and their sum.

Scores need not lie in [0, 1], but 1 or more from the function that judges the answer counts as right. A reward model
(`model`) and a remote scorer (`url`) are other modules' work: here they are scorers like any other.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import CORRECTNESS, RewardConfig
from rlx.math_judge import Judge
from rlx.types import Checker, Response, Scorer

Reward = Callable[[Response, RewardConfig], float]
_KEYWORDS = ("prompts", "completions", "answers")
_ELSEWHERE = ("model", "url")
_JUDGE = Judge()
_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # of thousands: "1,2" is not 12


class RewardError(ValueError):
    """A reward function failed, or returned what are no scores; the text is one line that names it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the responses of a batch scored, in their order."""

    total: list[float]  # the weighted sum
    parts: dict[str, list[float]]  # each function's own, unweighted
    right: list[bool]  # by the function that judges the answer


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
    return max(-1.0, -abs(response.tokens - config.length_target) / config.length_target)


def _of_answer(judge: Callable[[str, str], float]) -> Reward:
    """The reward of an answer given and expected; 0 for a completion that has none."""
    return lambda response, _: 0.0 if response.given is None else judge(response.given, response.prompt.answer)


REWARDS: dict[str, Reward] = {
    "exact_match": _of_answer(exact_match),
    "numeric": _of_answer(numeric),
    "math_verify": _of_answer(math_verify),
    "format": format_match,
    "length": length_penalty,
}


def right_by(config: RewardConfig) -> str:
    """The function that says whether an answer is right: the first of reward.functions that can, else the task's."""
    return next((name for name in config.functions if name in CORRECTNESS), "task")


def scorers(config: RewardConfig, checker: Checker) -> dict[str, Scorer]:
    """A scorer for each of reward.functions but model and url; and for right_by, if it is not among them."""
    names = [name for name in config.functions | {right_by(config): 0.0} if name not in _ELSEWHERE]
    return {name: _scorer(name, config, checker) for name in names}


def _scorer(name: str, config: RewardConfig, checker: Checker) -> Scorer:
    if ":" in name:
        return _of_user(name)

    def task(response: Response, _: RewardConfig) -> float:
        given, prompt = response.given, response.prompt
        return 0.0 if given is None else checker(given, prompt.answer, prompt.entry)

    reward = (REWARDS | {"task": task})[name]
    return lambda responses: [reward(response, config) for response in responses]


# ---------------------------------------------------------------------------------------------------------------------
# Functions of one's own


def load_function(name: str) -> Callable[..., Any]:
    """The function that module:function names, with the signature that TRL gives reward functions.

    That is `function(prompts, completions, answers)`, called by keyword with lists of text: questions, whole
    completions, expected answers. ConfigError if it is not there, or cannot be called so.
    """
    path, _, attribute = name.partition(":")
    module = _module(name, path)
    known = [key for key, value in vars(module).items() if callable(value)]
    if not hasattr(module, attribute):
        raise ConfigError(f"reward.functions {name}: {path} has no {attribute}{nearest(attribute, known)}")
    function = getattr(module, attribute)
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"reward.functions {name}: {attribute} is no function but {kind}{nearest(attribute, known)}")
    _check_signature(name, function)
    return function


def _module(name: str, path: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a file beside the user, wherever the script lies; last, so that it hides nothing
    importlib.invalidate_caches()
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not f"{path}.".startswith(f"{missing}."):  # it is there, and something in it fails
            raise ConfigError(f"reward.functions {name}: importing {path} failed: {_brief(error)}") from error
        raise ConfigError(f"reward.functions {name}: no module {missing}{_nearest_module(str(missing))}") from None


def _nearest_module(path: str) -> str:
    parent = path.rpartition(".")[0]
    places = getattr(sys.modules[parent], "__path__", []) if parent else None
    return nearest(path, [found.name for found in pkgutil.iter_modules(places, parent and f"{parent}.")])


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward.functions {name}: a built-in function without a signature") from None
    try:
        signature.bind(**{key: [] for key in _KEYWORDS})
    except TypeError as error:
        hints = [nearest(key, _KEYWORDS) for key in signature.parameters if key not in _KEYWORDS]
        raise ConfigError(
            f"reward.functions {name}: must take {', '.join(_KEYWORDS)} by keyword: {error}{max(hints, default='')}"
        ) from None


def _of_user(name: str) -> Scorer:
    function = load_function(name)

    def scorer(responses: Sequence[Response]) -> Any:
        try:
            return function(
                prompts=[response.prompt.question for response in responses],
                completions=[response.text for response in responses],
                answers=[response.prompt.answer for response in responses],
            )
        except Exception as error:
            raise RewardError(f"reward {name}: raised {_brief(error)}") from error

    return scorer


# ---------------------------------------------------------------------------------------------------------------------
# Scoring


def score(responses: Sequence[Response], scorers: Mapping[str, Scorer], config: RewardConfig) -> Scores:
    """Asks all scorers at the same time, since some wait on a network, and adds up what they say by weight.

    The error of the first that fails comes out once all have ended.
    """
    if not responses:  # functions of one's own need not bear that
        return Scores([], {name: [] for name in scorers}, [])
    with ThreadPoolExecutor(len(scorers)) as pool:
        asked = {name: pool.submit(scorer, responses) for name, scorer in scorers.items()}
    parts = {name: _checked(name, responses, future.result()) for name, future in asked.items()}
    weighted = [[weight * one for one in parts[name]] for name, weight in config.functions.items()]
    return Scores(
        total=[sum(row) for row in zip(*weighted, strict=True)],
        parts=parts,
        right=[one >= 1 for one in parts[right_by(config)]],
    )


def _checked(name: str, responses: Sequence[Response], returned: Any) -> list[float]:
    """What a scorer returned, if that is one finite number per response."""
    try:
        scores = list(returned)
    except Exception as error:
        raise RewardError(
            f"reward {name}: {_brief(returned)} for {len(responses)} responses, from {_named(responses[0])} on"
        ) from error
    if len(scores) != len(responses):
        raise RewardError(
            f"reward {name}: {len(scores)} scores for {len(responses)} responses, from {_named(responses[0])} on: "
            f"{_brief(returned)}"
        )
    for response, one in zip(responses, scores, strict=True):
        if not _is_finite(one):
            raise RewardError(f"reward {name}: {_brief(one)} is no finite score, for {_named(response)}")
    return [float(one) for one in scores]


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)  # of NumPy's and PyTorch's numbers as well, while it refuses text
    except Exception:
        return False


def _named(response: Response) -> str:
    return f"prompt {response.prompt.id} ({_brief(response.prompt.question)})"


def _brief(value: object) -> str:
    """The start of what something looks like, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _number(text: str) -> float:
    return float(_SEPARATOR.sub("", text))
