"""Keeps the replies of a judge in the run's folder, so that a resumed run asks nothing twice.

Each call of the scorer adds a file of JSON lines, since object stores do not append. Left out: what a reply means.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Protocol, Self

from rlx.rewards.judge.rubric import JudgeReply

_LOG = logging.getLogger("rlx")
_READERS = 16
_MOST = 200_000_000  # characters in memory; the replies that were added first are forgotten first


class Folder(Protocol):
    """A folder or file, as rlx.storage.filesystem.Storage is one."""

    def __truediv__(self, name: str) -> Self: ...

    def names(self) -> list[str]:
        """Names of what is in the folder; none if it does not exist."""
        ...

    def read_text(self) -> str:
        """The content of the file."""
        ...

    def write_text(self, text: str) -> None:
        """Writes the file at once."""
        ...


def key_of(request: object) -> str:
    """A short name of a request: all of its text, the model and how it is sampled decide it."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:32]


class ReplyCache:
    """Replies by the key of their request; without a folder they are kept in memory alone."""

    def __init__(self, folder: Folder | None = None) -> None:
        """Reads the replies that the folder holds; what cannot be read there is asked again."""
        self._folder, self._lock = folder, Lock()
        self._new: dict[str, JudgeReply] = {}
        self._replies: dict[str, JudgeReply] = {}
        self._size = 0  # of all replies, in characters
        names = [name for name in folder.names() if name.endswith(".jsonl")] if folder else []
        with ThreadPoolExecutor(_READERS) as pool:
            for replies in pool.map(self._read, names):
                for key, reply in replies.items():
                    self._remember(key, reply)

    def _read(self, name: str) -> dict[str, JudgeReply]:
        assert self._folder
        try:
            return dict(_lines(self._folder / name))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("reward judge: %s holds no replies, they are asked for again: %s", name, error)
            return {}

    def get(self, key: str) -> JudgeReply | None:
        """The reply to a request; None if it is not known."""
        with self._lock:
            return self._replies.get(key)

    def add(self, key: str, reply: JudgeReply) -> None:
        """Keeps a reply; `flush` writes it."""
        with self._lock:
            self._new[key] = reply
            self._remember(key, reply)

    def _remember(self, key: str, reply: JudgeReply) -> None:
        self._size += len(reply.text) - len(self._replies.pop(key, JudgeReply("")).text)
        self._replies[key] = reply
        while self._size > _MOST:
            self._size -= len(self._replies.pop(next(iter(self._replies))).text)

    def flush(self) -> None:
        """Writes the replies that are new. A folder that cannot be written costs requests, not the run."""
        with self._lock:
            new, self._new = self._new, {}
        if not new or self._folder is None:
            return
        text = "".join(_line(key, reply) + "\n" for key, reply in new.items())
        try:
            (self._folder / f"{uuid.uuid4().hex}.jsonl").write_text(text)
        except OSError as error:
            _LOG.warning("reward judge: replies are not kept, a resume asks for them again: %s", error)


def _line(key: str, reply: JudgeReply) -> str:
    return json.dumps({"request": key, "reply": reply.text} | ({"cut": True} if reply.is_cut else {}))


def _lines(file: Folder) -> Iterator[tuple[str, JudgeReply]]:
    for line in file.read_text().splitlines():
        row = json.loads(line)
        yield str(row["request"]), JudgeReply(str(row["reply"]), bool(row.get("cut")))
