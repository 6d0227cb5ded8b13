"""TODO rlx.sweeps.records."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from ray.tune.experiment import Trial

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.config.sections import SchedulerName, SearchName
from rlx.storage.filesystem import Storage, retry

State = Literal["open", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is made of; kept with it, so that it can be resumed."""

    name: str
    tree: dict[str, Any]  # the config that all trials share
    space: str  # path of the search space
    trials: int = 4  # settings to try; a grid's own number once the sweep is checked
    search: SearchName = "random"
    scheduler: SchedulerName = "none"
    seeds: int = 1  # runs of each setting
    max_concurrent: int | None = None
    space_fingerprint: str = field(default="")

    @property
    def config(self) -> RunConfig:
        return from_tree(self.tree)


class TrialRecord(BaseModel):
    """What is kept of a trial."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    state: State = "open"  # stopped: by a scheduler
    reports: list[tuple[int, float]] = []  # step and held-out accuracy of each evaluation
    words: str = ""  # why it failed
    begun: int = 1  # how often it was begun from the start

    @property
    def is_over(self) -> bool:
        return self.state != "open"

    @property
    def step(self) -> int:
        return self.reports[-1][0] if self.reports else 0


class TrialRecords:
    """The records of a sweep's trials, a file each; the driver alone writes them."""

    def __init__(self, sweep: Storage) -> None:
        self.folder = sweep / "trials"

    def read(self, name: str) -> TrialRecord:
        """ConfigError if it is not what rlx wrote."""
        file = self.folder / f"{name}.json"
        try:
            return TrialRecord.model_validate_json(retry(file.read_text, f"reading {file.path}"))
        except ValueError:  # pydantic's are among them, and what is no text
            raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None

    def write(self, name: str, record: TrialRecord) -> None:
        file = self.folder / f"{name}.json"
        retry(partial(file.write_text, record.model_dump_json()), f"writing {file.path}")

    def all(self) -> dict[str, TrialRecord]:
        """Every trial's, by name."""
        names = [name.removesuffix(".json") for name in self.folder.names() if name.endswith(".json")]
        return {name: self.read(name) for name in names}


def trial_name(trial: Trial) -> str:
    """trial_00003 and the like: its number in the sweep, whenever and wherever it runs."""
    return f"trial_{trial.trial_id}"
