"""Claims: at most one process at a time writes a run or a sweep, on any storage that several machines share.

A claim is a small file in the claimed folder. Its number grows with each owner; the highest one counts. The owner
renews it every few seconds, so that others can take over from an owner that is gone.
Left out: which folders are claimed (rlx.runs, rlx.sweeps).

On disks and NFS, creating a file that must not exist is atomic. On object stores, which pyarrow cannot ask for that,
each writes a file of its own and then lists: only who is alone has won. As a listing shows all finished writes, of two
who both write before they list, neither is alone; the one with the lower name stays and looks again, the other goes.
"""

from __future__ import annotations

import atexit
import getpass
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import FiniteFloat, PositiveInt, TypeAdapter

from rlx.storage.filesystem import Storage, StorageError, free_name

_LOG = logging.getLogger("rlx")
_FILE = re.compile(r"owner-(\d+)(\.[0-9a-f]{32})?\.json")
_BEAT_S = 10.0
_GONE_S = 60.0  # who has not renewed a claim for so long is gone
_ATTEMPTS = 10  # at a file in a folder that others remove
_LOOKS_S = (0.0, 0.5, 1.0, 2.0)  # waits before the looks of one who is not alone


class ClaimedError(StorageError):
    """Another process that is alive holds the claim. The text says which."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a claim."""

    user: str
    host: str
    machine: str  # differs between boots and containers, within which process ids mean something
    pid: PositiveInt
    started: str  # tells a process from a later one with the same id
    since: FiniteFloat  # Unix seconds

    @classmethod
    def myself(cls) -> Owner:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # the user id has no name, as in some containers
            user = str(os.getuid())
        return cls(user, socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()), time.time())

    def is_gone(self, unseen_s: float) -> bool:
        """Whether the process has ended.

        Args:
            unseen_s: seconds since it renewed its claim; counts for processes of other machines.
        """
        if self.machine != _machine():
            return unseen_s > _GONE_S
        started = _started(self.pid)
        if started and self.started:
            return started != self.started
        return not _exists(self.pid) or unseen_s > _GONE_S

    def __str__(self) -> str:
        is_own = (self.machine, self.pid, self.started) == (_machine(), os.getpid(), _started(os.getpid()))
        itself = " (this process itself)" if is_own else ""
        return " ".join(f"process {self.pid} of {self.user} on {self.host}{itself}".split())


_OWNER = TypeAdapter(Owner)


class Claim:
    """The claim of this process on a folder, renewed by a thread until `release` or the end of the process.

    If another process takes over nevertheless, for this one was stopped for a minute, this one is interrupted.
    """

    def __init__(self, file: Storage, owner: Owner, what: str) -> None:
        self._file, self._owner, self._what = file, owner, what
        self.folder = Storage(file.filesystem, file.path.rpartition("/")[0])
        self._released, self._lock = threading.Event(), threading.Lock()
        atexit.register(self.release)
        threading.Thread(target=self._renew, name="claim", daemon=True).start()

    def _renew(self) -> None:
        while not self._released.wait(_BEAT_S):
            with suppress(OSError), self._lock:  # what is written to that storage next reports its errors
                if self._released.is_set():
                    return
                if any(_number(name) > _number(self._file.name) for name in _claims(self.folder)):
                    _LOG.error("%s: another process has taken it over, this one ends", self._what)
                    # As Ctrl-C, so also where the main thread waits; in the background of some shells that is ignored.
                    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                    os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
                    return
                self._touch()

    def _touch(self) -> None:
        if self._file.is_local:  # also on a full disk
            os.utime(self._file.path)
        else:
            self._file.write_text(json.dumps(asdict(self._owner)))

    def release(self) -> None:
        """Gives the folder free. One that is still empty is removed."""
        if self._released.is_set():
            return
        self._released.set()
        atexit.unregister(self.release)
        with suppress(OSError), self._lock:  # the thread writes nothing afterwards
            for name in _claims(self.folder):  # the own one last: until then it counts
                if _number(name) <= _number(self._file.name):
                    (self.folder / name).delete()
            if self.folder.is_local:
                os.rmdir(self.folder.path)  # fails unless it is empty

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def take_new(parent: Storage, name: str | None, kind: str, prefix: str) -> Claim:
    """Claims a folder for something new; see `take`.

    Args:
        name: the folder's name in `parent`; None: the first of prefix-1, prefix-2, ... that is not there.
    """
    while not name:
        with suppress(ClaimedError):  # another process was faster: the next name
            free = free_name(parent, prefix)
            return take(parent / free, f"{kind} {free!r}")
    return take(parent / name, f"{kind} {name!r}")


