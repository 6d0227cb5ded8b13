"""The plain tensors of optimizer state that torchao keeps in 8 bits: codes, and the scales of blocks.

They share memory with the state, so that reading a checkpoint into them restores it. They are exact on any number of
ranks as long as rows are whole blocks. Left out: which weights are quantized (rlx.training.optimizers.eight_bit).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def plain_parts(moment: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the plain tensor of a state; torchao's 8 bits are codes, and scales of the blocks of rows."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "codes"):
        yield moment, tensor
        return
    for name, part in (("codes", local.codes), ("scale", local.scale.view(len(local.codes), -1))):
        yield f"{moment}.{name}", _sharded_like(tensor, part)


def _sharded_like(tensor: Tensor, part: Tensor) -> Tensor:
    """Returns a rank's part of another tensor with the same rows, `[m, n]`, in the shards of `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    shape = torch.Size((tensor.shape[0], part.shape[1]))
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=(part.shape[1], 1)
    )
