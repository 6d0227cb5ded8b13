"""The training processes as a grid: replicas in rows, the tensor-parallel neighbours that share a replica's matrices in
columns; and how decoder layers are cut over neighbours.

Embeddings, norms and heads are not cut: neighbours hold them alike. Sharding over replicas is model's (FSDP2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from rlx.config.errors import ConfigError

T = TypeVar("T")
DATA, TENSOR = "data", "tensor"
"""dimensions of the mesh: over replicas, over tensor-parallel neighbours"""


@dataclass(frozen=True, slots=True)
class Grid:
    """A process's place among all; neighbours have successive ranks and train on the same completions."""

    mesh: DeviceMesh  # [replicas, tp]; without tensor parallelism [replicas]
    rank: int  # among all processes
    ranks: int
    tp: int  # neighbours that share each layer's matrices

    @classmethod
    def of(cls, device_type: str, tp: int) -> Grid:
        """The grid over the default process group; a collective call."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if tp == 1:
            return cls(init_device_mesh(device_type, (ranks,)), rank, ranks, tp)
        # Every process would say once that two gathers one after the other could be faster.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        return cls(init_device_mesh(device_type, (ranks // tp, tp), mesh_dim_names=(DATA, TENSOR)), rank, ranks, tp)

    @property
    def dp_rank(self) -> int:
        """This process's replica."""
        return self.rank // self.tp

    @property
    def dp_size(self) -> int:
        """How many replicas there are, each with completions of its own."""
        return self.ranks // self.tp

    @property
    def replicas(self) -> Any:
        """The process group of those, one of each replica, that hold the same part of it."""
        return self.mesh.get_group(0)

    @property
    def leads(self) -> bool:
        """Whether this is its replica's first process, the one that draws and scores completions."""
        return self.rank % self.tp == 0

    def shared(self, value: T | None) -> T:
        """What the replica's first process has, on all of its processes; a collective call of theirs."""
        things = [value]
        if self.tp > 1:
            dist.broadcast_object_list(things, group=self.mesh.get_group(TENSOR), group_src=0)
        return things[0]  # type: ignore[return-value]

    def add(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over replicas, in place; a collective call. All processes get the very same bits, and so take
        the same decisions."""
        if not self.leads:
            tensor.zero_()
        dist.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        """Gives back the process groups that were made for the grid."""
        for name in self.mesh.mesh_dim_names or ():
            dist.destroy_process_group(self.mesh.get_group(name))


def _norm_of_heads() -> ParallelStyle:
    """For a norm of each head by itself: its weight is every process's, its gradient the sum over all heads."""
    # In [B, T, heads, size] neighbours hold heads of their own, as they would hold parts of a sequence.
    return SequenceParallel(sequence_dim=2, use_local_output=True)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": _norm_of_heads,
}
"""how transformers' plans cut a layer"""


def layer_plan(config: Any, tp: int) -> dict[str, ParallelStyle]:
    """How the decoder layers of a model with this transformers config are cut, by name pattern: its own plan.

    Raises:
        ConfigError: it has none, or one that asks for more than is done here, or its sizes are no multiples of `tp`.
    """
    where = f"parallel.tp {tp}: model {config.name_or_path or config.model_type}"
    # Entries beside the layers are those of the embedding, which stays whole.
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if not plan:
        raise ConfigError(f"{where} ({config.model_type}) has no tensor-parallel plan in transformers")
    if unknown := {name: style for name, style in plan.items() if style not in _STYLES}:
        name, style = next(iter(unknown.items()))
        raise ConfigError(f"{where} cuts {name} as {style}; known: {', '.join(_STYLES)}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and size % tp:
            raise ConfigError(f"{where} has {key} {size}, no multiple of {tp}")
    return {name: _STYLES[style]() for name, style in plan.items()}


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the decoder layers of a policy or critic over the processes of a mesh, on its device.

    Raises:
        ConfigError: see `layer_plan`.
    """
    bases = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part.base_model is part)
    base = next(bases)
    plan = layer_plan(base.config, mesh.size())
    # All have read the same file: nothing need be sent.
    parallelize_module(base.to(mesh.device_type), mesh, plan, src_data_rank=None)
