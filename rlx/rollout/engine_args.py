"""TODO rlx.rollout.engine_args."""

from __future__ import annotations

from typing import Any

from rlx.config.run import RunConfig
from rlx.config.sections import ALL_LAYERS
from rlx.runs.resources import plan_resources


def engine_args(config: RunConfig) -> dict[str, Any]:
    """vLLM's engine arguments for a config."""
    settings = config.rollout
    return vllm_arguments(
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + settings.max_tokens,
        max_num_seqs=settings.max_num_seqs,
        on_gpu=plan_resources(config).engines[0].get("GPU", 0) > 0,
        kv_cache_mib=settings.kv_cache_mib,
        gpu_memory=settings.gpu_memory_utilization,
        eager=settings.enforce_eager,
        sleeps=settings.placement == "colocated",
        tensor_parallel=settings.tensor_parallel,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=config.model.lora_rank if config.model.lora_sync == "adapter" else 0,
    )


def adapter_config(config: RunConfig) -> dict[str, Any] | None:
    """peft's description of the adapters that engines are sent; None if they are sent the whole model."""
    chosen = config.model
    if chosen.lora_sync != "adapter":
        return None
    targets = list(chosen.lora_targets) or ALL_LAYERS
    return {"peft_type": "LORA", "r": chosen.lora_rank, "lora_alpha": chosen.lora_alpha, "target_modules": targets}


def vllm_arguments(
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    on_gpu: bool,
    kv_cache_mib: int,
    gpu_memory: float,
    eager: bool,
    sleeps: bool = False,
    tensor_parallel: int = 1,
    trust_remote_code: bool = False,
    lora_rank: int = 0,
) -> dict[str, Any]:
    """vLLM engine arguments for a run. On CPU: blocks short enough for the prefix cache to hit, and always eager.

    With `tensor_parallel` the model is split over as many processes on one node. With `lora_rank` the engine takes
    adapters of at most that rank; with `sleeps` it can give its GPU memory back.
    """
    common: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "trust_remote_code": trust_remote_code,
    }
    if tensor_parallel > 1:  # Ray's executor would want a placement group of its own
        common |= {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "mp"}
    if lora_rank:
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
        common |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in ranks if r >= lora_rank)}
    if on_gpu:
        common |= {"enable_sleep_mode": True} if sleeps else {}
        return common | {"gpu_memory_utilization": gpu_memory, "enforce_eager": eager}
    # A prompt cut in two cannot be sampled with a seed on CPU (vLLM rewinds a generator offset that only GPUs have).
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
    memory = {"kv_cache_memory_bytes": kv_cache_mib << 20, "block_size": 32}
    return common | whole_prompts | memory | {"enforce_eager": True}
