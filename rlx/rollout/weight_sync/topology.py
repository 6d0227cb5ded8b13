"""Which way an engine's weights take, from where the engine and the trainers compute. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Transport = Literal["auto", "object_store", "gloo"]


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where a process computes."""

    node: str
    gpu: str  # its UUID; empty: the node's CPU


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """An engine as it says of itself that it is there."""

    process: str  # another one after every start
    workers: tuple[DeviceLocation, ...]  # one, or as many as the model is split over


@dataclass(frozen=True, slots=True)
class Source:
    """Where one worker of an engine gets its weights from."""

    kind: Literal["shared", "nccl", "gloo"]  # memory that it shares with a trainer, or a process group
    rank: int  # the trainer's among the trainers, or the worker's own in the process group; 0 there is the sender


def routes(
    engines: Mapping[int, EngineLocation], ranks: Sequence[DeviceLocation], transport: Transport = "auto"
) -> dict[int, tuple[Source, ...]]:
    """The source of each worker of each engine; engines that are left out are sent to through Ray's object store.

    Memory is shared with a trainer on the same GPU (CUDA IPC) or, where both compute on CPU, on the same node. NCCL
    reaches all other GPUs, though no GPU twice. The object store reaches one process, so an engine of several that
    none of this reaches takes gloo.

    Args:
        engines: by their number in the pool.
        ranks: of the trainers; the first is the one that sends to groups.
        transport: auto, or the way of all whom it can reach.
    """
    members = {"nccl": 1, "gloo": 1}  # of each process group, the sender included
    # What cannot join NCCL's group any more: CPUs never can, and a sender without a GPU has none.
    taken = {"", ranks[0].gpu}
    if not ranks[0].gpu:
        taken |= {worker.gpu for engine in engines.values() for worker in engine.workers}
    found: dict[int, tuple[Source, ...]] = {}
    for index, engine in engines.items():
        kinds = _kinds(engine, ranks, taken, transport)
        if not kinds:
            continue
        sources = []
        for kind, worker in zip(kinds, engine.workers, strict=True):
            if kind == "shared":
                sources.append(Source(kind, ranks.index(worker)))
                continue
            sources.append(Source(kind, members[kind]))
            members[kind] += 1
            taken |= {worker.gpu} if kind == "nccl" else set()
        found[index] = tuple(sources)
    return found


def _kinds(
    engine: EngineLocation, ranks: Sequence[DeviceLocation], taken: set[str], transport: Transport
) -> list[Literal["shared", "nccl", "gloo"]]:
    """What each of an engine's workers takes; nothing: the object store."""
    workers = engine.workers
    if transport == "gloo":
        return ["gloo"] * len(workers)
    if transport == "auto" and all(worker in ranks or worker.gpu not in taken for worker in workers):
        return ["shared" if worker in ranks else "nccl" for worker in workers]
    return [] if len(workers) == 1 else ["shared" if worker in ranks else "gloo" for worker in workers]
