"""A trial of a sweep, in its own process: a function trainable that relays the reports of one launch.run.

The process stays for the next trial, and with it the engines and workers. Which trials there are is trials.py's.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.trainable.function_trainable import wrap_function

from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import DEFAULT_METRIC, flatten
from rlx.runs import launch, preflight
from rlx.runs.resources import plan_resources
from rlx.runs.run_folder import exists, saved_config
from rlx.storage.addresses import join_address
from rlx.storage.filesystem import Storage
from rlx.sweeps import space
from rlx.sweeps.records import SweepPlan, TrialRecords
from rlx.sweeps.schedulers import PAUSING, REPLAYING

_POINTER = "pointer.json"
_START = ("checkpoint.init_from", "checkpoint.init_state")


def trainable(sweep: SweepPlan, storage: Storage) -> Any:
    """A trial as Tune wants it, with all that its run needs reserved at once."""
    tables = _shared_tables(sweep)

    def trial(settings: dict[str, Any]) -> None:
        _run_trial(sweep, storage, settings, ray.get(tables) if tables else None)

    class Trainable(wrap_function(trial, name="trial")):  # type: ignore[misc]
        # The class is pickled by value: what it imports is the trial process's own.
        def reset_config(self, new_config: dict[str, Any]) -> bool:  # another trial follows in this process
            from rlx.runs import launch

            launch.stop()
            os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"
            return bool(super().reset_config(new_config))

        def cleanup(self) -> None:  # no other follows
            from rlx.runs import launch

            launch.stop()
            launch.release()
            super().cleanup()

    Trainable.__name__ = "trial"
    needed = plan_resources(sweep.config)
    bundles = tune.PlacementGroupFactory([{}, *needed.bundles], strategy=needed.strategy)  # {}: the trial's own process
    return tune.with_resources(Trainable, bundles)


def _shared_tables(sweep: SweepPlan) -> Any:
    """The prompt tables in the object store, prepared once for all trials; None if the trials differ in prompts."""
    apart = ("data.", "eval.", "model.")
    if any(key.startswith(apart) for key in space.load_space(sweep.space, sweep.tree)):
        return None
    return ray.put(preflight.prompt_tables(sweep.config, preflight.model_folder(sweep.config)))


def _run_trial(sweep: SweepPlan, storage: Storage, settings: dict[str, Any], tables: Any) -> None:
    """In the trial's own process: one run, or the rest of one, its reports passed on to Tune."""
    name, folder = tune.get_context().get_trial_name(), storage / "sweeps" / sweep.name
    record = TrialRecords(folder).read(name)
    if sweep.scheduler in REPLAYING:
        for step, accuracy in record.reports:
            tune.report({"step": step, DEFAULT_METRIC: accuracy})
    if record.is_over:
        return
    leg, start = _attempt(sweep, folder, name, settings, record.begun)
    config = from_tree(with_overrides(sweep.tree, settings | start | {"name": f"{sweep.name}.{leg}"}))
    launch.connect(config)
    launch.run(
        config,
        folder / "runs" / leg,
        resume=exists(folder / "runs" / leg),
        parent=folder if leg == name else folder / "runs" / name,
        tags=_tags(sweep.name, name, leg, start),
        tables=tables,
        on_report=functools.partial(_relay, sweep.scheduler in PAUSING),
        keep=True,
    )


def _relay(hand_over: bool, metrics: dict[str, Any], checkpoint: str | None) -> None:
    if checkpoint is None or not hand_over:
        tune.report(metrics)
        return
    with tempfile.TemporaryDirectory() as pointer:  # what Tune hands to another trial is a checkpoint of its own
        Path(pointer, _POINTER).write_text(json.dumps(checkpoint.split("/")[-2:]))
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(pointer))


def _attempt(
    sweep: SweepPlan, folder: Storage, name: str, settings: Mapping[str, Any], begun: int
) -> tuple[str, dict[str, Any]]:
    """The run that a trial is to go on with or begin, and where a new one starts from.

    A trial is one run, unless it was begun again from the start or went on from another's checkpoint: each time it is
    a further one, NAME.2 and so on.
    """
    newest, start = newest_attempt(folder, name), _handed_over(sweep, name)
    if start:
        saved = saved_config(folder / "runs" / newest)
        same = with_overrides(saved, {**settings, **start}) == saved
        return (newest if same else f"{name}.{attempt_number(newest) + 1}"), start
    if attempt_number(newest) >= begun and exists(folder / "runs" / newest):
        saved = flatten(from_tree(saved_config(folder / "runs" / newest)))
        return newest, {key: saved[key] for key in (*settings, *_START)}  # it goes on as it began
    return (name if begun == 1 else f"{name}.{begun}"), {}


def newest_attempt(folder: Storage, name: str) -> str:
    """A trial's last run so far; its first if there is none yet."""
    runs = folder / "runs"
    legs = [leg for leg in runs.names() if leg.partition(".")[0] == name and exists(runs / leg)]
    return max(legs, key=attempt_number, default=name)


def _handed_over(sweep: SweepPlan, name: str) -> dict[str, Any]:
    """Settings by which a run starts from the checkpoint of another trial that Tune has put in place of its own."""
    handed = tune.get_checkpoint()
    if handed is None:
        return {}
    with handed.as_directory() as pointer:
        leg, step = json.loads(Path(pointer, _POINTER).read_text())
    if leg.partition(".")[0] == name:
        return {}
    address = join_address(sweep.config.storage, "sweeps", sweep.name, "runs", leg, step)
    return dict(zip(_START, (address, "state"), strict=True))


def attempt_number(leg: str) -> int:
    return int(leg.partition(".")[2] or 1)


def _tags(sweep: str, name: str, leg: str, start: Mapping[str, Any]) -> dict[str, str]:
    """By which a trial's runs are found in MLflow."""
    tags = {"rlx.sweep": sweep, "rlx.trial": name}
    if leg != name:
        tags["rlx.kind"] = "attempt"
    if source := start.get("checkpoint.init_from"):
        donor, step = source.partition("?")[0].split("/")[-2:]
        tags["rlx.from"] = f"{donor.partition('.')[0]}@{int(step.rpartition('_')[2])}"
    return tags
