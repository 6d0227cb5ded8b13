"""The tracker of real runs. It sends records to a tracking service while training continues.

Each process of a run that records something has an `OutboxTracker` with a writer name of its own. Records that the
service does not take wait in memory, and after `flush` in <run>/outbox/<writer>; the next tracker of the same writer
sends them.

Left out: the files (outbox.py), sending and retrying (delivery.py), what a record means to a service (mlflow.py).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlx.storage.filesystem import Storage, retry
from rlx.tracking.base import RunStatus, TrackingService
from rlx.tracking.delivery import Delivery
from rlx.tracking.mlflow import MLflowService
from rlx.tracking.outbox import EntryKind, OutboxQueue, entry_names, read_run_record, write_run_record, writers
from rlx.types import Notify

_LOG = logging.getLogger("rlx")

TRACKING_SERVICES: dict[str, Callable[[str], TrackingService]] = {
    "": MLflowService,
}
"""The tracking service for each scheme of `tracking.uri`; "" is for all schemes without a row, because MLflow takes
sqlite, http, https, postgresql and more"""


def service_at(uri: str) -> TrackingService:
    """The tracking service that an address belongs to."""
    scheme = uri.partition(":")[0]
    return TRACKING_SERVICES.get(scheme, TRACKING_SERVICES[""])(uri)


class OutboxTracker:
    """Records one run from one process of it; neither waits for the tracking service nor fails with it.

    Implements `Tracker`, which explains the methods.

    Args:
        service: where the records go.
        folder: the run's folder.
        writer: name of this process in the run, e.g. "rank_0". Two live processes must not have the same name.
        notify: called from another thread with messages for a person, see `Delivery`.

    Raises:
        StorageError: the records of an earlier tracker cannot be read.
    """

    def __init__(self, service: TrackingService, folder: Storage, writer: str, notify: Notify = _LOG.warning) -> None:
        self.service, self.folder = service, folder
        self._queue = OutboxQueue(folder / "outbox" / writer)
        for file in self._queue.load():
            notify(f"{file.path} is damaged: it is not sent to {service.title}")
        self._delivery = Delivery(service, folder, self._queue, notify)
        self._delivery.start()

    @property
    def run_id(self) -> str | None:
        """The id of the run in the tracking service; None until the service has created the run."""
        return self._delivery.run_id

    def open(
        self,
        experiment: str,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        parent: Storage | None = None,
    ) -> None:
        """Requests that the run is created, or continued if the folder has one; starts now. Writes run.json."""
        record = retry(partial(read_run_record, self.folder), f"reading {self.folder.path}/run.json")
        if record.key is None:
            write_run_record(self.folder, replace(record, key=uuid.uuid4().hex))
        content = {
            "experiment": experiment,
            "name": name,
            "params": {key: str(value) for key, value in params.items()},
            "tags": dict(tags),
            "parent": parent.path if parent else None,
            "at": now_ms(),
        }
        self._queue.add(EntryKind.OPEN, content)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records all metrics of a step."""
        values = {name: float(value) for name, value in metrics.items()}
        self._queue.add(EntryKind.LOG, {"metrics": values, "step": step, "at": now_ms()})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Records completions as a table. Call it before the `log` of the same step."""
        if rows:
            self._queue.add(EntryKind.LOG_SAMPLES, {"rows": [dict(row) for row in rows], "step": step})

    def log_text(self, name: str, text: str) -> None:
        """Stores a text file with the run."""
        self._queue.add(EntryKind.LOG_TEXT, {"name": name, "text": text})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        self._queue.add(EntryKind.SET_TAGS, {"tags": dict(tags)})

    def end(self, status: RunStatus) -> None:
        """Marks the run as ended now."""
        self._queue.add(EntryKind.END, {"status": status, "at": now_ms()})

    def flush(self, patience_s: float = 1.0) -> None:
        """Returns once the service has every record, or the outbox folder has those that the service did not take."""
        self._queue.save(patience_s)

    def close(self, patience_s: float) -> int:
        """Sends for at most `patience_s`, saves the rest in the outbox folder, and returns how many are left."""
        self._delivery.hurry()
        try:
            self._queue.wait_until_empty(patience_s)
        finally:
            try:
                self._queue.save(0)
            finally:  # also on a full disk: the thread ends
                self._queue.close()
                self._delivery.hurry()
        return len(self._queue)


def send_pending(
    service: TrackingService, folder: Storage, notify: Notify = _LOG.warning, patience_s: float = 30.0
) -> int:
    """Sends the records that the processes of a run have left in its outbox; returns how many are still left.

    Args:
        folder: the folder of a run that is over.
        patience_s: how long to send.

    Raises:
        StorageError: the outbox cannot be read.
    """
    unfinished = [writer for writer in writers(folder) if entry_names(folder / "outbox" / writer)]
    deadline = time.monotonic() + patience_s
    trackers: list[OutboxTracker] = []
    try:
        for writer in unfinished:  # all at once: one may wait until another has created the run
            trackers.append(OutboxTracker(service, folder, writer, notify))
    finally:
        left = sum(tracker.close(max(deadline - time.monotonic(), 0.0)) for tracker in trackers)
    return left


def now_ms() -> int:
    """Milliseconds since the epoch, as tracking services count time."""
    return int(time.time() * 1000)
