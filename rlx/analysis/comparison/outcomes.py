"""What the runs of a setting answered, question by question, at each evaluation: read from the runs' folders.

Left out: writing these files (rlx.samples.evaluations), and comparing settings by them (`pairs`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlx.algorithms.sampled_answers import pass_at_k
from rlx.analysis.loading import SettingValue, Trial
from rlx.analysis.statistics import SEED, Group
from rlx.config.errors import ConfigError
from rlx.samples import evaluations
from rlx.samples.evaluations import AVERAGED, HELD_OUT, EvaluationFile, Outcomes
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage, StorageError
from rlx.tracking.services import mlflow

_TOLERANCE = 1e-6  # between the mean over a file's questions and the value that was logged
_PLAIN = ("accuracy", "reward", "length")  # of the held-out questions; before the name of a source, of its alone
WHOLE = "all questions"
"""the one question of a run that has kept nothing but the mean over all of them"""


class Judged(NamedTuple):
    """The set of questions and the quantity that a metric is of: eval/aime/pass_at_4 is (aime, pass_at_4)."""

    name: str
    quantity: str

    @classmethod
    def of(cls, metric: str) -> Judged | None:
        """What a metric is of; None if it is no evaluation's, or only that of the questions of one source."""
        parts = metric.split("/")
        if parts[0] != "eval" or len(parts) not in (2, 3) or (len(parts) == 3 and parts[1] in _PLAIN):
            return None
        names = {"ema": AVERAGED}
        return cls(HELD_OUT if len(parts) == 2 else names.get(parts[1], parts[1]), parts[-1])


def question_values(outcomes: Outcomes, quantity: str) -> NDArray[np.float64] | None:
    """The value of each question, [N], of which the metric is the mean; None if questions do not have this one."""
    samples = outcomes.right.shape[1]
    if quantity in ("accuracy", f"avg_at_{samples}"):
        return np.asarray(outcomes.right.mean(axis=1))
    if quantity.startswith("pass_at_"):
        k = int(quantity.removeprefix("pass_at_"))
        return np.array([pass_at_k(samples, int(right), k) for right in outcomes.right.sum(axis=1)])
    if quantity.startswith("maj_at_"):
        return outcomes.majority
    grids = {"reward": outcomes.scores, "length": outcomes.lengths}
    return np.asarray(grids[quantity].mean(axis=1)) if quantity in grids else None


@dataclass(eq=False)
class EvaluatedRun:
    """One run of a setting, and the value of each question at its evaluations."""

    trial: Trial
    metric: str
    run: Storage | None  # its folder, if it is still there
    kept: frozenset[int] = frozenset()  # steps whose outcomes are
    _read: dict[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, uri: str, trial: Trial, metric: str) -> EvaluatedRun:
        """The run of a trial; without a folder if it has several, or none that can be read."""
        judged = Judged.of(metric)
        run = _run_folder(uri, trial) if judged and not trial.origins else None
        if not judged or not run:
            return cls(trial, metric, None)
        try:
            files = evaluations.kept_evaluations(run)
        except (StorageError, OSError):  # the analysis of a sweep may outlive its runs
            return cls(trial, metric, None)
        return cls(trial, metric, run, frozenset(file.step for file in files if file.name == judged.name))

    @property
    def judged(self) -> Judged | None:
        """The questions and the quantity that its metric is of."""
        return Judged.of(self.metric)

    @property
    def seed(self) -> SettingValue:
        return self.trial.settings.get(SEED)

    def outcomes(self, step: int) -> Outcomes | None:
        """What came of each question; None if that was not kept or cannot be read."""
        if not self.judged or not self.run or step not in self.kept:
            return None
        try:
            return evaluations.read_outcomes(self.run, EvaluationFile(step, self.judged.name))
        except (ConfigError, StorageError):
            return None

    def values(self, step: int) -> Mapping[str, float]:
        """The value of each question by its id; empty if they are not known, or their mean is not the logged one."""
        if step not in self._read:
            outcomes = self.outcomes(step)
            each = question_values(outcomes, self.judged.quantity) if outcomes and self.judged else None
            self._read[step] = {}
            if outcomes and each is not None and self._is_as_logged(step, float(each.mean())):
                self._read[step] = dict(zip(outcomes.questions, each.tolist(), strict=True))
        return self._read[step]

    def _is_as_logged(self, step: int, mean: float) -> bool:
        """Whether the mean over the questions is the value that was logged; if not, says so once."""
        logged = self.mean(step).get(WHOLE, mean)
        if self.run and self.judged and not math.isclose(mean, logged, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            file = self.run / evaluations.EVALUATIONS / str(EvaluationFile(step, self.judged.name))
            _warn(f"{file} is left out: the mean of {self.metric} is {mean:g} there, but {logged:g} was logged")
            return False
        return True

    def mean(self, step: int) -> Mapping[str, float]:
        """The metric as it was logged, as if it were one question; empty if it was not."""
        curve = self.trial.curve(self.metric)
        return {WHOLE: float(curve[step])} if step in curve.index else {}

    @property
    def steps(self) -> set[int]:
        """The steps at which the metric is known."""
        return set(map(int, self.trial.curve(self.metric).index))


def evaluated_runs(uri: str, group: Group, metric: str) -> Sequence[EvaluatedRun]:
    """The runs of a setting that have ended, one for each seed, in the order of the seeds."""
    by_seed = {trial.settings.get(SEED): trial for trial in reversed(group.ended)}  # of several, the best
    return [EvaluatedRun.of(uri, by_seed[seed], metric) for seed in sorted(by_seed, key=_order)]


def _run_folder(uri: str, trial: Trial) -> Storage | None:
    """The folder of a trial's run in the storage that its settings name; None if that is out of reach."""
    run = mlflow.get_run(uri, trial.run_ids[-1])
    storage, folder = _storage(run.params.get("storage", "")), run.tags.get("rlx.folder")
    return Storage(storage.filesystem, folder) if storage and folder else None


@functools.cache
def _storage(address: str) -> Storage | None:
    """The storage at an address; asked once, since one that does not answer takes its time."""
    try:
        return open_storage(address, create=False)
    except StorageError:
        return None


@functools.cache
def _warn(line: str) -> None:
    """Prints a warning, once."""
    print(f"warning: {line}", file=sys.stderr)


def _order(seed: SettingValue) -> tuple[bool, float, str]:
    is_number = isinstance(seed, int | float)
    return not is_number, float(seed) if isinstance(seed, int | float) else 0.0, str(seed)
