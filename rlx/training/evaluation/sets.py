"""The questions that one rank asks in evaluations, made from the settings and the rank's share of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlx.config.sections.data import DataConfig, EvalConfig, EvalSetConfig, label_of
from rlx.config.sections.reward import RewardConfig
from rlx.data import sources
from rlx.data.stream import Share
from rlx.mesh import Mesh
from rlx.rewards import scoring
from rlx.rewards.completions import CompletionScorer, SourceRewards
from rlx.samples.evaluations import HELD_OUT
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


@dataclass(frozen=True)
class ScorerMaker:
    """Makes scorers of completions; a scorer has functions of its own for each source of prompts."""

    remote: Mapping[str, Scorer]  # reward models and servers, which all share
    tokenizer: Any
    mesh: Mesh

    def __call__(self, parts: Iterable[ScoredSource]) -> CompletionScorer:
        """The scorer of the prompts from some sources, in the order of their numbers."""
        rewards = []
        for part in parts:
            checker = partial(sources.answer_checker, part.data, part.seed, part.size)
            remote = {name: scorer for name, scorer in self.remote.items() if name in part.reward.functions}
            rewards.append(SourceRewards(part.reward, scoring.scorers(part.reward, checker) | remote))
        return CompletionScorer(rewards, self.tokenizer, self.mesh)


@dataclass(frozen=True)
class SetMaker:
    """Makes the sets of questions of one rank."""

    evaluation: EvalConfig
    data: DataConfig
    rewards: Sequence[RewardConfig]  # of each source in `data.parts`
    sampling: Sampling  # of training
    scorer: ScorerMaker
    share: Callable[[list[str]], Share]  # this replica's share of prompt tables, by their names

    def held_out(self) -> QuestionSet:
        """The held-out prompts, with a greedy answer each."""
        share = self.share(sources.table_names(self.data, "held_out"))
        return QuestionSet(
            name=HELD_OUT,
            prompts=share.in_order(),
            size=len(share.rows),
            samplings=[self.sampling.greedy],
            score=self.scorer(self._held_out_parts(self.rewards)),
            every=self.evaluation.every,
            labels=self.data.labels or [label_of(self.evaluation.source or self.data.source)],
        )

    def of(self, eval_set: EvalSetConfig, reward: RewardConfig, held_out: QuestionSet) -> QuestionSet:
        """One of eval.sets; `reward`: of all prompts. Without a source of its own it has those of `held_out`."""
        samplings, own = [set_sampling(eval_set, self.sampling)] * eval_set.samples, self.evaluation.of(eval_set)
        common = replace(held_out, name=eval_set.name, samplings=samplings, every=own.every, settings=eval_set)
        if not eval_set.source:
            rewards = [shared.part(eval_set.reward, eval_set.answer_pattern) for shared in self.rewards]
            size = eval_set.num_prompts or held_out.size
            prompts = [prompt for prompt in held_out.prompts if prompt.id < size]
            score = self.scorer(self._held_out_parts(rewards))
            return replace(common, prompts=prompts, size=min(size, held_out.size), score=score)
        share = self.share([sources.set_table(eval_set.name)])
        own_reward = reward.part(eval_set.reward, eval_set.answer_pattern)
        part = ScoredSource(eval_set.prompts(self.data), own_reward, own.seed, own.num_prompts)
        labels, score = [label_of(eval_set.source)], self.scorer([part])
        return replace(common, prompts=share.in_order(), size=len(share.rows), score=score, labels=labels)

    def _held_out_parts(self, rewards: Sequence[RewardConfig]) -> list[ScoredSource]:
        evaluations = [self.evaluation.part(self.data, number) for number in range(len(rewards))]
        rows = zip(self.data.parts, rewards, evaluations, strict=True)
        return [ScoredSource(part, reward, each.seed, each.num_prompts) for part, reward, each in rows]


def set_sampling(eval_set: EvalSetConfig, training: Sampling) -> Sampling:
    """How the answers of one of eval.sets are sampled: as in training where the set says nothing.

    Of schedules `training` has the first values: a curve over evaluations would show a change of temperature, too.
    """
    if eval_set.temperature == 0:
        return training.greedy
    own = eval_set.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
    return replace(training, logprobs=False, **own)
