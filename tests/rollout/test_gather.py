"""Many shards in one all-gather are what each is by itself."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared import OnRanks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from rlx.rollout.weight_sync.gather import gather_full
from rlx.types import ShardedWeight

ROWS = (1, 2, 5, 8)  # on three ranks: none, one, two and three of them on a rank


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    return base + scale * (up @ down)


def sharded(ranks: int) -> tuple[list[ShardedWeight], list[Tensor]]:
    """Weights of all kinds, and what they are in full."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, rows) for rows in ROWS])
    full = [p.detach().clone() for p in model.parameters()]
    fully_shard(model, mesh=(mesh := init_device_mesh("cpu", (ranks,))))
    weights = [ShardedWeight(name, tuple(p.shape), (p,)) for name, p in model.named_parameters()]
    base, down, up = torch.randn(5, 7), torch.randn(2, 7), torch.randn(5, 2)
    parts = tuple(distribute_tensor(part, mesh) for part in (base, down, up))
    weights.append(ShardedWeight("merged", (5, 7), parts, partial(merged, scale=0.5)))
    full.append(merged(base, down, up, 0.5))
    weights.append(ShardedWeight("whole", (2, 7), (down,)))
    weights.append(ShardedWeight("replicated", (5, 2), (distribute_tensor(up, mesh, [Replicate()]),)))
    return weights, [*full, down, up]


def differences(rank: int, ranks: int) -> list[tuple[str, bool]]:
    weights, full = sharded(ranks)
    assert any(isinstance(part, DTensor) for weight in weights for part in weight.parts)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for weight, one, expected in zip(weights, gather_full(weights, dtype), full, strict=True):
            travelled = ranks > 1 and not weight.join and weight.name not in ("whole", "replicated")
            as_told = one.dtype == (dtype if travelled else torch.float32)
            if weight.name == "whole":
                as_told &= one.data_ptr() == weight.parts[0].data_ptr()
            found.append((weight.name, torch.equal(one.to(dtype), expected.to(dtype)) and as_told))
    dist.barrier()
    return found


@pytest.mark.slow
def test_gathered_weights_are_the_whole_ones(on_ranks: OnRanks) -> None:
    for ranks in (1, 3):
        for found in on_ranks(ranks, differences):
            assert len(found) == 2 * (2 * len(ROWS) + 3)
            assert [name for name, same in found if not same] == []
