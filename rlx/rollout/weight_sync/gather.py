"""Full tensors of what FSDP2 has cut into shards: those of many weights in one all-gather.

One by one, three hundred of them take longer to ask for than to send.
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

from rlx.types import ShardedWeight

_ALIGNED = 16  # bytes: any dtype may begin there


@torch.no_grad()
def gather_full(weights: Sequence[ShardedWeight], dtype: torch.dtype) -> list[Tensor]:
    """The weights in full; all ranks call it with theirs, in the same order.

    What FSDP2 has cut by rows is cast to `dtype` before it travels. All else keeps its own, and a tensor that no other
    rank has a part of is not copied: whoever copies it casts it at once.
    """
    parts = [(part, part.dtype if weight.join else dtype) for weight in weights for part in weight.parts]
    full = iter(_full(parts))
    whole = []
    for weight in weights:
        own = [next(full) for _ in weight.parts]
        whole.append(weight.join(*own) if weight.join else own[0])
    return whole


def _full(parts: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Each tensor in full; those of the one all-gather are in their dtype here."""
    meshes = [_mesh(part) for part, _ in parts]
    mesh = next(filter(None, meshes), None)
    together = [i for i, own in enumerate(meshes) if own is not None and own == mesh]
    found = dict(zip(together, _all_gathered([parts[i] for i in together], mesh), strict=True)) if mesh else {}
    return [found[i] if i in found else _alone(part) for i, (part, _) in enumerate(parts)]


def _mesh(part: Tensor) -> DeviceMesh | None:
    """The ranks over which a tensor is cut by rows, as FSDP2 cuts over one dimension of several ranks; else None."""
    if not isinstance(part, DTensor) or part.device_mesh.ndim > 1 or part.placements != (Shard(0),):
        return None
    return part.device_mesh if _ranks(part.device_mesh) > 1 else None


def _alone(part: Tensor) -> Tensor:
    if not isinstance(part, DTensor):
        return part.detach()
    return part.to_local() if _ranks(part.device_mesh) == 1 else part.full_tensor()


@functools.lru_cache(maxsize=8)
def _ranks(mesh: DeviceMesh) -> int:
    """Counted once: asked for each of three hundred tensors, a mesh takes a fifth of a sync to count."""
    return int(mesh.size())  # type: ignore[no-untyped-call]


def _all_gathered(parts: Sequence[tuple[Tensor, torch.dtype]], mesh: DeviceMesh) -> list[Tensor]:
    """Tensors of which each rank has as many rows, the last ones fewer or none."""
    ranks, shards = _ranks(mesh), [part.to_local() for part, _ in parts]  # type: ignore[attr-defined]
    sizes = [
        math.ceil(part.shape[0] / ranks) * math.prod(part.shape[1:]) * dtype.itemsize for part, dtype in parts
    ]  # of a rank's rows, in bytes
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + math.ceil(size / _ALIGNED) * _ALIGNED)
    mine = torch.empty(starts[-1], dtype=torch.uint8, device=shards[0].device)
    for shard, (_, dtype), start, size in zip(shards, parts, starts, sizes, strict=False):
        mine[start : start + size].view(dtype)[: shard.numel()].copy_(shard.reshape(-1))
    everyone = torch.empty(ranks, starts[-1], dtype=torch.uint8, device=mine.device)
    dist.all_gather_into_tensor(everyone.view(-1), mine, group=mesh.get_group())
    return [
        everyone[:, start : start + size].view(dtype).reshape(-1)[: part.numel()].view(part.shape)
        for (part, dtype), start, size in zip(parts, starts, sizes, strict=False)
    ]
