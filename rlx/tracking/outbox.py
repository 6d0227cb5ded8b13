"""Records that a run could not send yet, and its ids in the tracking services: files in the run's folder.

    <run>/run.json                           id of the run in each service, and the key to find it again
    <run>/outbox/<writer>/000001.json        one record that waits for MLflow; each process of the run is a writer
    <run>/outbox/<writer>.wandb/000001.json  one that waits for another service

Left out: sending (delivery.py).
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import validate_call

from rlx.config.errors import ConfigError
from rlx.config.sections.records import BackendName
from rlx.storage.filesystem import Storage, StorageError, retry, write_record
from rlx.tracking.base import RunStatus, RunWriter, TrackingService
from rlx.types import sendable

_ID = "_run"
_RECORD = threading.Lock()  # the threads of several services read and write one run.json


class EntryKind(StrEnum):
    """The request of an entry: `OPEN` creates the run, any other value is the `RunWriter` method to call."""

    OPEN = "open"
    LOG = "log"
    LOG_SAMPLES = "log_samples"
    LOG_TEXT = "log_text"
    SET_TAGS = "set_tags"
    END = "end"


@dataclass
class OutboxEntry:
    """One record on its way to the tracking service. Its texts are `sendable`, which clients of services need."""

    kind: EntryKind
    content: dict[str, Any]  # keyword arguments
    file: Storage | None = None  # where it is saved; None while it is only in memory
    is_sent: bool = False

    def __post_init__(self) -> None:
        self.content = _sendable(self.content)
        if self.kind == EntryKind.END:
            self.content["status"] = RunStatus(self.content["status"])


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json."""

    ids: Mapping[str, str] = field(default_factory=dict)  # by service, once it has created the run
    key: str | None = None  # unique text that finds the run if its id was lost; None before `OutboxTracker.open`


def _sendable(value: Any) -> Any:
    """What JSON can hold, with all of its texts as `sendable` makes them."""
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, Mapping):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    return [*map(_sendable, value)] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------------------------------------------
# Files


def run_id(folder: Storage, service: BackendName = "mlflow") -> str | None:
    """The id of a run in a tracking service; None if the service has not created it yet.

    Args:
        folder: the run's folder.

    Raises:
        ConfigError: run.json is damaged.
    """
    return read_run_record(folder).ids.get(service)


def pending(folder: Storage) -> int:
    """How many entries of a run wait in its outbox, over all writers and services."""
    return sum(len(entry_names(queue)) for queue in _queues(folder))


def unfinished_writers(folder: Storage) -> list[str]:
    """The writers of a run that have left entries."""
    return sorted({queue.name.partition(".")[0] for queue in _queues(folder) if entry_names(queue)})


def left_by_others(folder: Storage, own: Storage) -> set[str]:
    """The paths of entries that other writers of a run have left for the service that the queue `own` is for."""
    service = own.name.partition(".")[2]
    others = [each for each in _queues(folder) if each.path != own.path and each.name.partition(".")[2] == service]
    return {f"{queue.path}/{name}" for queue in others for name in entry_names(queue)}


def _queues(folder: Storage) -> list[Storage]:
    """The folders in the outbox of a run; a desktop may have put files beside them."""
    queues = [folder / "outbox" / name for name in (folder / "outbox").names()]
    return [queue for queue in queues if queue.size() is None]


def entries_of(folder: Storage, writer: str, service: BackendName) -> Storage:
    """The folder in which the entries of a writer wait for a service."""
    return folder / "outbox" / (writer if service == "mlflow" else f"{writer}.{service}")


def entry_names(outbox: Storage) -> list[str]:
    """The names of the entry files of one writer, oldest first."""
    return [name for name in outbox.names() if name.removesuffix(".json").isdecimal()]


def read_entry(file: Storage) -> OutboxEntry | None:
    """Reads an entry; None if the file is gone, because its writer sent it in the meantime.

    Raises:
        ValueError, KeyError, TypeError: the file is damaged.
    """
    try:
        saved = file.read_json()
    except FileNotFoundError:
        return None
    except OSError:
        if file.exists() and file.size() is None:
            raise ValueError(f"{file} is a folder") from None
        raise
    kind, content = EntryKind(saved["kind"]), dict(saved["content"])
    request: Any = partial(TrackingService.make_run, key="") if kind == EntryKind.OPEN else getattr(RunWriter, kind)
    validate_call(request)(None, **content)  # of the protocol, which does nothing
    return OutboxEntry(kind, content, file)


