"""What was logged against what came again: metrics by step, completions token by token, weights by checksum, and what
came of each question of an evaluation.

Values are equal if they are the same to the last bit; a gap may be allowed, for GPUs. Left out: tables (rlx.cli).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from rlx.config.errors import ConfigError
from rlx.replay.branches import MOVABLE, Branch
from rlx.replay.recorded import RecordedRun, StepMetrics
from rlx.samples import evaluations, reader
from rlx.samples.columns import Kind
from rlx.samples.evaluations import EvaluationFile
from rlx.storage import checkpoint_catalog
from rlx.storage.checkpoint_manifest import FileRecord
from rlx.storage.filesystem import Storage, StorageError
from rlx.tracking.metrics import MEASURED
from rlx.types import Episode


@dataclass(frozen=True)
class Compared:
    """One metric of one step, in the record and again."""

    step: int
    name: str
    logged: float | None  # None: it was not logged
    again: float | None

    @property
    def gap(self) -> float:
        """The difference relative to the larger value; 0 if both are the same to the last bit, or nan."""
        if self.logged is None or self.again is None:
            return math.inf
        if self.logged == self.again or (math.isnan(self.logged) and math.isnan(self.again)):
            return 0.0
        gap = abs(self.logged - self.again) / max(abs(self.logged), abs(self.again))
        return math.inf if math.isnan(gap) else gap


@dataclass(frozen=True)
class Comparison:
    """What a branch showed of a record."""

    metrics: tuple[Compared, ...]  # by step and name
    completions: tuple[str, ...] | None  # columns that differ in the last step; None: the run has not kept them
    weights: bool | None  # whether the weights of the last step are equal; None: the run has no checkpoint of it
    allowed: float = 0.0  # the relative gap up to which metrics count as equal
    questions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns that differ, by evaluation file

    @property
    def different(self) -> tuple[Compared, ...]:
        """The metrics that differ by more than is allowed."""
        return tuple(each for each in self.metrics if each.gap > self.allowed)

    @property
    def holds(self) -> bool:
        """Whether the record is confirmed: all but metrics counts only where metrics must be equal."""
        if self.different or not self.metrics:
            return False
        return self.allowed > 0 or not (self.completions or self.weights is False or self.forged)

    @property
    def forged(self) -> Mapping[str, tuple[str, ...]]:
        """The evaluation files that are not as they came again, each with its columns that differ."""
        return {file: columns for file, columns in self.questions.items() if columns}

    @property
    def largest(self) -> float:
        """The largest gap of a metric."""
        return max((each.gap for each in self.metrics), default=0.0)

    @property
    def first_fault(self) -> int | None:
        """The first step with a metric that differs."""
        return min((each.step for each in self.different), default=None)


def compare_metrics(logged: StepMetrics, again: StepMetrics, steps: Iterable[int]) -> tuple[Compared, ...]:
    """All metrics of the steps but those that no two runs have in common, such as times; by step and name."""
    return tuple(
        Compared(step, name, logged.get(step, {}).get(name), again.get(step, {}).get(name))
        for step in steps
        for name in sorted({*logged.get(step, {}), *again.get(step, {})})
        if not name.startswith(MEASURED)
    )


def compare(branch: Branch, folder: Storage, logged: StepMetrics, again: StepMetrics, allowed: float) -> Comparison:
    """Compares a branch that has been run with the record of its run.

    Args:
        folder: of the branch.
        logged, again: the metrics of the run and of the branch.
        allowed: the relative gap up to which metrics count as equal.
    """
    steps = [step for step in branch.steps if step in logged]
    return Comparison(
        compare_metrics(logged, again, steps),
        different_columns(branch.run.folder, folder, branch.until),
        same_weights(branch.run, folder, branch.until),
        allowed,
        different_questions(branch, folder, steps),
    )


def different_columns(run: Storage, again: Storage, step: int) -> tuple[str, ...] | None:
    """The columns in which the completions of a step of training differ, of the prompts that the run has kept.

    None if it has kept none of the step, or not those of all ranks.
    """
    kept = step_completions(run, step)
    found = step_completions(again, step)
    if kept is None or found is None:
        return None
    found = found.filter(pc.is_in(found["group"], pc.unique(kept["group"])))
    if len(found) != len(kept):
        return ("group",)
    # A file has the rewards of its own rows alone: those of prompts that were not kept are empty here.
    empty = {name for name in found.column_names if found[name].null_count == len(found)}
    names = dict.fromkeys([*kept.column_names, *(name for name in found.column_names if name not in empty)])
    return tuple(name for name in names if _values(kept, name) != _values(found, name))


def different_questions(branch: Branch, again: Storage, steps: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """The columns that differ in each evaluation file that the run has kept of these steps; empty if it kept none.

    What a source is called is left out where the branch reads it from another place.
    """
    wanted, is_moved = set(steps), any(key in branch.changes for key in MOVABLE if key.endswith("source"))
    found, there = {}, set(evaluations.kept_evaluations(again))
    for file in evaluations.kept_evaluations(branch.run.folder):
        if file.step in wanted:
            # A storage is asked several times for what is not there.
            before, after = _columns(branch.run.folder, file), _columns(again, file) if file in there else {}
            names = [name for name in {**before, **after} if name != "sources" or not is_moved]
            found[str(file)] = tuple(name for name in names if before.get(name) != after.get(name))
    return found


def _columns(run: Storage, file: EvaluationFile) -> dict[str, str]:
    """The columns of an evaluation file as texts, by which no bit is lost; empty if it is damaged or not there."""
    try:
        columns = asdict(evaluations.read_outcomes(run, file))
    except (ConfigError, StorageError):
        return {}
    return {name: repr(list(column) if name == "sources" else column.tolist()) for name, column in columns.items()}


def step_completions(run: Storage, step: int) -> pa.Table | None:
    """The completions that a step of a run trained on; None if they were not kept, or not those of all ranks."""
    of_step = (each for each in reader.kept_steps(run) if (each.number, each.kind) == (step, Kind.TRAINING))
    kept = next(of_step, None)
    return None if kept is None or kept.missing else reader.read(run, kept)


def _values(table: pa.Table, name: str) -> Sequence[Episode | str] | None:
    """The values of a column as texts, by which nan is equal to itself and no bit is lost.

    Episodes are equal however long their environments took, and however often a call was made again.
    """
    if name not in table.column_names:
        return None
    values = table[name].to_pylist()
    return list(map(_episode, values)) if name == "episode" else list(map(repr, values))


def _episode(text: str | None) -> Episode | str:
    """What an episode's JSON says; of other texts, and of no episode, the text."""
    try:
        return Episode.of_json(text or "")
    except (ValueError, TypeError, KeyError):
        return repr(text)


def same_weights(run: RecordedRun, again: Storage, step: int) -> bool | None:
    """Whether the weights and the optimizer's state after a step have the same checksums; None: there are not two."""
    before = run.at(step)
    after = checkpoint_catalog.read_checkpoint(again / checkpoint_catalog.checkpoint_name(step)).manifest
    if before is None or before.manifest is None or after is None or before.manifest.ranks != after.ranks:
        return None
    return _checksums(before.manifest.files) == _checksums(after.files)


def _checksums(files: Mapping[str, FileRecord]) -> dict[str, str]:
    return {name: file.sha256 for name, file in files.items()}
