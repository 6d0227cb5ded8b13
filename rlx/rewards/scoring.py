"""Scores of a batch of responses: calls all reward functions at the same time and adds up their scores by weight.

Scores need not lie in [0, 1], but a score of 1 or more from the function that judges the answer counts as correct.
Left out: the reward model (`model`) and the servers (`url`, `judge`), which the caller adds to the scorers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig
from rlx.rewards.custom import RewardError, brief, closing_process, custom_scorer, describe_batch, is_finite
from rlx.rewards.functions import REWARDS, numeric, of_answers
from rlx.rewards.judge.cache import ReplyCache
from rlx.rewards.judge.scorer import Judge
from rlx.rewards.sandbox.reward import check_answers, check_tests
from rlx.types import AnswerCheck, Checker, MarkedScores, Prompt, Response, Scorer

_LOG = logging.getLogger("rlx")
_LARGEST = 1e18
"""scores beyond it would overflow where training squares them in float32"""
_MADE_BY_CALLER = ("model", "url", "judge")


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a batch of responses, in their order."""

    total: list[float]  # the weighted sum
    by_function: dict[str, list[float]]  # the unweighted scores of each reward function, and what else it reports
    is_correct: list[bool]  # according to the function that judges the answer


def scorers(config: RewardConfig, make_checker: Callable[[], Checker]) -> dict[str, Scorer]:
    """A scorer for each of reward.functions except `model`, `url` and `judge`, and one for that which judges answers.

    Args:
        make_checker: gives the task's own judge of answers; called if `task` is among the names.
    """
    names = [name for name in config.functions | {config.judging: 0.0} if name not in _MADE_BY_CALLER]
    return {name: _task_scorer(make_checker()) if name == "task" else _scorer(name, config) for name in names}


def _scorer(name: str, config: RewardConfig) -> Scorer:
    if ":" in name:
        return custom_scorer(name, config)
    reward = REWARDS[name]
    return lambda responses: reward(responses, config)


def _task_scorer(checker: Checker) -> Scorer:
    def score(responses: Sequence[Response]) -> list[float]:
        return of_answers(checker, responses)

    return score


def score(responses: Sequence[Response], scorers: Mapping[str, Scorer], config: RewardConfig) -> Scores:
    """Calls all scorers at the same time, since some wait for a network, and adds up their scores by weight.

    Raises:
        Exception: of the first scorer that fails, once all have returned; RewardError for scores that are not one
            finite number per response.
    """
    if not responses:  # functions of the user need not accept an empty batch
        return Scores([], {name: [] for name in scorers}, [])
    with ThreadPoolExecutor(len(scorers)) as pool:
        futures = {name: pool.submit(scorer, responses) for name, scorer in scorers.items()}
    returned = {name: future.result() for name, future in futures.items()}
    by_function = {name: checked(name, responses, scores_of(each)) for name, each in returned.items()}
    for each in returned.values():
        by_function |= each.marks if isinstance(each, MarkedScores) else {}
    weighted = [[weight * score for score in by_function[name]] for name, weight in config.functions.items()]
    total = [sum(row) for row in zip(*weighted, strict=True)]
    for response, value in zip(responses, total, strict=True):
        if not abs(value) <= _LARGEST:
            raise RewardError(f"reward: the weighted sum {value:g} is too large, for {_named(response)}")
    return Scores(
        total=total,
        by_function=by_function,
        is_correct=[score >= 1 for score in by_function[config.judging]],
    )


def answer_check(config: RewardConfig, environment: str | None = None) -> AnswerCheck | None:
    """What each prompt's answer has to pass when prompts are read; None: any text will do.

    Args:
        environment: the name of the run's environment, if it has one.
    """
    if environment == "code":
        return partial(check_tests, config=None)
    if "code" in config.functions:
        return partial(check_tests, config=config)
    paid = {name for name, weight in config.functions.items() if weight > 0}
    pays_for_none = config.answer_pattern is None and {"task", "exact_match"} & paid
    return _check_said if pays_for_none else None


def _check_said(answer: str) -> None:
    if not answer.strip():
        raise ValueError(
            "the expected answer is blank: task and exact_match of reward.functions would pay for saying "
            "nothing (without reward.answer_pattern a whole completion is the answer)"
        )


def try_functions(config: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Calls the user's functions once, with the expected answers as completions. Their processes end after it.

    The answers of `code` and `numeric` are only looked at. A judge is asked about the first prompt.

    Raises:
        ConfigError: an answer holds no tests, or none is a number.
        RewardError: one of them fails, or returns no score.
    """
    responses = [Response(prompt, prompt.answer, prompt.answer, 1, True, environment_score=0.0) for prompt in prompts]
    if "code" in config.functions:
        check_answers(prompts, config)
    if config.functions.get("numeric") and prompts and not any(numeric(each.answer, each.answer) for each in prompts):
        raise ConfigError(
            f"reward.functions numeric: the expected answer {prompts[0].answer!r:.200} is no number; "
            "--data.expected-pattern finds one in it"
        )
    if "judge" in config.functions and responses:
        tried = [responses[0], replace(responses[0], text="")]
        Judge.from_config(config, ReplyCache())(tried, needs_all=True)
    for name in config.functions:
        if ":" not in name:
            continue
        try:
            with closing_process(name):
                checked(name, responses, scores_of(custom_scorer(name, config)(responses)))
        except RewardError as error:
            completions = brief([response.text for response in responses])
            text = f"{error}; tried with the expected answers as completions: {completions}"
            raise RewardError(text, error.details) from None


def try_rewards(config: RewardConfig, prompts: Sequence[Prompt], *, on_gpu: bool) -> None:
    """Tries the functions as `try_functions` does.

    Args:
        on_gpu: workers have GPUs; this machine may have none, so a failure is only shown.

    Raises:
        ConfigError: an answer cannot be used.
        RewardError: one of them fails.
    """
    try:
        try_functions(config, prompts)
    except RewardError as error:
        if not on_gpu:
            raise
        _LOG.warning("on this machine, which need not be like those of the workers: %s", error)


def scores_of(returned: Any) -> Any:
    """The scores in what a scorer returned."""
    return returned.scores if isinstance(returned, MarkedScores) else returned


def checked(name: str, responses: Sequence[Response], returned: Any) -> list[float]:
    """Returns what a scorer returned as floats.

    Raises:
        RewardError: it is not one finite number per response.
    """
    try:
        scores = list(returned)
    except Exception as error:
        what = f"returned {brief(returned)}, not a list of scores"
        raise RewardError(f"reward {name}: {what}, for {describe_batch(responses)}") from error
    if len(scores) != len(responses):
        raise RewardError(f"reward {name}: {len(scores)} scores for {describe_batch(responses)}: {brief(returned)}")
    for response, value in zip(responses, scores, strict=True):
        if not is_finite(value):
            raise RewardError(f"reward {name}: {brief(value)} is not a finite score, for {_named(response)}")
        if abs(float(value)) > _LARGEST:
            raise RewardError(f"reward {name}: {brief(value)} is too large a score, for {_named(response)}")
    return [float(value) for value in scores]


def _named(response: Response) -> str:
    return f"prompt {response.prompt.id} ({brief(response.prompt.question)})"
