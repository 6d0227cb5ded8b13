"""The questions that two settings answer differently, most first, with an answer of each.

Texts are those that the runs have kept of their held-out prompts (`tracking.completions`); other questions have only
their ids. Left out: whether the settings differ at all (`pairs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlx.analysis.comparison.outcomes import EvaluatedRun
from rlx.analysis.comparison.pairs import PairedGap
from rlx.config.errors import ConfigError
from rlx.samples import reader
from rlx.samples.columns import Kind
from rlx.samples.evaluations import HELD_OUT
from rlx.storage.filesystem import StorageError

_COLUMNS = ["prompt_index", "sample", "question", "expected", "completion"]


@dataclass(frozen=True)
class Flip:
    """A question that two settings answer differently; values are means over the paired runs."""

    question: str  # its text, or its id
    expected: str  # answer; empty if it was not kept
    first: float
    second: float
    answers: tuple[str, str]  # a completion of each, empty if it was not kept


def flipped(pair: PairedGap, most: int = 20) -> tuple[int, int, list[Flip]]:
    """How many questions the first setting answers better, how many the second does, and the largest differences.

    Nothing is known of them if the runs have not kept the outcomes of their questions.
    """
    if not pair.is_by_question:
        return 0, 0, []
    first, second = (table.mean(axis=0) for table in pair.tables)
    gaps = pair.sign * (first - second)  # above 0 where the first is better, also where low is good
    order = [int(i) for i in np.argsort(-np.abs(gaps), kind="stable") if gaps[i]][:most]
    texts = [_texts([runs[side] for runs in pair.runs], pair.steps[side]) for side in (0, 1)]
    flips = []
    for index in order:
        row = row_of(pair.questions[index])
        kept = [side.get(row, ("", "", "")) for side in texts]
        question, expected = kept[0][:2] if kept[0][0] else kept[1][:2]
        answers = (kept[0][2], kept[1][2])
        flips.append(
            Flip(question or pair.questions[index], expected, float(first[index]), float(second[index]), answers)
        )
    return int(np.sum(gaps > 0)), int(np.sum(gaps < 0)), flips


def row_of(question: str) -> int:
    """The row of the prompt table in the id of a question: source/row/checksum."""
    return int(question.rsplit("/", 2)[1])


def _texts(runs: Sequence[EvaluatedRun], step: int) -> Mapping[int, tuple[str, str, str]]:
    """Question, expected answer and completion by row, of the first run that has kept them."""
    found: dict[int, tuple[str, str, str]] = {}
    for run in runs:
        if run.judged and run.judged.name == HELD_OUT and run.run:
            found = _kept(run, step) | found
    return found


def _kept(run: EvaluatedRun, step: int) -> dict[int, tuple[str, str, str]]:
    assert run.run
    try:
        steps = [each for each in reader.kept_steps(run.run) if each.kind is Kind.HELD_OUT and each.number == step]
        rows = reader.read(run.run, steps[0]).select(_COLUMNS).to_pylist() if steps else []
    except (ConfigError, StorageError):  # texts are an extra
        return {}
    return {each["prompt_index"]: (each["question"], each["expected"] or "", each["completion"]) for each in rows}
