"""The tracker of real runs. It sends records to one or more tracking services while training continues.

Each process of a run that records something has an `OutboxTracker` with a writer name of its own. Records that a
service does not take wait in memory, and after `flush` in <run>/outbox; the next tracker of the same writer sends them.
No service waits for another one.

Left out: the files (outbox.py), sending and retrying (delivery.py), what a record means to a service (services/).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.sections.records import BackendName, TrackingConfig
from rlx.storage.addresses import local_folder
from rlx.storage.filesystem import Storage
from rlx.tracking.base import ERROR_TAG, RunStatus, TrackingService
from rlx.tracking.delivery import Delivery
from rlx.tracking.outbox import EntryKind, OutboxQueue, add_key, entries_of, unfinished_writers
from rlx.tracking.services import mlflow
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.services.tensorboard import TensorBoardService
from rlx.tracking.services.wandb import WandbService
from rlx.types import Notify

_LOG = logging.getLogger("rlx")

TRACKING_SERVICES: dict[BackendName, Callable[[TrackingConfig, Path], TrackingService]] = {
    "mlflow": lambda tracking, folder: MLflowService(tracking.uri or mlflow.default_uri(folder)),
    "tensorboard": lambda tracking, folder: TensorBoardService(folder / "tensorboard"),
    "wandb": lambda tracking, folder: WandbService(folder),
}
"""makes the service of each name in `tracking.backends`; its files, if it has any, are in a folder of this machine"""
_OF_A_JOB = "working_dir_files"
"""the folder of Ray in which the working folders of jobs are"""


def services_of(tracking: TrackingConfig, storage: str) -> tuple[TrackingService, ...]:
    """The services that `tracking.backends` names; makes the folder of a local MLflow store.

    Args:
        storage: the address beside which services that are files have them.

    Raises:
        ConfigError: that is the working folder of a Ray job, which goes with the cluster.
    """
    folder = local_folder(storage)
    keeps_files = (tracking.uri is None and "mlflow" in tracking.backends) or "tensorboard" in tracking.backends
    if _OF_A_JOB in folder.parts and keeps_files:
        raise ConfigError(
            f"tracking.uri: records would be in {folder}, the working folder of this job, which goes with the cluster: "
            "give the address of an MLflow server, without tensorboard, or a --storage that is a folder of all nodes"
        )
    return tuple(TRACKING_SERVICES[name](tracking, folder) for name in tracking.backends)


class OutboxTracker:
    """Records one run from one process of it: metrics, samples, texts and tags.

    Except for `flush` and `close`, no method waits for a tracking service or fails because of it.

    Args:
        services: where the records go, each of them to all; none: they are dropped.
        folder: the run's folder.
        writer: name of this process in the run, e.g. "rank_0". Two live processes must not have the same name.
        notify: called from another thread with messages for a person, see `Delivery`.
        again: steps that are recorded already are done again with other settings, so that their new values hold.

    Raises:
        StorageError: the records of an earlier tracker cannot be read.
    """

    def __init__(
        self,
        services: Sequence[TrackingService],
        folder: Storage,
        writer: str,
        notify: Notify = _LOG.warning,
        *,
        again: bool = False,
    ) -> None:
        self.services, self.folder = services, folder
        self._of_steps = {"again": True} if again else {}
        self._deliveries = [_started(service, folder, writer, notify) for service in services]
        self.is_away = False  # whether `close` has left records of a run that is neither deleted nor refused

    @property
    def run_id(self) -> str | None:
        """The id of the run in MLflow; None until MLflow has created the run, or if it does not record it."""
        return next((each.run_id for each in self._deliveries if each.service.name == "mlflow"), None)

    def open(
        self,
        experiment: str,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        parent: Storage | None = None,
    ) -> None:
        """Requests that the run is created, or continued if the folder has one; starts now. Writes run.json.

        One process of a run calls this.

        Args:
            experiment: the group of runs that the service lists together.
            params: settings by dotted name.
            parent: folder of the run that contains this one, on the same storage.

        Raises:
            ConfigError: the run's folder holds a damaged record.
            StorageError: the folder cannot be read or written.
        """
        add_key(self.folder, uuid.uuid4().hex)
        content = {
            "experiment": experiment,
            "name": name,
            "params": {key: str(value) for key, value in params.items()},
            "tags": dict(tags),
            "parent": parent.path if parent else None,
            "at": now_ms(),
        }
        self._add(EntryKind.OPEN, content)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records all metrics of a step. A step that is recorded already keeps its first values, unless `again`."""
        values = {name: float(value) for name, value in metrics.items()}
        self._add(EntryKind.LOG, {"metrics": values, "step": step, "at": now_ms(), **self._of_steps})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Records completions as a table. Call it before the `log` of the same step. The values must fit in JSON."""
        if rows:
            self._add(EntryKind.LOG_SAMPLES, {"rows": [dict(row) for row in rows], "step": step, **self._of_steps})

    def log_text(self, name: str, text: str) -> None:
        """Stores a text file with the run; replaces an earlier one of the same name."""
        self._add(EntryKind.LOG_TEXT, {"name": name, "text": text})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run; a tag that exists gets the new value."""
        self._add(EntryKind.SET_TAGS, {"tags": dict(tags)})

    def end(self, status: RunStatus, error: str = "") -> None:
        """Marks the run as ended now.

        Args:
            status: one other than RUNNING.
            error: why it failed, which it keeps as `ERROR_TAG`.
        """
        if error:
            self.set_tags({ERROR_TAG: error})
        self._add(EntryKind.END, {"status": status, "at": now_ms()})

    def flush(self, patience_s: float = 1.0) -> None:
        """Returns once everything recorded so far would survive the death of this process.

        Args:
            patience_s: how long to wait for the services before the records are written to the outbox folder instead.

        Raises:
            StorageError: the run's folder cannot be written.
        """
        deadline = time.monotonic() + patience_s
        for delivery in self._deliveries:
            delivery.queue.save(max(deadline - time.monotonic(), 0.0))

    def close(self, patience_s: float) -> int:
        """Sends for at most `patience_s`, saves the rest in the outbox folder, and returns how many are left.

        Those of a run that is deleted in the service, or refused by it, are not waited for. No other method may be
        called afterwards.

        Raises:
            StorageError: the run's folder cannot be written.
        """
        deadline = time.monotonic() + patience_s
        with ExitStack() as stack:  # all are closed, also if the records of one cannot be saved
            for delivery in reversed(self._deliveries):
                stack.callback(_close, delivery, deadline)
        self.is_away = any(len(each.queue) > 0 and not each.queue.is_held for each in self._deliveries)
        return sum(len(delivery.queue) for delivery in self._deliveries)

    def _add(self, kind: EntryKind, content: dict[str, Any]) -> None:
        for delivery in self._deliveries:
            delivery.queue.add(kind, content)


