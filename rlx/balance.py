"""A step's completions dealt anew over the replicas, so that none waits for another that has longer ones.

FSDP's collectives hold all ranks together: each micro-batch takes as long as its largest on any replica. Which
completions those are is experience's choice; here they travel.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.experience import dealt, widened
from rlx.mesh import Grid
from rlx.types import Experience


def balanced(batch: Experience, count: int, grid: Grid) -> Experience:
    """The replica's share of `count` mini-batches that hold the same completions as before, over all replicas, and as
    many on each; a collective call."""
    if grid.dp_size == 1:
        return batch
    shape = torch.tensor([batch.ids.shape[1], batch.mask.shape[1]], device=batch.ids.device)
    own = torch.cat([batch.prompt_lengths + batch.widths, shape])
    everyone = torch.empty(grid.dp_size, len(own), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(everyone.view(-1), own, group=grid.replicas)
    lengths, (length, width) = everyone[:, :-2].cpu(), everyone[:, -2:].amax(0).tolist()
    owners = dealt(lengths, count)
    mine, here = owners[grid.dp_rank], owners == grid.dp_rank
    leaving, coming = mine.bincount(minlength=grid.dp_size).tolist(), here.sum(1).tolist()
    by_owner = mine.argsort(stable=True).to(own.device)

    def exchanged(column: Tensor) -> Tensor:
        received = torch.empty_like(column)
        dist.all_to_all_single(received, column[by_owner], coming, leaving, group=grid.replicas)
        return received

    whole = widened(batch, length, width)
    found = Experience(**{name: exchanged(column) for name, column in whole.columns.items()})
    by_minibatch = (here.nonzero()[:, 1] // (len(mine) // count)).argsort(stable=True)
    return replace(found.rows(by_minibatch.to(own.device)), place=torch.arange(len(mine), device=own.device))
