"""What a sweep keeps in its folder: its plan, one record per trial, what its scheduler was told; and its MLflow run.

A resume reads nothing else. Left out: the runs of the trials, which have folders of their own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from rlx.cluster.resources import ResourcePlan, plan_resources
from rlx.config.errors import ConfigError, nearest
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig, is_default_storage
from rlx.config.sections.records import TrackingConfig
from rlx.config.sweep import (
    DEFAULT_ALPHA,
    DEFAULT_METRIC,
    PROGRESS,
    MetricName,
    Mode,
    ReuseName,
    RungUnit,
    SchedulerName,
    SearchName,
)
from rlx.runs import preflight
from rlx.storage import signatures
from rlx.storage.filesystem import Storage, retry, write_record
from rlx.tracking.base import RunStatus, TrackingService
from rlx.tracking.tracker import OutboxTracker, services_of

PLAN_FILE, SPACE_FILE = "sweep.json", "space.py"
TOLD_FILE = "told.jsonl"
_PATIENCE_S = 10.0  # longest wait for the tracking service
DEFAULTS = 3
"""the defaults of this rlx; 2: those of before engines followed the workers' GPUs; 1: those of before it had a default
experiment, which every model got"""
_ENGINES_BEFORE: dict[str, Any] = {"num_engines": 1, "resources_per_engine": {"CPU": 0.5}}


class TrialState(StrEnum):
    """How far a trial is, as its record says."""

    OPEN = "open"  # not over: it waits, runs or was interrupted
    FINISHED = "finished"  # all steps are done
    STOPPED = "stopped"  # by a scheduler
    FAILED = "failed"


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep consists of. It is kept in the sweep's folder, so that the sweep can be resumed.

    A candidate is a point of the search space, of which each seed is a trial.
    """

    name: str
    tree: dict[str, Any]  # the config that all trials share; its paths are absolute
    space: str  # path of the search space
    candidates: Annotated[PositiveInt, Field(alias="trials")] = 4  # `plans.check_sweep` puts a grid's number here
    search: SearchName = "random"
    scheduler: SchedulerName = "none"
    seeds: PositiveInt = 1  # runs of each candidate
    max_seeds: PositiveInt | None = None  # of a race, which adds seeds up to here; None: it adds none
    alpha: float = DEFAULT_ALPHA  # of a race: its chance of dropping the best candidate
    max_concurrent: PositiveInt | None = None
    reuse: ReuseName = "engines"  # what stays in a trial's process for the next trial
    metric: MetricName = DEFAULT_METRIC  # by which trials are compared; every evaluation measures it
    mode: Mode = "max"
    budget: str | None = None  # which all trials together keep, such as 8gpu-h; None: there is no limit
    rung_by: RungUnit = "steps"  # of which trials have taken the same where a scheduler compares them
    defaults: PositiveInt = DEFAULTS  # which ones its trials have where the tree says nothing

    @cached_property
    def config(self) -> RunConfig:
        return from_tree(self.tree)

    @cached_property
    def resources(self) -> ResourcePlan:
        """What each trial needs of the cluster."""
        return plan_resources(self.config)

    @property
    def total_trials(self) -> int:
        """How many trials it has, without those that a race may add."""
        return self.seeds * self.candidates

    @property
    def gpus(self) -> float:
        """The GPUs of each trial, parts of one included."""
        return self.resources.total().get("GPU", 0.0)

    @property
    def tracking_uri(self) -> str:
        return preflight.tracking_uri(self.config.tracking, self.config.storage)

    @cached_property
    def tracking(self) -> Sequence[TrackingService]:
        """The tracking services of the sweep, as this process reaches them."""
        return services_of(self.config.tracking, self.config.storage)

    def with_its_defaults(self) -> SweepPlan:
        """The plan of a saved sweep, whose further trials have the defaults that its first ones had."""
        tree = over_experiment(self.tree) if self.defaults < 2 else self.tree
        if self.defaults < 3:
            rollout = _ENGINES_BEFORE | tree.get("rollout", {})
            if tree.get("scaling", {}).get("use_gpu"):  # else refused today, and a resume cannot change it
                rollout["resources_per_engine"] = {"GPU": 0.0} | rollout["resources_per_engine"]
            tree = tree | {"rollout": rollout}
        return replace(self, tree=tree, defaults=DEFAULTS)


_PLAN = TypeAdapter(SweepPlan)


def plan_content(plan: SweepPlan) -> dict[str, Any]:
    """Returns the fields of a plan as its file has them, which calls the number of candidates `trials`."""
    content: dict[str, Any] = _PLAN.dump_python(plan, by_alias=True)
    return content