def take(folder: Storage, what: str) -> Claim:
    """Claims a folder for this process; creates it.

    Args:
        what: what the folder is, for errors, e.g. "run 'ppo-1'".

    Raises:
        ClaimedError: another process holds it.
        StorageError: the storage cannot be written.
    """
    try:
        gone = _judge(folder, what)
        owner = Owner.myself()
        number = max(map(_number, gone), default=0) + 1
        file = _create(folder, number, json.dumps(asdict(owner)), gone)
    except OSError as error:
        raise StorageError(f"{what} cannot be claimed in {folder}: {error}") from None
    if file is None:
        raise ClaimedError(f"{what} is being started by another process at this moment")
    return Claim(file, owner, what)


def holder(folder: Storage) -> str:
    """Which process that is alive holds a folder, and since when; empty if none does, or that cannot be seen."""
    with suppress(OSError):
        for name in _claims(folder):
            with suppress(FileNotFoundError):  # released since
                if found := _holder(folder / name, (folder / name).read_text()):
                    return found
    return ""


def _judge(folder: Storage, what: str) -> dict[str, str]:
    """Returns the claims in a folder, with their content, if all of their owners are gone.

    Raises:
        ClaimedError: one of them is alive.
    """
    gone: dict[str, str] = {}
    while left := [name for name in _claims(folder) if name not in gone]:
        for name in left:
            with suppress(FileNotFoundError):  # released since: look again, another may have come
                gone[name] = (folder / name).read_text()
                if holder := _holder(folder / name, gone[name]):
                    raise ClaimedError(f"{what} is in use by {holder}: wait for its end, or end it")
    return gone


def _holder(file: Storage, content: str) -> str:
    """Who holds the claim in a file, and since when; empty if that process is gone."""
    unseen_s = _seconds_since(file)
    try:
        owner = _OWNER.validate_json(content)
    except ValueError:  # it is being written
        return "" if unseen_s > _GONE_S else "a process that starts it"
    if owner.is_gone(unseen_s):
        return ""
    return f"{owner} for {time.time() - owner.since:.0f} s (last sign {max(unseen_s, 0):.0f} s ago)"


def _seconds_since(file: Storage) -> float:
    """Age of a file by its storage's clock, which need not be ours."""
    probe = Storage(file.filesystem, f"{file.path.rpartition('/')[0]}/now-{uuid.uuid4().hex}")
    try:
        probe.write_text("")
        now, then = (file.filesystem.get_file_info(each.path).mtime for each in (probe, file))
    finally:
        probe.delete()
    if then is None:
        raise FileNotFoundError(file.path)
    return float((now - then).total_seconds())


def _create(folder: Storage, number: int, content: str, gone: Mapping[str, str]) -> Storage | None:
    """Creates the claim of that number, or returns None if another process has one.

    Args:
        gone: claims of processes that are gone, with their content.
    """
    if folder.is_local:
        file = folder / f"owner-{number}.json"
        if not _create_local(Path(file.path), content):
            return None
    else:
        file = folder / f"owner-{number}.{uuid.uuid4().hex}.json"
        file.write_text(content)
    for wait_s in _LOOKS_S:
        time.sleep(wait_s)
        others = [name for name in _claims(folder) if name != file.name and not _is_same(folder / name, gone)]
        if not others:
            return file
        if _order(others[0]) < _order(file.name) or _number(others[-1]) > number:
            break
    file.delete()
    return None


def _create_local(file: Path, content: str) -> bool:
    """Creates a file that must not exist; tells whether it did not."""
    for _ in range(_ATTEMPTS):
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has released the empty folder meanwhile
            try:
                file.touch(exist_ok=False)
            except FileExistsError:
                return False
            _fill(file, content)
            return True
    return False


def _fill(file: Path, content: str) -> None:
    """Writes a claim; removes it if the disk is full: it would keep others out for a minute."""
    try:
        file.write_text(content)
    except OSError:
        file.unlink()
        with suppress(OSError):  # unless others have put something into the folder
            file.parent.rmdir()
        raise


def _is_same(file: Storage, known: Mapping[str, str]) -> bool:
    """Whether a file is one of those known, or is there no more."""
    try:
        return file.name in known and file.read_text() == known[file.name]
    except FileNotFoundError:
        return True


def _claims(folder: Storage) -> list[str]:
    """The claims in a folder by their numbers, and within a number by name."""
    return sorted(filter(_FILE.fullmatch, folder.names()), key=_order)


def _order(name: str) -> tuple[int, str]:
    return _number(name), name


def _number(name: str) -> int:
    found = _FILE.fullmatch(name)
    return int(found[1]) if found else 0


def _machine() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):  # Linux has them
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _started(pid: int) -> str:
    """When a process of this machine began, in the kernel's own unit; empty if that cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # there is none, or it is of another user and hidden
        return ""
    return "zombie" if fields[0] == "Z" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number of more than 32 bits
        return False
    except PermissionError:  # it is of another user
        return True
    return True
