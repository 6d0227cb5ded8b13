"""Weights by a process group of their own, NCCL or gloo: rank 0 of the trainers broadcasts, engine workers receive.

Also the store of torch.distributed through which its members meet, and in which senders and receivers of all transports
leave notes. A group is kept while the same engine processes are in it; if one dies or hangs, the group is closed.
Left out: which engines are in a group (topology.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rlx.rollout.weight_sync.base import (
    DeviceLocation,
    Incoming,
    UpdateInterruptedError,
    check_interrupted,
    deadline,
    interrupted_note,
    wait,
)
from rlx.rollout.weight_sync.buckets import byte_size
from rlx.rollout.weight_sync.sender import OutgoingBucket, OutgoingUpdate
from rlx.types import WeightSyncError


def create_store(host: str, timeout_s: float) -> Any:
    """A new store on this node. It listens on that address alone; torch's own sockets listen on all of the machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:  # of a network that translates addresses: none of this machine's interfaces has it
        listener = socket.create_server(("", 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def choose_interface(address: tuple[str, int]) -> None:
    """Lets gloo use the network interface that leads to the address of a store, unless the environment names one.

    By itself gloo takes that of the host's name, which Debian and Ubuntu map to loopback: no other node reaches it.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # it sends nothing
        probe.connect(address)
        own = probe.getsockname()[0]
        names = [name for name, found in psutil.net_if_addrs().items() if own in {each.address for each in found}]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def open_store(address: tuple[str, int], timeout_s: float) -> Any:
    """A connection to the store of a sender.

    Raises:
        WeightSyncError: the store is gone.
    """
    try:
        return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise WeightSyncError(f"its sender at {address[0]}:{address[1]} is gone: {error}") from None


def nccl_rank(
    worker: DeviceLocation, trainers: Sequence[DeviceLocation], joined: Sequence[DeviceLocation]
) -> int | None:
    """The rank of a worker that joins an NCCL group after others; None if it cannot: NCCL takes each GPU once."""
    if not worker.gpu or not trainers[0].gpu or worker.gpu == trainers[0].gpu:
        return None
    return None if worker.gpu in {other.gpu for other in joined} else len(joined) + 1


def gloo_rank(worker: DeviceLocation, trainers: Sequence[DeviceLocation], joined: Sequence[DeviceLocation]) -> int:
    """The rank of a worker that joins a gloo group after others."""
    return len(joined) + 1


class BroadcastGroup:
    """A process group in addition to the default one: rank 0 sends, all others receive. NCCL or gloo."""

    def __init__(
        self, kind: str, incoming: Incoming, rank: int, device: torch.device, deadline: float, check: Callable[[], None]
    ) -> None:
        """Returns when all have joined; see `wait` for the errors."""
        self.kind, self.name, self.device = kind, incoming.group, device
        self._group: Any = None
        self._is_abandoned = False
        self._works: deque[Any] = deque(maxlen=2)  # broadcasts that may not have ended
        errors: list[RuntimeError] = []

        def join() -> None:
            try:
                store = c10d.PrefixStore(f"{self.name}/{kind}", open_store(incoming.address, incoming.timeout_s))
                timeout = timedelta(seconds=incoming.timeout_s)
                choose_interface(incoming.address)
                self._group = group = _GROUPS[kind](store, rank, incoming.world[kind], timeout)
                if self._is_abandoned:  # meanwhile
                    self._end(group)
                    return
                first = _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
                self._works.append(first)
                first.wait()  # it connects them
            except RuntimeError as error:
                errors.append(error)

        # In a thread, because NCCL waits for the other members without end.
        thread = threading.Thread(target=join, daemon=True, name="joining a process group")
        thread.start()
        try:
            wait(lambda: not thread.is_alive(), deadline, check)
            if errors:
                raise errors[0]
        except BaseException:
            self.abandon()
            raise

    def broadcast(self, bucket: Tensor) -> Any:
        """Begins to send or receive a bucket, `[bytes]` uint8; returns the work to wait for."""
        self._works.append(_broadcast(self._group, bucket))
        return self._works[-1]

    def wait(self, work: Any, deadline: float, check: Callable[[], None]) -> None:
        """Waits for a broadcast: with NCCL the GPU's stream waits, however long it takes; otherwise this thread."""
        if self.kind != "nccl":
            wait(work.is_completed, deadline, check)
        work.wait()

    def abandon(self) -> None:
        """Ends the group and its unfinished broadcasts, without waiting for the other members."""
        self._is_abandoned = True
        group, self._group = self._group, None
        if group is not None:  # otherwise it is not made yet
            self._end(group)

    def _end(self, group: Any) -> None:
        threading.Thread(target=_end, args=(group, [*self._works]), daemon=True, name="end of a process group").start()


class GroupSender:
    """Rank 0's end of a process group: see `Transport`."""

    maps_memory = False

    def __init__(self, kind: str, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self.group: BroadcastGroup | None = None
        self._update: OutgoingUpdate
        self._works: dict[int, Any] = {}  # unfinished broadcasts, by the number of the bucket

    @property
    def is_connected(self) -> bool:
        return self.group is not None

    def prepare(self, update: OutgoingUpdate) -> bool:
        self._update, self._works = update, {}
        is_used = update.sender.rank == 0 and self._kind in update.plan.world
        if self.group and (not is_used or self.group.name != update.plan.group):
            self.close()
        return is_used

    def connect(self) -> None:
        if self.group:
            return
        update = self._update
        try:
            check = partial(update.check_members, self._kind)
            self.group = BroadcastGroup(
                self._kind, next(iter(update.incoming.values())), 0, self._device, update.deadline(), check
            )
        except (TimeoutError, RuntimeError):  # the calls of the engines show which one did not join
            self._give_up()

    def send(self, bucket: OutgoingBucket) -> None:
        if not self.group:
            return
        assert bucket.memory is not None
        try:
            self._works[bucket.number] = self.group.broadcast(bucket.memory)
        except RuntimeError:  # a member is gone: the calls of the engines show which one
            self._give_up()

    def release(self, number: int) -> None:
        """Returns when a buffer may be filled again; on a GPU, work that is queued after this call waits for NCCL."""
        work = self._works.pop(number, None)
        if work is None or not self.group:
            return
        try:
            self.group.wait(work, self._update.deadline(), partial(self._update.check_members, self._kind))
        except (TimeoutError, RuntimeError):
            self._give_up()

    def finish(self) -> None:
        for number in sorted(self._works):
            self.release(number)

    def leave_out(self, engine: int) -> None:
        """Closes the group, on any rank, if the engine is in it: its other members wait for rank 0's broadcast."""
        if any(source.transport == self._kind for source in self._update.plan.sources[engine]):
            self._give_up()

    def interrupt(self) -> None:
        if self.group:
            self._give_up()

    def close(self) -> None:
        if self.group:
            self.group.abandon()
        self.group = None

    def _give_up(self) -> None:
        self._update.sender.store.set(interrupted_note(self._update.plan.group), "")
        self.close()


class GroupReceiver:
    """An engine worker's end of a process group: see `ReceivingEnd`."""

    def __init__(self, kind: str, device: torch.device, worker: int) -> None:
        self._kind, self._device, self._worker = kind, device, worker
        self._store: Any = None
        self._group: BroadcastGroup | None = None
        self._buffers: list[Tensor] = []

    def connect(self, incoming: Incoming, store: Any) -> None:
        self._store = store
        if self._group and self._group.name != incoming.group:
            self.close()
        if self._group:
            return
        check = partial(check_interrupted, store, incoming)
        check()
        rank = incoming.sources[self._worker].rank
        with _interrupted():
            self._group = BroadcastGroup(self._kind, incoming, rank, self._device, deadline(incoming), check)

    def receive(self, incoming: Incoming) -> Iterator[Tensor]:
        """Yields each bucket, `[bytes]` uint8, while the next one arrives in the other of two buffers."""
        assert self._group
        group, sizes = self._group, [byte_size(layout) for layout in incoming.layouts]
        if not self._buffers or len(self._buffers[0]) < max(sizes):
            self._buffers.clear()
            self._buffers += [torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(2)]
        buckets = [self._buffers[i % 2][:nbytes] for i, nbytes in enumerate(sizes)]
        with _interrupted():
            works = [group.broadcast(bucket) for bucket in buckets[:2]]
        for i, bucket in enumerate(buckets):
            with _interrupted():
                group.wait(works[i], deadline(incoming), partial(check_interrupted, self._store, incoming))
            yield bucket
            with _interrupted():
                works += [group.broadcast(bucket) for bucket in buckets[i + 2 : i + 3]]

    def fail(self, incoming: Incoming, error: Exception) -> None:
        """Ends the group; the sender learns of the error by the engine's answer."""
        self.close()

    def close(self) -> None:
        if self._group:
            self._group.abandon()
        self._group = None


@contextmanager
def _interrupted() -> Iterator[None]:
    """Errors that a process group raises come from its connections, so usually another member is at fault."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise UpdateInterruptedError(f"the {type(error).__name__} of a process group: {error}") from None


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([tensor], options)


def _end(group: Any, works: Sequence[Any]) -> None:
    with suppress(RuntimeError):  # gloo cannot abort
        group.abort()
    # Until the group's deadline: otherwise gloo waits as long when the group is freed, and holds the interpreter lock.
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)


def _nccl(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 10 * timeout  # rlx's own deadline comes first
    with _without_error_handling():
        return dist.ProcessGroupNCCL(store, rank, world, options)


_GROUPS: dict[str, Callable[..., Any]] = {"nccl": _nccl, "gloo": dist.ProcessGroupGloo}


@contextmanager
def _without_error_handling() -> Iterator[None]:
    """Turns off torch's own handling of errors, by which an engine that dies would end the trainer's process as well.

    Torch reads the variable when a group is made.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
