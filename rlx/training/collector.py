"""Rollouts of one rank: prompts in, scored completions out, and the choice of those that a step trains on.

This module leaves out how engines work (rlx.rollout), how completions are scored (rlx.rewards) and the queue of
rollouts that run ahead of training (rollout_queue).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlx.algorithms import advantages
from rlx.config.sections.algorithm import AlgorithmConfig
from rlx.mesh import Mesh, exchange_objects, in_turns
from rlx.rewards.completions import CompletionScorer, PendingScores
from rlx.rollout.base import Engines
from rlx.samples.columns import Kind, StepCompletions, TrainedTokens
from rlx.samples.evaluations import HELD_OUT, EvaluationFile, Outcomes, OutcomeWriter
from rlx.samples.gradients import write_shares
from rlx.samples.writer import CompletionWriter
from rlx.training.evaluation.sets import QuestionSet
from rlx.training.experience import Experience, RolloutBatch, build_batch
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.trainer import Trainer
from rlx.types import Completion, Sampling, ScoredCompletion


class Selection:
    """The completions that a step trains on, group by group; a group is the completions of one prompt.

    With `filtered` it leaves out groups whose completions are alike: little can be learnt from them. Episodes whose
    environment failed are not compared. Source: dynamic sampling of Yu et al. 2025, DAPO (arXiv 2503.14476), whose
    eq. 11 counts right answers.

    All replicas choose together: the first groups by round and by the order of prompts. Each replica generates every
    n-th prompt of a round and gets every n-th chosen group, so choice and order do not depend on how many there are.
    """

    def __init__(
        self,
        wanted: int,
        samples: int,
        mesh: Mesh,
        *,
        filtered: bool,
        greedy: bool,
        by_correct: bool = False,
    ) -> None:
        """Starts empty.

        Args:
            wanted: groups that this replica trains on.
            samples: completions of a group.
            mesh: of the replicas.
            filtered: leave out groups whose scores, or right answers, are all equal.
            greedy: each group has one more completion at its end, the greedy one. The others get its score, or
                their own if its environment failed, so that nothing is learnt from them.
            by_correct: right answers count, not scores.
        """
        self.wanted, self.samples = wanted, samples
        self.filtered, self.greedy, self.by_correct = filtered, greedy, by_correct
        self.mesh, self.replica, self.replicas = mesh, mesh.dp_rank, mesh.dp_size
        self.candidates: list[ScoredCompletion] = []  # all that this replica generated to choose from
        self.taken: list[ScoredCompletion] = []  # those that it trains on, in their order; others may have made them
        self.left_out: list[ScoredCompletion] = []  # of the candidates, those that no replica trains on
        self.tokens = 0  # response tokens generated for them
        self.varied = 0  # groups whose scores differ
        self.rounds = 0  # rounds of generation so far
        self.seconds = 0.0  # that engines took for them
        self.scoring_seconds = 0.0  # that their scores took
        self._groups: list[list[ScoredCompletion]] = []  # of the candidates
        self._alike: list[bool] = []  # whether each group is left out while there are others

    @property
    def counted(self) -> list[ScoredCompletion]:
        """The candidates that say something of the policy: those whose environment has not failed."""
        return [each for each in self.candidates if not each.completion.has_failed]

    def choosable(self, completions: Sequence[Completion]) -> list[Completion]:
        """Those of a round, or of a part of one, that may be trained on: all but greedy ones."""
        size = self.samples + self.greedy
        return [each for place, each in enumerate(completions) if place % size < self.samples]

    def add(self, scored: Sequence[ScoredCompletion]) -> None:
        """Adds the groups of a round of generation, or of a part of one."""
        size = self.samples + self.greedy
        for start in range(0, len(scored), size):
            group = list(scored[start : start + self.samples])
            if self.greedy:
                last = scored[start + self.samples]
                failed = last.completion.has_failed
                group = [replace(each, greedy_score=each.score if failed else last.score) for each in group]
            counted = [each for each in group if not each.completion.has_failed]
            self.varied += len({each.score for each in counted}) > 1
            compared = {each.is_correct if self.by_correct else each.score for each in counted}
            self._alike.append(self.filtered and len(compared) <= 1)
            self._groups.append(group)
            self.candidates += group
        self.tokens += sum(each.completion.num_drawn for each in scored)

    def end_round(self, seconds: float) -> None:
        """Counts a round of generation, all of whose completions were added; the engines took `seconds` for it."""
        self.rounds += 1
        self.seconds += seconds

    def count_missing(self) -> int:
        """How many more groups all replicas together want; a collective call."""
        return max(0, self.wanted * self.replicas - self._alike_of_all().count(False))

    def take(self) -> list[ScoredCompletion]:
        """The completions to train on, once all are added; with `filtered` a collective call.

        Without `filtered` they are all that `choosable` gave. If too few groups remain, some that were left out are
        added.
        """
        groups = self._share_out() if self.filtered else self._groups
        self.taken = [each for group in groups for each in group]
        return self.taken

    def _share_out(self) -> list[list[ScoredCompletion]]:
        """The chosen groups that this replica gets, wherever they were generated; a collective call."""
        alike = self._alike_of_all()
        order = sorted(range(len(alike)), key=alike.__getitem__)
        chosen = order[: self.wanted * self.replicas]
        outgoing: list[list[list[ScoredCompletion]]] = [[] for _ in range(self.replicas)]
        for place, number in enumerate(chosen):
            if number % self.replicas == self.replica:
                outgoing[place % self.replicas].append(self._groups[number // self.replicas])
        others = [number for number in order[len(chosen) :] if number % self.replicas == self.replica]
        self.left_out = [each for number in others for each in self._groups[number // self.replicas]]
        arrived = [iter(part) for part in exchange_objects(outgoing, self.mesh)]
        return [next(arrived[number % self.replicas]) for number in chosen[self.replica :: self.replicas]]

    def _alike_of_all(self) -> list[bool]:
        """Whether each group of all replicas, by round and prompt, is left out while there are others."""
        own = torch.tensor(self._alike, dtype=torch.float32, device=self.mesh.mesh.device_type)
        return [bool(each) for each in in_turns(own, self.mesh).tolist()]


def new_selection(trainer: Trainer) -> Selection:
    """An empty selection of the groups that a replica trains on in a step."""
    config, mesh = trainer.config, trainer.mesh
    return Selection(
        wanted=config.train.prompts_per_step // mesh.dp_size,
        samples=config.train.samples_per_prompt,
        mesh=mesh,
        filtered=config.algorithm.filter_groups,
        greedy=config.algorithm.estimator.needs_greedy,
        by_correct=config.algorithm.filter_by == "correct",
    )


@dataclass(frozen=True)
class RolloutCollector:
    """One rank's steps from prompts to scored completions; every rank makes the same calls in the same order."""

    trainer: Trainer
    engines: Engines
    queue: RolloutQueue
    sampling: Sampling
    score: CompletionScorer
    evaluations: Sequence[QuestionSet]
    completions: CompletionWriter | None = None  # None: this process keeps none
    outcomes: OutcomeWriter | None = None  # None: another process keeps those of all

    def push_weights(self, version: int, *, starting: bool = False) -> None:
        """Sends the policy to the engines; returns on every rank once they have it.

        Args:
            version: the step that the weights belong to.
            starting: the engines may still be starting; requests of an earlier run on them end first.
        """
        midway = self.trainer.config.rollout.partial_rollouts and not starting
        self.engines.push(version, starting=starting, midway=midway)

    def finish_scoring(self, pending: PendingScores, selection: Selection) -> None:
        """Adds completions to a selection when they are scored, with the length penalties of the step subtracted."""
        config, (scored, seconds) = self.trainer.config, pending.result()
        selection.add(apply_length_penalty(scored, config.algorithm, config.rollout.max_tokens))
        selection.scoring_seconds += seconds

    def observe(self, selection: Selection) -> dict[str, float]:
        """Tells a curriculum how a step's prompts were answered, and returns its metrics; a collective call."""
        prompts = self.queue.prompts
        if prompts.success is None:
            return {}
        rows, size = selection.candidates, selection.samples
        shares = [right_share(rows[start : start + size]) for start in range(0, len(rows), size)]
        own = torch.tensor(shares, dtype=torch.float64, device=self.trainer.device)
        return prompts.observe(in_turns(own, self.trainer.mesh).tolist())

    def next_round(self, selection: Selection, steps: int) -> Iterator[list[Completion]]:
        """The completions of the next round, chunk by chunk; after the last one the selection counts the round.

        Args:
            steps: the step at which training ends: no round begins ahead that no step would train on.
        """
        yield from self.queue.next(self.trainer.step, steps)
        selection.end_round(self.queue.seconds)

    def begin_next(self) -> None:
        """Begins the next round, so that engines work meanwhile; with a curriculum it begins when it is needed.

        What a checkpoint says of a curriculum is as before the round.
        """
        if self.queue.prompts.success is None:
            self.queue.begin(self.trainer.step, self.trainer.config.train.steps)

    def wait_for_pending(self, step: int) -> None:
        """Waits for rollouts that run ahead, unless they may continue with the next weights."""
        if not self.trainer.config.rollout.partial_rollouts:
            self.queue.wait(step)

    def sleep_engines(self) -> None:
        """Makes engines that share their GPU with a trainer free its memory until the next push."""
        if self.trainer.config.rollout.placement == "colocated":
            self.engines.sleep()

    def answers(self, sets: Sequence[QuestionSet], step: int) -> Iterator[tuple[QuestionSet, list[ScoredCompletion]]]:
        """The scored answers of the engines to each set of questions, those to a question together; a collective call.

        Engines generate those of one set at a time, the next one's while these are scored.
        """
        pending = self.engines.begin(sets[0].prompts, sets[0].samplings, step)
        for number, each in enumerate(sets, 1):
            completions = self.engines.finish(pending, step)
            if number < len(sets):
                pending = self.engines.begin(sets[number].prompts, sets[number].samplings, step)
            yield each, each.score(completions)

    def keep(self, step: int, selection: Selection, batch: Experience) -> None:
        """Has a step's completions written: those trained on with what training computed, then those left out.

        Args:
            step: that has trained on them.
            batch: the completions that the selection gave, in their order, after the update.
        """
        if self.completions is None:
            return
        columns = (batch.logprobs, batch.newest_logprobs, batch.advantages, batch.trained)
        trained = TrainedTokens(*(column.cpu().numpy() for column in columns))
        rows = [*selection.taken, *selection.left_out]
        prompts, labels = len(self.queue.prompts.rows), self.trainer.config.data.labels
        self.completions.keep(StepCompletions(Kind.TRAINING, step, prompts, rows, trained, labels))

    def keep_answers(self, step: int, name: str, scored: Sequence[ScoredCompletion], outcomes: Outcomes) -> None:
        """Writes what came of each question in the evaluation of that name after a step, and has the answers written
        if the questions are the held-out ones."""
        if self.outcomes is not None:
            self.outcomes.keep(EvaluationFile(step, name), outcomes)
        if self.completions is not None and name == HELD_OUT and scored:
            prompts = 1 + max(each.completion.prompt.id for each in scored)  # they have no epochs
            labels = self.trainer.config.data.labels
            self.completions.keep(StepCompletions(Kind.HELD_OUT, step, prompts, scored, sources=labels))

    def keep_shares(self, step: int, shares: Mapping[int, float]) -> None:
        """Writes each prompt's share in the gradient of a step."""
        if self.outcomes is not None:
            write_shares(self.outcomes.run, step, shares)

    def build_batch(self, completions: Sequence[Completion]) -> RolloutBatch:
        """The completions as tensors on the rank's device, without scores."""
        pad_id, mask_truncated = self.score.tokenizer.pad_token_id or 0, self.trainer.config.algorithm.mask_truncated
        return build_batch(completions, pad_id, mask_truncated).to(self.trainer.device)


def right_share(group: Sequence[ScoredCompletion]) -> float:
    """The share of right completions, without those whose environment failed; NaN if none is left."""
    answers = [each.is_correct for each in group if not each.completion.has_failed]
    return sum(answers) / len(answers) if answers else math.nan


def apply_length_penalty(
    scored: Sequence[ScoredCompletion], algorithm: AlgorithmConfig, max_tokens: int
) -> list[ScoredCompletion]:
    """The completions with the soft overlong penalty and that for truncated responses subtracted from each score.

    The environment's tokens count as well, and those that a new context reads again: `max_tokens` limits them all.
    """
    lengths = torch.tensor([len(each.completion.token_ids) for each in scored])
    buffer, penalty = algorithm.overlong_tokens(max_tokens), algorithm.overlong_penalty
    overlong = advantages.overlong_penalty(lengths, max_tokens, buffer, penalty).tolist()
    truncated = [algorithm.missing_eos_penalty * (not each.completion.finished) for each in scored]
    rows = zip(scored, overlong, truncated, strict=True)
    return [replace(each, score=each.score - late - cut) for each, late, cut in rows]
