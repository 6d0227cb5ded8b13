"""Tensors as they travel: some of them one after the other in a run of bytes, with a checksum.

How the bytes get from one process to another is links.py's and sync.py's business.
"""

from __future__ import annotations

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

_ALIGNED = 16  # bytes: any dtype may begin there
_CHECKSUM = 16  # bytes behind the tensors, of which the first 8 are used
_WIDTH = 1024  # words


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as they travel in host memory."""

    layout: Layout
    data: np.ndarray  # [bytes] uint8, see `fill`


def group_weights(weights: Sequence[ShardedWeight], dtype: torch.dtype, limit: int) -> list[list[ShardedWeight]]:
    """Runs of tensors that take at most `limit` bytes together; a larger one stands alone."""
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
    """What a bucket of these weights holds."""
    return tuple((weight.name, str(dtype).removeprefix("torch."), weight.shape) for weight in weights)


def byte_size(layout: Layout) -> int:
    """Bytes of a bucket, its checksum included."""
    return sum(_space(entry) for entry in layout) + _CHECKSUM


def fill(bucket: Tensor, layout: Layout, tensors: Sequence[Tensor]) -> None:
    """Writes tensors and their checksum into a run of bytes, `[size(layout)]` uint8, on whichever device."""
    # As one call: three hundred calls take longer than the GPU does.
    torch._foreach_copy_([view for _, view in views(bucket, layout)], list(tensors))
    bucket[-_CHECKSUM:].view(torch.int64)[0] = _checksum(bucket, layout)


def views(bucket: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name, sharing its memory."""
    whole = {dtype: bucket.view(getattr(torch, dtype)) for dtype in {dtype for _, dtype, _ in layout}}
    start = 0
    for entry in layout:
        name, dtype, shape = entry
        first = start // whole[dtype].itemsize
        yield name, whole[dtype][first : first + math.prod(shape)].view(shape)
        start += _space(entry)


def is_sound(bucket: Tensor, layout: Layout) -> Tensor:
    """Whether a bucket is what was written: a bool on its device, so that nobody has to wait for it."""
    return bucket[-_CHECKSUM:].view(torch.int64)[0] == _checksum(bucket, layout)


def pack(layout: Layout, tensors: Sequence[Tensor]) -> Bucket:
    """Copies tensors of any shapes into a bucket."""
    data = torch.empty(byte_size(layout), dtype=torch.uint8, device=tensors[0].device)
    fill(data, layout, tensors)
    return Bucket(layout, data.cpu().numpy())


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket by name, sharing its memory.

    Raises:
        WeightSyncError: the bucket is not what was packed.
    """
    # Ray's shared memory arrives read-only and torch wants writable memory: a copy of one bucket.
    data = torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())
    if not is_sound(data, bucket.layout):
        raise WeightSyncError(f"checksum of a bucket with {bucket.layout[0][0]} differs from what was sent")
    yield from views(data, bucket.layout)


def _checksum(bucket: Tensor, layout: Layout) -> Tensor:
    """Over names, dtypes, shapes and bytes: a sum of 8-byte words, each times a number that follows from where it is.

    Rows and columns of words are summed first, so nothing as large as the bucket is made. A word's factor is that of
    its row, which is odd, plus that of its column, which is even: whatever is changed in one word changes the sum.
    """
    words = bucket[:-_CHECKSUM].view(torch.int64)
    words, rest = words[: len(words) // _WIDTH * _WIDTH].view(-1, _WIDTH), words[len(words) // _WIDTH * _WIDTH :]
    place = torch.arange(max(len(words), _WIDTH) + 1, device=bucket.device)
    rows = (words.sum(1) * (2 * place[: len(words)] + 1)).sum() + (words.sum(0) * 65536 * place[:_WIDTH]).sum()
    last = (rest * (2 * len(words) + 1 + 65536 * place[: len(rest)])).sum()
    return rows + last + zlib.crc32(repr(layout).encode())


def _space(entry: tuple[str, str, tuple[int, ...]]) -> int:
    _, dtype, shape = entry
    return math.ceil(math.prod(shape) * getattr(torch, dtype).itemsize / _ALIGNED) * _ALIGNED
