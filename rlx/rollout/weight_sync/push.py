"""Weights from the trainers to the engines: gathered from the FSDP shards bucket by bucket, sent while the next bucket
is gathered, checked on arrival.

Which way they take follows from where engines and trainers are (routes.py). The direct ways are direct.py's; here is
the one that reaches every engine, Ray's object store: shared memory within a node and a copy between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlx.rollout.weight_sync import buckets
from rlx.rollout.weight_sync.gather import gather_full
from rlx.rollout.weight_sync.object_store import ObjectStorePush, pack
from rlx.rollout.weight_sync.sender import WeightBroadcast, WeightSender
from rlx.rollout.weight_sync.topology import EngineLocation
from rlx.types import ShardedWeight

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""on a GPU what a bucket costs is Python's time, not the copy's"""


def push(
    weights: Sequence[ShardedWeight],
    engines: Mapping[int, Any],
    version: int,
    *,
    sender: bool,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = 120.0,
    keep: bool = False,
    bucket_bytes: int | None = None,
    direct: WeightSender | None = None,
    there: Mapping[int, EngineLocation] | None = None,
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
    groups = buckets.group_weights(weights, dtype, limit)
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
    groups: Sequence[Sequence[ShardedWeight]],
    engines: Mapping[int, Any],
    version: int,
    sender: bool,
    dtype: torch.dtype,
    timeout_s: float,
    keep: bool,
    direct: WeightSender | None,
    there: Mapping[int, EngineLocation],
) -> tuple[dict[int, str], dict[int, str]]:
    """Sends once; the engines that failed, and those that are to be sent to again, and why; the same on all ranks."""
    layouts = [buckets.layout(group, dtype) for group in groups]
    course = direct.agreed({index: there[index] for index in engines}, timeout_s) if direct else None
    reached = course.sources if course else {}
    stored = {index: engine for index, engine in engines.items() if index not in reached}
    delivery = (
        WeightBroadcast(direct, course, layouts, version, timeout_s, keep) if direct and course and reached else None
    )
    update = ObjectStorePush(stored, version, timeout_s) if sender and stored else None
    if update:
        update.start(sum(map(len, groups)), keep)
    for group, layout in zip(groups, layouts, strict=True):
        tensors = gather_full(group, dtype)
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
