"""Weights from the trainers to the engines: gathered from the FSDP shards bucket by bucket, each bucket sent while the
next one is gathered, and checked on arrival.

How the bytes travel is decided in topology.py, for each engine by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlx.actors import EngineLostError
from rlx.mesh import Mesh
from rlx.rollout.weight_sync import buckets
from rlx.rollout.weight_sync.gather import gather_full
from rlx.rollout.weight_sync.object_store import ObjectStorePush
from rlx.rollout.weight_sync.sender import WeightBroadcast, WeightSender
from rlx.rollout.weight_sync.topology import EngineLocation, Transport
from rlx.types import ShardedWeight

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""on a GPU the cost of a bucket is Python's time, not the copy's"""

Failures = dict[int, EngineLostError]
"""engines, and why they did not take the weights"""


@dataclass
class WeightSync:
    """Sends weights from all ranks to the engines. Every rank has one and makes the same calls in the same order."""

    engines: Sequence[Any]  # actor handles; rank 0's are used
    mesh: Mesh
    device: torch.device  # on which this rank trains
    dtype: torch.dtype  # in which engines hold the weights
    transport: Transport | None = "auto"  # None: Ray's object store alone
    bucket_bytes: int | None = None  # that travel at a time; None: BUCKET_BYTES of the weights' device
    sender: WeightSender | None = field(init=False)

    def __post_init__(self) -> None:
        rank, ranks = self.mesh.rank, self.mesh.world_size
        self.sender = WeightSender(rank, ranks, self.device, self.engines, self.transport) if self.transport else None

    def push(
        self,
        weights: Sequence[ShardedWeight],
        version: int,
        locations: Mapping[int, EngineLocation],
        *,
        timeout_s: float = 120.0,
        keep: bool = False,
    ) -> Failures:
        """Sends all weights to the engines as `version`; a collective call. Returns on rank 0 when engines have them.

        Args:
            weights: in the same order on every rank.
            locations: of the engines to send to, by index; rank 0's count.
            timeout_s: the longest that an engine may take to open the update, to take a bucket, to finish.
            keep: running requests continue with these weights; otherwise they finish first, with the old ones.

        Returns:
            On rank 0: the engines that did not take the weights, or not as they were sent, and why.
        """
        failed: Failures = {}
        limit = self.bucket_bytes or BUCKET_BYTES[weights[0].parts[0].device.type]
        groups = buckets.group_weights(weights, self.dtype, limit)
        remaining = dict(locations)
        while True:
            lost, retry = self._send(groups, version, remaining, timeout_s, keep)
            if retry and not lost:  # no engine is at fault, so they would fail again
                lost, retry = retry, {}
            failed |= lost
            if not retry:
                return failed
            remaining = {index: location for index, location in remaining.items() if index in retry}

    def close(self) -> None:
        """Frees the buffers and process groups that are kept between pushes."""
        if self.sender:
            self.sender.close()

    def _send(
        self,
        groups: Sequence[Sequence[ShardedWeight]],
        version: int,
        locations: Mapping[int, EngineLocation],
        timeout_s: float,
        keep: bool,
    ) -> tuple[Failures, Failures]:
        """Sends once. Returns the engines at fault, and those to send to again; the same on all ranks."""
        layouts = [buckets.layout(group, self.dtype) for group in groups]
        course = self.sender.agreed(locations, timeout_s) if self.sender else None
        reached = course.sources if course else {}
        stored = {index: self.engines[index] for index in locations if index not in reached}
        delivery = (
            WeightBroadcast(self.sender, course, layouts, version, timeout_s, keep)
            if self.sender and course and reached
            else None
        )
        update = ObjectStorePush(stored, version, timeout_s) if self.mesh.rank == 0 and stored else None
        if update:
            update.start(sum(map(len, groups)), keep)
        for group, layout in zip(groups, layouts, strict=True):
            tensors = gather_full(group, self.dtype)
            if delivery:
                delivery.send(tensors)
            if update:
                if delivery:
                    delivery.wait_for_gpu()
                update.send(buckets.pack(layout, tensors))
        if update:
            update.finish()
        if delivery:
            delivery.finish()
        failed = update.failed if update else {}
        return _together(failed | delivery.failed, delivery.again) if delivery else (failed, {})


def _together(failed: Failures, retry: Failures) -> tuple[Failures, Failures]:
    """The failures that any rank has seen, and the engines to send to again that no rank has seen fail."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (failed, retry))
    failed = {index: error for mine, _ in reversed(ranks) for index, error in mine.items()}
    return failed, {i: error for _, mine in ranks for i, error in mine.items() if i not in failed}
