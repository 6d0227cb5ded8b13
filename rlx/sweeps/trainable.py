"""`PPOTrial`: a trial of a sweep as Ray Tune knows it, which does one run of rlx.runs in its own process.

The process stays for the next trial (`reuse_actors`), and the engines with it. A trial reports each step of its run;
its checkpoint is a pointer: a small folder with the address of the run's newest complete checkpoint.
Left out: which trials there are (`trial_source`) and when they stop (`schedulers`).
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT, TRAINING_ITERATION

from rlx.cluster import connection, nodes
from rlx.cluster.nodes import FolderCopies
from rlx.cluster.resources import ResourcePlan
from rlx.config.errors import ConfigError, one_line
from rlx.config.loading import from_tree, setting_at, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.runs import launch, preflight
from rlx.runs.launch import Parent
from rlx.runs.processes import RunProcesses
from rlx.runs.run_folder import POINTER, holds_run, saved_config
from rlx.runs.train_run import RunError, RunLostError, RunStopped
from rlx.storage.addresses import join_address, without_options
from rlx.storage.checkpoint_catalog import checkpoint_name, complete_checkpoints
from rlx.storage.filesystem import Storage, write_record
from rlx.storage.signatures import Signer
from rlx.sweeps.records import SweepPlan, TrialRecord, record_of
from rlx.tracking.base import RunStatus, TrackingService
from rlx.types import OnReport

_FAILURE = "failed.txt"
_NODE_ID = "ray.io/node-id"  # Ray's label of every node
_START = ("checkpoint.init_from", "checkpoint.init_state")
_END_S = 120.0  # longest wait for the end of a run that has reported its last step, or was stopped


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


@dataclass(frozen=True)
class SharedInputs:
    """What the driver has made once for all trials of a sweep."""

    tracking: Sequence[TrackingService]
    mailbox: Any  # actor handle
    signer: Signer | None = None  # of the trials' settings
    known: Mapping[str, TrialRecord] = field(default_factory=dict)  # of trials before a resume, by name
    model_path: str | None = None  # the model's folder or name; None if it differs from trial to trial
    tables: Mapping[str, Any] | None = None  # the prompts; None if they differ
    copies: FolderCopies | None = None  # of the models, for nodes that join later


# ---------------------------------------------------------------------------------------------------------------------
# Ray Tune's class


class PPOTrial(tune.Trainable):
    """One trial; `tune.with_parameters` gives it the sweep's plan."""

    thread: RunThread | None  # of the run that it does now
    start: str  # path of the checkpoint that it starts from, "" if it begins or continues by itself
    checkpoint: str  # path of its newest complete one, "" if there is none
    repeated: list[dict[str, float]]  # its newest report of before a resume, until Tune is given it again
    seen: int  # the step that Tune was given last, -1 before the first
    unsaved: dict[str, dict[str, Any]]  # what Tune was told of the steps since it last saved, by checkpoint name

    def setup(self, config: dict[str, Any], plan: SweepPlan, storage: Storage, shared: SharedInputs) -> None:
        """
        Args:
            config: the settings that the search has chosen.
        """
        connection.quiet_environment()  # on a cluster that was joined, nothing has set it in this process
        self.plan, self.storage, self.shared = plan, storage, shared
        self.processes = RunProcesses(plan.reuse, shared.mailbox)
        self._begin()

    def step(self) -> dict[str, Any]:
        """Waits for the next step of the run; the last one is `done`."""
        if self.repeated:  # the scheduler may end or pause it before its run starts
            return self.repeated.pop()
        if self.thread:
            self.processes.release(self.seen)  # Tune has decided that it goes on
        else:
            self.thread = RunThread(partial(self._run, dict(self.config), self.start), self.plan.config.train.steps)
        metrics, checkpoint = self.thread.next_report()
        self.seen, self.checkpoint = metrics["step"], checkpoint or self.checkpoint
        report = metrics | {DONE: self.thread.is_done} | ({"checkpoint_path": checkpoint} if checkpoint else {})
        self.unsaved[checkpoint_name(self.seen)] = report | {TRAINING_ITERATION: self.training_iteration + 1}
        return report | {SHOULD_CHECKPOINT: checkpoint is not None}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Saves as Tune does, with the metrics of the checkpoint's own step: training goes on while one is written."""
        saved = super().save(checkpoint_dir)
        name = self.checkpoint.rpartition("/")[2]
        saved.metrics.update(self.unsaved.get(name, {}))
        self.unsaved = {each: told for each, told in self.unsaved.items() if each > name}
        return saved

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, POINTER).write_text(json.dumps({"path": self.checkpoint}))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Continues from a checkpoint, of this trial or of another one, from now on."""
        self._end()
        self.repeated = []
        self.start = self.checkpoint = str(json.loads(Path(checkpoint, POINTER).read_text())["path"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial follows in this process, or this one with other settings."""
        self._end()
        self.config = new_config
        self._begin()
        return True

    def cleanup(self) -> None:
        try:
            self._end()
        finally:
            self.processes.close()

    def _begin(self) -> None:
        self.thread, self.start, self.checkpoint, self.seen, self.unsaved = None, "", "", -1, {}
        self.record = self.shared.known.get(self.trial_name) or TrialRecord(settings=self.config)
        newest = self.record.as_told(self.plan.rung_by, self.plan.metric)[-1:]
        # The last one comes from the run: nothing is decided there.
        self.repeated = [report for report in newest if report["step"] < self.plan.config.train.steps]
        if self.repeated:  # if it pauses or ends here, Tune is to have a checkpoint of it
            sweep = self.storage / "sweeps" / self.plan.name
            run = sweep / "runs" / newest_attempt(sweep, self.trial_name)
            self.checkpoint = next((each.folder.path for each in reversed(complete_checkpoints(run))), "")

    def _end(self) -> None:
        if self.thread:
            self.thread.end(self.processes.stop)
        self.thread = None

    def _run(self, settings: dict[str, Any], start: str, on_report: OnReport) -> None:
        """Does the trial's run, or its remaining steps; in a thread."""
        record = self.record.model_copy(update={"settings": settings})
        attempt = current_attempt(self.plan, self.storage, self.trial_name, record, start)
        run_trial(self.plan, self.storage, settings, attempt, self.shared, self.processes, on_report)


