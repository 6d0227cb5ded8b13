"""Models of random weights: shapes that are known here, and models that end their responses by themselves.

Importing this module imports neither torch nor transformers: benchmarks say how many threads they have before.
Left out: which of them a benchmark takes, and where it is kept (workload.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

UNTRAINED = "tiny-random"
# A small one for CPUs; Qwen2's, arXiv 2407.10671, table 1, and Qwen3's, arXiv 2505.09388, table 1, both with their
# config.json. The weights are random.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-30m": {
        "vocab_size": 16_000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen2-1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}
ENDING = {
    "qwen2-30m-ending": ("qwen2-30m", 64),
    "qwen2-0.5b-ending": ("qwen2-0.5b", 160),  # 128 where 256 are the most
    "qwen2-1.5b-ending": ("qwen2-1.5b", 512),
}
"""models whose responses differ in length: their shapes, and how many tokens a response has in the mean if none is cut
off; it may end at each token with the same chance, so a few are several times as long as the mean"""


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Makes a model's folder, all at once; a model on a GPU leaves it."""
    import torch

    from rlx.models import tiny

    with tiny.atomic_folder(folder, repeatable=True) as unfinished, tiny.no_progress_bars():
        model.cpu().save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    torch.cuda.empty_cache()  # for the run that follows; without a GPU it does nothing


def random_model(name: str, tokenizer: Any, **other: Any) -> Any:
    """A model that is known here; `other` are settings of its shape that differ."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlx.models import tiny

    if name == UNTRAINED:
        return tiny.build_model(tiny.WarmStart(), tokenizer)
    if name in ENDING:
        shape, mean = ENDING[name]
        return ending(random_model(shape, tokenizer, **other), mean)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = AutoConfig.for_model(**{"model_type": "qwen2"} | SHAPES[name] | ends | other)
    # Billions of random numbers take minutes on CPUs, and seconds on a GPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(shape).to(torch.bfloat16)


def ending(model: Any, mean: int) -> Any:
    """Gives each token of a random model of Qwen2's kind the same chance to be the last one of a response, 1 / mean."""
    import torch

    end = model.config.eos_token_id
    with torch.no_grad():
        large = steady(model)
        others = model(input_ids=_some_tokens(model), use_cache=False).logits.float()
        others[..., end] = -math.inf
        model.lm_head.weight[end] = 0.0
        model.lm_head.weight[end, 0] = (others.logsumexp(-1).mean() - math.log(mean - 1)) / large
    return model


def steady(model: Any) -> float:
    """Makes the first number of a random Qwen2's hidden states large at every token, and returns what the output layer
    reads of it. The first layer's attention adds it, not the embedding, whose rows may be the output layer's."""
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight.zero_()
    attention.v_proj.bias.fill_(1.0)
    attention.o_proj.weight[0] = 100.0 / attention.o_proj.in_features
    states = model.model(input_ids=_some_tokens(model), use_cache=False).last_hidden_state
    return float(states[..., 0].float().mean())


def _some_tokens(model: Any) -> Any:
    import torch

    return torch.arange(6, 22, device=model.device)[None]
