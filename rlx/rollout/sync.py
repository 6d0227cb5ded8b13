"""Weights from the trainers to the engines: gathered from the FSDP shards bucket by bucket, sent through Ray's shared
memory while the next bucket is gathered, checked on arrival.

One transport for every machine: the object store, which is shared memory within a node and a copy between nodes.
"""

from __future__ import annotations

import math
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from rlx.rollout.pool import RolloutError, answer
from rlx.types import Weight, WeightSyncError


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as they travel."""

    layout: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape of each
    data: np.ndarray  # [bytes] uint8, the tensors one after the other
    checksum: int


def push(
    weights: Sequence[Weight],
    engines: Mapping[int, Any],
    version: int,
    *,
    sender: bool,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = 120.0,
    keep: bool = False,
    bucket_bytes: int = 64 << 20,
) -> dict[int, str]:
    """Sends the whole policy to the engines as `version`; all ranks call it, the sender's call returns when it is in.

    Engines that are just starting are waited for.

    Args:
        weights: in the same order on every rank.
        engines: actor handles by their number in the pool.
        sender: whether this rank sends; the others only take part in gathering.
        dtype: what the engines hold.
        timeout_s: the longest that an engine may take to open the update, to take a bucket, to finish.
        keep: what the engines are drawing goes on with these weights; otherwise it is finished first.

    Returns:
        On the sender: the engines that did not take the weights, or not the ones sent, and why.
    """
    update = _Push(engines, version, timeout_s) if sender else None
    if update:
        update.start(len(weights), keep)
    for group in _grouped(weights, bucket_bytes):
        tensors = [(weight.name, weight.full().to(dtype)) for weight in group]
        if update:
            update.send(pack(tensors))
    if update:
        update.finish()
    return update.failed if update else {}


class _Push:
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
                answer(call, index, deadline)
            except RolloutError as error:
                self.failed[index] = f"sending weight version {self.version}: {error}"
                del self.engines[index]


def pack(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Tensors as one run of bytes with a checksum over names, shapes and bytes."""
    layout = tuple((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors)
    data = torch.cat([t.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, t in tensors]).numpy()
    return Bucket(layout, data, _checksum(layout, data))


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, sharing its memory; WeightSyncError if it is not what was packed."""
    if _checksum(bucket.layout, bucket.data) != bucket.checksum:
        raise WeightSyncError(f"checksum of a bucket with {bucket.layout[0][0]} differs from what was sent")
    # shared memory arrives read-only and torch wants writable memory: a copy of one bucket
    data = torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())
    start = 0
    for name, dtype, shape in bucket.layout:
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        yield name, data[start : start + size].view(kind).view(shape)
        start += size


def _checksum(layout: tuple[tuple[str, str, tuple[int, ...]], ...], data: np.ndarray) -> int:
    return zlib.crc32(data.data, zlib.crc32(repr(layout).encode()))


def _grouped(weights: Sequence[Weight], limit: int) -> Iterator[list[Weight]]:
    """Runs of tensors of at most `limit` bytes together; a larger one stands alone."""
    group: list[Weight] = []
    size = 0
    for weight in weights:
        if group and size + weight.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(weight)
        size += weight.nbytes
    yield group