def _started(service: TrackingService, folder: Storage, writer: str, notify: Notify) -> Delivery:
    """Sends what an earlier tracker has left for a service, and what will be added."""
    queue = OutboxQueue(entries_of(folder, writer, service.name))
    for file in queue.load():
        notify(f"{file} is damaged: it is not sent to {service.title}")
    delivery = Delivery(service, folder, queue, notify)
    delivery.start()
    return delivery


def _close(delivery: Delivery, deadline: float) -> None:
    """Sends until nothing is left or the time `deadline` (monotonic), and saves what is left."""
    delivery.queue.is_held = False  # the next attempt shows whether it is so still
    delivery.hurry()
    try:
        delivery.queue.wait_until_empty(max(deadline - time.monotonic(), 0.0))
    finally:
        try:
            delivery.queue.save(0)
        finally:  # also on a full disk: the thread ends
            delivery.queue.close()
            delivery.hurry()


@dataclass(frozen=True)
class Unsent:
    """Records of a run that services have not taken."""

    count: int
    is_away: bool  # whether a service may take none of other runs, either; not if the run is deleted or refused there


def send_pending(
    services: Sequence[TrackingService], folder: Storage, notify: Notify = _LOG.warning, patience_s: float = 30.0
) -> Unsent:
    """Sends the records that the processes of a run have left in its outbox; returns what is still left.

    Args:
        folder: the folder of a run that is over.
        patience_s: how long to send.

    Raises:
        StorageError: the outbox cannot be read.
    """
    deadline = time.monotonic() + patience_s
    trackers: list[OutboxTracker] = []
    try:
        for writer in unfinished_writers(folder):  # all at once: one may wait until another has created the run
            trackers.append(OutboxTracker(services, folder, writer, notify))
    finally:
        left = sum(tracker.close(max(deadline - time.monotonic(), 0.0)) for tracker in trackers)
    return Unsent(left, any(tracker.is_away for tracker in trackers))


def now_ms() -> int:
    """Milliseconds since the epoch, as tracking services count time."""
    return int(time.time() * 1000)
