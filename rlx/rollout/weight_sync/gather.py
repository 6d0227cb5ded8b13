"""The full tensors of weights that FSDP2 has sharded: many weights in one all-gather.

One all-gather for each of three hundred tensors takes longer to start than to run. Left out: where the tensors are
sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlx.rollout.weight_sync.buckets import ALIGNMENT
from rlx.types import ShardedWeight


@torch.no_grad()
def gather_full(weights: Sequence[ShardedWeight], dtype: torch.dtype) -> list[Tensor]:
    """The weights in full, each of its `shape`; all ranks call it with theirs, in the same order.

    Tensors that FSDP2 has sharded by rows are cast to `dtype` before they travel. All others keep their dtype, and a
    tensor that no other rank has a part of is not copied: the caller copies it into a bucket and casts it there.
    """
    parts = [(part, part.dtype if weight.join else dtype) for weight in weights for part in weight.parts]
    full = iter(_full(parts))
    gathered = []
    for weight in weights:
        tensors = [next(full) for _ in weight.parts]
        gathered.append(weight.join(*tensors) if weight.join else tensors[0])
    return gathered


def _full(parts: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Each tensor in full; tensors that are gathered together are first cast to the dtype of their pair."""
    meshes = [_sharding_mesh(part) for part, _ in parts]
    mesh = next(filter(None, meshes), None)
    together = [i for i, other in enumerate(meshes) if other is not None and other == mesh]
    gathered = dict(zip(together, _all_gather([parts[i] for i in together], mesh), strict=True)) if mesh else {}
    return [gathered[i] if i in gathered else _gather_alone(part) for i, (part, _) in enumerate(parts)]


def _sharding_mesh(part: Tensor) -> DeviceMesh | None:
    """The mesh of a tensor that FSDP2 has sharded by rows over one dimension of several ranks; else None."""
    if not isinstance(part, DTensor) or part.device_mesh.ndim > 1 or part.placements != (Shard(0),):
        return None
    return part.device_mesh if _size(part.device_mesh) > 1 else None


def _gather_alone(part: Tensor) -> Tensor:
    if not isinstance(part, DTensor):
        return part.detach()
    return part.to_local() if _size(part.device_mesh) == 1 else part.full_tensor()


@functools.lru_cache(maxsize=8)
def _size(mesh: DeviceMesh) -> int:
    """The ranks of a mesh; cached, because computing it for each of three hundred tensors takes a fifth of a sync."""
    return int(mesh.size())  # type: ignore[no-untyped-call]


def _all_gather(parts: Sequence[tuple[Tensor, torch.dtype]], mesh: DeviceMesh) -> list[Tensor]:
    """Gathers tensors that are sharded by rows; the last ranks may have fewer rows than the others, or none."""
    ranks, shards = _size(mesh), [part.to_local() for part, _ in parts]  # type: ignore[attr-defined]
    sizes = [
        math.ceil(part.shape[0] / ranks) * math.prod(part.shape[1:]) * dtype.itemsize for part, dtype in parts
    ]  # of a rank's rows, in bytes
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)
    mine = torch.empty(starts[-1], dtype=torch.uint8, device=shards[0].device)
    for shard, (_, dtype), start, size in zip(shards, parts, starts, sizes, strict=False):
        mine[start : start + size].view(dtype)[: shard.numel()].copy_(shard.reshape(-1))
    all_ranks = torch.empty(ranks, starts[-1], dtype=torch.uint8, device=mine.device)
    dist.all_gather_into_tensor(all_ranks.view(-1), mine, group=mesh.get_group())
    return [
        all_ranks[:, start : start + size].view(dtype).reshape(-1)[: part.numel()].view(part.shape)
        for (part, dtype), start, size in zip(parts, starts, sizes, strict=False)
    ]
