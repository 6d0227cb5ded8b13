"""The outcomes of all ranks' answers to a set of questions, and their metrics.

Every rank gets the outcome of every question in one collective call, and computes the metrics by itself. So they are
the same to the last bit on any number of ranks. Left out: the formulas (rlx.algorithms.sampled_answers), and the files
of outcomes (rlx.samples.evaluations).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from rlx.algorithms.sampled_answers import majority, pass_at_k, standard_error
from rlx.config.sections.data import EvalSetConfig, error_of
from rlx.samples.evaluations import Outcomes
from rlx.training.evaluation.sets import QuestionSet
from rlx.training.trainer import Trainer
from rlx.types import ScoredCompletion

_PLAIN = 3  # numbers of a question: its source, its checksum, the vote of the majority


def gather_outcomes(trainer: Trainer, questions: QuestionSet, scored: Sequence[ScoredCompletion]) -> Outcomes:
    """The outcomes of a set on all ranks; `scored`: this rank's answers. A collective call."""
    samples = len(questions.samplings)
    table = torch.zeros(questions.size, _PLAIN + 3 * samples, dtype=torch.float64)  # [N, ...], of other ranks 0
    for start in range(0, len(scored), samples):
        group = scored[start : start + samples]
        table[group[0].completion.prompt.id] = torch.tensor(_numbers(group), dtype=torch.float64)
    numbers = trainer.mesh.all_reduce_sum(table.to(trainer.device)).cpu().numpy()
    plain, grids = numbers[:, :_PLAIN], numbers[:, _PLAIN:].reshape(questions.size, 3, samples)
    return Outcomes(
        sources=tuple(questions.labels[int(number)] for number in plain[:, 0]),
        rows=np.arange(questions.size),
        checksums=plain[:, 1].astype(np.uint32),
        right=grids[:, 0] > 0,
        scores=grids[:, 1],
        lengths=grids[:, 2].astype(np.int32),
        majority=plain[:, 2],
    )


def _numbers(group: Sequence[ScoredCompletion]) -> list[float]:
    """The numbers of one question, by its scored samples."""
    prompt, right = group[0].completion.prompt, [each.is_correct for each in group]
    checksum = zlib.crc32(np.array(prompt.token_ids, np.int32).tobytes())
    vote = majority([each.answer for each in group], right)
    lengths = [each.completion.num_drawn for each in group]
    return [prompt.source, checksum, vote, *right, *(each.score for each in group), *lengths]


def eval_metrics(eval_set: EvalSetConfig, outcomes: Outcomes) -> dict[str, float]:
    """The metrics of one of eval.sets with their standard errors, which one question alone does not have."""
    right = outcomes.right.sum(1).tolist()
    columns = [
        outcomes.right.mean(1),
        *([pass_at_k(eval_set.samples, count, k) for count in right] for k in eval_set.counts),
        *([outcomes.majority] if eval_set.samples > 1 else []),
        outcomes.scores.mean(1),
        outcomes.lengths.mean(1),
    ]
    metrics: dict[str, float] = {}
    for name, column in zip(eval_set.metrics, columns, strict=True):
        values = [float(value) for value in column]
        metrics |= {name: math.fsum(values) / len(values), error_of(name): standard_error(values)}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
