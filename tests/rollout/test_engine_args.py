"""The arguments of vLLM's engines for settings of a run, without vLLM."""

from typing import Any

import pytest

from rlx.config.sections.model import ALL_LAYERS, ModelConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.rollout.engine_actors import EngineSpec
from rlx.rollout.engine_args import adapter_config, engine_args


def made(rollout: dict[str, Any] | None = None, *, on_gpu: bool = False, **model: Any) -> dict[str, Any]:
    settings = RolloutConfig(**{"max_tokens": 100, **(rollout or {})})
    return engine_args(settings, ModelConfig(**model), max_prompt_tokens=28, on_gpu=on_gpu)


def test_on_cpu_prompts_are_whole_and_the_cache_has_the_size_that_was_asked_for() -> None:
    assert made({"kv_cache_mib": 3, "max_num_seqs": 5}) == {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 5,
        "trust_remote_code": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 3 * 1024 * 1024,
        "block_size": 32,
        "enforce_eager": True,
    }
    assert made({"max_tokens": 9000})["max_num_batched_tokens"] == 9028  # a prompt that long is read at once


def test_on_gpu_the_memory_is_shared_and_engines_sleep_only_beside_a_worker() -> None:
    found = made({"gpu_memory_utilization": 0.3}, on_gpu=True)
    assert found["gpu_memory_utilization"] == 0.3 and found["enforce_eager"] is False
    assert not {"enable_sleep_mode", "kv_cache_memory_bytes", "block_size", "enable_chunked_prefill"} & set(found)
    colocated = made({"placement": "colocated", "enforce_eager": True}, on_gpu=True)
    assert colocated["enable_sleep_mode"] is True and colocated["enforce_eager"] is True


def test_a_model_is_split_in_processes_of_one_node() -> None:
    assert "tensor_parallel_size" not in made() and "distributed_executor_backend" not in made()
    found = made({"tensor_parallel": 2}, on_gpu=True)
    assert (found["tensor_parallel_size"], found["distributed_executor_backend"]) == (2, "mp")


@pytest.mark.parametrize(
    ("text", "has_tokenizer"), [({}, False), ({"stop": ["x"]}, True), ({"bad_words": ["x"]}, True)]
)
def test_engines_have_a_tokenizer_only_where_settings_are_text(text: dict[str, Any], has_tokenizer: bool) -> None:
    assert made(text).get("skip_tokenizer_init") == (False if has_tokenizer else None)


@pytest.mark.parametrize(
    ("rank", "reserved"), [(1, 8), (8, 8), (9, 16), (129, 256), (257, 320), (321, 512), (512, 512)]
)
def test_engines_reserve_the_next_rank_that_vllm_has(rank: int, reserved: int) -> None:
    found = made(lora_rank=rank, lora_sync="adapter")
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, reserved)
    assert "enable_lora" not in made(lora_rank=rank, lora_sync="merged")


def test_adapters_are_described_as_peft_does() -> None:
    assert adapter_config(ModelConfig(lora_rank=4)) is None
    described = adapter_config(ModelConfig(lora_rank=4, lora_alpha=6, lora_sync="adapter"))
    assert described == {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ALL_LAYERS}
    some = adapter_config(ModelConfig(lora_rank=4, lora_sync="adapter", lora_targets=("q_proj", "o_proj")))
    assert some and some["target_modules"] == ["q_proj", "o_proj"]


def test_options_of_engines_come_last() -> None:
    assert made({"engine_options": {"block_size": 16, "seed_offset": 1}})["block_size"] == 16


def test_an_engine_of_a_float32_model_multiplies_float32_exactly_on_a_gpu() -> None:
    def precision(dtype: str) -> str | None:
        return EngineSpec("model", {"dtype": dtype}, {"GPU": 1.0}).environment.get("TRITON_F32_DEFAULT")

    assert precision("float32") == "ieee"
    assert precision("bfloat16") is None
