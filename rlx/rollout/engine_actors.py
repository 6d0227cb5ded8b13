"""Starts vLLM engines as Ray actors in a placement group. Left out: requests to them (engine_pool.py).

Engines belong to the process that starts the run, not to rank 0, so they outlive a restart of the workers. Those that
share a worker's GPU belong to the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlx.rollout import vllm_engine

# On GPUs vLLM's attention for float32 is a kernel of Triton's, whose products keep ten bits of each number by default.
_FLOAT32_ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is started with."""

    model: str  # Hugging Face folder or name
    options: dict[str, Any]  # vLLM's engine arguments, see engine_args.py
    resources: dict[str, float]  # that it takes of its bundle, as Ray names them
    adapter: dict[str, Any] | None = None  # peft's description of its adapters; None: it is sent whole models
    bring: Callable[[], None] | None = None  # called first in its process: brings the model's folder to the node
    turn_s: float | None = None  # how long it waits while another engine on its GPU draws; None: it does not

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the engine's process."""
        on_cpu = {} if self.resources.get("GPU", 0) > 0 else vllm_engine.CPU_ENVIRONMENT
        exact = _FLOAT32_ENVIRONMENT if self.options.get("dtype") == "float32" else {}
        return vllm_engine.ENVIRONMENT | on_cpu | exact


def start_engines(spec: EngineSpec, group: PlacementGroup, bundles: Sequence[int]) -> list[Any]:
    """Starts an engine in each of these bundles of a placement group; does not wait for them.

    Returns:
        The actors' handles, whose methods are those of `Engine`.
    """
    resources = {"num_cpus": spec.resources.get("CPU", 0), "num_gpus": spec.resources.get("GPU", 0)}
    strategies = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]
    return [_start(spec, spec.environment, scheduling_strategy=strategy, **resources) for strategy in strategies]


def start_engine_here(spec: EngineSpec) -> Any:
    """Starts an engine on the node and the GPU of this process, which holds them for both; does not wait for it.

    The engine ends with this process.
    """
    context = ray.get_runtime_context()
    gpus = ",".join(context.get_accelerator_ids()["GPU"])
    # Ray gives an actor without GPUs of its own no device, unless it is told to leave the variable alone.
    device = {"CUDA_VISIBLE_DEVICES": gpus, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    return _start(spec, spec.environment | device, scheduling_strategy=here, num_cpus=0, num_gpus=0)


def _start(spec: EngineSpec, environment: dict[str, str], **options: Any) -> Any:
    return (
        ray.remote(vllm_engine.VLLMEngine)
        .options(
            max_concurrency=1000,
            max_restarts=-1,  # it restarts with the model's own weights, and is in use again after the next push
            runtime_env={"env_vars": environment},
            **options,
        )
        .remote(spec.model, spec.options, spec.adapter, spec.bring, spec.turn_s)
    )
