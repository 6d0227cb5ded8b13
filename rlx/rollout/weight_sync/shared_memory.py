"""Weights in memory that a trainer and an engine worker both map: CUDA IPC on one GPU, shared memory on a node's CPUs.

The trainer notes in the store when it has filled a bucket, the worker notes when it has read it. No bytes travel.
Left out: which workers share memory with which trainer (topology.py).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlx.actors import EngineLostError, EngineTimeoutError, Lifeline
from rlx.rollout.weight_sync.base import DeviceLocation, Incoming, Source, UpdateInterruptedError, deadline, wait
from rlx.rollout.weight_sync.buckets import byte_size
from rlx.rollout.weight_sync.sender import OutgoingBucket, OutgoingUpdate
from rlx.types import WeightSyncError

NAME = "shared_memory"
_MEMORY = "rlx-weights"  # its name, which no file has
_ALIVE_S = 1.0  # between two checks whether an engine's process is alive


def trainer_rank(
    worker: DeviceLocation, trainers: Sequence[DeviceLocation], joined: Sequence[DeviceLocation]
) -> int | None:
    """The first trainer on the worker's GPU or, where both compute on CPU, on its node; None if there is none."""
    return trainers.index(worker) if worker in trainers else None


class SharedMemorySender:
    """A rank's end for the workers that share its memory: see `Transport`."""

    maps_memory = True
    is_connected = True

    def __init__(self) -> None:
        self._update: OutgoingUpdate
        self._readers: dict[int, list[int]] = {}  # the workers of each engine that read this rank's memory
        self._unread: list[int] = []  # the numbers of the buckets that were sent and not released
        self._lifelines: dict[int, Lifeline] = {}  # of the engines that read, from one update to the next
        self._asked = 0.0  # time of the last check whether an engine is alive

    def prepare(self, update: OutgoingUpdate) -> bool:
        self._update, self._unread, self._asked = update, [], time.monotonic()
        mine = Source(NAME, update.sender.rank)
        readers = {i: [w for w, source in enumerate(all_) if source == mine] for i, all_ in update.plan.sources.items()}
        self._readers = {engine: workers for engine, workers in readers.items() if workers}
        for engine in self._readers:
            if engine not in self._lifelines or self._lifelines[engine].is_broken:
                self._lifelines[engine] = Lifeline(update.sender.engines[engine])
        return bool(self._readers)

    def connect(self) -> None:
        """There is nothing to connect: workers map the memory that the note of a bucket names."""

    def send(self, bucket: OutgoingBucket) -> None:
        if not self._readers:
            return
        self._unread.append(bucket.number)
        self._update.wait_for_gpu()
        plan, sender = self._update.plan, self._update.sender
        sender.store.set(_written(plan.name, bucket.number, sender.rank), bucket.handle)

    def release(self, number: int) -> None:
        """Returns when all workers have read a bucket, or are lost."""
        if number not in self._unread:
            return
        self._unread.remove(number)
        deadline = self._update.deadline()
        for engine in list(self._readers):
            try:
                wait(partial(self._has_read, engine, number), deadline, partial(self._check, engine))
            except TimeoutError:
                self._update.mark_failed(engine, EngineTimeoutError.of(engine))
            except EngineLostError as error:
                self._update.mark_failed(engine, error)

    def finish(self) -> None:
        for number in list(self._unread):
            self.release(number)
        self._clear_notes()

    def leave_out(self, engine: int) -> None:
        self._readers.pop(engine, None)

    def interrupt(self) -> None:
        """There is no connection: workers that wait for a bucket have a deadline."""

    def close(self) -> None:
        """Nothing is kept: the buffers belong to `SendBuffers`."""

    def _has_read(self, engine: int, number: int) -> bool:
        """Whether all of an engine's workers have read a bucket, or the engine is left out of the update."""
        if engine not in self._readers:
            return True
        plan = self._update.plan
        keys = [_read(plan.name, number, plan.processes[engine], worker) for worker in self._readers[engine]]
        return bool(self._update.sender.store.check(keys))

    def _clear_notes(self) -> None:
        """Takes the update's notes of this rank out of the store, which lives as long as the run."""
        plan, sender = self._update.plan, self._update.sender
        readers = [(plan.processes[engine], worker) for engine, all_ in self._readers.items() for worker in all_]
        for number in range(len(self._update.request.layouts)) if readers else ():
            sender.store.delete_key(_written(plan.name, number, sender.rank))
            for reader in readers:
                sender.store.delete_key(_read(plan.name, number, *reader))

    def _check(self, engine: int) -> None:
        """Leaves an engine out that was interrupted.

        Raises:
            EngineLostError: it has died, or one of its workers has failed.
        """
        self._update.check()
        plan, store = self._update.plan, self._update.sender.store
        for worker in self._readers.get(engine, []):
            if store.check([key := _failed(plan.name, plan.processes[engine], worker)]):
                raise EngineLostError(f"engine {engine} failed: {store.get(key).decode()}")
            if store.check([key := _interrupted(plan.name, plan.processes[engine], worker)]):
                error = EngineLostError(f"engine {engine}: {store.get(key).decode()}")
                self._update.mark_failed(engine, error, is_at_fault=False)
        if time.monotonic() - self._asked > _ALIVE_S:
            self._asked = time.monotonic()
            if self._lifelines[engine].is_broken:
                raise EngineLostError(f"engine {engine} died: its process ended")


