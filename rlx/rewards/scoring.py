"""Reward functions: from a completion and the expected answer to a score, several of them at once, and their sum.

Scores need not lie in [0, 1], but 1 or more from the function that judges the answer counts as right. A reward model
(`model`) and a remote scorer (`url`) are other modules' work: here they are scorers like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlx.config.sections import CORRECTNESS, RewardConfig
from rlx.rewards.custom import RewardError, brief, reward_of_user
from rlx.rewards.functions import REWARDS
from rlx.types import Checker, Response, Scorer

_ELSEWHERE = ("model", "url")


@dataclass(frozen=True, slots=True)
class Scores:
    """What the responses of a batch scored, in their order."""

    total: list[float]  # the weighted sum
    by_function: dict[str, list[float]]  # the unweighted scores of each reward function
    is_correct: list[bool]  # according to the function that judges the answer


def right_by(config: RewardConfig) -> str:
    """The function that says whether an answer is right: the first of reward.functions that can, else the task's."""
    return next((name for name in config.functions if name in CORRECTNESS), "task")


def scorers(config: RewardConfig, checker: Checker) -> dict[str, Scorer]:
    """A scorer for each of reward.functions but model and url; and for right_by, if it is not among them."""
    names = [name for name in config.functions | {right_by(config): 0.0} if name not in _ELSEWHERE]
    return {name: _scorer(name, config, checker) for name in names}


def _scorer(name: str, config: RewardConfig, checker: Checker) -> Scorer:
    if ":" in name:
        return reward_of_user(name)

    def task(response: Response, _: RewardConfig) -> float:
        answer, prompt = response.answer, response.prompt
        return 0.0 if answer is None else checker(answer, prompt.answer, prompt.dataset_index)

    reward = (REWARDS | {"task": task})[name]
    return lambda responses: [reward(response, config) for response in responses]


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
        by_function=parts,
        is_correct=[one >= 1 for one in parts[right_by(config)]],
    )


def _checked(name: str, responses: Sequence[Response], returned: Any) -> list[float]:
    """What a scorer returned, if that is one finite number per response."""
    try:
        scores = list(returned)
    except Exception as error:
        raise RewardError(
            f"reward {name}: {brief(returned)} for {len(responses)} responses, from {_named(responses[0])} on"
        ) from error
    if len(scores) != len(responses):
        raise RewardError(
            f"reward {name}: {len(scores)} scores for {len(responses)} responses, from {_named(responses[0])} on: "
            f"{brief(returned)}"
        )
    for response, one in zip(responses, scores, strict=True):
        if not _is_finite(one):
            raise RewardError(f"reward {name}: {brief(one)} is no finite score, for {_named(response)}")
    return [float(one) for one in scores]


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)  # of NumPy's and PyTorch's numbers as well, while it refuses text
    except Exception:
        return False


def _named(response: Response) -> str:
    return f"prompt {response.prompt.id} ({brief(response.prompt.question)})"
