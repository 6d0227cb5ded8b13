"""Weights from the trainers to the engines: gathered from the FSDP shards bucket by bucket, sent while the next bucket
is gathered, checked on arrival.

Which way they take follows from where engines and trainers are (routes.py). The direct ways are direct.py's; here is
the one that reaches every engine, Ray's object store: shared memory within a node and a copy between nodes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from rlx.rollout import buckets
from rlx.rollout.buckets import Layout
from rlx.rollout.direct import Delivery, Direct
from rlx.rollout.pool import RolloutError, answer
from rlx.rollout.routes import Whereabouts
from rlx.shards import gathered
from rlx.types import Weight, WeightSyncError

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""on a GPU what a bucket costs is Python's time, not the copy's"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as they travel."""

    layout: Layout
    data: np.ndarray  # [bytes] uint8, see `buckets.fill`


def push(
    weights: Sequence[Weight],
    engines: Mapping[int, Any],
    version: int,
    *,
    sender: bool,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = 120.0,
    keep: bool = False,
    bucket_bytes: int | None = None,
    direct: Direct | None = None,
    there: Mapping[int, Whereabouts] | None = None,
) -> dict[int, str]:
    """Sends the whole policy to the engines as `version`; all ranks call it, the sender's call returns when it is in.

    Engines that are just starting are waited for.

    Args:
        weights: in the same order on every rank.
        engines: actor handles by their number in the pool; the sender's count.
        sender: whether this rank sends to engines that share no memory with another; it is rank 0.
        dtype: what the engines hold.
        timeout_s: the longest that an engine may take to open the update, to take a bucket, to finish.
        keep: what the engines are drawing goes on with these weights; otherwise it is finished first.
        bucket_bytes: that travel at a time; None: BUCKET_BYTES of the device the weights are on.
        direct: the direct ways, where there are such.
        there: where the engines are, for the direct ways.

    Returns:
        On the sender: the engines that did not take the weights, or not the ones sent, and why.
    """
    failed: dict[int, str] = {}
    limit = bucket_bytes or BUCKET_BYTES[weights[0].parts[0].device.type]
    groups = buckets.grouped(weights, dtype, limit)
    left = dict(engines)
    while True:
        lost, again = _sent(groups, left, version, sender, dtype, timeout_s, keep, direct, there or {})
        if again and not lost:  # nobody is to blame, and so they would only fail again
            lost, again = again, {}
        failed |= lost
        if not again:
            return failed
        left = {index: engine for index, engine in left.items() if index in again}


def _sent(
    groups: Sequence[Sequence[Weight]],
    engines: Mapping[int, Any],
    version: int,
    sender: bool,
    dtype: torch.dtype,
    timeout_s: float,
    keep: bool,
    direct: Direct | None,
    there: Mapping[int, Whereabouts],
) -> tuple[dict[int, str], dict[int, str]]:
    """Sends once; the engines that failed, and those that are to be sent to again, and why; the same on all ranks."""
    layouts = [buckets.layout(group, dtype) for group in groups]
    course = direct.agreed({index: there[index] for index in engines}, timeout_s) if direct else None
    reached = course.sources if course else {}
    stored = {index: engine for index, engine in engines.items() if index not in reached}
    delivery = Delivery(direct, course, layouts, version, timeout_s, keep) if direct and course and reached else None
    update = _Push(stored, version, timeout_s) if sender and stored else None
    if update:
        update.start(sum(map(len, groups)), keep)
    for group, layout in zip(groups, layouts, strict=True):
        tensors = gathered(group, dtype)
        if delivery:
            delivery.send(tensors)
        if update:
            if delivery:
                delivery.wait_for_gpu()
            update.send(pack(layout, tensors))
    if update:
        update.finish()
    if delivery:
        delivery.finish()
    failed = update.failed if update else {}
    return _together(failed | delivery.failed, delivery.again) if delivery else (failed, {})


def _together(failed: dict[int, str], again: dict[int, str]) -> tuple[dict[int, str], dict[int, str]]:
    """What any rank has seen fail; what none has is sent to again."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (failed, again))
    failed = {index: words for own, _ in reversed(everyone) for index, words in own.items()}
    return failed, {i: words for _, own in everyone for i, words in own.items() if i not in failed}


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


def pack(layout: Layout, tensors: Sequence[Tensor]) -> Bucket:
    """Tensors as one run of bytes with a checksum over names, shapes and bytes."""
    data = torch.empty(buckets.size(layout), dtype=torch.uint8, device=tensors[0].device)
    buckets.fill(data, layout, tensors)
    return Bucket(layout, data.cpu().numpy())


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, sharing its memory; WeightSyncError if it is not what was packed."""
    # shared memory arrives read-only and torch wants writable memory: a copy of one bucket
    data = torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())
    if not buckets.is_sound(data, bucket.layout):
        raise WeightSyncError(f"checksum of a bucket with {bucket.layout[0][0]} differs from what was sent")
    yield from buckets.views(data, bucket.layout)
