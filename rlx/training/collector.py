"""Rollouts of one rank: prompts in, scored completions out, and the choice of those that a step trains on.

This module leaves out how engines work (rlx.rollout), what a reward function computes (rlx.rewards) and the queue of
rollouts that run ahead of training (rollout_queue).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlx.algorithms import advantages
from rlx.config.algorithm import AlgorithmConfig
from rlx.config.sections import RewardConfig, RolloutConfig, TrainConfig
from rlx.mesh import Mesh
from rlx.rewards import functions, scoring
from rlx.rollout.base import Engines
from rlx.training.experience import RolloutBatch, build_batch
from rlx.training.rollout_queue import RolloutQueue
from rlx.types import Completion, Prompt, Response, Sampling, ScoredCompletion, Scorer


class Selection:
    """The completions that a step trains on, group by group; a group is the completions of one prompt.

    With `filtered` it leaves out groups whose scores are all equal: their advantages would all be 0. Source: dynamic
    sampling of Yu et al. 2025, DAPO (arXiv 2503.14476) eq. 11.
    """

    def __init__(self, wanted: int, samples: int, *, filtered: bool, greedy: bool, immediate: bool = False) -> None:
        """Starts empty.

        Args:
            wanted: groups that this replica trains on.
            samples: completions of a group.
            filtered: leave out groups whose scores are all equal.
            greedy: each group has one more completion at its end, the greedy one. The others get its score.
            immediate: `take` gives groups as they come, instead of all at the end.
        """
        self.wanted, self.samples = wanted, samples
        self.filtered, self.greedy, self.immediate = filtered, greedy, immediate
        self.candidates: list[ScoredCompletion] = []  # all that were generated to choose from
        self.tokens = 0  # response tokens generated for them
        self.varied = 0  # groups whose scores differ
        self.rounds = 0  # rounds of generation so far
        self._kept: list[list[ScoredCompletion]] = []
        self._left_out: list[list[ScoredCompletion]] = []
        self._taken = 0  # groups that `take` has given

    def add(self, scored: Sequence[ScoredCompletion]) -> None:
        """Adds the groups of a round of generation, or of a part of one."""
        size = self.samples + self.greedy
        for start in range(0, len(scored), size):
            group = list(scored[start : start + self.samples])
            if self.greedy:
                group = [replace(each, greedy_score=scored[start + self.samples].score) for each in group]
            varied = len({each.score for each in group}) > 1
            (self._left_out if self.filtered and not varied else self._kept).append(group)
            self.candidates += group
            self.varied += varied
        self.tokens += sum(len(each.completion.token_ids) for each in scored)

    @property
    def missing(self) -> int:
        """How many more groups are wanted."""
        return max(0, self.wanted - len(self._kept))

    def take(self, last: bool = False) -> list[ScoredCompletion]:
        """The completions to train on that were not taken before.

        Which groups are left out is known at the `last` call only, so earlier calls return none, unless `immediate`. If
        too few groups remain, the last call adds groups that were left out.
        """
        if not (self.immediate or last):
            return []
        groups = (self._kept + self._left_out)[self._taken : self.wanted]
        self._taken += len(groups)
        return [each for group in groups for each in group]


@dataclass(frozen=True)
class CompletionScorer:
    """Turns completions into scored completions: decodes them, finds the answers, calls the reward functions."""

    reward: RewardConfig
    functions: Mapping[str, Scorer]
    tokenizer: Any
    mesh: Mesh

    def __call__(self, completions: Sequence[Completion]) -> list[ScoredCompletion]:
        """Each completion with its score; a collective call of a replica's ranks."""
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        answers = functions.extract_answers(texts, self.reward.answer_pattern)
        responses = [
            Response(c.prompt, text, answer, len(c.token_ids), c.finished)
            for c, text, answer in zip(completions, texts, answers, strict=True)
        ]
        # One rank of a replica scores for all: a reward function may fail, or give random scores.
        is_leader = self.mesh.is_tp_leader
        scores = self.mesh.broadcast_from_leader(
            scoring.score(responses, self.functions, self.reward) if is_leader else None
        )
        rows = zip(*scores.by_function.values(), strict=True)
        by_function = [dict(zip(scores.by_function, row, strict=True)) for row in rows]
        columns = zip(completions, scores.total, scores.is_correct, by_function, strict=True)
        return [ScoredCompletion(*row) for row in columns]