class RunThread:
    """A run of so many steps in a thread of its own, whose reports wait to be taken."""

    def __init__(self, run: Callable[[OnReport], None], steps: int) -> None:
        self._items: queue.Queue[tuple[dict[str, Any], str | None] | Exception] = queue.Queue()
        self._run, self._steps, self.is_done = run, steps, False
        self._thread = threading.Thread(target=self._work, daemon=True, name="run")
        self._thread.start()

    def next_report(self) -> tuple[dict[str, Any], str | None]:
        """Waits for the next step; returns what `OnReport` gets. After the last step, `is_done` is true.

        Raises:
            RunError: the run has failed.
        """
        item = self._items.get()
        if isinstance(item, Exception):
            raise item
        self.is_done = item[0]["step"] >= self._steps
        return item

    def end(self, stop: Callable[[], None]) -> None:
        """Returns when the run has ended; one that has not reported its last step is stopped first.

        Raises:
            RunError: it does not end: its engines and workers cannot be given to another run.
        """
        if not self.is_done:
            stop()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise RunError(f"the run before did not end within {_END_S:.0f} s")

    def _work(self) -> None:
        try:
            self._run(lambda *report: self._items.put(report))
        except Exception as error:
            kind = RunLostError if isinstance(error, RunLostError) else RunError
            self._items.put(kind(one_line(error, 500)))


def trainable(plan: SweepPlan, storage: Storage, shared: SharedInputs, most: int | None) -> Any:
    """Returns a trial in the form that Tune asks for, with what its engines and reward models reserve.

    Args:
        most: how many trials Tune may run at once; None: as many as it is given and the cluster has room for.
    """
    made = tune.with_parameters(PPOTrial, plan=plan, storage=storage, shared=shared)
    return tune.with_resources(made, trial_resources(plan.resources, most))


