"""Two branches from one checkpoint, a control and one with other settings, compared question by question.

Both saw the same prompts with the same seeds, and the control is the run itself, so what differs comes from the
settings alone. Intervals are over questions, or prompts: they say nothing of other seeds. Left out: running the two
(branches.py), and whether the control is the run (comparing.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlx.analysis.statistics import Estimate, mean_interval
from rlx.config.errors import ConfigError
from rlx.config.experiment import followers
from rlx.config.loading import from_tree, with_overrides
from rlx.replay import branches
from rlx.replay.branches import Branch
from rlx.replay.comparing import step_completions
from rlx.replay.recorded import RecordedRun, change_within
from rlx.runs import run_folder
from rlx.samples import evaluations
from rlx.storage.filesystem import Storage

_OWN = ("name", "storage", "tracking.completions")
"""settings that a branch is given by rlx"""
_ROUNDING = 1e-12  # relative, and absolute around 0


@dataclass(frozen=True)
class Paired:
    """The same questions in both branches."""

    what: str  # the evaluation, or the training prompts of steps
    step: int  # steps done before the evaluation; the last of those of training
    questions: int
    control: float  # mean over the questions
    changed: float
    difference: Estimate  # changed - control, with the 95 % interval over questions
    better: int  # questions with a higher value than in the control
    worse: int


def pair_of(
    run: RecordedRun, step: int, steps: int, changes: Mapping[str, Any], *, trust: bool = False
) -> tuple[Branch, Branch]:
    """Returns two branches of so many steps from a checkpoint: one as the run is, one with changed settings.

    Defaults that follow changed settings change with them, if they can within a run.

    Raises:
        ConfigError: the run has no checkpoint of that step, or a setting cannot change within a run.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps}: at least 1")
    start = run.at(step)
    if start is None:
        known = ", ".join(str(each.step) for each in run.checkpoints) or "none"
        raise ConfigError(
            f"run {run.name} has no checkpoint of step {step}: there are {known}; --checkpoint.keep-every keeps more"
        )
    if own := [key for key in changes if key in _OWN]:
        raise ConfigError(f"--set {own[0]}: each branch has its own")
    if "train.steps" in changes:
        raise ConfigError("--set train.steps: --steps says how far both branches go")
    if fixed := [key for key in changes if run_folder.is_fixed(key)]:
        raise ConfigError(f"{fixed[0]} cannot change within a run: start a new one with rlx train")
    control = Branch(run, start, step + steps, trust=trust)
    _refuse_changes(run, control.steps)
    recorded = from_tree(control.tree())
    if unchanged := [key for key in changes if not _has_effect(key, control.tree(), changes)]:
        raise ConfigError(f"--set {unchanged[0]}={changes[unchanged[0]]}: that is its value in run {run.name}")
    longer = {"train.steps": control.until} if control.until > recorded.train.steps else {}
    if longer and recorded.train.lr_schedule != "constant":
        raise ConfigError(
            f"--steps {steps}: run {run.name} ends with step {recorded.train.steps}, and its learning rate follows "
            f"train.steps (lr_schedule {recorded.train.lr_schedule}): at most {recorded.train.steps - step} steps"
        )
    following = {
        key: value for key, value in followers(control.tree(), changes).items() if not run_folder.is_fixed(key)
    }
    return (
        Branch(run, start, control.until, longer, trust),
        Branch(run, start, control.until, {**longer, **following, **changes}, trust),
    )


def _refuse_changes(run: RecordedRun, steps: range) -> None:
    """Raises ConfigError if not all steps of a control were done with the settings of its first one."""
    start = steps[0] - 1
    branches.refuse_unknown(run, steps[0], f"{run.name}@{start}")
    if change := change_within(run, steps):
        at, keys = change
        later = f", or start from {run.name}@{at}" if run.at(at) else ""
        raise ConfigError(
            f"--steps {len(steps)}: a resume of run {run.name} changed {', '.join(keys)} after step {at}: "
            f"at most {at - start} steps from {run.name}@{start}{later}"
        )


def _has_effect(key: str, tree: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether a change makes other settings of a tree, as they are understood: 1e-6 is 0.000001."""
    without = {other: value for other, value in changes.items() if other != key}
    with suppress(ConfigError):
        return from_tree(with_overrides(dict(tree), changes)) != from_tree(with_overrides(dict(tree), without))
    return True


def pair_names(runs: Storage, run: RecordedRun, step: int) -> tuple[str, str]:
    """Returns the first free names of a control and of the branch beside it."""
    start, taken, number = f"{branches.stem(run)}-at-{step}", set(runs.names()), 1
    while {f"{start}-{number}.{kind}" for kind in ("control", "changed")} & taken:
        number += 1
    return f"{start}-{number}.control", f"{start}-{number}.changed"


def paired_evaluations(control: Storage, changed: Storage, after: int) -> list[Paired]:
    """Compares the evaluations that both branches have made after a step, each over its questions.

    Raises:
        ConfigError, StorageError: the outcomes cannot be read.
    """
    both = set(evaluations.kept_evaluations(control)) & set(evaluations.kept_evaluations(changed))
    rows = []
    for file in sorted(each for each in both if each.step > after):
        values = []
        for folder in (control, changed):
            outcomes = evaluations.read_outcomes(folder, file)
            values.append(dict(zip(outcomes.questions, outcomes.right.mean(axis=1).tolist(), strict=True)))
        rows += _paired(file.name, file.step, *values)
    return rows


def paired_prompts(control: Storage, changed: Storage, steps: Sequence[int]) -> list[Paired]:
    """Compares the scores of the training prompts that both branches had in each step; one row, if there are any.

    Raises:
        ConfigError, StorageError: the completions cannot be read.
    """
    values: list[dict[str, float]] = [{}, {}]
    for step in steps:
        scores = [prompt_scores(folder, step) for folder in (control, changed)]
        for own, other in zip(values, scores, strict=True):
            own |= {f"{step}/{group}": score for group, score in other.items()}
    return _paired("training prompts", steps[-1], *values)


def prompt_scores(run: Storage, step: int) -> dict[int, float]:
    """The mean score of each prompt of a step of training, by its id; empty if nothing was kept."""
    table = step_completions(run, step)
    if table is None:
        return {}
    means = table.group_by("group").aggregate([("score", "mean")])
    return dict(zip(means["group"].to_pylist(), means["score_mean"].to_pylist(), strict=True))


def _paired(what: str, step: int, control: Mapping[str, float], changed: Mapping[str, float]) -> list[Paired]:
    """One row on the questions that both have; none if they have none in common."""
    common = [each for each in control if each in changed]
    if not common:
        return []
    gaps = [_gap(control[each], changed[each]) for each in common]
    before, after = (math.fsum(values[each] for each in common) / len(common) for values in (control, changed))
    difference = Estimate(_gap(before, after), _gap(0.0, mean_interval(gaps).half_width))
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    return [Paired(what, step, len(common), before, after, difference, better, worse)]


def _gap(before: float, after: float) -> float:
    """The difference of two means; 0 if it is no more than the rounding of their sums, whose order may differ."""
    return 0.0 if math.isclose(before, after, rel_tol=_ROUNDING, abs_tol=_ROUNDING) else after - before
