"""Critics that start from a reward model or from another model: their values, and which models are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_policy import PROMPTS, RESPONSES, padded, sequences
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

from rlx.config import loading as config_loading
from rlx.config.errors import ConfigError
from rlx.mesh import Mesh
from rlx.models import fsdp
from rlx.models.loading import load_critic
from rlx.models.tiny import build_tokenizer
from rlx.storage import checkpoint_files
from rlx.storage.filesystem import Storage
from rlx.training.setup.models import build_models


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path) -> Path:
    """A sequence classifier with one label, of the tiny model with other weights."""
    return reward_model_at(tiny_model.with_name("judge"), tiny_model)


def reward_model_at(folder: Path, base: Path, labels: int = 1) -> Path:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    generator = torch.Generator().manual_seed(5)
    for weight in (model.score.weight, model.model.norm.weight):
        torch.nn.init.normal_(weight, std=0.5, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_the_value_before_a_token_is_the_score_of_what_stands_before_it(reward_model: Path) -> None:
    judge = AutoModelForSequenceClassification.from_pretrained(reward_model)
    values = load_critic(str(reward_model), head="zero")(padded())
    for row, (sequence, prompt, length) in enumerate(zip(sequences(), PROMPTS, RESPONSES, strict=True)):
        for t in range(length):
            score = judge(input_ids=sequence[None, : prompt + t]).logits.squeeze()
            torch.testing.assert_close(values[row, t], score, atol=1e-5, rtol=1e-5)
    assert values.abs().max() > 0.1


@torch.no_grad()
def test_any_other_model_gets_a_new_head(tiny_model: Path, untied_model: Path) -> None:
    critic = load_critic(str(untied_model), head="normal", seed=4)
    same = load_critic(str(tiny_model), head="normal", seed=4)
    assert torch.equal(critic.value_head.weight, same.value_head.weight) and not critic.value_head.bias.any()


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    return str(folder)


def test_models_that_cannot_be_critics_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    bert = BertConfig(vocab_size=99, num_labels=1, initializer_range=0.5, **sizes)
    cases = {
        str(reward_model_at(tmp_path / "three", tiny_model, labels=3)): "no linear layer `score` for one label",
        saved(tmp_path / "encoder", BertForSequenceClassification(bert)): "no linear layer `score` for one label",
        saved(tmp_path / "both ways", BertModel(bert)): "values may not depend on later tokens",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=f"^model.critic_path {path}: .*{message}"):
            load_critic(path, head="zero", setting="model.critic_path")


# --- sharded, saved and read again


def critic_of(path: str, judge: str, **more: Any) -> Any:
    tree = config_loading.with_overrides({}, {"model.critic_path": judge, **more})
    models = build_models(config_loading.from_tree(tree), path, Mesh.of("cpu", 1).mesh).trained
    return models


def kept(rank: int, ranks: int, path: str, judge: str, folder: str) -> list[torch.Tensor]:
    """A critic's values as it starts, after a change of its weights, and those of another start from the checkpoint."""
    models, again = critic_of(path, judge), critic_of(path, judge)
    values = [models["critic"].model(padded()).detach()]
    fsdp.reshard(models["critic"].model)
    with torch.no_grad():
        for weight in models["critic"].model.parameters():
            weight.add_(0.01)
    values.append(models["critic"].model(padded()).detach())
    file = Path(folder, f"rank_{rank:05d}.safetensors")
    checkpoint_files.write_shards(checkpoint_files.copy_shards(models, {}), file)
    torch.distributed.barrier()
    files = [Storage.local(Path(folder, f"rank_{i:05d}.safetensors")) for i in range(ranks)]
    checkpoint_files.load_state(files, again, {})
    return [*values, again["critic"].model(padded()).detach()]


@pytest.mark.slow
def test_a_critic_from_a_reward_model_is_sharded_saved_and_read(
    on_ranks: OnRanks, tiny_model: Path, reward_model: Path, tmp_path: Path
) -> None:
    expected = load_critic(str(reward_model), head="zero")(padded()).detach()
    for start, changed, again in on_ranks(2, kept, str(tiny_model), str(reward_model), str(tmp_path)):
        torch.testing.assert_close(start, expected, atol=1e-5, rtol=1e-5)
        assert (changed - start).abs().max() > 1e-3
        torch.testing.assert_close(again, changed, atol=0, rtol=0)


def with_other_tokens(rank: int, ranks: int, path: str, other: str) -> str:
    with pytest.raises(ConfigError) as refused:
        critic_of(path, other)
    return str(refused.value)


def test_a_critic_that_numbers_tokens_differently_is_refused(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    (said,) = on_ranks(1, with_other_tokens, str(tiny_model), str(tmp_path))
    assert said == f"model.critic_path {tmp_path}: its tokenizer is another one than that of {tiny_model}"
