"""Which rank this process is, and the collective calls over replicas and over neighbours.

Neighbours work on the same completions: they share the matrices of layers (tensor parallelism) or the tokens of packed
rows (sequence parallelism). How models are split is in rlx/models; nothing here knows a model.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(hours=3)
"""the longest that a process waits for the others in a collective call: for a rollout, for scores, for a checkpoint
that another one writes. A process that ends is noticed at once, without it"""
DATA, TENSOR, SEQUENCE = "data", "tensor", "sequence"
"""dimensions of the mesh: over replicas, over tensor-parallel neighbours, over sequence-parallel neighbours"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The position of a process among all. Neighbours have successive ranks and train on the same completions."""

    mesh: DeviceMesh  # [replicas, neighbours]; without neighbours [replicas]
    rank: int  # among all processes
    world_size: int
    tp: int  # neighbours that share each layer's matrices
    sp: int = 1  # neighbours that share the tokens of each row; this or tp is 1

    @classmethod
    def of(cls, device_type: str, tp: int, sp: int = 1) -> Mesh:
        """The mesh over the default process group; a collective call."""
        rank, world_size, neighbours = dist.get_rank(), dist.get_world_size(), tp * sp
        if neighbours == 1:
            return cls(init_device_mesh(device_type, (world_size,)), rank, world_size, tp)
        # Otherwise every process logs once that two successive gathers could be faster.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        names = DATA, TENSOR if sp == 1 else SEQUENCE
        mesh = init_device_mesh(device_type, (world_size // neighbours, neighbours), mesh_dim_names=names)
        for group in mesh.get_all_groups():
            _set_pg_timeout(COLLECTIVE_TIMEOUT, group)  # which NCCL's groups have not inherited
        return cls(mesh, rank, world_size, tp, sp)

    @property
    def neighbours(self) -> int:
        """The number of processes of a replica."""
        return self.tp * self.sp

    @property
    def shards(self) -> int:
        """The number of processes over which FSDP cuts each weight."""
        return self.world_size // self.tp

    @property
    def dp_rank(self) -> int:
        """The index of this process's replica."""
        return self.rank // self.neighbours

    @property
    def dp_size(self) -> int:
        """The number of replicas; each has its own completions."""
        return self.world_size // self.neighbours

    @property
    def replicas(self) -> Any:
        """The process group of the processes, one of each replica, that do the same part of its work."""
        return self.mesh.get_group(0)

    @property
    def is_leader(self) -> bool:
        """Whether this is the first process of its replica, the one that generates and scores completions."""
        return self.rank % self.neighbours == 0

    def broadcast_from_leader(self, value: T | None) -> T:
        """Returns the value of the replica's first process on all its processes; a collective call of the replica."""
        values = [value]
        if self.neighbours > 1:
            dist.broadcast_object_list(values, group=self.mesh.get_group(1), group_src=0)
        return values[0]  # type: ignore[return-value]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor of any shape over replicas, in place; a collective call.

        All processes get the same bits, so their decisions are equal.
        """
        if not self.is_leader:
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


def gather_objects(value: T, group: Any = None) -> list[T]:
    """The values of all processes, in the order of their ranks, on every process; a collective call.

    Args:
        group: of all processes; None: the default one.
    """
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, group: Any = None) -> T:
    """The value of rank 0 on every process; a collective call, see `gather_objects`."""
    values = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def in_turns(own: Tensor, mesh: Mesh) -> Tensor:
    """`[N n]` the numbers of all n replicas, of which each has every n-th, `own` `[N]`; a collective call."""
    found = own.new_zeros(len(own) * mesh.dp_size)
    found[mesh.dp_rank :: mesh.dp_size] = own
    return mesh.all_reduce_sum(found)


def exchange_objects(values: Sequence[T], mesh: Mesh) -> list[T]:
    """What each replica has for this one, in the order of replicas; a collective call.

    Args:
        values: what this replica has for each, itself included.
    """
    if mesh.dp_size == 1:
        return list(values)
    device = mesh.mesh.device_type
    outgoing = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in values]
    sizes = torch.tensor([len(each) for each in outgoing], device=device)
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=mesh.replicas)
    sent, received = sizes.tolist(), arriving.tolist()
    arrived = torch.empty(sum(received), dtype=torch.uint8, device=device)
    dist.all_to_all_single(arrived, torch.cat(outgoing).to(device), received, sent, group=mesh.replicas)
    return [pickle.loads(each.numpy().tobytes()) for each in arrived.cpu().split(received)]


# --- sequence parallelism


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Neighbours that share a row of tokens: each has its part of them, or all of them in a part of each token's heads.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509). All calls but `share` are collective calls of the
    neighbours, and have gradients. That of `gather` is the sum over neighbours. All of them compute the same loss, so
    it is `size` times that of one; FSDP's mean over all processes makes it the mean over replicas.
    """

    group: Any  # the neighbours' process group; None: this process has no neighbours
    size: int = 1
    rank: int = 0  # of this process among the neighbours

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SequenceGroup:
        """Over the processes of a mesh of one dimension."""
        return cls(mesh.get_group(), mesh.size(), mesh.get_local_rank())

    def length(self, tokens: int) -> int:
        """How many of a row's tokens a process has; the last ones of a row may have copies of its last token."""
        return -(-tokens // self.size)

    def share(self, values: Tensor) -> Tensor:
        """This process's part `[p, ...]` of values `[P, ...]`."""
        if self.size == 1:
            return values
        own = self.length(len(values))
        places = torch.arange(self.rank * own, (self.rank + 1) * own, device=values.device)
        return values[places.clamp(max=len(values) - 1)]

    def gather(self, values: Tensor, tokens: int) -> Tensor:
        """The values `[P, ...]` of all P `tokens` from each process's part `[p, ...]`."""
        if self.size == 1:
            return values
        gathered: Tensor = _Gather.apply(values, self.group, self.size)  # type: ignore[no-untyped-call]
        return gathered[:tokens]

    def to_heads(self, states: Tensor, tokens: int) -> Tensor:
        """States `[P, heads / sp, size]` of all P `tokens` in this process's heads, from `[p, heads, size]`.

        Fewer heads than `size` divides are repeated, as queries that share a head of keys need it.
        """
        if self.size == 1:
            return states
        repeats = self.size // math.gcd(self.size, states.shape[1])
        states = states.repeat_interleave(repeats, dim=1) if repeats > 1 else states
        parts = states.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        exchanged: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged.flatten(0, 1)[:tokens]

    def to_tokens(self, states: Tensor) -> Tensor:
        """The reverse: states `[p, heads, size]` of this process's tokens, from `[P, heads / sp, size]`."""
        if self.size == 1:
            return states
        missing = self.length(len(states)) * self.size - len(states)
        parts = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, missing)).unflatten(0, (self.size, -1))
        exchanged: Tensor = _Exchange.apply(parts.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return exchanged.transpose(0, 1).flatten(1, 2)


UNSHARED = SequenceGroup(None)
"""a process that has all tokens of its rows"""


class _Exchange(torch.autograd.Function):
    """Sends part i of `[sp, ...]` to process i of a group; gives the parts that come, in the order of their senders.

    By functional collectives, which torch.compile takes. Torch's own gradient for them leaves the wait to the first use
    of the result, also where that is a view.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return wait_tensor(all_to_all_single(parts, None, None, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return wait_tensor(all_to_all_single(gradient.contiguous(), None, None, ctx.group)), None


class _Gather(torch.autograd.Function):
    """The parts `[p, ...]` of all processes of a group, one after the other; gradients are summed over processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        gathered = part.new_empty(size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = gradient.new_empty(len(gradient) // ctx.size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None, None
