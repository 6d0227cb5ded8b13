"""The table of transports, and which of them each engine takes: from where the engine and the trainers compute.

Left out: sending. A new transport is a file with its two ends, an entry in TRANSPORTS, and a row of `_ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rlx.config.sections.rollout import TransportName
from rlx.rollout.weight_sync import object_store, process_group, shared_memory
from rlx.rollout.weight_sync.base import OBJECT_STORE, DeviceLocation, EngineLocation, ReceivingEnd, Source
from rlx.rollout.weight_sync.sender import Transport


@dataclass(frozen=True)
class TransportKind:
    """A transport: which workers it reaches, and how its two ends are made."""

    rank: Callable[[DeviceLocation, Sequence[DeviceLocation], Sequence[DeviceLocation]], int | None]
    """(worker, trainers, workers that take it already) -> the rank in the worker's `Source`; None: not reached"""
    sender: Callable[[torch.device], Transport]
    receiver: Callable[[torch.device, int], ReceivingEnd] | None
    """(device, worker's index in the engine) -> its end; None: the engine's actor receives"""


# In the order in which a bucket is sent: the broadcasts are queued first, because the others wait until it is filled.
TRANSPORTS = {
    "nccl": TransportKind(
        process_group.nccl_rank,
        partial(process_group.GroupSender, "nccl"),
        partial(process_group.GroupReceiver, "nccl"),
    ),
    "gloo": TransportKind(
        process_group.gloo_rank,
        partial(process_group.GroupSender, "gloo"),
        partial(process_group.GroupReceiver, "gloo"),
    ),
    "shared_memory": TransportKind(
        shared_memory.trainer_rank,
        lambda device: shared_memory.SharedMemorySender(),
        shared_memory.SharedMemoryReceiver,
    ),
    OBJECT_STORE: TransportKind(object_store.any_rank, lambda device: object_store.ObjectStoreSender(), None),
}

# For each value of `rollout.transport`: an engine takes the first row that reaches all its workers, each worker the
# first transport of the row that reaches it. NCCL reaches all GPUs that no trainer is on, though no GPU twice.
_ROWS: dict[TransportName, Sequence[Sequence[str]]] = {
    "auto": [["shared_memory", "nccl"], [OBJECT_STORE], ["shared_memory", "gloo"]],
    "object_store": [[OBJECT_STORE], ["shared_memory", "gloo"]],
    "gloo": [["gloo"]],
}


def routes(
    engines: Mapping[int, EngineLocation], trainers: Sequence[DeviceLocation], choice: TransportName = "auto"
) -> dict[int, tuple[Source, ...]]:
    """The source of each worker of each engine.

    Args:
        engines: by their index in the pool.
        trainers: by rank; the first one sends to process groups and to the object store.
        choice: the setting `rollout.transport`.
    """
    joined: dict[str, list[DeviceLocation]] = {name: [] for name in TRANSPORTS}
    chosen: dict[int, tuple[Source, ...]] = {}
    for index, engine in engines.items():
        sources = next(filter(None, (_sources(engine, row, trainers, joined) for row in _ROWS[choice])))
        for source, worker in zip(sources, engine.workers, strict=True):
            joined[source.transport].append(worker)
        chosen[index] = sources
    return chosen


def _sources(
    engine: EngineLocation,
    row: Sequence[str],
    trainers: Sequence[DeviceLocation],
    joined: Mapping[str, Sequence[DeviceLocation]],
) -> tuple[Source, ...] | None:
    """The sources of an engine's workers among the transports of a row; None if some worker is not reached."""
    if row == [OBJECT_STORE] and len(engine.workers) > 1:  # the actor cannot hand tensors to other processes
        return None
    taken = {name: list(joined[name]) for name in row}
    sources: list[Source] = []
    for worker in engine.workers:
        ranks = ((name, TRANSPORTS[name].rank(worker, trainers, taken[name])) for name in row)
        source = next((Source(name, rank) for name, rank in ranks if rank is not None), None)
        if source is None:
            return None
        taken[source.transport].append(worker)
        sources.append(source)
    return tuple(sources)
