"""Which of vLLM's options `rollout.engine_options` and `rollout.sampling_options` may not set, and why.

The trainer's log-probability of a token has to be that of the distribution from which the engine drew it. Imports no
vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections.rollout import RolloutConfig

_RLX = "rlx itself"
ENGINE_OWN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "rollout.num_engines",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_sleep_mode": "rollout.placement",
    "enable_lora": "model.lora_sync",
    "max_loras": "model.lora_sync",
    "max_lora_rank": "model.lora_rank",
    **dict.fromkeys(("seed", "logprobs_mode", "skip_tokenizer_init", "scheduler_cls", "worker_cls"), _RLX),
    **dict.fromkeys(("worker_extension_cls", "disable_log_stats", "distributed_executor_backend"), _RLX),
}
"""arguments of engines that rlx sets, and from which setting"""
OTHER_MODEL = (
    *("quantization", "quantization_config", "hf_overrides", "hf_config_path", "model_class_overrides"),
    *(
        "model_weights",
        "revision",
        "code_revision",
        "lora_dtype",
        "logits_processors",
        "watermark_config",
        "diffusion_config",
    ),
    *("speculative_config", "spec_method", "spec_model", "spec_tokens", "runner", "convert", "pooler_config"),
    *("generation_config", "override_generation_config"),
)
"""arguments of engines that make them another model than the trainer's, or draw in another way"""
ROUGHER = ("kv_cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales", "kv_sharing_fast_prefill")
"""arguments of engines that change log-probabilities by more than rounding"""
SAMPLING_OWN = {
    **{name: f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens")},
    **{name: f"rollout.{name}" for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
    **{name: f"rollout.{name}" for name in ("stop", "bad_words")},
    "n": "train.samples_per_prompt",
    "seed": "seed",
    "truncate_prompt_tokens": "data.max_prompt_tokens",
    **dict.fromkeys(("stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "logprob_token_ids"), _RLX),
    **dict.fromkeys(("flat_logprobs", "detokenize", "output_kind", "skip_special_tokens", "stream_interval"), _RLX),
    **dict.fromkeys(("include_stop_str_in_output", "trace_decode_token_ids"), _RLX),
}
"""arguments of a request that rlx sets, and from which setting"""


def problem(rollout: RolloutConfig, correction: str) -> str | None:
    """Why options of vLLM cannot be used; None if they can. `correction`: the resolved rollout_correction."""
    engine, sampling = rollout.engine_options, rollout.sampling_options
    if name := _first(engine, ENGINE_OWN):
        return f"rollout.engine_options.{name} is set by {ENGINE_OWN[name]}"
    if name := _first(sampling, SAMPLING_OWN):
        return f"rollout.sampling_options.{name} is set by {SAMPLING_OWN[name]}"
    if name := _first(engine, dict.fromkeys(OTHER_MODEL, "")):
        return (
            f"rollout.engine_options.{name} makes the engines another model than the trainer's, which weight updates "
            f"and log-probabilities would not show"
        )
    if (name := _first(engine, dict.fromkeys(ROUGHER, ""))) and correction == "none":
        return (
            f"rollout.engine_options.{name} changes the engines' log-probabilities, which biases PPO's ratio: set "
            f"algorithm.rollout_correction to tis or mask"
        )
    return None


def _first(given: Mapping[str, object], table: Mapping[str, str]) -> str | None:
    return next((name for name in given if name in table), None)


def check_option_names(rollout: RolloutConfig) -> None:
    """Raises ConfigError if vLLM has no option of a name; where vLLM is not installed, all pass.

    The names are read from vLLM's sources: to import it takes seconds. A config of another machine, which may have
    another vLLM, can still be read: this is checked before a run, and where a config is refused anyway.
    """
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations if found else None) or ():
        _check_names("engine_options", rollout.engine_options, Path(folder, "engine", "arg_utils.py"), "EngineArgs")
        _check_names("sampling_options", rollout.sampling_options, Path(folder, "sampling_params.py"), "SamplingParams")


def _check_names(setting: str, given: Mapping[str, Any], source: Path, owner: str) -> None:
    if not given:
        return
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [node for each in classes if each.name == owner for node in each.body if isinstance(node, ast.AnnAssign)]
    known = [field.target.id for field in fields if isinstance(field.target, ast.Name)]
    for name in given:
        if known and name not in known:
            hint = nearest(name, known)
            own = {**ENGINE_OWN, **SAMPLING_OWN}.get(hint.rpartition(" ")[2])
            raise ConfigError(
                f"rollout.{setting}.{name}: vLLM has no such option{hint}{f', which {own} sets' if own else ''}"
            )
