"""Weights through Ray's object store: shared memory within a node, a copy between nodes. It reaches every engine.

Buckets go to the engine's actor, as arguments of `receive`, and from there to its one worker. It is also the only
transport for adapters, which the actor writes to a folder. Left out: where it is used (topology.py).
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from torch import Tensor

from rlx.actors import RolloutError, get_result
from rlx.rollout.weight_sync.base import RECEIVER_PATIENCE, DeviceLocation
from rlx.rollout.weight_sync.buckets import Bucket, pack, unpack
from rlx.rollout.weight_sync.sender import OutgoingBucket, OutgoingUpdate
from rlx.types import WeightSyncError


def any_rank(worker: DeviceLocation, trainers: Sequence[DeviceLocation], joined: Sequence[DeviceLocation]) -> int:
    """The rank that a worker gets weights from: any, since Ray's object store is the same for all."""
    return 0


class ObjectStoreSender:
    """Rank 0's end: see `Transport`. At most two buckets are on their way, so that memory never holds all."""

    maps_memory = False
    is_connected = True

    def __init__(self) -> None:
        self._update: OutgoingUpdate
        self._engines: dict[int, Any] = {}  # handles of the engines that take the update
        self._receipts: dict[int, Any] = {}  # the calls of `receive` with the newest bucket, by engine

    def prepare(self, update: OutgoingUpdate) -> bool:
        self._update, self._receipts = update, {}
        indices = update.plan.sources.keys() - update.plan.direct.keys() if update.sender.rank == 0 else ()
        self._engines = {index: update.sender.engines[index] for index in sorted(indices)}
        return bool(self._engines)

    def connect(self) -> None:
        request = self._update.request
        tensors = sum(map(len, request.layouts))
        opened = (self._update.plan.name, tensors, RECEIVER_PATIENCE * request.timeout_s, request.midway)
        self._wait({index: engine.start_update.remote(*opened) for index, engine in self._engines.items()})

    def send(self, bucket: OutgoingBucket) -> None:
        self._update.wait_for_gpu()
        self.put(pack(bucket.layout, bucket.tensors))

    def put(self, bucket: Bucket) -> None:
        """Sends a bucket that has been packed; returns while the engines load it."""
        self._wait(self._receipts)
        name, reference = self._update.plan.name, ray.put(bucket)
        self._receipts = {index: engine.receive.remote(name, reference) for index, engine in self._engines.items()}

    def release(self, number: int) -> None:
        """The buffers are not used: a bucket is packed into memory of its own."""

    def finish(self) -> None:
        name, version = self._update.plan.name, self._update.request.version
        self._wait({index: engine.finish_update.remote(name, version) for index, engine in self._engines.items()})

    def leave_out(self, engine: int) -> None:
        self._engines.pop(engine, None)

    def interrupt(self) -> None:
        """There is no connection: engines that wait for a bucket have a deadline."""

    def close(self) -> None:
        """Nothing is kept."""

    def _wait(self, calls: Mapping[int, Any]) -> None:
        """Waits for the call of each engine; leaves out those whose call failed."""
        deadline = self._update.deadline()
        for index, call in calls.items():
            try:
                get_result(call, index, deadline)
            except RolloutError as error:
                self._update.mark_failed(index, error)


class BucketQueue:
    """The buckets of one update, from the calls of an engine's actor to the thread that loads them."""

    def __init__(self, tensors: int, timeout_s: float) -> None:
        """Args: tensors: how many will arrive; timeout_s: the longest wait for each bucket."""
        self.error: WeightSyncError | None = None  # why the update ended early
        self.loaded: asyncio.Future[None] | None = None  # done when the update has ended
        self._missing = tensors
        self._timeout_s = timeout_s
        self._buckets: queue.SimpleQueue[tuple[Bucket, asyncio.Future[None]] | None] = queue.SimpleQueue()

    async def put(self, bucket: Bucket) -> None:
        """Returns when the thread begins to load this bucket, or the update has ended."""
        assert self.loaded
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buckets.put((bucket, begun))
        await asyncio.wait({begun, self.loaded}, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Ends the update at once if it still waits for buckets."""
        self._buckets.put(None)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the buckets, of their layouts' shapes, checked, as they arrive. Runs on the thread.

        Ends early at an error and keeps the error in `error`. It does not raise, because vLLM cannot interrupt a load:
        the next load would fuse tensors of this one with its own.
        """
        try:
            while self._missing > 0:
                bucket, begun = self._next()
                begun.get_loop().call_soon_threadsafe(begun.set_result, None)
                yield from unpack(bucket)
                self._missing -= len(bucket.layout)
        except WeightSyncError as error:
            self.error = error

    def _next(self) -> tuple[Bucket, asyncio.Future[None]]:
        try:
            arrived = self._buckets.get(timeout=self._timeout_s)
        except queue.Empty:
            waited = f"waited {self._timeout_s:.0f} s for the next weights"
            raise WeightSyncError(f"{waited}, {self._missing} tensors missing") from None
        if arrived is None:
            raise WeightSyncError("another weight update was started")
        return arrived
