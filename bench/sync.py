"""How long engines take to get new weights, against a bare copy of as many bytes between the same two places.

    python bench/sync.py [--model.path FOLDER] [--rollout.transport KIND] [--placement separate|colocated]

Trainer and engine are those of a run: FSDP2 on one rank, a vLLM engine actor, `EngineGroup.push`. The bare copy, in
the same run: on CPU a memcpy into shared memory that has been written to before, on one GPU a copy from device to
device, between two GPUs an NCCL broadcast of one flat buffer. Without a model, one of Qwen2's shape is made of random
weights: 30 M parameters on CPU, 0.5 B on GPU. Prints a table and writes bench/results/sync-PLACEMENT-DEVICE.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import table
import torch
import torch.distributed as dist
import workload
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.cli.options import exit_code
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.mesh import Mesh
from rlx.models import fsdp, loading, lora
from rlx.rollout.engine_actors import start_engines
from rlx.rollout.engine_group import EngineGroup
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync.base import Incoming, Source
from rlx.rollout.weight_sync.process_group import BroadcastGroup, create_store
from rlx.rollout.weight_sync.shared_memory import allocate_shared
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.runs.processes import engine_spec

_WARM, _ROUNDS = 2, 10


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model.path", dest="path", help="Hugging Face folder; unset: random weights")
    options.add_argument("--rollout.transport", dest="transport", default="auto")
    options.add_argument("--placement", choices=("separate", "colocated"), help="unset: separate if there are two GPUs")
    options.add_argument("--storage", default="storage", help="where models of random weights are kept")
    options.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder for the JSON file")

    def script() -> int:
        given, gpus, load = options.parse_args(argv), workload.gpus(), os.getloadavg()[0]
        placement = given.placement or ("separate" if gpus != 1 else "colocated")
        path = given.path or ("qwen2-0.5b" if gpus else "qwen2-30m")
        config = config_of(path, bool(gpus), placement, given.transport, given.storage)
        with workload.prepared(config) as (ready, folder):
            figures, facts = measure(ready, folder)
            table.finish(f"sync-{placement}", figures, ready, given.out, load, facts)
        return 0

    return exit_code(script)


def config_of(path: str, on_gpu: bool, placement: str, transport: str, storage: str) -> RunConfig:
    share = {"GPU": 1.0 if placement == "separate" else 0.5} if on_gpu else {}
    return from_tree(
        {
            "storage": storage,
            "algorithm": {"advantage": "grpo"},  # without a critic
            "model": {"path": path, "dtype": "bfloat16" if on_gpu else "float32"},
            "data": {"max_prompt_tokens": 64},
            "rollout": {
                "resources_per_engine": {"CPU": 1.0} | share,
                "transport": transport,
                "gpu_memory_utilization": 0.3,
                "enforce_eager": True,
            },
            "scaling": {"use_gpu": on_gpu, "resources_per_worker": {"CPU": 1.0} | share},
        }
    )


def measure(config: RunConfig, path: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Medians over the counted pushes, and the bare copies after them; and the transports of both."""
    bundles = [dict(config.scaling.resources_per_worker), dict(config.rollout.resources_per_engine)]
    group = placement_group(bundles, "STRICT_PACK")
    ray.get(group.ready())
    (engine,) = start_engines(
        engine_spec(config.rollout, config.model, config.data.max_prompt_tokens, path, bundles[1]), group, [1]
    )
    place = PlacementGroupSchedulingStrategy(group, 0)
    share = {"num_cpus": 1, "num_gpus": bundles[0].get("GPU", 0)}
    trainer = ray.remote(Trainer).options(scheduling_strategy=place, **share).remote(config, path, engine)
    return ray.get(trainer.measure.remote())


class Trainer:
    """One rank with a real policy, as a worker has it."""

    def __init__(self, config: RunConfig, path: str, engine: Any) -> None:
        self.device = torch.device("cuda", 0) if config.scaling.use_gpu else torch.device("cpu")
        backend = "nccl" if config.scaling.use_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self.dtype = getattr(torch, config.model.dtype)
        grid = Mesh.of(self.device.type, 1)
        self.policy: Any = fsdp.shard(loading.load_policy(path, head=None), grid.mesh, self.dtype)
        self.engine = engine
        self.on_one_gpu = config.rollout.resources_per_engine.get("GPU", 1.0) < 1
        self.sync = WeightSync([engine], grid, self.device, self.dtype, config.rollout.transport)
        weights = partial(lora.engine_weights, self.policy)
        pool = EnginePool([engine], 0, timeout_s=300.0, hang_s=300.0)
        self.group = EngineGroup(pool, grid, self.sync, weights, retries=0, notify=print)

    def measure(self) -> tuple[dict[str, float], dict[str, Any]]:
        pushes = seconds(self._push)
        nbytes = sum(p.numel() for p in self.policy.parameters()) * self.dtype.itemsize
        assert self.sync.plan
        way = self.sync.plan.sources[0][0].transport
        what, copies = self._copies(nbytes, way)
        sync, copy = statistics.median(pushes), statistics.median(copies)
        figures = {
            "bytes, MB": nbytes / 1e6,
            "first push, s": self.first,
            "sync, s": sync,
            "slowest sync, s": max(pushes),
            "bare copy, s": copy,
            "bare copy, GB/s": nbytes / copy / 1e9,
            "sync time / copy time": sync / copy,
        }
        return figures, {"way": way, "bare copy": what}

    def _push(self, number: int) -> None:
        started = time.perf_counter()
        self.group.push(number + 1, starting=number == 0)
        if number == 0:
            self.first = time.perf_counter() - started

    def _copies(self, nbytes: int, way: str) -> tuple[str, list[float]]:
        if self.device.type == "cpu":
            source, memory = np.ones(nbytes, np.uint8), allocate_shared(nbytes, self.device)[0].numpy()
            return "memcpy into shared memory", seconds(lambda _: np.copyto(memory, source))
        buffer = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        if self.on_one_gpu:
            target = torch.empty_like(buffer)
            return "device to device", seconds(lambda _: synchronised(lambda: target.copy_(buffer)))
        store = create_store(ray.util.get_node_ip_address(), 60)
        address = (store.host, store.port)
        incoming = Incoming("", "", address, "bare", {"nccl": 2}, (Source("nccl", 1),), (), 60, False)
        other = self.engine.__ray_call__.remote(lambda _, told, size: broadcasts(told, 1, size), incoming, nbytes)
        times = broadcasts(incoming, 0, nbytes)
        ray.get(other)
        return "NCCL broadcast", times


def broadcasts(incoming: Incoming, rank: int, nbytes: int) -> list[float]:
    """Seconds of broadcasts of one flat buffer between trainer and engine."""
    device = torch.device("cuda", 0)
    group = BroadcastGroup("nccl", incoming, rank, device, time.monotonic() + 60, lambda: None)
    buffer = torch.ones(nbytes, dtype=torch.uint8, device=device)
    return seconds(lambda _: synchronised(lambda: group.broadcast(buffer).wait()))


def synchronised(work: Callable[[], Any]) -> None:
    work()
    torch.cuda.synchronize()


def seconds(work: Callable[[int], Any]) -> list[float]:
    """How long each of the counted rounds takes."""
    times = []
    for number in range(_WARM + _ROUNDS):
        started = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - started)
    return times[_WARM:]


if __name__ == "__main__":
    sys.exit(main())
