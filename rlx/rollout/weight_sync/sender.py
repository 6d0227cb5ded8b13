"""One weight update as one rank sends it: its plan, its buckets, and which engines still take it.

The transports move the bytes. Two buffers take turns: while one is sent or read, the other is filled.
An engine that dies or hangs is left out; the others that shared a process group with it have to be sent to again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import torch
from torch import Tensor

from rlx.actors import EngineLostError, EngineTimeoutError, RolloutError, get_result
from rlx.rollout.weight_sync.base import OBJECT_STORE, RECEIVER_PATIENCE, Incoming, Source, wait
from rlx.rollout.weight_sync.buckets import Layout, byte_size, fill

_GRACE_S = 5.0  # in which engines answer that an update was interrupted

Failures = dict[int, EngineLostError]
"""engines, and why they did not take the weights"""


@dataclass(frozen=True)
class UpdatePlan:
    """How one update travels; the same on all ranks."""

    name: str  # that no other update has
    address: tuple[str, int]  # of the store
    group: str  # name of the process groups
    sources: dict[int, tuple[Source, ...]]  # of the workers of each engine
    processes: dict[int, str]  # of each engine, see `EngineLocation`

    @property
    def world(self) -> dict[str, int]:
        """The size of each transport's process group, rank 0 of the trainers included."""
        names = [source.transport for sources in self.sources.values() for source in sources]
        return {name: 1 + names.count(name) for name in names}

    @property
    def direct(self) -> dict[int, tuple[Source, ...]]:
        """The engines whose workers fetch the update."""
        return {i: sources for i, sources in self.sources.items() if sources[0].transport != OBJECT_STORE}


@dataclass(frozen=True)
class UpdateRequest:
    """What all ranks are asked to send."""

    version: int
    layouts: tuple[Layout, ...]  # of each bucket
    timeout_s: float  # the longest wait for an engine in each phase
    midway: bool  # running requests continue with these weights


@dataclass(frozen=True)
class OutgoingBucket:
    """A bucket on its way."""

    number: int  # within the update, from 0
    layout: Layout
    tensors: Sequence[Tensor]
    memory: Tensor | None = None  # `[bytes]` uint8, filled with the tensors; None: no direct transport sends here
    handle: bytes = b""  # by which receivers map the memory; empty: they cannot


class Transport(Protocol):
    """The sending end of a transport on one rank, kept from one update to the next.

    For each update `prepare` is called first, then, if it returns True, `connect` once, `send` and `release` for each
    bucket, and `finish` once. An end that cannot reach an engine marks it as failed in the update and goes on.
    """

    maps_memory: bool  # whether receivers map the buffers that buckets are in

    @property
    def is_connected(self) -> bool:
        """Whether an update to the same engines needs no new connection."""
        ...

    def prepare(self, update: OutgoingUpdate) -> bool:
        """Begins an update, drops connections of other ones; returns whether this rank sends by this transport."""
        ...

    def connect(self) -> None:
        """Connects to the engines; they know of the update."""
        ...

    def send(self, bucket: OutgoingBucket) -> None:
        """Begins to send the next bucket."""
        ...

    def release(self, number: int) -> None:
        """Returns when the buffer of a bucket may be filled again."""
        ...

    def finish(self) -> None:
        """Returns when all buckets have been sent."""
        ...

    def leave_out(self, engine: int) -> None:
        """Stops waiting for an engine; is called also if `prepare` returned False."""
        ...

    def interrupt(self) -> None:
        """Ends the connections that this rank has, if any, and tells their receivers."""
        ...

    def close(self) -> None:
        """Frees what is kept between updates."""
        ...


@dataclass
class SendingRank:
    """What a rank keeps from one update to the next."""

    rank: int
    device: torch.device
    engines: Sequence[Any]  # actor handles
    transports: dict[str, Transport]  # by name, see TRANSPORTS
    buffer: Callable[[int, int, bool], tuple[Tensor, bytes]]  # see `SendBuffers.get`
    store: Any = None  # in which senders and receivers leave notes; None until a direct transport needs it


