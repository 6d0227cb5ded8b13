"""A run as its folder and MLflow have recorded it: with which settings a step was done, and what was logged of it.

Everything is read alone. Left out: doing steps again (branches.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, steps_differ_in
from rlx.config.sections.data import EvalConfig
from rlx.config.sections.records import TrackingConfig
from rlx.runs import preflight, run_folder
from rlx.samples import evaluations
from rlx.storage import checkpoint_catalog, signatures
from rlx.storage.addresses import storage_above
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import Storage
from rlx.tracking import changes, outbox
from rlx.tracking.services import mlflow, mlflow_errors
from rlx.tracking.services.reachable import check_mlflow

StepMetrics = Mapping[int, Mapping[str, float]]
"""metrics by step and name, as they were logged"""


@dataclass(frozen=True)
class RecordedRun:
    """A run, and those of its checkpoints that are complete."""

    address: str
    folder: Storage
    newest: Mapping[str, Any]  # its settings, those of its last resume
    checkpoints: tuple[CheckpointEntry, ...]  # oldest first
    changes: Mapping[int, Sequence[str]] = field(default_factory=dict)  # see `changes.noted_changes`

    @classmethod
    def read(cls, which: str, storage: str) -> RecordedRun:
        """Reads a run by its name, or by its folder or address; `storage`: the address where named runs are.

        Raises:
            ConfigError, StorageError: there is no such run, or its records cannot be read.
        """
        address, folder = run_folder.locate(which, storage)
        checkpoints, noted = checkpoint_catalog.complete_checkpoints(folder), changes.noted_changes(folder)
        return cls(address, folder, run_folder.saved_config(folder), tuple(checkpoints), noted)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def storage(self) -> str:
        """The address of the storage that the run lies in, also if it is a trial of a sweep."""
        return storage_above(self.address) or str(self.newest["storage"])

    @property
    def steps(self) -> int:
        """The last of its steps: how many it is to do in all, or has done, where a resume asked for fewer.

        What was logged of later steps, before a kill, is of no run that goes on.
        """
        done = self.checkpoints[-1].step if self.checkpoints else 0
        return max(from_tree(dict(self.newest)).train.steps, done)

    @property
    def every(self) -> int:
        """Steps between its checkpoints; 0: only the last step has one."""
        return from_tree(dict(self.newest)).checkpoint.every

    def evaluated_ends(self, evaluation: EvalConfig) -> frozenset[int]:
        """The steps that were evaluated though nothing was due: the run ended with them, for good or for a while."""
        every = {each.name: evaluation.of(each).every for each in evaluation.sets}
        kept = evaluations.kept_evaluations(self.folder)
        return frozenset(each.step for each in kept if each.step % (every.get(each.name, evaluation.every) or math.inf))

    def before(self, step: int) -> CheckpointEntry | None:
        """The newest checkpoint of an earlier step; None if there is none, so that only the start is left."""
        return next((each for each in reversed(self.checkpoints) if each.step < step), None)

    def at(self, step: int) -> CheckpointEntry | None:
        """The checkpoint of a step; None if it has none, or not any more."""
        return next((each for each in self.checkpoints if each.step == step), None)

    def after(self, step: int) -> CheckpointEntry | None:
        """The oldest checkpoint of a step or a later one; None if there is none."""
        return next((each for each in self.checkpoints if each.step >= step), None)

    def unknown_at(self, step: int) -> list[str]:
        """The settings of a step that nothing tells: a resume changed them, and where it began is deleted.

        It has noted them at a step between the checkpoints before and after the step. Resumes of earlier versions have
        noted nothing: there, the two checkpoints differ in them. Where none between the two can have been deleted, the
        resume went on from the first.
        """
        earlier, later = self.before(step), self.after(step)
        first, last = earlier.step if earlier else 0, later.step if later else self.steps
        changed = {key for at, keys in self.changes.items() if first < at < last for key in keys}
        if earlier and later and first not in self.changes and not self._has_all_since(earlier):
            changed |= steps_differ_in(_config_of(earlier), _config_of(later))
        return sorted(changed)

    def _has_all_since(self, checkpoint: CheckpointEntry) -> bool:
        """Whether no checkpoint after this one was deleted, as none is of the newest that a run keeps."""
        since = [each for each in self.checkpoints if each.step >= checkpoint.step]
        kept = [from_tree(_config_of(each)).checkpoint.keep_last for each in since]
        return all(count is None or len(since) <= count for count in kept)

    def settings_of(self, step: int, *, trust: bool = False, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings with which a step was done, as a tree: a resume may have changed some later.

        They are those of the next checkpoint, or the newest ones if none has followed.

        Args:
            trust: take all of them, whoever wrote them.
            given: settings that replace those of the run.

        Raises:
            ConfigError: somebody else wrote settings that name code, models, addresses or patterns.
        """
        later = self.after(step)
        following = later and later.manifest
        tree = dict(following.config if following else self.newest)
        if not trust:
            is_own = (
                signatures.is_own(following.config, following.signature)
                if following
                else signatures.is_own_folder(self.folder, tree)
            )
            run_folder.refuse_powers(self.name, self.folder, {} if is_own else tree, given or {})
        return tree


