"""FSDP2: shards a model over data-parallel ranks, gathers full tensors, clips gradients over all shards.

Left out: cutting matrices over tensor-parallel ranks (tensor_parallel), and when gradients are reduced (training).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

UNIT = 2**27
"""least number of weights of decoder layers that are gathered together: 256 MiB in bfloat16"""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: those that its architecture forbids to split."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, offload: bool = False) -> nn.Module:
    """Shards a model in place over the devices of a mesh, one shard per rank, and returns it.

    Trained weights become float32, frozen ones `dtype`, unit by unit as they are cut: no rank holds all of a model that
    was loaded in bfloat16 in float32. Forward and backward run in `dtype`, gradients are reduced in float32. Weights
    are gathered unit by unit. A unit is one decoder layer of a large model, or several of a small one, because the
    Python code that gathers a small layer takes longer than its computation on the GPU. All other weights are one more
    unit.

    Args:
        offload: shards, gradients and therefore the optimizer stay in host memory; the weights of a unit are copied to
            the device when they are needed.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    _move_buffers(model, mesh.device_type)
    for unit in (*_units(decoder_layers(model)), [model]):
        _move_weights(unit, mesh.device_type, dtype)
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
    return model


def _move_weights(unit: Sequence[nn.Module], device: str, dtype: torch.dtype) -> None:
    """Moves the weights of a unit that are not cut yet, see `shard`; those that are cut are there already."""
    for weight in itertools.chain.from_iterable(module.parameters() for module in unit):
        if not isinstance(weight, DTensor):
            # FSDP would cast them at each gather, to the same bits: only what an optimizer changes needs more of them.
            weight.data = weight.data.to(device, torch.float32 if weight.requires_grad else dtype)


def _move_buffers(model: nn.Module, device: str) -> None:
    """Moves what a model holds beside its weights; numbers become float32."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device, torch.float32 if buffer.is_floating_point() else buffer.dtype))


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights that forward passes left in memory. The shards, which are trained, stay."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Splits layers, in order, into units of at least UNIT weights each; no unit if there would be only one.

    A unit ends where layers are no longer computed again in the backward pass: FSDP gathers a unit for all of it.
    """
    units: list[list[nn.Module]] = []
    for _, alike in itertools.groupby(layers, lambda layer: getattr(layer, "gradient_checkpointing", False)):
        units.append([])
        for layer in alike:
            if sum(weight.numel() for member in units[-1] for weight in member.parameters()) >= UNIT:
                units.append([])
            units[-1].append(layer)
    return units if len(units) > 1 else []


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of an FSDP shard, in its global shape; a plain tensor as it is. Collective: all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales gradients down to a global norm of at most `limit`. Collective: all ranks call it.

    Returns:
        The norm before, a scalar that stays on its device so that the caller need not wait for the device.
    """
    meshes = _by_mesh(weight for weight in model.parameters() if weight.grad is not None)
    norm = _total_norm([weight.grad for weight in weights if weight.grad is not None] for weights in meshes)
    for weights in meshes:
        nn.utils.clip_grads_with_norm_(weights, limit, norm)
    return norm


def weight_norm(model: nn.Module) -> Tensor:
    """The norm of all weights that are trained, a scalar that stays on its device. Collective: all ranks call it."""
    return _total_norm(_by_mesh(weight.detach() for weight in model.parameters() if weight.requires_grad))


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each mesh. Tensor-parallel layers have one of their own, and torch takes one at a time."""
    meshes: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        meshes.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(meshes.values())


def _total_norm(meshes: Iterable[list[Tensor]]) -> Tensor:
    """The norm over the tensors of all meshes, a scalar; a collective call."""
    return nn.utils.get_total_norm([full_tensor(nn.utils.get_total_norm(tensors)) for tensors in meshes])