def trial_resources(needed: ResourcePlan, most: int | None) -> tune.PlacementGroupFactory:
    """Returns the placement group of a trial. Its first bundle is that of the trial's own process, which needs none.

    A group has no room for the workers, which are in one of Ray Train's. So that no more trials start than there is
    room for workers, too, each may take a part of this node's memory of which there are `most`.
    """
    bundles, selectors = list(needed.bundles), list(needed.selectors)
    if most or not bundles:  # Tune takes no empty group
        here = ray.get_runtime_context().get_node_id()
        memory = next(node["Resources"]["memory"] for node in ray.nodes() if node["NodeID"] == here)
        memory -= (most or 0) * needed.total().get("memory", 0.0)  # which the trials ask for themselves
        if memory <= 0:
            raise ConfigError(f"{most} trials at once ask for more memory than this node has: let them ask for less")
        bundles.append({"memory": memory // (most + 0.5) if most else 1.0})
        selectors.append({_NODE_ID: here})
    return tune.PlacementGroupFactory([{}, *bundles], strategy=needed.strategy, bundle_label_selector=selectors)


# ---------------------------------------------------------------------------------------------------------------------
# A trial's runs


def run_trial(
    plan: SweepPlan,
    storage: Storage,
    settings: Mapping[str, Any],
    attempt: Attempt,
    shared: SharedInputs,
    processes: RunProcesses,
    on_report: OnReport,
) -> None:
    """Does one run of a trial, or its remaining steps; a run that failed by itself fails again.

    Raises:
        RunError: it failed.
        RunStopped: the trial was stopped.
    """
    sweep, runs = storage / "sweeps" / plan.name, storage / "sweeps" / plan.name / "runs"
    folder = runs / attempt.name
    if message := failure_of(folder):
        raise RunError(message)
    nested_in = sweep if attempt.is_first else runs / attempt.trial
    parent = Parent(nested_in, tags_of(plan.name, attempt), shared.signer)
    if attempt.start and not holds_run(folder):
        finish_run(runs / newest_attempt(sweep, attempt.trial), shared.tracking)
    try:
        prepared = _prepared(plan, settings, attempt, shared)
        launch.run(
            prepared,
            folder,
            resume=holds_run(folder),
            parent=parent,
            on_report=on_report,
            processes=processes,
            waits=True,
        )
    except RunStopped:
        pass
    except (RunError, ConfigError) as error:
        if not isinstance(error, RunLostError):
            write_record(folder / _FAILURE, str(error))  # Tune tries a trial again: its process may have been lost
        raise


def _prepared(
    plan: SweepPlan, settings: Mapping[str, Any], attempt: Attempt, shared: SharedInputs
) -> preflight.PreparedRun:
    """Returns the run of an attempt.

    Raises:
        ConfigError: its settings do not go together.
    """
    if shared.copies:
        shared.copies.bring_here()
    config = attempt_config(plan, settings, attempt)
    prepared = preflight.prepare(config, tables=shared.tables, model_path=shared.model_path)
    if shared.model_path is None:
        nodes.bring_folder(prepared.model_path, "model.path")
    return replace(prepared, reachable=shared.tracking, copies=shared.copies)


def attempt_config(plan: SweepPlan, settings: Mapping[str, Any], attempt: Attempt) -> RunConfig:
    """Returns the config of a trial's run; `preflight.prepare` makes its paths absolute.

    Args:
        settings: those that the search has chosen, by dotted key.

    Raises:
        ConfigError: the settings do not go together.
    """
    overrides = {**settings, **attempt.start, "name": f"{plan.name}.{attempt.name}"}
    return from_tree(with_overrides(plan.tree, overrides))


def finish_run(folder: Storage, tracking: Sequence[TrackingService]) -> None:
    """Ends what a run of a trial has in tracking services: the trial goes on with another one."""
    if holds_run(folder):
        with record_of(tracking, folder) as record:
            record.end(RunStatus.FINISHED)


def failure_of(folder: Storage) -> str | None:
    """Returns why a run failed by itself, as it would again; None if it did not."""
    file = folder / _FAILURE
    return file.read_text() if file.exists() else None


def forgive(folder: Storage) -> None:
    """Lets a run that has failed be tried again."""
    (folder / _FAILURE).delete()


def current_attempt(plan: SweepPlan, storage: Storage, name: str, record: TrialRecord, start: str) -> Attempt:
    """Returns the run that a trial continues or begins.

    Args:
        record: with the settings that Tune gives the trial now.
        start: path of the checkpoint that Tune has given it, "" if none.
    """
    folder = storage / "sweeps" / plan.name
    newest, settings = newest_attempt(folder, name), _start_from_other(plan, name, start)
    saved_folder = folder / "runs" / newest
    if settings:
        saved = saved_config(saved_folder)
        is_same = with_overrides(saved, {**record.settings, **settings}) == saved
        return Attempt(name, newest if is_same else f"{name}.{attempt_number(newest) + 1}", settings)
    if attempt_number(newest) >= record.attempts and holds_run(saved_folder):
        saved = flatten(from_tree(saved_config(saved_folder)))
        as_it_began = {key: setting_at(saved, key) for key in (*record.settings, *_START)}
        return Attempt(name, newest, as_it_began)
    return Attempt(name, name if record.attempts == 1 else f"{name}.{record.attempts}")


def newest_attempt(folder: Storage, trial: str) -> str:
    """Returns the name of a trial's last run so far; of its first one if there is none yet."""
    number = 1
    while holds_run(folder / "runs" / f"{trial}.{number + 1}"):
        number += 1
    return trial if number == 1 else f"{trial}.{number}"


def attempt_number(attempt: str) -> int:
    """Returns 1 for NAME, 2 for NAME.2 and so on."""
    return int(attempt.partition(".")[2] or 1)


def _start_from_other(plan: SweepPlan, name: str, start: str) -> dict[str, Any]:
    """Returns the settings by which a run starts from another trial's checkpoint; none if it is the trial's own."""
    if not start or start.split("/")[-2].partition(".")[0] == name:
        return {}
    address = join_address(plan.config.storage, "sweeps", plan.name, "runs", *start.split("/")[-2:])
    return dict(zip(_START, (address, "all"), strict=True))


def tags_of(sweep: str, attempt: Attempt) -> dict[str, str]:
    """Returns the tags by which a trial's runs are found in MLflow."""
    tags = {"rlx.sweep": sweep, "rlx.trial": attempt.trial}
    if not attempt.is_first:
        tags["rlx.kind"] = "attempt"
    if source := attempt.start.get("checkpoint.init_from"):
        donor, step = without_options(source).split("/")[-2:]
        tags["rlx.from"] = f"{donor.partition('.')[0]}@{int(step.rpartition('_')[2])}"
    return tags
