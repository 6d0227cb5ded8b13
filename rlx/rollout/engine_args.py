"""The arguments of vLLM's engine for a run's settings, and peft's description of adapters. Imports no vLLM.

Left out: whether engines are on GPUs. That follows from the resource plan, so the caller passes it.
"""

from __future__ import annotations

from typing import Any

from rlx.config.sections.model import ALL_LAYERS, ModelConfig
from rlx.config.sections.rollout import RolloutConfig

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM can reserve memory


def engine_args(rollout: RolloutConfig, model: ModelConfig, *, max_prompt_tokens: int, on_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for a run.

    The model is split over `rollout.tensor_parallel` processes on one node. With `model.lora_sync` adapter
    the engine takes adapters of at most `model.lora_rank`. On CPU the engine is always eager.
    """
    max_model_len = max_prompt_tokens + rollout.max_tokens
    return {
        "dtype": model.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "trust_remote_code": model.trust_remote_code,
        **({"skip_tokenizer_init": False} if rollout.stop or rollout.bad_words else {}),  # they are text
        **_split_args(rollout),
        **_adapter_args(model),
        **(_gpu_args(rollout) if on_gpu else _cpu_args(rollout, max_model_len)),
        **rollout.engine_options,
    }


def adapter_config(model: ModelConfig) -> dict[str, Any] | None:
    """peft's description of the adapters that engines are sent; None if engines are sent the whole model."""
    if model.lora_sync != "adapter":
        return None
    targets = list(model.lora_targets) or ALL_LAYERS
    return {"peft_type": "LORA", "r": model.lora_rank, "lora_alpha": model.lora_alpha, "target_modules": targets}


def _split_args(rollout: RolloutConfig) -> dict[str, Any]:
    if rollout.tensor_parallel == 1:
        return {}
    # vLLM's Ray executor would need a placement group of its own.
    return {"tensor_parallel_size": rollout.tensor_parallel, "distributed_executor_backend": "mp"}


def _adapter_args(model: ModelConfig) -> dict[str, Any]:
    if model.lora_sync != "adapter":
        return {}
    rank = next(rank for rank in _LORA_RANKS if rank >= model.lora_rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def _gpu_args(rollout: RolloutConfig) -> dict[str, Any]:
    sleep = {"enable_sleep_mode": True} if rollout.placement == "colocated" else {}
    memory = {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    return sleep | memory | {"enforce_eager": rollout.enforce_eager}


def _cpu_args(rollout: RolloutConfig, max_model_len: int) -> dict[str, Any]:
    return {
        # vLLM cannot sample a chunked prompt with a seed on CPU: it rewinds a generator offset that only GPUs have.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, max_model_len),
        "kv_cache_memory_bytes": rollout.kv_cache_mib << 20,
        "block_size": 32,  # short enough for the prefix cache to hit
        "enforce_eager": True,
    }
