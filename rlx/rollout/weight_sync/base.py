"""What both ends of weight transports share: where engines are, what an update is, how to wait.

The sending end of a transport is a `Transport` (sender.py), the end in an engine's worker is a `ReceivingEnd`. This
module does not import torch, so that the driver can import it quickly. Left out: how each transport works (its file).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlx.types import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

    from rlx.rollout.weight_sync.buckets import Layout

OBJECT_STORE = "object_store"
"""the one transport that reaches an engine's actor, in calls of its own; all others reach an engine's workers"""
RECEIVER_PATIENCE = 3
"""an engine waits this many times longer than the trainer, which may wait for other engines"""
_FAST_S, _SLOW_S = 1e-4, 0.02  # between two calls of `is_done`, and between two calls of `check`


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where a process computes."""

    node: str
    gpu: str  # its UUID; empty: the node's CPU


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """Where an engine computes."""

    process: str  # a name that changes with each start of the engine
    workers: tuple[DeviceLocation, ...]  # one, or as many as the model is split over


@dataclass(frozen=True, slots=True)
class Source:
    """Where one worker of an engine gets its weights from."""

    transport: str  # a key of TRANSPORTS
    rank: int  # what the transport needs to know: the trainer that shares memory, or the worker's rank in a group


@dataclass(frozen=True, slots=True)
class Incoming:
    """What an engine needs to know of an update that its workers fetch."""

    update: str  # a name that no other update has
    engine: str  # the process that is to receive it
    address: tuple[str, int]  # of the store in which sender and receivers leave notes
    group: str  # name of the process groups
    world: dict[str, int]  # size of each process group, by transport
    sources: tuple[Source, ...]  # of each worker
    layouts: tuple[Layout, ...]  # of each bucket, in order
    timeout_s: float  # longest wait for a bucket
    midway: bool  # running requests continue with these weights


class UpdateInterruptedError(WeightSyncError):
    """The sender interrupted the update, or the connection broke: the receiving engine is not known to be at fault."""


class ReceivingEnd(Protocol):
    """The receiving end of a transport in one worker of an engine, kept from one update to the next."""

    def connect(self, incoming: Incoming, store: Any) -> None:
        """Connects to the sender.

        Args:
            store: in which sender and receivers leave notes, see process_group.py.
        """
        ...

    def receive(self, incoming: Incoming) -> Iterator[Tensor]:
        """Yields each bucket, `[bytes]` uint8; asking for the next one means that this one has been read."""
        ...

    def fail(self, incoming: Incoming, error: Exception) -> None:
        """Ends the connection after an error, and tells the sender."""
        ...

    def close(self) -> None:
        """Frees what is kept between updates."""
        ...


def interrupted_note(group: str) -> str:
    """The key of the note that the process groups of an update are no longer used."""
    return f"{group}/interrupted"


def check_interrupted(store: Any, incoming: Incoming) -> None:
    """Raises UpdateInterruptedError if the sender has noted that it interrupted the update."""
    if store.check([interrupted_note(incoming.group)]):
        raise UpdateInterruptedError("the sender interrupted the update, because another engine was lost")


def deadline(incoming: Incoming) -> float:
    """The time of `time.monotonic()` until which a worker waits for its next bucket, from now."""
    return time.monotonic() + incoming.timeout_s


def wait(is_done: Callable[[], bool], deadline: float, check: Callable[[], None]) -> None:
    """Returns when `is_done` returns true; calls `check` from time to time, which may raise.

    Raises:
        TimeoutError: it is not done at the deadline, a time of `time.monotonic()`.
    """
    checked = time.monotonic()
    while not is_done():
        if (now := time.monotonic()) > deadline:
            raise TimeoutError
        if now - checked > _SLOW_S:
            check()
            checked = now
        time.sleep(_FAST_S)
