"""Buckets: several tensors one after the other in one block of bytes, with a checksum.

Left out: sending a bucket to another process, which the transports do.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlx.types import ShardedWeight, WeightSyncError

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""name, dtype and shape of each tensor of a bucket"""

ALIGNMENT = 16
"""a number of bytes: a tensor of any dtype may begin at a multiple of it"""
_CHECKSUM = 16  # bytes after the tensors, of which the first 8 are used
_WIDTH = 1024  # words of a row, see `_checksum`


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket in host memory, as it travels through Ray."""

    layout: Layout
    data: np.ndarray  # [bytes] uint8, see `fill`


def group_weights(weights: Sequence[ShardedWeight], dtype: torch.dtype, limit: int) -> list[list[ShardedWeight]]:
    """The weights in successive groups of at most `limit` bytes; a larger weight is a group by itself."""
    groups: list[list[ShardedWeight]] = []
    size = limit + 1
    for weight in weights:
        nbytes = math.prod(weight.shape) * dtype.itemsize
        if size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(weight)
        size += nbytes
    return groups


def layout(weights: Sequence[ShardedWeight], dtype: torch.dtype) -> Layout:
    """The layout of a bucket of these weights."""
    return tuple((weight.name, str(dtype).removeprefix("torch."), weight.shape) for weight in weights)


@functools.lru_cache(maxsize=4096)
def byte_size(layout: Layout) -> int:
    """The bytes of a bucket, its checksum included."""
    return sum(_space(entry) for entry in layout) + _CHECKSUM


def fill(memory: Tensor, layout: Layout, tensors: Sequence[Tensor]) -> None:
    """Writes tensors of the layout's shapes and their checksum into `memory`, `[bytes]` uint8."""
    # In one call: three hundred calls take longer than the copies on the GPU.
    torch._foreach_copy_([view for _, view in views(memory, layout)], list(tensors))
    memory[-_CHECKSUM:].view(torch.int64)[0] = _checksum(memory, layout)


def views(memory: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name, of the layout's shapes, as views of its memory `[bytes]` uint8."""
    typed = {dtype: memory.view(getattr(torch, dtype)) for dtype in {dtype for _, dtype, _ in layout}}
    start = 0
    for entry in layout:
        name, dtype, shape = entry
        first = start // typed[dtype].itemsize
        yield name, typed[dtype][first : first + math.prod(shape)].view(shape)
        start += _space(entry)


def is_sound(memory: Tensor, layout: Layout) -> Tensor:
    """Whether a bucket `[bytes]` uint8 is what was written: a scalar bool on its device.

    It is a tensor so that the host need not wait for the device.
    """
    return memory[-_CHECKSUM:].view(torch.int64)[0] == _checksum(memory, layout)


def pack(layout: Layout, tensors: Sequence[Tensor]) -> Bucket:
    """Copies tensors of the layout's shapes into a bucket in host memory."""
    data = torch.empty(byte_size(layout), dtype=torch.uint8, device=tensors[0].device)
    fill(data, layout, tensors)
    return Bucket(layout, data.cpu().numpy())


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name, of the layout's shapes, as views of its memory.

    Raises:
        WeightSyncError: the bucket is not what was packed.
    """
    # Ray's shared memory arrives read-only and torch wants writable memory: a copy of one bucket.
    data = torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())
    if not is_sound(data, bucket.layout):
        raise WeightSyncError(f"checksum of a bucket with {bucket.layout[0][0]} differs from what was sent")
    yield from views(data, bucket.layout)


def _checksum(memory: Tensor, layout: Layout) -> Tensor:
    """A checksum `[]` int64 over names, dtypes, shapes and bytes: a sum of 8-byte words, each times a factor.

    Rows and columns of words are summed first, so no temporary tensor is as large as the bucket. The factor of a
    word is that of its row, which is odd, plus that of its column, which is even: a change of any one word changes the
    sum.
    """
    words = memory[:-_CHECKSUM].view(torch.int64)
    words, tail = words[: len(words) // _WIDTH * _WIDTH].view(-1, _WIDTH), words[len(words) // _WIDTH * _WIDTH :]
    index = torch.arange(max(len(words), _WIDTH) + 1, device=memory.device)
    rows = (words.sum(1) * (2 * index[: len(words)] + 1)).sum() + (words.sum(0) * 65536 * index[:_WIDTH]).sum()
    last = (tail * (2 * len(words) + 1 + 65536 * index[: len(tail)])).sum()
    return rows + last + zlib.crc32(repr(layout).encode())


def _space(entry: tuple[str, str, tuple[int, ...]]) -> int:
    """The bytes that a tensor takes in a bucket."""
    _, dtype, shape = entry
    return math.ceil(math.prod(shape) * getattr(torch, dtype).itemsize / ALIGNMENT) * ALIGNMENT
