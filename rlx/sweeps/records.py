"""What a sweep keeps in its folder: its plan, and one record per trial.

A resume reads nothing else. Left out: the runs of the trials, which have folders of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.tune.experiment import Trial

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.config.sections import SchedulerName, SearchName
from rlx.runs import preflight
from rlx.runs.resources import ResourcePlan, plan_resources
from rlx.storage.filesystem import Storage, retry


class TrialState(StrEnum):
    """How far a trial is, as its record says."""

    OPEN = "open"  # not over: it waits, runs or was interrupted
    FINISHED = "finished"  # all steps are done
    STOPPED = "stopped"  # by a scheduler
    FAILED = "failed"


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep consists of. It is kept in the sweep's folder, so that the sweep can be resumed."""

    name: str
    tree: dict[str, Any]  # the config that all trials share; its paths are absolute
    space: str  # path of the search space
    trials: int = 4  # settings to try; `tuner.check_sweep` puts a grid's number here
    search: SearchName = "random"
    scheduler: SchedulerName = "none"
    seeds: int = 1  # runs of each setting
    max_concurrent: int | None = None
    space_fingerprint: str = ""

    @cached_property
    def config(self) -> RunConfig:
        return from_tree(self.tree)

    @cached_property
    def resources(self) -> ResourcePlan:
        """What each trial needs of the cluster."""
        return plan_resources(self.config)

    @property
    def tracking_uri(self) -> str:
        return preflight.tracking_uri(self.config.tracking, self.config.storage)


class TrialRecord(BaseModel):
    """What is kept of a trial."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    state: TrialState = TrialState.OPEN
    reports: list[tuple[int, float]] = []  # step and held-out accuracy of each evaluation
    message: str = ""  # why it failed
    attempts: int = 1  # how often it was started from step 0

    @property
    def is_over(self) -> bool:
        return self.state is not TrialState.OPEN

    @property
    def step(self) -> int:
        return self.reports[-1][0] if self.reports else 0


class TrialRecords:
    """The records of a sweep's trials, one file each. Only the driver writes them."""

    def __init__(self, sweep: Storage) -> None:
        self.folder = sweep / "trials"

    def read(self, name: str) -> TrialRecord:
        """Returns a trial's record.

        Raises:
            ConfigError: the file is not what rlx wrote.
        """
        file = self.folder / f"{name}.json"
        try:
            return TrialRecord.model_validate_json(retry(file.read_text, f"reading {file.path}"))
        except ValueError:  # pydantic's errors are among them, and bytes that are not text
            raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None

    def write(self, name: str, record: TrialRecord) -> None:
        file = self.folder / f"{name}.json"
        retry(partial(file.write_text, record.model_dump_json()), f"writing {file.path}")

    def all(self) -> dict[str, TrialRecord]:
        """Returns the records of all trials by name."""
        names = [name.removesuffix(".json") for name in self.folder.names() if name.endswith(".json")]
        return {name: self.read(name) for name in names}


def trial_name(trial: Trial) -> str:
    """Returns trial_00003 and the like: the trial's number in the sweep, whenever and wherever it runs."""
    return f"trial_{trial.trial_id}"
