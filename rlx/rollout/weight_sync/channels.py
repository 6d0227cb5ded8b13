"""Ways for bytes from a trainer to the workers of engines, without copies in between: a process group of their own
(NCCL, gloo), or memory that both have mapped (CUDA IPC on one GPU, shared memory on one node's CPUs).

What both ends have in common. What travels, and when, is direct.py's and receiver.py's.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rlx.rollout.weight_sync.buckets import Layout
from rlx.rollout.weight_sync.topology import Source
from rlx.types import WeightSyncError

_FAST_S, _SLOW_S = 1e-4, 0.02  # between looks at what is waited for, and at whether there is still hope


class GivenUpError(WeightSyncError):
    """The sender gave the update up, or the way to it broke: nothing is known to be wrong with the one that was to get
    it."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """What an engine is told of an update that its workers receive by themselves."""

    update: str  # a name that no other has
    engine: str  # the process that is meant
    address: tuple[str, int]  # of the store where sender and receivers leave notes
    group: str  # name of the process group
    world: dict[str, int]  # how many take part in it, by kind
    sources: tuple[Source, ...]  # of each worker
    layouts: tuple[Layout, ...]  # of each bucket, in order
    timeout_s: float  # longest wait for a bucket
    keep: bool  # whether what is being drawn goes on with these weights


def kept(host: str, timeout_s: float) -> Any:
    """A new store on this node."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]


def opened(address: tuple[str, int], timeout_s: float) -> Any:
    """A connection to the store that a sender keeps; WeightSyncError if it is gone."""
    try:
        return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise WeightSyncError(f"its sender at {address[0]}:{address[1]} is gone: {error}") from None


def given_up(group: str) -> str:
    """The note that a process group is given up."""
    return f"{group}/given up"


def written(update: str, bucket: int, rank: int) -> str:
    """The note that a trainer has a bucket ready in shared memory."""
    return f"{update}/{bucket}/{rank}"


def read(update: str, bucket: int, engine: str, worker: int) -> str:
    """The note that a worker has copied it."""
    return f"{update}/{bucket}/{engine}/{worker}"


def failed(update: str, engine: str, worker: int) -> str:
    """The note that a worker reads no more of it, and why."""
    return f"{update}/{engine}/{worker}/failed"


def wait(is_done: Callable[[], bool], deadline: float, check: Callable[[], None]) -> None:
    """Returns once something is done; `check` is called now and then and may raise.

    Raises:
        TimeoutError: it is not done at the deadline, a time of `time.monotonic()`.
    """
    checked = time.monotonic()
    while not is_done():
        if (now := time.monotonic()) > deadline:
            raise TimeoutError
        if now - checked > _SLOW_S:
            check()
            checked = now
        time.sleep(_FAST_S)


class Group:
    """A process group beside the default one: rank 0 sends, all others receive. NCCL or gloo."""

    def __init__(
        self, kind: str, incoming: Incoming, rank: int, device: torch.device, deadline: float, check: Callable[[], None]
    ) -> None:
        """Returns once all have joined; see `wait` for the errors."""
        self.kind, self.name, self.device = kind, incoming.group, device
        self._group: Any = None
        self._works: deque[Any] = deque(maxlen=2)  # that may be under way
        failed: list[RuntimeError] = []

        def join() -> None:
            try:
                store = c10d.PrefixStore(f"{self.name}/{kind}", opened(incoming.address, incoming.timeout_s))
                patience = timedelta(seconds=incoming.timeout_s)
                group = _GROUPS[kind](store, rank, incoming.world[kind], patience)
                _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device)).wait()  # connects them
                self._group = group
            except RuntimeError as error:
                failed.append(error)

        # In a thread, as NCCL waits for the others as long as it takes.
        thread = threading.Thread(target=join, daemon=True, name="joining a process group")
        thread.start()
        wait(lambda: not thread.is_alive(), deadline, check)
        if failed:
            raise failed[0]

    def broadcast(self, bucket: Tensor) -> Any:
        """Begins to send or receive."""
        self._works.append(_broadcast(self._group, bucket))
        return self._works[-1]

    def settle(self, work: Any, deadline: float, check: Callable[[], None]) -> None:
        """Has what follows wait for a broadcast: on a GPU its stream, which may take however long; else this thread."""
        if self.kind != "nccl":
            wait(work.is_completed, deadline, check)
        work.wait()

    def abandon(self) -> None:
        """Ends it, and what is under way in it, without waiting for others."""
        group, self._group = self._group, None
        threading.Thread(target=_end, args=(group, [*self._works]), daemon=True, name="end of a process group").start()


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([tensor], options)


def _end(group: Any, works: Sequence[Any]) -> None:
    with suppress(RuntimeError):  # gloo cannot
        group.abort()
    # Until its own deadline. Without, gloo would wait as long when the group is freed, and hold the interpreter's lock.
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)


def _nccl(store: c10d.Store, rank: int, world: int, patience: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 10 * patience  # ours comes first
    with _errors_left_to_us():
        return dist.ProcessGroupNCCL(store, rank, world, options)


_GROUPS: dict[str, Callable[..., Any]] = {"nccl": _nccl, "gloo": dist.ProcessGroupGloo}


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Without it, an engine that dies ends the trainer's process as well: torch reads this when a group is made."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def shared(nbytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Memory `[nbytes]` uint8 on this device, and how another process on the same GPU or node maps it."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, (_, _, _, _, _, _, *handles) = reduce_tensor(memory)
        return memory, noted(nbytes, handles)
    file = os.memfd_create("rlx-weights")  # has no name that could be left behind
    path = f"/proc/{os.getpid()}/fd/{file}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8), noted(nbytes, [path])


def forget(handle: bytes) -> None:
    """Lets no further process map memory that was made with `shared`; it is freed once nobody has it mapped."""
    _, (path, *others) = read_note(handle)
    if not others:
        os.close(int(os.path.basename(path)))


def mapped(handle: bytes, device: torch.device) -> Tensor:
    """The memory that another process has made with `shared`."""
    nbytes, handles = read_note(handle)
    if device.type == "cuda":
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        plain = (Tensor, torch.Size([nbytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
        return rebuild_cuda_tensor(*plain, device.index or 0, *handles[1:])  # a GPU may have another number here
    return torch.from_file(handles[0], shared=True, size=nbytes, dtype=torch.uint8)


def noted(nbytes: int, handles: Sequence[Any]) -> bytes:
    """A note of how memory is mapped; no pickle, as notes lie in a store that all on the network can write to."""
    plain = [{"hex": value.hex()} if isinstance(value, bytes) else value for value in handles]
    return json.dumps([nbytes, plain]).encode()


def read_note(note: bytes) -> tuple[int, list[Any]]:
    """What `noted` was given."""
    nbytes, plain = json.loads(note)
    return nbytes, [bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for value in plain]