@dataclass(frozen=True)
class RolloutCollector:
    """One rank's steps from prompts to scored completions; every rank makes the same calls in the same order."""

    engines: Engines
    queue: RolloutQueue
    sampling: Sampling
    score: CompletionScorer
    held_out: Sequence[Prompt]  # this replica's share of the held-out prompts
    score_held_out: CompletionScorer
    train: TrainConfig
    algorithm: AlgorithmConfig
    rollout: RolloutConfig

    def push_weights(self, version: int, *, starting: bool = False) -> None:
        """Sends the policy to the engines; returns on every rank once they have it.

        Args:
            version: the step that the weights belong to.
            starting: the engines may still be starting; requests of an earlier run on them end first.
        """
        self.engines.push(version, starting=starting, keep=self.rollout.partial_rollouts and not starting)

    def collect(self, step: int) -> Iterator[list[Completion]]:
        """The completions of the next round of prompts, chunk by chunk, those of a prompt together.

        Later rounds begin as far ahead as rollout.max_staleness allows.
        """
        return self.queue.next(step, self.train.steps)

    def score_training(self, completions: Sequence[Completion]) -> list[ScoredCompletion]:
        """Scores with length penalties subtracted."""
        return apply_length_penalty(self.score(completions), self.algorithm, self.rollout.max_tokens)

    def wait_for_pending(self, step: int) -> None:
        """Waits for rollouts that run ahead, unless they may continue with the next weights."""
        if not self.rollout.partial_rollouts:
            self.queue.wait(step)

    def sleep_engines(self) -> None:
        """Makes engines that share their GPU with a trainer free its memory until the next push."""
        if self.rollout.placement == "colocated":
            self.engines.sleep()

    def evaluate(self, step: int) -> list[ScoredCompletion]:
        """Greedy, scored answers of the engines to the held-out prompts; a collective call."""
        pending = self.engines.begin(self.held_out, [self.sampling.greedy], step)
        return self.score_held_out(self.engines.finish(pending, step))

    def new_selection(self) -> Selection:
        """An empty selection of the groups that this replica trains on in a step."""
        return Selection(
            wanted=self.train.prompts_per_step // self.score.mesh.dp_size,
            samples=self.train.samples_per_prompt,
            filtered=self.algorithm.filter_groups,
            greedy=self.algorithm.estimator.needs_greedy,
            immediate=self.rollout.num_chunks > 1,
        )

    def build_batches(self, scored: Sequence[ScoredCompletion], device: torch.device) -> list[RolloutBatch]:
        """The completions as tensors on a device: one batch, or none for no completions."""
        pad_id = self.score.tokenizer.pad_token_id or 0
        return [build_batch(scored, pad_id).to(device)] if scored else []


def apply_length_penalty(
    scored: Sequence[ScoredCompletion], algorithm: AlgorithmConfig, max_tokens: int
) -> list[ScoredCompletion]:
    """The same with the soft overlong penalty and the penalty for truncated responses subtracted from each score."""
    lengths = torch.tensor([len(each.completion.token_ids) for each in scored])
    overlong = advantages.overlong_penalty(
        lengths, max_tokens, algorithm.overlong_buffer, algorithm.overlong_penalty
    ).tolist()
    truncated = [algorithm.missing_eos_penalty * (not each.completion.finished) for each in scored]
    rows = zip(scored, overlong, truncated, strict=True)
    return [replace(each, score=each.score - late - cut) for each, late, cut in rows]