def read_plan(content: Any) -> SweepPlan:
    """Returns the plan with such fields, see `plan_content`.

    Raises:
        ConfigError: a field is missing, unknown, or has a wrong value.
    """
    try:
        return _PLAN.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))} {first['input']!r:.60}: {first['msg']}") from None


def find_sweep(storage: Storage, name: str | None) -> Storage:
    """Returns the folder of a sweep, or of the newest one.

    Raises:
        ConfigError: there is no such sweep.
    """
    sweeps = storage / "sweeps"
    names = [each for each in sweeps.names() if (sweeps / each / PLAN_FILE).exists()]
    if not names or (name and name not in names):
        what = f"sweep {name}" if name else "sweeps"
        raise ConfigError(f"no {what} in {sweeps}{nearest(name or '', names)}")
    newest = max(names, key=lambda each: sweeps.filesystem.get_file_info((sweeps / each / PLAN_FILE).path).mtime)
    return sweeps / (name or newest)


def signed_content(folder: Storage) -> dict[str, Any]:
    """Returns what the signature in a sweep's folder is of: the content of its plan, and the code of its space."""
    return {"plan": (folder / PLAN_FILE).read_json(), "space": (folder / SPACE_FILE).read_text()}


def planned_tracking(storage: Storage, name: str | None, *, trust: bool = False) -> TrackingConfig:
    """Returns where a sweep, or the newest one, is recorded by its plan; the defaults if there is none to be read.

    Args:
        trust: ask there, whoever wrote the address: the user's own key for MLflow goes with the question.

    Raises:
        ConfigError: somebody else wrote the address.
    """
    try:
        signed = signed_content(folder := find_sweep(storage, name))
        tracking = from_tree({"tracking": read_plan(signed["plan"]).tree.get("tracking", {})}).tracking
    except (OSError, TypeError, ValueError, RecursionError):  # MLflow may know the sweep all the same
        return TrackingConfig()
    if tracking.uri and not (trust or signatures.is_own_folder(folder, signed)):
        raise ConfigError(
            f"this user did not write sweep {folder.name!r}, which is recorded at {tracking.uri}: --tracking.uri gives "
            "that or another address, --trust takes it"
        )
    return tracking


def refuse_existing(folder: Storage) -> None:
    """Raises ConfigError if the folder holds a sweep already."""
    if (folder / PLAN_FILE).exists():
        raise ConfigError(f"sweep {folder.name!r} exists in {folder}: --resume {folder.name} continues it")


@contextmanager
def record_of(tracking: Sequence[TrackingService], folder: Storage) -> Iterator[OutboxTracker]:
    """Gives the tracker of the MLflow run of a sweep or of a trial's run, and waits until it has sent everything."""
    tracker = OutboxTracker(tracking, folder, "driver")
    try:
        yield tracker
    finally:
        tracker.close(_PATIENCE_S)


@contextmanager
def ending_record(plan: SweepPlan, folder: Storage) -> Iterator[None]:
    """Ends the sweep's MLflow run if the block does not come to its end."""
    try:
        yield
    except BaseException as error:
        with record_of(plan.tracking, folder) as record:
            record.end(RunStatus.KILLED if isinstance(error, KeyboardInterrupt) else RunStatus.FAILED)
        raise


