"""What a tracking service offers to the tracker: `TrackingService` and `RunWriter`.

One file of services/ implements these two, and has a row in `tracker.TRACKING_SERVICES`. `TrackedRun` and `MetricPoint`
are what is read back.

Left out: what records a run (tracker.py), and how records wait while a service is away (outbox.py, delivery.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rlx.config.sections.records import BackendName

ERROR_TAG = "rlx.error"
"""the tag of a run that failed: why, in one line; gone or empty once the run goes on"""


class RunStatus(StrEnum):
    """The state of a run in its tracking service."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"

    def after(self, earlier: str | None) -> RunStatus:
        """The state of a run that had ended with another one: one that has finished stays so when its process, which is
        stopped after that, says that it was killed."""
        return RunStatus.FINISHED if (earlier, self) == (RunStatus.FINISHED, RunStatus.KILLED) else self


class Failure(StrEnum):
    """Why a service has not taken a record."""

    AWAY = "away"  # another attempt may help
    DELETED = "deleted"  # the run or its experiment is deleted there; records of other runs are taken
    REFUSED = "refused"  # another attempt is useless


class Reach(StrEnum):
    """Which processes can write to a service."""

    ANYWHERE = "anywhere"
    NODE = "node"  # those on the driver's node: the service is a file on its disk
    PROCESS = "process"  # one: its client keeps a file or a connection open for each run


@dataclass(frozen=True)
class TrackedRun:
    """A run as it was read back from its tracking service."""

    id: str
    name: str
    experiment_id: str
    parent_id: str | None  # of the run that contains this one
    status: RunStatus
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]  # the last value of each
    start_ms: int  # since the epoch
    end_ms: int | None  # None while it is running


@dataclass(frozen=True)
class MetricPoint:
    """One logged value of a metric."""

    step: int
    value: float
    at_ms: int  # since the epoch


class RunWriter(Protocol):
    """Writes to one run of a tracking service.

    A record that is sent twice must be stored once. Each method raises what the client of the service raises.
    Times (`at`) are in milliseconds since the epoch.
    """

    def missing(self) -> str:
        """What of the run the service does not keep, why, and what to do; empty if it keeps everything."""

    def log(self, metrics: Mapping[str, float], step: int, at: int, again: bool = False) -> None:
        """Stores the metrics of a step, unless the run has the step already.

        Args:
            again: the step was done again with other settings: these values hold, as far as the service can take them.
        """

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int, again: bool = False) -> None:
        """Stores a table of completions, unless the run has the step already; `again` as for `log`."""

    def log_text(self, name: str, text: str) -> None:
        """Stores a text file; replaces an earlier one of the same name."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags."""

    def end(self, status: RunStatus, at: int) -> None:
        """Ends the run, unless it has this status already; see `RunStatus.after`."""


class TrackingService(Protocol):
    """Creates runs at one address of a tracking service and opens them for writing."""

    @property
    def name(self) -> BackendName:
        """The name of the service in `tracking.backends`, and in the files of a run."""

    @property
    def reach(self) -> Reach:
        """Which processes can write to it."""

    @property
    def title(self) -> str:
        """The name of the service, as messages show it."""

    @property
    def address(self) -> str:
        """The address, as messages show it: without a password."""

    def check(self, experiment: str) -> None:
        """Returns if the service answers and takes new runs of an experiment.

        Raises:
            ConfigError: no service answers at the address, or the experiment is deleted.
        """

    def browse_command(self) -> str:
        """What to type in a shell to see the runs in a browser."""

    def run_page(self, run_id: str | None) -> str:
        """The web address of a run, or of the start page if that of the run is not known."""

    def make_run(
        self,
        key: str,
        experiment: str,
        name: str,
        *,
        parent: str | None,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        at: int,
    ) -> str:
        """Returns the id of the run that has a key; creates the run first if no run has the key.

        Args:
            key: unique text, so that a request that is repeated creates one run.
            parent: id of the run that contains this one.
            at: start time.
        """

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Marks a run as running again, without an error. If there is no such run, it fails as `Failure.DELETED`.

        Args:
            at: start time of the new attempt. A repeated call with the same time changes nothing.
            params: its settings by dotted name, which may be others than those that `make_run` was given.
            tags: those that `make_run` would be given.
        """

    def writer(self, run_id: str) -> RunWriter:
        """Opens a run for writing."""

    def failure(self, error: Exception) -> Failure:
        """Which kind of failure it is that the service has not taken a record."""

    def cause(self, error: Exception) -> str:
        """Why the client of the service failed, in a few words and without a password."""


def typed(text: str) -> bool | int | float | str:
    """The value of a parameter that travels as text: services order and plot numbers only if they are numbers."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"True": True, "False": False}.get(text, text)