class SharedMemoryReceiver:
    """A worker's end that maps a trainer's memory: see `ReceivingEnd`."""

    def __init__(self, device: torch.device, worker: int) -> None:
        self._device, self._worker = device, worker
        self._store: Any = None
        self._mapped: dict[bytes, Tensor] = {}  # the trainer's buffers, by handle

    def connect(self, incoming: Incoming, store: Any) -> None:
        self._store = store

    def receive(self, incoming: Incoming) -> Iterator[Tensor]:
        """Yields each bucket, `[bytes]` uint8, in the trainer's memory."""
        rank, store = incoming.sources[self._worker].rank, self._store
        for number, layout in enumerate(incoming.layouts):
            key = _written(incoming.update, number, rank)
            wait(partial(store.check, [key]), deadline(incoming), lambda: None)
            yield self._buffer(store.get(key))[: byte_size(layout)]
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            store.set(_read(incoming.update, number, incoming.engine, self._worker), "")

    def fail(self, incoming: Incoming, error: Exception) -> None:
        """Tells the trainer whose memory is mapped: it may not be the rank that gets the engine's answers."""
        note = _interrupted if isinstance(error, UpdateInterruptedError) else _failed
        with suppress(RuntimeError):  # the store is gone, and so is the trainer
            self._store.set(note(incoming.update, incoming.engine, self._worker), str(error))

    def close(self) -> None:
        self._mapped.clear()

    def _buffer(self, handle: bytes) -> Tensor:
        if handle not in self._mapped:
            if len(self._mapped) == 2:
                self._mapped.clear()  # the trainer has allocated other buffers
            self._mapped[handle] = map_shared(handle, self._device)
        return self._mapped[handle]


class SendBuffers:
    """Two buffers that buckets are filled in by turns, kept from one update to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, bytes]] = []  # `[bytes]` uint8, and the handle by which others map it

    def get(self, number: int, nbytes: int, is_shared: bool) -> tuple[Tensor, bytes]:
        """The buffer `[bytes]` uint8 for a bucket, by its number, and its handle, empty if it is not shared."""
        if not self._buffers or len(self._buffers[0][0]) < nbytes or (is_shared and not self._buffers[0][1]):
            self.close()
            self._buffers = [self._allocate(nbytes, is_shared) for _ in range(2)]
        return self._buffers[number % 2]

    def close(self) -> None:
        """Frees the buffers."""
        for handle in (handle for _, handle in self._buffers if handle):
            forget(handle)
        self._buffers = []

    def _allocate(self, nbytes: int, is_shared: bool) -> tuple[Tensor, bytes]:
        if is_shared:
            return allocate_shared(nbytes, self._device)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device), b""


def allocate_shared(nbytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Memory `[nbytes]` uint8 on this device, and the handle by which a process on the same GPU or node maps it."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, (_, _, _, _, _, _, *values) = reduce_tensor(memory)
        return memory, encode_handle(nbytes, values)
    file = os.memfd_create(_MEMORY)  # it has no name that could be left behind
    path = f"/proc/{os.getpid()}/fd/{file}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8), encode_handle(nbytes, [path])


def forget(handle: bytes) -> None:
    """Prevents more processes from mapping memory of `allocate_shared`; it is freed when no process maps it."""
    _, (path, *others) = decode_handle(handle)
    if not others:
        os.close(int(os.path.basename(path)))


def map_shared(handle: bytes, device: torch.device) -> Tensor:
    """The memory `[nbytes]` uint8 that another process has made with `allocate_shared`.

    Raises:
        WeightSyncError: the handle names anything else; whoever reaches the store may have written it.
    """
    nbytes, values = decode_handle(handle)
    if device.type == "cuda":
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        plain = (Tensor, torch.Size([nbytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
        return rebuild_cuda_tensor(*plain, device.index or 0, *values[1:])  # a GPU may have another number here
    if not _is_memory(values[0], nbytes):
        raise WeightSyncError(f"the note of a bucket names {values[0]!r:.100}, which is no memory of a trainer")
    return torch.from_file(values[0], shared=True, size=nbytes, dtype=torch.uint8)


def _is_memory(path: Any, nbytes: int) -> bool:
    """Whether a path names memory of `allocate_shared` of that size. Any other file could be read, grown or made."""
    if not isinstance(path, str) or not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        return False
    try:
        return os.readlink(path) == f"/memfd:{_MEMORY} (deleted)" and os.stat(path).st_size == nbytes
    except OSError:  # it is there no more
        return False


def encode_handle(nbytes: int, values: Sequence[Any]) -> bytes:
    """A handle as JSON. It is not a pickle, because every process on the network can write to the store."""
    plain = [{"hex": value.hex()} if isinstance(value, bytes) else value for value in values]
    return json.dumps([nbytes, plain]).encode()


def decode_handle(handle: bytes) -> tuple[int, list[Any]]:
    """The arguments of `encode_handle`."""
    nbytes, plain = json.loads(handle)
    return nbytes, [bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for value in plain]


def _written(update: str, bucket: int, rank: int) -> str:
    """The key of the note that a trainer has filled a bucket; the note is the buffer's handle."""
    return f"{update}/{bucket}/{rank}"


def _read(update: str, bucket: int, engine: str, worker: int) -> str:
    """The key of the note that a worker has read a bucket."""
    return f"{update}/{bucket}/{engine}/{worker}"


def _failed(update: str, engine: str, worker: int) -> str:
    """The key under which a worker notes that it has stopped reading an update, and why."""
    return f"{update}/{engine}/{worker}/failed"


def _interrupted(update: str, engine: str, worker: int) -> str:
    """The key under which a worker notes that it has stopped reading an update for a reason that is not its own."""
    return f"{update}/{engine}/{worker}/interrupted"