def change_within(run: RecordedRun, steps: range) -> tuple[int, list[str]] | None:
    """The first of some steps, but the last, after which a resume changed settings, with them; None if none did.

    Resumes of earlier versions have noted nothing: there, checkpoints tell which settings the steps after them had.
    """
    noted = {at: list(keys) for at, keys in run.changes.items() if keys}
    if not noted:
        first = run.settings_of(steps[0], trust=True)
        for each in run.checkpoints:
            noted[each.step] = sorted(steps_differ_in(first, run.settings_of(each.step + 1, trust=True)))
    return min(((at, keys) for at, keys in noted.items() if keys and at in steps[:-1]), default=None)


def _config_of(checkpoint: CheckpointEntry) -> dict[str, Any]:
    assert checkpoint.manifest
    return dict(checkpoint.manifest.config)


def logged_metrics(run: RecordedRun, uri: str | None = None, *, trust: bool = False) -> StepMetrics:
    """Everything that a run has logged.

    Args:
        uri: the MLflow store; None: the one that the run reported to.
        trust: ask there, whoever wrote the address: the user's own key for MLflow goes with the question.

    Raises:
        ConfigError: the run was not recorded in MLflow, or MLflow does not have it.
    """
    tracking = from_tree(dict(run.newest)).tracking
    if not (uri or trust or signatures.is_own_folder(run.folder, dict(run.newest))):
        run_folder.refuse_powers(run.name, run.folder, {"tracking": {"uri": tracking.uri}}, {})
    if "mlflow" not in tracking.backends:
        raise ConfigError(f"run {run.name} was not recorded in MLflow (tracking.backends): nothing to compare with")
    run_id = outbox.run_id(run.folder)
    if not run_id:
        raise ConfigError(f"the records of run {run.name} still wait in {run.folder}/outbox: resume it first")
    return metrics_of(store_of(run, tracking, uri), run_id)


def store_of(run: RecordedRun, tracking: TrackingConfig, uri: str | None = None) -> str:
    """The address of the MLflow store that a run reported to, or of the given one instead."""
    check_mlflow(uri or tracking.uri)
    return uri or preflight.tracking_uri(tracking, run.storage)


def metrics_of(uri: str, run_id: str) -> StepMetrics:
    """All metrics of an MLflow run; of a value that was logged twice, the last: a resume may have changed settings.

    Raises:
        ConfigError: the store cannot be read, or does not have the run.
    """
    by_step: dict[int, dict[str, float]] = {}
    try:
        for name in mlflow.get_run(uri, run_id).metrics:
            for point in sorted(mlflow.history(uri, run_id, name), key=lambda point: point.at_ms):
                by_step.setdefault(point.step, {})[name] = point.value
    except Exception as error:  # the error type depends on the kind of store
        raise ConfigError(f"MLflow at {mlflow_errors.without_password(uri)}: {mlflow_errors.cause(error)}") from None
    return dict(sorted(by_step.items()))
