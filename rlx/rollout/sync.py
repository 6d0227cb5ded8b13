"""Weights from the trainers to the engines: gathered from the FSDP shards bucket by bucket, sent through Ray's shared
memory while the next bucket is gathered, checked on arrival.

One transport for every machine: the object store, which is shared memory within a node and a copy between nodes.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlx.types import WeightSyncError


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as they travel."""

    layout: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape of each
    data: np.ndarray  # [bytes] uint8, the tensors one after the other
    checksum: int


def push(
    parameters: Iterable[tuple[str, Tensor]],
    engines: Sequence[Any],
    version: int,
    *,
    sender: bool,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = 120.0,
    bucket_bytes: int = 64 << 20,
) -> None:
    """Sends the whole policy to every engine as `version`; all ranks call it, the sender's call returns when it is in.

    Args:
        parameters: (Hugging Face name, full tensor or FSDP shard), in the same order on every rank.
        engines: actor handles.
        sender: whether this rank sends; the others only take part in gathering.
        dtype: what the engines hold.

    Raises:
        WeightSyncError: an engine did not take the weights in time, or not the ones sent; names the engine.
    """
    shards = list(parameters)
    updates = [e.update_weights.remote(version, len(shards), timeout_s) for e in engines] if sender else []
    for group in _grouped(shards, bucket_bytes):
        tensors = [(name, gathered(tensor).to(dtype)) for name, tensor in group]
        if sender:
            bucket = ray.put(pack(tensors))
            for engine in engines:
                engine.receive.remote(bucket)
    if sender:
        _await_all(updates, version, timeout_s)


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
    return zlib.crc32(memoryview(data), zlib.crc32(repr(layout).encode()))


def _grouped(tensors: list[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Runs of tensors of at most `limit` bytes together; a larger one stands alone."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if group and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += nbytes
    yield group


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of an FSDP shard; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _await_all(updates: list[Any], version: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for index, update in enumerate(updates):
        try:
            ray.get(update, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise WeightSyncError(
                f"engine {index} did not take weight version {version} within {timeout_s:.0f} s"
            ) from None
        except ray.exceptions.RayError as error:
            raise WeightSyncError(f"engine {index} did not take weight version {version}: {error}") from None
