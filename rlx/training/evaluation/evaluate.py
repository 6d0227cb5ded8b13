"""The evaluations of a step: those that are due, each with its metrics and with a record of every question.

Left out: which questions there are (sets), and what becomes of all ranks' answers to them (outcomes).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlx.config.sections.reward import CORRECTNESS, RewardConfig
from rlx.samples.evaluations import AVERAGED, HELD_OUT
from rlx.training.collector import RolloutCollector
from rlx.training.evaluation.outcomes import eval_metrics, gather_outcomes
from rlx.training.evaluation.sets import QuestionSet
from rlx.training.metrics import failed_fraction, mean_over_ranks, sample_rows
from rlx.training.trainer import Trainer
from rlx.types import ScoredCompletion

_PREFIXES = {HELD_OUT: "eval", AVERAGED: "eval/ema"}
"""what the metrics of evaluations begin with that are no eval.sets"""


def evaluate(
    trainer: Trainer, collector: RolloutCollector, *, all_sets: bool = False
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Asks the questions that are due after the current step, or those of all sets; a collective call.

    A replay may ask for all sets, too. With train.ema_decay the averaged weights answer the held-out prompts as well.

    Returns:
        The metrics over all ranks, and some of this rank's answers to held-out prompts as sample rows; both are empty
        if nothing is due.
    """
    all_sets |= trainer.replay is not None and trainer.step in trainer.replay.evaluated
    due = [each for each in collector.evaluations if all_sets or trainer.is_due(each.every)]
    if not due:
        return {}, []
    started, metrics, samples = time.perf_counter(), dict[str, float](), list[dict[str, Any]]()
    for each, scored in collector.answers(due, trainer.step):
        metrics |= record_outcomes(trainer, collector, each, scored)
        if each.name == HELD_OUT:
            samples = sample_rows(scored[: trainer.config.tracking.samples])
    if trainer.ema and (held_out := [each for each in due if each.name == HELD_OUT]):
        with averaged_weights(trainer):
            collector.push_weights(trainer.step)
            for each, scored in collector.answers(held_out, trainer.step):
                metrics |= record_outcomes(trainer, collector, replace(each, name=AVERAGED), scored)
        collector.push_weights(trainer.step)
    return metrics | {"time/eval": time.perf_counter() - started}, samples


def unread_answers(samples: Sequence[Mapping[str, Any]], accuracy: float, reward: RewardConfig) -> list[str]:
    """A line for whoever watches if answers seem to be right and count as wrong; none if they do not.

    A model whose answers are not found in what it writes looks like one that cannot learn.

    Args:
        samples: of an evaluation, as `sample_rows` gives them.
        accuracy: of that evaluation.
    """
    named = sum(_names(row["completion"], row["answer"]) for row in samples)
    if not set(reward.functions) & set(CORRECTNESS) or named <= 2 * accuracy * len(samples):
        return []
    pattern = f"is {reward.answer_pattern!r}" if reward.answer_pattern else "is unset, so the whole text is the answer"
    return [
        f"{named} of {len(samples)} answers of the first evaluation contain the expected one, but {accuracy:.0%} "
        f"of all count as right: reward.answer_pattern {pattern}; rlx samples RUN --held-out shows them"
    ]


def _names(text: str, answer: str) -> bool:
    """Whether an answer is in a text, not as a part of another word or number."""
    return bool(answer.strip() and re.search(rf"(?<![\w.-]){re.escape(answer.strip())}(?![\w-]|[.,]\d)", text))


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[None]:
    """Context in which the policy has the averaged weights. The engines keep theirs until the next push."""
    weights = {name: p for name, p in trainer.policy.named_parameters() if name in trainer.ema}
    own = {name: p.detach().clone() for name, p in weights.items()}
    with torch.no_grad():
        for name, p in weights.items():
            p.copy_(trainer.ema[name])
        yield
        for name, p in weights.items():
            p.copy_(own[name])


def record_outcomes(
    trainer: Trainer, collector: RolloutCollector, each: QuestionSet, scored: Sequence[ScoredCompletion]
) -> dict[str, float]:
    """Keeps the answers to a set of questions and what came of them, and returns its metrics; a collective call."""
    outcomes = gather_outcomes(trainer, each, scored)
    collector.keep_answers(trainer.step, each.name, scored, outcomes)
    failed = failed_fraction(trainer, scored, _PREFIXES.get(each.name, f"eval/{each.name}"))
    if each.settings:
        return eval_metrics(each.settings, outcomes) | failed
    metrics = mean_over_ranks(trainer, scored, _PREFIXES[each.name]) | failed
    return metrics | ({"eval/questions": float(each.size)} if each.name == HELD_OUT else {})
