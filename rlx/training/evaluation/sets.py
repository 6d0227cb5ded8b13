"""The questions of an evaluation as one rank has them, and what scores completions. Left out: which sets there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlx.config.sections.data import DataConfig, EvalSetConfig
from rlx.config.sections.reward import RewardConfig
from rlx.data import sources
from rlx.mesh import Mesh
from rlx.rewards import scoring
from rlx.rewards.completions import CompletionScorer, SourceRewards
from rlx.types import Prompt, Sampling, Scorer


@dataclass(frozen=True)
class QuestionSet:
    """Questions that are evaluated together, as one replica has them."""

    name: str
    prompts: Sequence[Prompt]  # this replica's share; the ids are rows of all questions
    size: int  # questions of all replicas
    samplings: Sequence[Sampling]  # each question gets one answer by each
    score: CompletionScorer
    every: int  # steps between evaluations, see `Trainer.is_due`
    labels: Sequence[str]  # what the sources of the questions are called, by their numbers
    settings: EvalSetConfig | None = None  # if it is one of eval.sets


@dataclass(frozen=True)
class ScoredSource:
    """One source of prompts, and the rewards of their completions."""

    data: DataConfig
    reward: RewardConfig
    seed: int  # the first of generated prompts
    size: int  # how many seeds there are


def make_scorer(
    parts: Iterable[ScoredSource], remote: Mapping[str, Scorer], tokenizer: Any, mesh: Mesh
) -> CompletionScorer:
    """The scorer of the prompts from some sources, which has functions of its own for each of them.

    Args:
        parts: in the order of their numbers.
        remote: reward models and servers, which all sources share.
    """
    rewards = []
    for part in parts:
        checker = partial(sources.answer_checker, part.data, part.seed, part.size)
        own = {name: scorer for name, scorer in remote.items() if name in part.reward.functions}
        rewards.append(SourceRewards(part.reward, scoring.scorers(part.reward, checker) | own))
    return CompletionScorer(rewards, tokenizer, mesh)


def set_sampling(eval_set: EvalSetConfig, training: Sampling) -> Sampling:
    """How the answers of one of eval.sets are sampled: as in training where the set says nothing.

    Of schedules `training` has the first values: a curve over evaluations would show a change of temperature, too.
    """
    if eval_set.temperature == 0:
        return training.greedy
    own = eval_set.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
    return replace(training, logprobs=False, **own)
