"""TODO rlx.rollout.weight_sync.object_store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from rlx.actors import RolloutError, get_result
from rlx.rollout.weight_sync import buckets
from rlx.rollout.weight_sync.buckets import Layout
from rlx.types import WeightSyncError


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as they travel."""

    layout: Layout
    data: np.ndarray  # [bytes] uint8, see `buckets.fill`


class ObjectStorePush:
    """The sender's side of one weight update; see `Engine.start_update`. An engine that fails is left out of the rest:
    the others, and the other ranks, are in the middle of it."""

    def __init__(self, engines: Mapping[int, Any], version: int, timeout_s: float) -> None:
        self.engines = dict(engines)
        self.failed: dict[int, str] = {}
        self.version = version
        self.timeout_s = timeout_s
        self.name = uuid.uuid4().hex
        self.receipts: dict[int, Any] = {}  # of the bucket sent last

    def start(self, tensors: int, keep: bool) -> None:
        opened = (self.name, tensors, self.timeout_s, keep)
        self._settle({index: engine.start_update.remote(*opened) for index, engine in self.engines.items()})

    def send(self, bucket: Bucket) -> None:
        """Returns while the engines load this bucket; two at most are under way, so that memory never holds all."""
        self._settle(self.receipts)
        sent = ray.put(bucket)
        self.receipts = {index: engine.receive.remote(self.name, sent) for index, engine in self.engines.items()}

    def finish(self) -> None:
        self._settle({i: engine.finish_update.remote(self.name, self.version) for i, engine in self.engines.items()})

    def _settle(self, calls: Mapping[int, Any]) -> None:
        """Waits for all calls, and leaves out the engines whose call failed."""
        deadline = time.monotonic() + self.timeout_s
        for index, call in calls.items():
            try:
                get_result(call, index, deadline)
            except RolloutError as error:
                self.failed[index] = f"sending weight version {self.version}: {error}"
                del self.engines[index]


def pack(layout: Layout, tensors: Sequence[Tensor]) -> Bucket:
    """Tensors as one run of bytes with a checksum over names, shapes and bytes."""
    data = torch.empty(buckets.byte_size(layout), dtype=torch.uint8, device=tensors[0].device)
    buckets.fill(data, layout, tensors)
    return Bucket(layout, data.cpu().numpy())


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, sharing its memory; WeightSyncError if it is not what was packed."""
    # shared memory arrives read-only and torch wants writable memory: a copy of one bucket
    data = torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())
    if not buckets.is_sound(data, bucket.layout):
        raise WeightSyncError(f"checksum of a bucket with {bucket.layout[0][0]} differs from what was sent")
    yield from buckets.views(data, bucket.layout)
