"""Which rank this process is, and the collective calls over replicas and over tensor-parallel neighbours.

How models are split over the mesh is in rlx/models; nothing here knows a model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
DATA, TENSOR = "data", "tensor"
"""dimensions of the mesh: over replicas, over tensor-parallel neighbours"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The position of a process among all. Neighbours have successive ranks and train on the same completions."""

    mesh: DeviceMesh  # [replicas, tp]; without tensor parallelism [replicas]
    rank: int  # among all processes
    world_size: int
    tp: int  # neighbours that share each layer's matrices

    @classmethod
    def of(cls, device_type: str, tp: int) -> Mesh:
        """The mesh over the default process group; a collective call."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if tp == 1:
            return cls(init_device_mesh(device_type, (world_size,)), rank, world_size, tp)
        # Otherwise every process logs once that two successive gathers could be faster.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = init_device_mesh(device_type, (world_size // tp, tp), mesh_dim_names=(DATA, TENSOR))
        return cls(mesh, rank, world_size, tp)

    @property
    def dp_rank(self) -> int:
        """The index of this process's replica."""
        return self.rank // self.tp

    @property
    def dp_size(self) -> int:
        """The number of replicas; each has its own completions."""
        return self.world_size // self.tp

    @property
    def replicas(self) -> Any:
        """The process group of the processes, one of each replica, that hold the same part of the model."""
        return self.mesh.get_group(0)

    @property
    def is_tp_leader(self) -> bool:
        """Whether this is the first process of its replica, the one that generates and scores completions."""
        return self.rank % self.tp == 0

    def broadcast_from_leader(self, value: T | None) -> T:
        """Returns the value of the replica's first process on all its processes; a collective call of the replica."""
        values = [value]
        if self.tp > 1:
            dist.broadcast_object_list(values, group=self.mesh.get_group(TENSOR), group_src=0)
        return values[0]  # type: ignore[return-value]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor of any shape over replicas, in place; a collective call.

        All processes get the same bits, so their decisions are equal.
        """
        if not self.is_tp_leader:
            tensor.zero_()
        dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The maximum of a tensor of any shape over all processes, in place; a collective call."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def close(self) -> None:
        """Destroys the process groups that were made for the mesh."""
        for name in self.mesh.mesh_dim_names or ():
            dist.destroy_process_group(self.mesh.get_group(name))
