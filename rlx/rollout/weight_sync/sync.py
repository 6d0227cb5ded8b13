"""Weights from the trainers to the engines: gathered from the FSDP shards bucket by bucket, each bucket sent while the
next one is gathered, and checked on arrival.

Left out: which transport reaches which engine (topology.py), and one update on one rank (sender.py).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch

from rlx.config.sections.rollout import TransportName
from rlx.mesh import Mesh, broadcast_object, gather_objects
from rlx.rollout.weight_sync import buckets
from rlx.rollout.weight_sync.base import OBJECT_STORE, DeviceLocation, EngineLocation, Source
from rlx.rollout.weight_sync.gather import gather_full
from rlx.rollout.weight_sync.process_group import create_store, open_store
from rlx.rollout.weight_sync.sender import Failures, OutgoingUpdate, SendingRank, UpdatePlan, UpdateRequest
from rlx.rollout.weight_sync.shared_memory import SendBuffers
from rlx.rollout.weight_sync.topology import TRANSPORTS, routes
from rlx.types import ShardedWeight

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""the size of a bucket by device: on a GPU a bucket costs Python's time, not the copy's"""


class WeightSync:
    """Sends weights from all ranks to the engines. Every rank has one and makes the same calls in the same order."""

    def __init__(
        self,
        engines: Sequence[Any],
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        transport: TransportName | None = "auto",
        bucket_bytes: int | None = None,
    ) -> None:
        """Makes no connection: the first push does.

        Args:
            engines: actor handles.
            device: on which this rank trains.
            dtype: in which the engines hold the weights.
            transport: the setting `rollout.transport`; None: the object store for all engines, as adapters need.
            bucket_bytes: that travel at a time; None: BUCKET_BYTES of the weights' device, or as many as the largest
                weight has.
        """
        self.mesh, self.dtype, self.transport, self.bucket_bytes = mesh, dtype, transport, bucket_bytes
        self.plan: UpdatePlan | None = None  # of the newest update
        self._trainers: list[DeviceLocation] = []  # by rank
        self._buffers = SendBuffers(device)
        self.transports = {name: kind.sender(device) for name, kind in TRANSPORTS.items()}
        self._rank = SendingRank(mesh.rank, device, engines, self.transports, self._buffers.get)

    def push(
        self,
        weights: Sequence[ShardedWeight],
        version: int,
        locations: Mapping[int, EngineLocation],
        *,
        timeout_s: float = 120.0,
        midway: bool = False,
    ) -> Failures:
        """Sends all weights to the engines as `version`; a collective call. Returns on rank 0 when engines have them.

        Args:
            weights: in the same order on every rank.
            locations: of the engines to send to, by index; those of rank 0 count.
            timeout_s: the longest that an engine may take to open the update, to take a bucket, to finish.
            midway: running requests continue with these weights; otherwise they finish first, with the old ones.

        Returns:
            On rank 0: the engines that did not receive the weights, or received changed ones, and why.
        """
        failed: Failures = {}
        # A buffer must hold the largest weight, so the others may fill it, too.
        largest = max(math.prod(weight.shape) for weight in weights) * self.dtype.itemsize
        limit = self.bucket_bytes or max(largest, BUCKET_BYTES[weights[0].parts[0].device.type])
        groups = buckets.group_weights(weights, self.dtype, limit)
        layouts = tuple(buckets.layout(group, self.dtype) for group in groups)
        request = UpdateRequest(version, layouts, timeout_s, midway)
        remaining = dict(locations)
        while True:
            lost, retry = self._send(groups, request, remaining)
            if retry and not lost:  # no engine is at fault, so they would fail again
                lost, retry = retry, {}
            failed |= lost
            if not retry:
                return failed
            remaining = {index: location for index, location in remaining.items() if index in retry}

    def close(self) -> None:
        """Frees the buffers and connections that are kept between pushes."""
        for end in self.transports.values():
            end.close()
        self._buffers.close()
        self._rank.store = None

    def _send(
        self,
        groups: Sequence[Sequence[ShardedWeight]],
        request: UpdateRequest,
        locations: Mapping[int, EngineLocation],
    ) -> tuple[Failures, Failures]:
        """Sends once. Returns the engines at fault, and those to send to again; the same on all ranks."""
        self.plan = self._agree(locations, request.timeout_s)
        update = OutgoingUpdate(self.plan, request, self._rank)
        update.connect()
        for group in groups:
            update.send(gather_full(group, self.dtype))
        update.finish()
        return _of_all_ranks(update) if self.plan.direct else (update.failed, update.retry)

    def _agree(self, locations: Mapping[int, EngineLocation], timeout_s: float) -> UpdatePlan:
        """The plan of rank 0 for the engines that it has found alive; a collective call unless `transport` is None."""
        if self.transport is None:
            return UpdatePlan(_new_name(), ("", 0), "", {i: (Source(OBJECT_STORE, 0),) for i in locations}, {})
        if not self._trainers:
            self._trainers = gather_objects(this_device(self._rank.device))
        plan = broadcast_object(self._make_plan(locations, timeout_s, self.transport) if self.mesh.rank == 0 else None)
        assert plan
        if self._rank.store is None and plan.direct:
            self._rank.store = open_store(plan.address, timeout_s)
        return plan

    def _make_plan(
        self, locations: Mapping[int, EngineLocation], timeout_s: float, transport: TransportName
    ) -> UpdatePlan:
        """The plan for engines at these locations; it keeps the process groups of the newest plan where it can."""
        sources = routes(locations, self._trainers, transport)
        processes = {index: location.process for index, location in locations.items()}
        plan = UpdatePlan(_new_name(), ("", 0), _new_name(), sources, processes)
        if plan.direct and self._rank.store is None:
            self._rank.store = create_store(own_address(), timeout_s)
        address = (self._rank.store.host, self._rank.store.port) if self._rank.store else ("", 0)
        group = self.plan.group if self.plan and self._is_connected(plan, self.plan) else plan.group
        return UpdatePlan(plan.name, address, group, sources, processes)

    def _is_connected(self, plan: UpdatePlan, before: UpdatePlan) -> bool:
        """Whether the connections of an earlier plan fit this one: the same engine processes in the same groups."""
        is_same = (before.direct, _processes(before)) == (plan.direct, _processes(plan))
        return is_same and all(self.transports[name].is_connected for name in plan.world)


def this_device(device: torch.device) -> DeviceLocation:
    """Where this process computes."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return DeviceLocation(ray.get_runtime_context().get_node_id(), gpu)


def own_address() -> str:
    """The address at which the run's other processes reach this one; with one node nobody else reaches it."""
    alone = sum(node["Alive"] for node in ray.nodes()) == 1
    return "127.0.0.1" if alone else ray.util.get_node_ip_address()


def _new_name() -> str:
    return uuid.uuid4().hex


def _processes(plan: UpdatePlan) -> dict[int, str]:
    return {index: plan.processes[index] for index in plan.direct}


def _of_all_ranks(update: OutgoingUpdate) -> tuple[Failures, Failures]:
    """The failures on any rank, and the engines to send to again, which failed on no rank."""
    ranks = gather_objects((update.failed, update.retry))
    failed = {index: error for mine, _ in reversed(ranks) for index, error in mine.items()}
    return failed, {i: error for _, mine in ranks for i, error in mine.items() if i not in failed}
