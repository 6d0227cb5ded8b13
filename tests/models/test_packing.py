"""Packed rows against padded ones: their layout by hand, and what models and gradients make of them."""

from pathlib import Path

import pytest
import torch
from test_policy import PAD, PROMPTS, RESPONSES, padded, randomize_head, sequences
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from rlx.models import loading, packing
from rlx.models.loading import load_critic, load_policy
from rlx.models.packing import pack_row
from rlx.models.policy import ResponseTokens


def shared() -> ResponseTokens:
    """The sequences of `padded`, and two more responses to the second one's prompt, padded and packed."""
    prompt, own = sequences()[1][: PROMPTS[1]], sequences()
    others = [torch.cat([prompt, torch.tensor(tokens)]) for tokens in ([7], [8, 9, 10, 7])]
    rows = [*own[:2], *others, *own[2:]]
    prompts = torch.tensor([*PROMPTS[:2], PROMPTS[1], PROMPTS[1], *PROMPTS[2:]])
    lengths = torch.tensor([len(row) for row in rows]) - prompts
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    mask[0, 2:4] = 0  # tokens that are not the policy's own
    tokens = ResponseTokens.of(ids, prompts, mask)
    groups = torch.tensor([4, 1, 1, 1, 0, 2])
    return tokens._replace(packing=pack_row(ids, prompts, lengths, groups, tokens.token_index))


def test_a_prompt_stands_once_before_its_responses() -> None:
    ids = torch.tensor([[11, 12, 21, 22, 0], [11, 12, 31, 0, 0], [11, 12, 41, 42, 43], [13, 51, 52, 0, 0]])
    prompts, responses = torch.tensor([2, 2, 2, 1]), torch.tensor([2, 1, 3, 2])
    index = (torch.arange(3) < responses[:, None]).nonzero(as_tuple=True)
    row = pack_row(ids, prompts, responses, torch.tensor([5, 5, 5, 6]), index)
    assert row.ids.tolist() == [[11, 12, 21, 41, 42, 13, 51]]
    assert row.positions.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    # Response tokens 21 22, 31, 41 42 43, 51 52: each is scored by the output of the token before it.
    assert row.before.tolist() == [1, 2, 1, 1, 3, 4, 5, 6]
    assert (row.queries.tolist(), row.keys.tolist()) == ([0, 2, 3, 5, 7], [0, 2, 5, 9, 11])
    assert row.key_index is not None and row.key_index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert (row.longest_queries, row.longest_keys) == (2, 4)
    alone = pack_row(ids, prompts, responses, torch.arange(4), index)
    assert alone.key_index is None and torch.equal(alone.queries, alone.keys)
    assert pack_row(ids, prompts, responses + 1, torch.arange(4), index).longest_keys == 8  # 5 at most
    assert alone.ids.tolist() == [[11, 12, 21, 11, 12, 11, 12, 41, 42, 13, 51]]


@pytest.mark.parametrize("folder", ["tiny_model", "untied_model"])
def test_packed_rows_give_the_same_scores_and_gradients(folder: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(folder))
    tokens = shared()
    found: dict[bool, list[Tensor]] = {}
    for is_packed in (False, True):
        policy, critic = (randomize_head(load(path, head="zero")) for load in (load_policy, load_critic))
        for model in (policy, critic) if is_packed else ():
            packing.enable(loading.transformer(model))
        inputs = tokens if is_packed else tokens._replace(packing=None)
        output, values = policy(inputs, 0.7, entropy=True), critic(inputs)
        (output.logprobs.sum() + output.entropy.sum() + output.values.sum() + values.square().sum()).backward()
        gradients = [p.grad for model in (policy, critic) for p in model.parameters()]
        found[is_packed] = [output.logprobs, output.entropy, output.values, values, *gradients]
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * max(1.0, float(other.detach().abs().max())), rtol=1e-5)
    assert found[True][0].count_nonzero() == sum(RESPONSES) - 2 + 5


@torch.no_grad()
def test_rows_that_are_not_packed_are_computed_as_before(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model), head=None)
    before = policy(padded(), 1.0).logprobs
    packing.enable(policy.lm)
    assert torch.equal(policy(padded(), 1.0).logprobs, before)


def llama(size: int) -> PreTrainedModel:
    return LlamaForCausalLM(small(LlamaConfig, size))


def small(kind: type, size: int) -> LlamaConfig:
    sizes = {"hidden_size": 4 * size, "intermediate_size": 8, "vocab_size": 9, "num_hidden_layers": 2}
    config: LlamaConfig = kind(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    return config


class Smoothed(nn.Module):
    """A layer whose output for a token depends on the token before it in the row, as convolutions do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.layer(states + states.roll(1, dims=1))
        return out


def test_models_that_look_at_other_tokens_are_not_packed(tiny_model: Path) -> None:
    assert packing.obstacle(AutoModelForCausalLM.from_pretrained(tiny_model)) is None
    assert packing.obstacle(llama(8)) is None
    assert packing.obstacle(llama(6)) == "its attention heads have 6 numbers each"
    window = "some of its layers do not attend to all earlier tokens"
    assert packing.obstacle(MistralForCausalLM(small(MistralConfig, 8))) == window
    smoothed = llama(8)
    smoothed.model.layers[0].mlp = Smoothed(smoothed.model.layers[0].mlp)
    assert packing.obstacle(smoothed) == "it computes something else for packed rows"
    assert smoothed.config._attn_implementation == "sdpa"  # as before
    sizes = {"hidden_size": 32, "ffn_dim": 8, "vocab_size": 9, "num_hidden_layers": 1, "word_embed_proj_dim": 32}
    other = packing.obstacle(OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)))
    assert other is None or other.startswith("it ")
