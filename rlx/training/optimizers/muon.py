"""Muon for matrices that may be sharded.

Muon makes the momentum of a matrix orthogonal, which takes the whole matrix. torch's Muon, given the shards of FSDP,
multiplies shards and communicates in each product. Here each matrix is gathered once, and torch's Muon has it whole:
the same gradients give the same update on any number of ranks. It computes in bfloat16, as its author does, which
enlarges differences: gradients that differ in the last bits of float32, as those of other micro-batches or ranks do,
give updates that differ by several per cent. Left out: the weights that it does not take, which AdamW has (choice).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Muon, Optimizer

from rlx.training.optimizers.groups import Groups

MOMENTUM = 0.95
"""of Nesterov's kind; the default of torch and of the author"""


class ShardedMuon(Optimizer):
    """Muon of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon).

    The update of a matrix `[m, n]` is scaled by 0.2 sqrt(max(m, n)): it then is as large as AdamW's, and takes AdamW's
    learning rates and decay. Source: Liu et al. 2025 (arXiv 2502.16982) sec. 2.2.
    """

    def __init__(self, groups: Groups) -> None:
        """Takes groups of matrices, each with `lr` and `weight_decay`."""
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step with the gradients that the matrices have; collective calls if they are shards."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    update = nesterov(weight.grad, self.state[weight])
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(orthogonal_step(update), alpha=group["lr"])


def nesterov(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The gradient `[m, n]` with Nesterov's momentum, which is updated in the state."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
    return gradient.lerp(momentum, MOMENTUM)


def orthogonal_step(update: Tensor) -> Tensor:
    """What a step of torch's Muon with learning rate 1, without momentum and decay, adds to a matrix, `[m, n]`.

    Of shards, every rank computes it of the whole matrix and keeps its shard; a collective call.
    """
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    moved = torch.zeros_like(whole).requires_grad_()
    moved.grad = whole
    Muon([moved], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    if not isinstance(update, DTensor):
        return moved.detach()
    return distribute_tensor(moved.detach(), update.device_mesh, update.placements, src_data_rank=None)