class OutgoingUpdate:
    """One update on one rank: calls the phases of its transports, and keeps the engines that do not take it.

    `failed` has the engines at fault, `retry` those that were interrupted because another failed or a connection broke.
    """

    def __init__(self, plan: UpdatePlan, request: UpdateRequest, sender: SendingRank) -> None:
        """Prepares the transports."""
        self.plan, self.request, self.sender = plan, request, sender
        self.failed: Failures = {}
        self.retry: Failures = {}
        self.incoming = {engine: _incoming(plan, request, engine) for engine in plan.direct}
        self._calls: dict[Any, int] = {}  # of `Engine.update` that have not returned, and their engines
        self._sent = 0  # buckets
        active = {name: end for name, end in sender.transports.items() if end.prepare(self)}
        self._active = list(active.values())
        self._direct = [end for name, end in active.items() if name != OBJECT_STORE]
        self._nbytes = max(map(byte_size, request.layouts)) if self._direct else 0
        self._is_mapped = any(end.maps_memory for end in self._direct)

    def connect(self) -> None:
        """Tells the engines of the update, on rank 0, and connects the transports."""
        if self.sender.rank == 0:
            engines, version = self.sender.engines, self.request.version
            self._calls = {engines[i].update.remote(incoming, version): i for i, incoming in self.incoming.items()}
        for transport in self._active:
            transport.connect()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends the next bucket; returns while it is on its way, on a GPU even before its buffer is filled.

        Args:
            tensors: those of the bucket's layout, in full, of any shapes.
        """
        number, layout = self._sent, self.request.layouts[self._sent]
        self._sent += 1
        bucket = OutgoingBucket(number, layout, tensors)
        if self._direct:
            for transport in self._direct:
                transport.release(number - 2)
            buffer, handle = self.sender.buffer(number, self._nbytes, self._is_mapped)
            bucket = OutgoingBucket(number, layout, tensors, buffer[: byte_size(layout)], handle)
            fill(buffer[: byte_size(layout)], layout, tensors)
        for transport in self._active:
            transport.send(bucket)

    def finish(self) -> None:
        """Returns when every engine has loaded the update, or failed to."""
        for transport in reversed(self._active):  # the object store first: its engines have a call for the end
            transport.finish()
        deadline = self.deadline()
        while self._calls and time.monotonic() < deadline:
            ray.wait(list(self._calls), timeout=max(0.0, deadline - time.monotonic()))
            self.check()
        if self._calls:
            self._interrupt()
            ray.wait(list(self._calls), num_returns=len(self._calls), timeout=_GRACE_S)
            for call, engine in list(self._calls.items()):
                self._take(call, engine)

    def deadline(self) -> float:
        """The time of `time.monotonic()` until which an engine is waited for, from now."""
        return time.monotonic() + self.request.timeout_s

    def check(self) -> None:
        """Takes the results of the engines' calls that have returned."""
        if self._calls:
            for call in ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
                if call in self._calls:
                    self._take(call, self._calls[call])

    def check_members(self, transport: str) -> None:
        """Raises EngineLostError if an engine that takes this transport does not take the update any more."""
        self.check()
        left_out = (*self.failed, *self.retry)
        if any(source.transport == transport for engine in left_out for source in self.plan.sources[engine]):
            raise EngineLostError("an engine of the process group is lost")

    def mark_failed(self, engine: int, error: RolloutError, *, is_at_fault: bool = True) -> None:
        """Leaves an engine out. For one that is not known to be at fault `finish` waits until it has stopped."""
        if is_at_fault:
            self._calls = {call: i for call, i in self._calls.items() if i != engine}
        failures = self.failed if is_at_fault else self.retry
        failures.setdefault(engine, _with_version(error, self.request.version))
        for transport in self.sender.transports.values():
            transport.leave_out(engine)

    def wait_for_gpu(self) -> None:
        """Returns when a bucket is filled, for receivers that do not wait for the GPU's stream.

        A copy to the host would wait as long as the stream waits for a process group that has lost a member, and would
        not notice.
        """
        if self.sender.device.type != "cuda" or not self._direct:
            return
        filled = torch.cuda.Event()
        filled.record()
        try:
            wait(filled.query, self.deadline(), self.check)
        except TimeoutError:  # the stream waits for a process group
            self._interrupt()
            filled.synchronize()

    def _take(self, call: Any, engine: int) -> None:
        self._calls.pop(call, None)
        try:
            if (reason := get_result(call, engine, time.monotonic())) is not None:
                self.mark_failed(engine, EngineLostError(f"engine {engine}: {reason}"), is_at_fault=False)
        except RolloutError as error:
            self.mark_failed(engine, error)

    def _interrupt(self) -> None:
        for transport in self._active:
            transport.interrupt()


def _incoming(plan: UpdatePlan, request: UpdateRequest, engine: int) -> Incoming:
    """What an engine needs to know of an update."""
    return Incoming(
        update=plan.name,
        engine=plan.processes[engine],
        address=plan.address,
        group=plan.group,
        world=plan.world,
        sources=plan.sources[engine],
        layouts=request.layouts,
        timeout_s=RECEIVER_PATIENCE * request.timeout_s,
        midway=request.midway,
    )


def _with_version(error: RolloutError, version: int) -> EngineLostError:
    """The same error with the version in its text."""
    kind = EngineTimeoutError if isinstance(error, EngineTimeoutError) else EngineLostError
    return kind(f"sending weight version {version}: {error}")