def read_run_record(folder: Storage) -> RunRecord:
    """Reads run.json; an empty record if the file does not exist.

    Raises:
        ConfigError: the file is damaged.
    """
    file = folder / "run.json"
    if not file.exists():
        return RunRecord()
    try:
        texts = {name: str(value) for name, value in file.read_json().items() if value is not None}
        ids = {name.removesuffix(_ID): value for name, value in texts.items() if name.endswith(_ID)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{file} is damaged: it is not what rlx wrote") from None
    return RunRecord(ids, texts.get("key"))


def add_key(folder: Storage, key: str) -> None:
    """Writes run.json with a key, unless it has one.

    Raises:
        ConfigError: run.json is damaged.
        StorageError: the folder cannot be read or written.
    """
    with _RECORD:
        record = retry(partial(read_run_record, folder), f"reading {folder}/run.json")
        if record.key is None:
            _write_run_record(folder, replace(record, key=key))


def add_run_id(folder: Storage, service: BackendName, run_id: str) -> None:
    """Writes the id of a run in a service into run.json.

    Raises:
        StorageError: the folder cannot be written.
    """
    with _RECORD:
        record = read_run_record(folder)
        _write_run_record(folder, replace(record, ids={**record.ids, service: run_id}))


def _write_run_record(folder: Storage, record: RunRecord) -> None:
    ids = {"mlflow_run": None} | {f"{service}{_ID}": run_id for service, run_id in record.ids.items()}
    file, text = folder / "run.json", json.dumps(ids | {"key": record.key})
    write_record(file, text)


# ---------------------------------------------------------------------------------------------------------------------
# The queue of one writer


class OutboxQueue:
    """The entries of one writer, oldest first: in memory, and as files once `save` had to write them.

    One thread adds entries, another one sends and removes them.

    Args:
        folder: the folder of the writer, <run>/outbox/<writer>.
    """

    def __init__(self, folder: Storage) -> None:
        self.folder = folder
        self.is_closed = False
        self._entries: deque[OutboxEntry] = deque()
        self._next_number = 1  # of the next file
        self._is_stuck = self.is_held = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._entries)

    def load(self) -> list[Storage]:
        """Adds the entries that an earlier process saved; returns the files that are damaged.

        Raises:
            StorageError: the folder cannot be read.
        """
        damaged = []
        for name in retry(partial(entry_names, self.folder), f"reading {self.folder}"):
            file = self.folder / name
            try:
                entry = retry(partial(read_entry, file), f"reading {file}")
            except StorageError:
                raise
            except (ValueError, KeyError, TypeError):
                damaged.append(file)
            else:
                self._entries.extend([entry] if entry else [])
            self._next_number = int(name.removesuffix(".json")) + 1
        return damaged

    def add(self, kind: EntryKind, content: dict[str, Any]) -> None:
        """Appends an entry; does nothing once the queue is closed."""
        with self._changed:
            if not self.is_closed:
                self._entries.append(OutboxEntry(kind, content))
                self._changed.notify_all()

    def oldest(self) -> OutboxEntry | None:
        """Waits for an entry and returns the oldest one, which stays in the queue; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._entries)
            return None if self.is_closed else self._entries[0]

    def remove_oldest(self) -> None:
        """Deletes the oldest entry, which has been sent: first its file, then the entry, then waiting threads wake."""
        with self._changed:
            entry = self._entries[0]
            entry.is_sent = True
        if entry.file:
            with suppress(StorageError):  # a later process sends it again, which changes nothing
                retry(entry.file.delete, f"deleting {entry.file.path}")
        with self._changed:
            self._entries.popleft()
            self._changed.notify_all()

    def set_stuck(self, is_stuck: bool, *, is_held: bool = False) -> None:
        """Tells `save` whether the service takes no entries now, so that waiting for it is useless.

        Args:
            is_held: it will take none until a person does something, so that `wait_until_empty` is useless, too.
        """
        with self._changed:
            self._is_stuck, self.is_held = is_stuck, is_held
            self._changed.notify_all()

    def wait_until_empty(self, patience_s: float) -> None:
        """Waits until all entries are sent or held, at most for `patience_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_held or not self._entries, patience_s)

    def save(self, patience_s: float) -> None:
        """Waits for the entries to be sent, unless the service is stuck; then writes the remaining ones to files.

        Raises:
            StorageError: the folder cannot be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_stuck or not self._entries, patience_s)
            for entry in self._entries:
                if entry.file is None and not entry.is_sent:
                    file = self.folder / f"{self._next_number:06d}.json"
                    self._next_number += 1
                    text = json.dumps({"kind": entry.kind, "content": entry.content})
                    write_record(file, text)
                    entry.file = file

    def close(self) -> None:
        """Ends `oldest` in the sending thread; entries that are left stay in their files."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
