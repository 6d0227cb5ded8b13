"""How the workers of a run meet: Ray Train's backend for torch, with a store that listens on one address.

Torch's own store listens on all interfaces of a machine, and whoever reaches it can read and change it.
Left out: the groups that send weights (rlx.rollout.weight_sync).
"""

from __future__ import annotations

import os
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.train.torch import TorchConfig

from rlx.config.sections.scaling import ScalingConfig
from rlx.mesh import COLLECTIVE_TIMEOUT
from rlx.rollout.weight_sync.process_group import choose_interface, create_store, open_store
from rlx.rollout.weight_sync.sync import own_address

_stores: list[Any] = []
"""in the process of rank 0: the store of its group"""


def backend_of(scaling: ScalingConfig, offload: tuple[str, ...]) -> str:
    """Returns the backend of the workers' collectives.

    Gradients in host memory are clipped there over all ranks, which NCCL cannot do.
    """
    if not scaling.use_gpu:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if "critic" in offload else "nccl"


class WorkerGroupConfig(TorchConfig):  # type: ignore[misc]  # Ray has no types
    """Ray's settings for torch, for a process group whose store listens on one address."""

    @property
    def backend_cls(self) -> type:
        return _Backend


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Runs in Ray Train's controller. `on_shutdown` is Ray's."""

    def on_start(self, worker_group: Any, backend_config: WorkerGroupConfig) -> None:
        address = worker_group.execute_single(0, _create_store, backend_config.timeout_s)
        joining = [
            worker_group.execute_single_async(rank, _join, address, backend_config.backend, backend_config.timeout_s)
            for rank in range(len(worker_group))
        ]
        ray.get(joining)


def _create_store(timeout_s: float) -> tuple[str, int]:
    """Runs on rank 0; returns the address of its store."""
    _stores[:] = [create_store(own_address(), timeout_s)]
    return _stores[0].host, _stores[0].port


def _join(address: tuple[str, int], backend: str, timeout_s: float) -> None:
    """Runs on each rank."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    # As torchrun does, for libraries that read it.
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": context.get_local_rank()}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    choose_interface(address)
    store = _stores[0] if rank == 0 else open_store(address, timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
