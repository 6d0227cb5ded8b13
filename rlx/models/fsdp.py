"""TODO rlx.models.fsdp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

UNIT = 2**27
"""weights of decoder layers that are gathered together: 256 MiB in bfloat16"""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: what its architecture says is not to be split."""
    names = {name for part in model.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    return [part for part in model.modules() if type(part).__name__ in names]


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, offload: bool = False) -> nn.Module:
    """Moves a model to the mesh's devices, one shard per rank: each few decoder layers a unit, the rest another.

    Weights stay float32; forward and backward run in `dtype`, gradients are reduced in float32. What is gathered at a
    time is a unit: a layer of a large model, several of a small one, where Python's part in it would take longer than
    the GPU's.

    Args:
        offload: shards, their gradients and with them the optimizer stay in host memory, and a unit's weights are
            brought to the device when its turn comes.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    home = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    model.to(mesh.device_type)
    # Where no other rank has a part, giving weights up between forward and backward would free little.
    after = False if mesh.size() == 1 and not offload else None
    for unit in (*_units(decoder_layers(model)), [model]):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=home, reshard_after_forward=after)
    return model


def reshard(model: nn.Module) -> None:
    """Gives up what forward passes have left gathered, which is no part of the weights that are trained."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _units(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Runs of layers with at least UNIT weights together; none if there would be only one."""
    units: list[list[nn.Module]] = [[]]
    for layer in layers:
        if sum(p.numel() for one in units[-1] for p in one.parameters()) >= UNIT:
            units.append([])
        units[-1].append(layer)
    return units if len(units) > 1 else []


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of an FSDP shard; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales gradients down to a global norm of at most `limit`; gives the norm before, a scalar on its device, so that
    nobody has to wait for it. All ranks call it."""
    meshes: dict[Any, list[Tensor]] = {}  # layers that are cut lie on one of two dimensions; torch takes one at a time
    for weight in model.parameters():
        if weight.grad is not None:
            meshes.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    gradients = ([w.grad for w in weights if w.grad is not None] for weights in meshes.values())
    norm = nn.utils.get_total_norm([full_tensor(nn.utils.get_total_norm(of_one)) for of_one in gradients])
    for weights in meshes.values():
        nn.utils.clip_grads_with_norm_(weights, limit, norm)
    return norm
