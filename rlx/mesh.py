"""TODO rlx.mesh."""

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
    """A process's place among all; neighbours have successive ranks and train on the same completions."""

    mesh: DeviceMesh  # [replicas, tp]; without tensor parallelism [replicas]
    rank: int  # among all processes
    ranks: int
    tp: int  # neighbours that share each layer's matrices

    @classmethod
    def of(cls, device_type: str, tp: int) -> Mesh:
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
