"""The thread that sends the entries of an outbox to a tracking service: in order, with retries while it is away.

An entry may be sent twice, because a process can die between sending an entry and deleting it; the service's
`RunWriter` stores it once. Left out: the queue and its files (outbox.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from weakref import WeakValueDictionary

from rlx.storage.filesystem import Storage
from rlx.tracking import outbox
from rlx.tracking.base import Failure, RunWriter, TrackingService
from rlx.tracking.outbox import EntryKind, OutboxEntry, OutboxQueue
from rlx.types import Notify

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0  # between attempts
_LAST_ANSWER_S = 30.0
_FAILURES_TO_NOTIFY = 2  # in a row: a single one is often a connection that the server closed because it was idle

_threads: WeakValueDictionary[str, threading.Thread] = WeakValueDictionary()
"""the newest delivery's of each queue, by the path of its folder"""


class _RunNotCreatedError(Exception):
    """The run, or the run that contains it, does not exist yet: another process creates it."""


class Delivery:
    """Sends the entries of one outbox queue from a thread of its own.

    Args:
        service: where the entries go.
        folder: the run's folder.
        queue: the entries.
        notify: called from the thread with messages for a person: the service takes no records, takes records again,
            refused one. A message is not repeated.
    """

    def __init__(self, service: TrackingService, folder: Storage, queue: OutboxQueue, notify: Notify) -> None:
        self.service, self.queue, self._folder = service, queue, folder
        self._notify, self._last_message = notify, ""
        self._hurry = threading.Event()  # ends a pause between attempts early
        self._failures, self._failure = 0, Failure.AWAY  # how many of this kind in a row
        self._is_told = False  # whether a person knows that the service takes no records
        self._writer: RunWriter | None = None
        self._run_id: str | None = None
        self._left_before: set[str] | None = None  # what others had left when the run was first to be continued

    @property
    def run_id(self) -> str | None:
        """The id of the run in the tracking service; None until the service has created the run."""
        return self._run_id or outbox.run_id(self._folder, self.service.name)

    def start(self) -> None:
        """Starts the thread."""
        path = self.queue.folder.path
        thread = threading.Thread(
            target=self._send_all, args=(_threads.get(path),), name=f"tracking {path}", daemon=True
        )
        _threads[path] = thread
        thread.start()

    def hurry(self) -> None:
        """Makes the next attempt now instead of after the pause."""
        self._hurry.set()

    def _send_all(self, before: threading.Thread | None) -> None:
        if before:  # a closed delivery of the same queue, which may still wait for a last answer
            before.join(_LAST_ANSWER_S)
        while entry := self.queue.oldest():
            if self._deliver(entry):
                self.queue.remove_oldest()

    def _deliver(self, entry: OutboxEntry) -> bool:
        """Sends an entry until the service has stored or refused it; False if the queue was closed before."""
        for pause_s in _pauses():
            if self.queue.is_closed:
                break
            try:
                self._send(entry)
                self._count_success()
                return True
            except _RunNotCreatedError:
                self.queue.set_stuck(True)
            except Exception as error:  # the client of each service has its own error types
                # What a text cannot be sent as, it cannot be sent as later either.
                failure = Failure.REFUSED if isinstance(error, UnicodeEncodeError) else self.service.failure(error)
                # A refused `OPEN` is repeated: without the run all later entries would be lost.
                if failure is Failure.REFUSED and entry.kind != EntryKind.OPEN:
                    cause = self.service.cause(error)
                    self._notify_once(f"{self.service.title} refused a record, which is left out: {cause}")
                    return True
                self._count_failure(error, failure)
            self._hurry.wait(pause_s)
            self._hurry.clear()
        return False

    def _send(self, entry: OutboxEntry) -> None:
        if entry.kind == EntryKind.OPEN:
            self._open_run(**entry.content)
            return
        if self._writer is None or self._failures:  # another process may have made a new run meanwhile
            existing = outbox.run_id(self._folder, self.service.name)
            if existing is None:
                raise _RunNotCreatedError
            if self._writer is None or existing != self._run_id:
                self._use_run(existing)
        assert self._writer
        getattr(self._writer, entry.kind)(**entry.content)

    def _open_run(
        self, *, parent: str | None, at: int, params: Mapping[str, str], tags: Mapping[str, str], **names: str
    ) -> None:
        """Continues the run of the folder, or creates it and writes its id to run.json.

        In place of a run that is deleted it creates one only if no records wait that may be of the deleted one; those
        that were not there at first are of this start.
        """
        record = outbox.read_run_record(self._folder)
        assert record.key  # `OutboxTracker.open` has written it
        before = existing = record.ids.get(self.service.name)
        if existing:
            if self._left_before is None:
                self._left_before = outbox.left_by_others(self._folder, self.queue.folder)
            try:
                self.service.reopen_run(existing, at, params, tags)
            except Exception as error:
                is_deleted = self.service.failure(error) is Failure.DELETED
                if not is_deleted or self._left_before & outbox.left_by_others(self._folder, self.queue.folder):
                    raise
                existing = None
        if existing is None:
            parent_id = outbox.run_id(Storage(self._folder.filesystem, parent), self.service.name) if parent else None
            if parent and parent_id is None:
                raise _RunNotCreatedError
            existing = self.service.make_run(record.key, parent=parent_id, at=at, params=params, tags=tags, **names)
            outbox.add_run_id(self._folder, self.service.name, existing)
            if before:
                self._notify_once(
                    f"{self.service.title} run {before} is not in {self.service.address}: "
                    "what comes now is recorded in a new one"
                )
        if missing := self._use_run(existing).missing():
            self._notify_once(missing)

    def _use_run(self, run_id: str) -> RunWriter:
        self._writer = writer = self.service.writer(run_id)
        self._run_id = run_id
        return writer

    def _count_failure(self, error: Exception, failure: Failure) -> None:
        self._failures = self._failures + 1 if failure is self._failure else 1
        self._failure = failure
        if self._failures == _FAILURES_TO_NOTIFY:
            self._is_told = True
            what = "refuses the run, and with it its" if failure is Failure.REFUSED else "takes no"
            self._notify_once(
                f"{self.service.title} at {self.service.address} {what} records ({self.service.cause(error)}): "
                f"training goes on, they are kept in {self._folder}/outbox"
            )
        # Not at once: another process may be making a new run.
        is_held = failure is not Failure.AWAY and self._failures >= _FAILURES_TO_NOTIFY
        self.queue.set_stuck(True, is_held=is_held)

    def _count_success(self) -> None:
        if self._is_told:
            self._notify_once(f"{self.service.title} at {self.service.address} takes records again")
        self._failures, self._is_told = 0, False
        self.queue.set_stuck(False)

    def _notify_once(self, message: str) -> None:
        """Notifies, unless the last message was the same."""
        if message != self._last_message:
            self._last_message = message
            self._notify(message)


def _pauses() -> Iterator[float]:
    """Seconds between attempts: they double up to a limit."""
    return (min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S) for attempt in itertools.count())
