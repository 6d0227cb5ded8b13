"""What of a rank's objects follows from the config alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.models import tiny
from rlx.models.engine_logprobs import engine_logits
from rlx.models.loading import end_tokens
from rlx.models.packing import can_pack
from rlx.models.policy import Policy
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.training.checkpointing import PinnedMemory
from rlx.training.optimizers.choice import make_optimizer
from rlx.training.optimizers.groups import base_lrs
from rlx.training.setup import tables
from rlx.training.setup.rank import threads
from rlx.training.setup.rollouts import sampling_of
from rlx.types import Prompt

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "vocab_size": 9,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(("share", "expected"), [({"CPU": 0.5}, 1), ({"CPU": 1}, 1), ({"CPU": 1.9}, 2), ({"x": 1}, 1)])
def test_a_worker_computes_with_as_many_threads_as_its_share_of_cpus(share: dict[str, float], expected: int) -> None:
    assert threads(from_tree({"scaling": {"resources_per_worker": share}}).scaling) == expected


def test_norms_and_biases_do_not_decay_and_the_head_has_the_critics_rate() -> None:
    policy = Policy(LlamaForCausalLM(LlamaConfig(**SIZES)), torch.nn.Linear(16, 1))
    policy.lm.model.embed_tokens.requires_grad_(False)
    train = from_tree({"train": {"weight_decay": 0.1, "adam_eps": 1e-5, "critic_lr": 3e-4, "actor_lr": 2e-5}}).train
    made = make_optimizer(train, policy, "actor_lr")
    names = {id(p): name for name, p in policy.named_parameters()}
    found = [
        (group["lr"], group["weight_decay"], group["eps"], sorted(names[id(p)] for p in group["params"]))
        for group in made.param_groups
    ]
    norms = ["lm.model.layers.0.input_layernorm.weight", "lm.model.layers.0.post_attention_layernorm.weight"]
    assert found[1:] == [
        (2e-5, 0.0, 1e-5, [*norms, "lm.model.norm.weight"]),
        (3e-4, 0.1, 1e-5, ["value_head.weight"]),
        (3e-4, 0.0, 1e-5, ["value_head.bias"]),
    ]
    assert found[0][:3] == (2e-5, 0.1, 1e-5)
    assert len(found[0][3]) == 8 and "lm.lm_head.weight" in found[0][3]  # seven of the layer
    models = {"policy": ModelAndOptimizer(policy, made)}
    assert base_lrs(train, models) == {"policy": [2e-5, 2e-5, 3e-4, 3e-4]}


def test_updates_of_models_that_cannot_be_packed_are_padded_unless_packing_was_asked_for() -> None:
    plain, window = Policy(LlamaForCausalLM(LlamaConfig(**SIZES))), Policy(MistralForCausalLM(MistralConfig(**SIZES)))
    for asked_by in (None, "train.packing"):
        assert can_pack(plain.lm, "mine", asked_by)
    assert not can_pack(window.lm, "mine", None)
    with pytest.raises(ConfigError, match=r"^parallel\.sp: model\.path mine: some of its layers do not attend to all"):
        can_pack(window.lm, "model.path mine", "parallel.sp")
    with pytest.raises(ConfigError, match=r"^parallel\.sp: mine: it has \d attention heads, not a multiple of 3"):
        can_pack(plain.lm, "mine", "parallel.sp", 3)
    ids = torch.tensor([[1, 2, 3]])  # the trial left the model as it was
    assert window.lm(input_ids=ids).logits.shape == (1, 3, 9)
    assert (plain.lm.config._attn_implementation, plain.packs) == ("sdpa", False)


TOKENIZER = tiny.build_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_generation", "in_config", "ends"),
    [
        (None, END, (END,)),  # no generation_config.json
        (END, None, (END,)),
        ([7, END, 5], END, (END, 7, 5)),
        (None, [7, 5], (END, 7, 5)),
    ],
)
def test_answers_end_with_every_token_that_vllm_ends_them_with(
    in_generation: Any, in_config: Any, ends: tuple[int, ...], tmp_path: Path
) -> None:
    """vLLM adds what generation_config.json names, and bans all of it before rollout.min_tokens."""
    from vllm import SamplingParams

    LlamaConfig(**SIZES, eos_token_id=in_config).save_pretrained(tmp_path)
    if in_generation:
        GenerationConfig(eos_token_id=in_generation).save_pretrained(tmp_path)
    config = from_tree({"rollout": {"min_tokens": 1}, "algorithm": {"rollout_correction": "tis"}})
    sampling = sampling_of(config.rollout, end_tokens(str(tmp_path), TOKENIZER))
    assert sampling.stop_token_ids == ends
    theirs = SamplingParams(min_tokens=1, stop_token_ids=[])
    theirs.update_from_generation_config({"eos_token_id": in_generation or in_config}, END)
    assert theirs.all_stop_token_ids == set(ends)
    none = torch.tensor([], dtype=torch.int64)
    first = engine_logits(torch.zeros(9), none, none, sampling, [])
    assert set((first == -torch.inf).nonzero().flatten().tolist()) == set(ends)


@pytest.mark.parametrize(("in_config", "end"), [([7, 5], [7]), (None, [])])
def test_supervised_answers_end_as_the_model_ends_them_also_without_an_eos_of_the_tokenizer(
    in_config: Any, end: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaConfig(**SIZES, eos_token_id=in_config).save_pretrained(tmp_path)
    (tokenizer := tiny.build_tokenizer()).eos_token = None
    stream = SimpleNamespace(next=lambda count: [Prompt(0, (1, 2), "1 + 1", "2")] * count)
    monkeypatch.setattr(tables, "share_of", lambda *given: SimpleNamespace(stream=lambda seed: stream))
    config = from_tree({"data": {"ptx_source": "a.jsonl", "ptx_batch": 1}, "algorithm": {"ptx_coef": 0.1}})
    inputs: Any = SimpleNamespace(config=config, model_path=str(tmp_path))
    rows: Any = tables.supervised_rows(inputs, cast(Any, None), tokenizer)
    batch = rows.batch(0, torch.device("cpu"))
    assert batch.ids[0].tolist() == [1, 2, *tokenizer("2", add_special_tokens=False).input_ids, *end]


def test_a_checkpoint_is_copied_where_memory_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(status: object) -> None:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    said, tensors = list[str](), {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    memory = PinnedMemory(said.append)
    for _ in range(2):
        assert all(torch.equal(copied, tensors[name]) for name, copied in memory.copies(tensors).items())
    assert said == ["checkpoints pause training for longer: main memory cannot be pinned (CUDA error: out of memory)"]
