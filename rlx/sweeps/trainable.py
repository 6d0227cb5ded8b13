"""A trial of a sweep in its own process: a function trainable that does one run and passes its reports on to Tune.

The process stays for the next trial, and the run's engines and workers with it.
Left out: which trials there are (`trial_source`) and when they stop (`schedulers`).
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.trainable.function_trainable import wrap_function

from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import DEFAULT_METRIC, flatten
from rlx.runs import launch, preflight
from rlx.runs.launch import Parent
from rlx.runs.run_folder import exists, saved_config
from rlx.storage.addresses import join_address
from rlx.storage.filesystem import Storage
from rlx.sweeps import space
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialRecords
from rlx.sweeps.schedulers import PAUSING, REPLAYING

_POINTER = "pointer.json"
_START = ("checkpoint.init_from", "checkpoint.init_state")


@dataclass(frozen=True)
class Attempt:
    """One run of a trial.

    A trial is one run, NAME. It gets a further one, NAME.2 and so on, each time it is started again from step 0 or
    continues from another trial's checkpoint.
    """

    trial: str
    name: str
    start: Mapping[str, Any] = field(default_factory=dict)  # the settings that name the checkpoint it starts from

    @property
    def is_first(self) -> bool:
        return self.name == self.trial


def trainable(plan: SweepPlan, storage: Storage) -> Any:
    """Returns a trial in the form that Tune asks for; Tune reserves all that the trial's run needs at once."""
    tables = _shared_tables(plan)

    def trial(settings: dict[str, Any]) -> None:
        _run_trial(plan, storage, settings, ray.get(tables) if tables else None)

    class Trainable(wrap_function(trial, name="trial")):  # type: ignore[misc]
        # Tune pickles the class by value: imports inside the methods are those of the trial's process.
        def reset_config(self, new_config: dict[str, Any]) -> bool:  # another trial follows in this process
            from rlx.runs.launch import kept_group

            kept_group.stop()
            os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"
            return bool(super().reset_config(new_config))

        def cleanup(self) -> None:  # no other trial follows
            from rlx.runs.launch import kept_group

            kept_group.stop()
            kept_group.release()
            super().cleanup()

    Trainable.__name__ = "trial"
    needed = plan.resources
    bundles = tune.PlacementGroupFactory([{}, *needed.bundles], strategy=needed.strategy)  # {}: the trial's own process
    return tune.with_resources(Trainable, bundles)


def _shared_tables(plan: SweepPlan) -> Any:
    """Puts the prompt tables into the object store, once for all trials; None if the trials' prompts differ."""
    decisive = ("data.", "eval.", "model.")
    if any(key.startswith(decisive) for key in space.load_space(plan.space, plan.tree)):
        return None
    config = plan.config
    return ray.put(preflight.prompt_tables(config, preflight.model_folder(config.model.path, config.storage)))


def _run_trial(plan: SweepPlan, storage: Storage, settings: dict[str, Any], tables: Any) -> None:
    """Does a trial's run, or its remaining steps, in the trial's own process."""
    name, folder = tune.get_context().get_trial_name(), storage / "sweeps" / plan.name
    record = TrialRecords(folder).read(name)
    if plan.scheduler in REPLAYING:
        for step, accuracy in record.reports:
            tune.report({"step": step, DEFAULT_METRIC: accuracy})
    if record.is_over:
        return
    attempt = _current_attempt(plan, folder, name, record.model_copy(update={"settings": settings}))
    overrides = {**settings, **attempt.start, "name": f"{plan.name}.{attempt.name}"}
    prepared = preflight.prepare(from_tree(with_overrides(plan.tree, overrides)), tables=tables)
    launch.connect(prepared.config.ray_address, prepared.resources)
    runs = folder / "runs"
    launch.run(
        prepared,
        runs / attempt.name,
        resume=exists(runs / attempt.name),
        parent=Parent(folder if attempt.is_first else runs / name, _tags(plan.name, attempt)),
        on_report=functools.partial(_report_to_tune, plan.scheduler in PAUSING),
        keep=True,
    )


def _report_to_tune(with_checkpoint: bool, metrics: dict[str, Any], checkpoint: str | None) -> None:
    if checkpoint is None or not with_checkpoint:
        tune.report(metrics)
        return
    with tempfile.TemporaryDirectory() as pointer:  # Tune's checkpoint holds the name of ours
        Path(pointer, _POINTER).write_text(json.dumps(checkpoint.split("/")[-2:]))
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(pointer))


def _current_attempt(plan: SweepPlan, folder: Storage, name: str, record: TrialRecord) -> Attempt:
    """Returns the run that a trial continues or begins; `record` has the settings that Tune gives it now."""
    newest, start = newest_attempt(folder, name), _start_from_other(plan, name)
    saved_folder = folder / "runs" / newest
    if start:
        saved = saved_config(saved_folder)
        is_same = with_overrides(saved, {**record.settings, **start}) == saved
        return Attempt(name, newest if is_same else f"{name}.{attempt_number(newest) + 1}", start)
    if attempt_number(newest) >= record.attempts and exists(saved_folder):
        saved = flatten(from_tree(saved_config(saved_folder)))
        return Attempt(name, newest, {key: saved[key] for key in (*record.settings, *_START)})  # as it began
    return Attempt(name, name if record.attempts == 1 else f"{name}.{record.attempts}")


def newest_attempt(folder: Storage, trial: str) -> str:
    """Returns the name of a trial's last run so far; of its first one if there is none yet."""
    runs = folder / "runs"
    attempts = [name for name in runs.names() if name.partition(".")[0] == trial and exists(runs / name)]
    return max(attempts, key=attempt_number, default=trial)


def attempt_number(attempt: str) -> int:
    """Returns 1 for NAME, 2 for NAME.2 and so on."""
    return int(attempt.partition(".")[2] or 1)


def _start_from_other(plan: SweepPlan, name: str) -> dict[str, Any]:
    """Returns the settings by which a run starts from another trial's checkpoint, if Tune has given the trial one."""
    handed_over = tune.get_checkpoint()
    if handed_over is None:
        return {}
    with handed_over.as_directory() as pointer:
        attempt, step = json.loads(Path(pointer, _POINTER).read_text())
    if attempt.partition(".")[0] == name:
        return {}
    address = join_address(plan.config.storage, "sweeps", plan.name, "runs", attempt, step)
    return dict(zip(_START, (address, "all"), strict=True))


def _tags(sweep: str, attempt: Attempt) -> dict[str, str]:
    """Returns the tags by which a trial's runs are found in MLflow."""
    tags = {"rlx.sweep": sweep, "rlx.trial": attempt.trial}
    if not attempt.is_first:
        tags["rlx.kind"] = "attempt"
    if source := attempt.start.get("checkpoint.init_from"):
        donor, step = source.partition("?")[0].split("/")[-2:]
        tags["rlx.from"] = f"{donor.partition('.')[0]}@{int(step.rpartition('_')[2])}"
    return tags