class TrialRecord(BaseModel):
    """What is kept of a trial."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")  # null could not be read back

    settings: dict[str, Any]
    state: TrialState = TrialState.OPEN
    reports: list[tuple[int, float]] = []  # step and the sweep's metric of each evaluation
    progress: dict[int, float] = {}  # by step of a report, the tokens or seconds so far; for rungs in them
    message: str = ""  # why it failed
    attempts: int = 1  # how often it was started from step 0

    @property
    def is_over(self) -> bool:
        return self.state is not TrialState.OPEN

    @property
    def step(self) -> int:
        return self.reports[-1][0] if self.reports else 0

    def as_told(self, rung_by: RungUnit, metric: str) -> list[dict[str, float]]:
        """Its evaluations as Tune and its schedulers are told them, in order; `metric`: that of the sweep."""
        return [
            {PROGRESS[rung_by]: self.progress.get(step, 0.0), "step": step, metric: value}
            for step, value in self.reports
        ]


def resuming(plan: SweepPlan) -> str:
    """The expression that makes a Tuner for what is left of a sweep."""
    place = "" if is_default_storage(plan.config.storage) else f", storage={plan.config.storage!r}"
    return f"rlx.resume_tuner({plan.name!r}{place})"


ToldName = Literal["add", "result", "complete", "remove", "error"]
Told = tuple[ToldName, str, dict[str, float]]
"""what a scheduler was told: Tune's name for it (on_trial_add and so on), the trial's name, and its report if any"""
_TOLD = TypeAdapter(Told)


class TrialRecords:
    """The records of a sweep's trials, one file each, and what its scheduler was told, a line each.

    Only the driver writes them.

    A thread writes the files, so that a slow storage does not hold up the sweep for long; `flush` waits for it.
    """

    def __init__(self, sweep: Storage) -> None:
        self.sweep, self.folder = sweep, sweep / "trials"
        self._written: dict[str, TrialRecord] = {}  # read or written, the newest of each trial
        self._calls: list[str] = []  # lines of what the scheduler was told
        self._waiting: dict[str, Callable[[], str]] = {}  # for the thread: what makes the content of each file
        self._lock, self._thread = threading.Lock(), ThreadPoolExecutor(1, "trial-records")

    def __getstate__(self) -> dict[str, Any]:
        return {"sweep": self.sweep}  # Tune pickles what refers to the records; a copy reads the files

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sweep"])  # type: ignore[misc]

    def read(self, name: str) -> TrialRecord:
        """Returns a trial's record.

        Raises:
            ConfigError: the file is not what rlx wrote.
        """
        if name in self._written:
            return self._written[name]
        file = self.folder / f"{name}.json"
        try:
            found = TrialRecord.model_validate_json(retry(file.read_text, f"reading {file.path}"))
            return self._written.setdefault(name, found)
        except ValueError:  # pydantic's errors are among them, and bytes that are not text
            raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None

    def find(self, name: str) -> TrialRecord | None:
        """Returns a trial's record; None if it was not written yet."""
        return self.read(name) if name in self._written or (self.folder / f"{name}.json").exists() else None

    def write(self, name: str, record: TrialRecord) -> None:
        """Replaces a record; its file follows."""
        self._written[name] = record
        self._later(f"trials/{name}.json", record.model_dump_json)

    def note(self, call: Told) -> None:
        """Adds to `calls`, which were read before; the file follows, before any record that is written later."""
        self._calls.append(json.dumps(call))
        self._later(TOLD_FILE, lambda: "\n".join(self._calls))

    def calls(self) -> list[Told]:
        """Returns what the scheduler was told, in order.

        Raises:
            ConfigError: the file is not what rlx wrote.
        """
        self.flush()
        file = self.sweep / TOLD_FILE
        try:
            self._calls = retry(file.read_text, f"reading {file.path}").splitlines() if file.exists() else []
            return [_TOLD.validate_json(line) for line in self._calls]
        except ValueError:
            raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None

    def flush(self, patience_s: float | None = None) -> None:
        """Waits until the files are written; not longer than `patience_s`, if given.

        Raises:
            StorageError: the storage keeps failing.
        """
        written = self._thread.submit(self._write_waiting)
        with nullcontext() if patience_s is None else suppress(TimeoutError):
            written.result(patience_s)

    def all(self) -> dict[str, TrialRecord]:
        """Returns the records of all trials by name."""
        self.flush()
        names = [name.removesuffix(".json") for name in self.folder.names() if name.endswith(".json")]
        return {name: self.read(name) for name in names}

    def _later(self, file: str, content: Callable[[], str]) -> None:
        with self._lock:
            self._waiting[file] = content
        self._thread.submit(self._write_waiting)

    def _write_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        try:
            for name in sorted(waiting, key=lambda name: name != TOLD_FILE):  # no record says more than it
                write_record(self.sweep / name, waiting[name]())
                del waiting[name]
        finally:  # those that are left are written with the next record
            with self._lock:
                self._waiting = waiting | self._waiting


def trial_name(number: int) -> str:
    """Returns the name of a trial: trial_00003."""
    return f"trial_{number:05d}"


def trial_number(name: str) -> int:
    """Returns 3 for trial_00003."""
    return int(name.rpartition("_")[2])


def number_of(candidate: int, seed_index: int, candidates: int, seeds: int) -> int:
    """Returns the number of the trial that runs a candidate on one of its seeds: the first `seeds` of a candidate
    follow each other; those that are added later follow all of these, for each added seed one of every candidate."""
    return candidate * seeds + seed_index if seed_index < seeds else seed_index * candidates + candidate


def place_of(number: int, candidates: int, seeds: int) -> tuple[int, int]:
    """Returns the candidate of a trial by its number, and the index of its seed, see `number_of`."""
    if number < candidates * seeds:
        return divmod(number, seeds)
    seed_index, candidate = divmod(number, candidates)
    return candidate, seed_index
