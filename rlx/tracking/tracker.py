"""A run's records on their way to MLflow: sent beside training, in order; kept on the storage while none are taken.

Each process of a run that records something has a tracker of its own, under a name of its own, whose entries a thread
sends one after the other. What a server does not take waits: in memory, and from `flush` on as files in
<run>/outbox/<writer>, from where the next tracker of that name sends them. Entries may be sent twice, since a process
can die between sending one and forgetting it; report.Record sees to it that they are there once.

What an entry means to MLflow is report's business.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rlx.storage.filesystem import Storage, StorageError, retry
from rlx.tracking import mlflow
from rlx.tracking.mlflow import MLflowRun
from rlx.tracking.outbox import OutboxEntry, entry_names, read_entry, read_run_record, run_id, write_run_record

Say = Callable[[str], None]

_LOG = logging.getLogger("rlx")
_SENT_WITH: dict[str, Callable[..., None]] = {
    "log": MLflowRun.log,
    "log_samples": MLflowRun.log_samples,
    "log_text": MLflowRun.log_text,
    "set_tags": MLflowRun.set_tags,
    "end": MLflowRun.end,
}
_OPEN = "open"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0  # between attempts
_LAST_ANSWER_S = 30.0
_TOLD_AT = 2  # failures in a row: one alone is often a connection that the server has closed for being idle


class _NotYet(Exception):
    """The run, or the one that it is nested in, is not made yet: another process does that."""


class Tracker:
    """One MLflow run as one process of it writes it; nothing waits for MLflow and nothing fails for it.

    Args:
        uri: tracking server or database.
        folder: the run's.
        writer: name of the process in the run, e.g. "rank_0"; two that live at once have two. None: what it is given
            goes nowhere.
        say: told what a person should know, each time once: that no records are taken, that they are again, that one
            was refused. Called from another thread.

    Raises:
        StorageError: what an earlier tracker has left cannot be read.
    """

    def __init__(self, uri: str, folder: Storage, writer: str | None, say: Say = _LOG.warning) -> None:
        self.uri, self.folder = uri, folder
        self._say, self._said = say, ""
        self._outbox = folder / "outbox" / (writer or "")
        self._waiting: deque[OutboxEntry] = deque()  # oldest first
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._hurry = threading.Event()  # cuts a pause between attempts short
        self._failures = 0  # in a row
        self._stuck = self._closed = writer is None
        self._record: MLflowRun | None = None
        if writer:
            self._take_over()
            mlflow.send_briefly()
            threading.Thread(target=self._send_all, name=f"mlflow {self._outbox.path}", daemon=True).start()

    @property
    def run_id(self) -> str | None:
        """Of the MLflow run; None until MLflow has made it."""
        return self._record.run_id if self._record else run_id(self.folder)

    def open(
        self,
        experiment: str,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        parent: Storage | None = None,
    ) -> None:
        """Asks for the folder's MLflow run, as of now: for a new one, or for the one that it has to go on.

        On return the folder has its run.json, {"mlflow_run": null or the id, "key": what the run is found by if the id
        was lost}.

        Args:
            parent: folder of the run that it is nested in, on the same storage.

        Raises:
            ConfigError: the run.json that is there is not what was written.
            StorageError: it cannot be read or written.
        """
        if self._closed:
            return
        kept = retry(partial(read_run_record, self.folder), f"reading {self.folder.path}/run.json")
        if "key" not in kept:
            write_run_record(self.folder, kept.get("mlflow_run"), uuid.uuid4().hex)
        texts = {key: str(value)[:6000] for key, value in params.items()}  # more is refused
        above = parent.path if parent else None
        about = {"experiment": experiment, "name": name, "params": texts, "tags": dict(tags), "parent": above}
        self._add(_OPEN, about | {"at": _now()})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """A step's metrics, all at once; a step that MLflow has already is not logged again."""
        self._add("log", {"metrics": {key: float(value) for key, value in metrics.items()}, "step": step, "at": _now()})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Completions, as a table; before the step's `log`. The values are such as JSON has."""
        if rows:
            self._add("log_samples", {"rows": [dict(row) for row in rows], "step": step})

    def log_text(self, name: str, text: str) -> None:
        """A text artifact; another of that name takes its place."""
        self._add("log_text", {"name": name, "text": text})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._add("set_tags", {"tags": dict(tags)})

    def end(self, status: str) -> None:
        """Closes the run as of now: FINISHED, FAILED or KILLED."""
        self._add("end", {"status": status, "at": _now()})

    def flush(self, patience_s: float = 1.0) -> None:
        """Returns once all that was logged before is with MLflow or in the outbox; where MLflow takes records, and in
        time, nothing is written.

        Raises:
            StorageError: the outbox cannot be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stuck or not self._waiting, patience_s)
            for entry in self._waiting:
                if entry.file is None and not entry.sent:
                    file = self._outbox / f"{next(self._numbers):06d}.json"
                    text = json.dumps({"kind": entry.kind, "content": entry.content})
                    retry(partial(file.write_text, text), f"writing {file.path}")
                    entry.file = file

    def close(self, patience_s: float) -> int:
        """The last call: sends what is left for so long at most, keeps the rest in the outbox; gives how many are left.

        Raises:
            StorageError: the outbox cannot be written.
        """
        self._hurry.set()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting, patience_s)
        finally:
            self.flush(0)
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._hurry.set()
        return len(self._waiting)

    def _add(self, kind: str, content: dict[str, Any]) -> None:
        with self._changed:
            if not self._closed:
                self._waiting.append(OutboxEntry(kind, content))
                self._changed.notify_all()

    def _take_over(self) -> None:
        """What an earlier tracker has left comes first; a file that it did not write is none of it."""
        for name in retry(partial(entry_names, self._outbox), f"reading {self._outbox.path}"):
            file = self._outbox / name
            try:
                kept = retry(partial(read_entry, file), f"reading {file.path}")
                if kept is None:
                    continue
                if kept["kind"] not in {_OPEN, *_SENT_WITH}:
                    raise KeyError(kept["kind"])
                self._waiting.append(OutboxEntry(kept["kind"], dict(kept["content"]), file))
            except StorageError:
                raise
            except (ValueError, KeyError, TypeError):
                self._tell(f"{file.path} is damaged: it is not sent to MLflow")
            self._numbers = itertools.count(int(name.removesuffix(".json")) + 1)

    # -----------------------------------------------------------------------------------------------------------------
    # In the thread

    def _send_all(self) -> None:
        own = threading.current_thread()
        for other in threading.enumerate():  # one that was closed may still wait for the server's last answer
            if other.name == own.name and other is not own:
                other.join(_LAST_ANSWER_S)
        while entry := self._next():
            if self._delivered(entry):
                self._forget(entry)

    def _next(self) -> OutboxEntry | None:
        """The oldest entry, as soon as there is one; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return None if self._closed else self._waiting[0]

    def _delivered(self, entry: OutboxEntry) -> bool:
        """Sends until MLflow has the entry, or refuses it for good; False if the tracker was closed before."""
        for pause in _pauses():
            if self._closed:
                break
            try:
                self._send(entry)
                self._succeeded()
                return True
            except _NotYet:
                self._wait()
            except Exception as error:  # each kind of MLflow store has its own
                # A run that could not be made is asked for again: without it all that comes after would be lost.
                if mlflow.is_refusal(error) and entry.kind != _OPEN:
                    self._tell(f"MLflow refused a record, which is left out: {mlflow.cause(error)}")
                    return True
                self._failed(error)
            self._hurry.wait(pause)
            self._hurry.clear()
        return False

    def _send(self, entry: OutboxEntry) -> None:
        if entry.kind == _OPEN:
            self._open(**entry.content)
            return
        if self._record is None:
            known = run_id(self.folder)
            if known is None:
                raise _NotYet
            self._record = MLflowRun(self.uri, known)
        _SENT_WITH[entry.kind](self._record, **entry.content)

    def _open(self, *, parent: str | None, at: int, **about: Any) -> None:
        kept = read_run_record(self.folder)
        known, key = kept["mlflow_run"], kept["key"]
        if known is None or not mlflow.reopen_run(self.uri, known, at):
            if known:
                where = mlflow.without_password(self.uri)
                self._tell(f"MLflow run {known} is not in {where}: what comes now is recorded in a new one")
            above = run_id(Storage(self.folder.filesystem, parent)) if parent else None
            if parent and above is None:
                raise _NotYet
            known = mlflow.make_run(self.uri, key, parent=above, at=at, **about)
            write_run_record(self.folder, known, key)
        self._record = MLflowRun(self.uri, known)

    def _forget(self, entry: OutboxEntry) -> None:
        """Out of the outbox before anyone hears that nothing is left."""
        with self._changed:
            entry.sent = True
        if entry.file:
            with suppress(StorageError):  # then it is sent again one day, which changes nothing
                retry(entry.file.delete, f"deleting {entry.file.path}")
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()

    def _wait(self) -> None:
        """Whoever waits for entries to be sent need not: that takes longer."""
        with self._changed:
            self._stuck = True
            self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._wait()
        if self._failures == _TOLD_AT:
            where = mlflow.without_password(self.uri)
            self._tell(
                f"MLflow at {where} takes no records ({mlflow.cause(error)}): training goes on, "
                f"they are kept in {self.folder.path}/outbox"
            )

    def _succeeded(self) -> None:
        if self._failures >= _TOLD_AT:
            self._tell(f"MLflow at {mlflow.without_password(self.uri)} takes records again")
        self._failures, self._stuck = 0, False

    def _tell(self, words: str) -> None:
        """Says something, but not what was said last."""
        if words != self._said:
            self._said = words
            self._say(words)


def send_pending(uri: str, folder: Storage, say: Say = _LOG.warning, patience_s: float = 30.0) -> int:
    """Sends what the processes of a run that is over have left, for so long at most; gives how many entries are left.

    Raises:
        StorageError: the outbox cannot be read.
    """
    writers = [writer for writer in (folder / "outbox").names() if entry_names(folder / "outbox" / writer)]
    deadline = time.monotonic() + patience_s
    trackers: list[Tracker] = []
    try:
        for writer in writers:  # all at once: one may wait for another's run
            trackers.append(Tracker(uri, folder, writer, say))
    finally:
        left = sum(tracker.close(max(deadline - time.monotonic(), 0.0)) for tracker in trackers)
    return left


def _pauses() -> Iterator[float]:
    return (min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S) for attempt in itertools.count())


def _now() -> int:
    """Milliseconds since the epoch, as MLflow counts."""
    return int(time.time() * 1000)
