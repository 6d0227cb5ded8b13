"""Which of a run's completions are shown: steps that are spread over the run, and in each the same prompts.

Everything is a function of what was kept, so two pages of the same run are equal, and two runs on the same prompts show
the same ones. Left out: how they are shown (page.py, rlx.cli.samples).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from rlx.config.errors import ConfigError, nearest
from rlx.samples import reader
from rlx.samples.columns import Kind
from rlx.samples.reader import KeptCompletion, KeptStep
from rlx.storage.filesystem import Storage


@dataclass(frozen=True)
class PageLimits:
    """The most that is shown, over all steps of all runs."""

    steps: int = 12  # of a run and kind
    completions: int = 2000
    tokens: int = 300_000


@dataclass(frozen=True)
class ShownStep:
    """A step's completions, or an evaluation's, of which `rows` are shown."""

    run: str
    kind: Kind
    step: int
    rows: tuple[KeptCompletion, ...]
    kept: int  # completions that the files have


def kept_of(run: Storage, name: str, numbers: Sequence[int] = ()) -> list[KeptStep]:
    """The steps and evaluations of a run, all or those after so many steps.

    Raises:
        ConfigError: nothing was kept of the run, or of such a step.
    """
    steps = reader.kept_steps(run)
    if not steps:
        raise ConfigError(f"run {name} has kept no completions: tracking.completions was 0, or it has not made any yet")
    known = [str(step.number) for step in steps]
    for number in numbers:
        if str(number) not in known:
            raise ConfigError(f"run {name} has kept no completions of step {number}{nearest(str(number), known)}")
    return [step for step in steps if not numbers or step.number in numbers]


def spread(steps: Sequence[KeptStep], count: int) -> list[KeptStep]:
    """At most so many of each kind, at equal distances, the first and the last among them."""
    chosen = []
    for kind in Kind:
        own = [step for step in steps if step.kind == kind]
        gaps = max(1, count - 1)
        chosen += own if len(own) <= count else [own[i * (len(own) - 1) // gaps] for i in range(count)]
    return sorted(chosen, key=lambda step: (step.number, step.kind))


def shown(runs: Sequence[tuple[str, Storage, Sequence[KeptStep]]], limits: PageLimits | None = None) -> list[ShownStep]:
    """What a page shows of runs, each given by its name, its folder and its steps.

    Steps that have kept nothing are left out.

    Raises:
        ConfigError, StorageError: a file cannot be read.
    """
    limits = limits or PageLimits()
    chosen = [(name, run, step) for name, run, steps in runs for step in spread(steps, limits.steps)]
    result, left = {}, limits
    # Evaluations first, which are smaller: what they leave is for the steps.
    order = sorted(range(len(chosen)), key=lambda place: chosen[place][2].kind)
    for done, place in enumerate(order):
        name, run, step = chosen[place]
        table, share = reader.read(run, step), len(chosen) - done
        few = within(table, left.completions // share, left.tokens // share)
        left = replace(left, completions=left.completions - len(few), tokens=left.tokens - num_tokens(few))
        result[place] = ShownStep(name, step.kind, step.number, tuple(reader.completions(few)), len(table))
    return [result[place] for place in range(len(chosen)) if result[place].rows]


def within(table: pa.Table, completions: int, tokens: int) -> pa.Table:
    """Whole prompts within the limits, in an order that follows from their texts; at least one completion."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(table["group"].to_pylist()):
        places.setdefault(group, []).append(place)
    questions, lengths = table["question"].to_pylist(), pc.list_value_length(table["tokens"]).to_pylist()
    chosen: list[int] = []
    for group in sorted(places, key=lambda group: (_rank(questions[places[group][0]]), group)):
        size = sum(lengths[place] for place in places[group])
        if len(chosen) + len(places[group]) <= completions and size <= tokens:
            chosen += places[group]
            tokens -= size
    return table.take(sorted(chosen)) if chosen else table.slice(0, 1)


def num_tokens(table: pa.Table) -> int:
    return int(pc.sum(pc.list_value_length(table["tokens"])).as_py() or 0)


def of_prompt(table: pa.Table, index: int) -> pa.Table:
    """The completions of the prompt in a row of the prompt table."""
    return table.filter(pc.equal(table["prompt_index"], index))


def by_score(table: pa.Table, worst: int | None, best: int | None) -> pa.Table:
    """The completions with the lowest scores, lowest first, or with the highest, highest first; or all as they are.

    Those of equal scores keep their order.
    """
    if worst is None and best is None:
        return table
    scores, sign = table["score"].to_pylist(), 1 if best is None else -1
    order = sorted(range(len(scores)), key=lambda place: sign * scores[place])
    return table.take(pa.array(order[: worst if best is None else best], pa.int64()))


def _rank(question: str) -> bytes:
    return hashlib.blake2b(question.encode(errors="replace"), digest_size=8).digest()
