"""Policy and critic against transformers' own forward pass; one PPO update against itself on more ranks."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MllamaConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.config.errors import ConfigError
from rlx.mesh import Mesh
from rlx.models import fsdp, logprobs, lora, policy
from rlx.models.loading import checkpoint_gradients, compile_layers, load_critic, load_policy, load_reference
from rlx.models.policy import Policy, ResponseTokens
from rlx.rollout.weight_sync import gather

PAD = 0
PROMPTS = (3, 9, 5, 6)  # tokens each
RESPONSES = (7, 2, 1, 5)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 90, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def padded(extra: int = 0) -> ResponseTokens:
    """Token ids with padding after each sequence, `extra` more than needed, the prompts' lengths, the mask, its ones'
    places."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences(), batch_first=True, padding_value=PAD)
    mask = (torch.arange(max(RESPONSES) + extra) < torch.tensor(RESPONSES)[:, None]).float()
    ids = torch.nn.functional.pad(ids, (0, extra), value=PAD)
    return ResponseTokens.of(ids, torch.tensor(PROMPTS), mask)


def randomize_head(module: Any) -> Any:
    """Value heads start at zero, where every position looks right."""
    torch.nn.init.normal_(module.value_head.weight, generator=torch.Generator().manual_seed(2))
    return module


@pytest.fixture(params=["tiny_model", "untied_model"])
def folder(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


# --- against transformers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_logprobs_and_entropy_are_those_of_the_whole_forward_pass(folder: str, temperature: float) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder)
    scored = load_policy(folder, head=None)(padded(), temperature, entropy=True)
    for row, (sequence, prompt, length) in enumerate(zip(sequences(), PROMPTS, RESPONSES, strict=True)):
        scores = torch.log_softmax(lm(sequence[None]).logits[0] / temperature, -1)[prompt - 1 : -1]
        expected = scores.gather(-1, sequence[prompt:, None]).squeeze(-1)
        torch.testing.assert_close(scored.logprobs[row, :length], expected, atol=1e-5, rtol=0)
        entropy = torch.distributions.Categorical(logits=scores).entropy()
        torch.testing.assert_close(scored.entropy[row, :length], entropy, atol=1e-5, rtol=0)
    assert scored.values is None


@torch.no_grad()
def test_a_value_is_read_one_position_before_its_token(folder: str) -> None:
    policy, critic = (
        randomize_head(load_policy(folder, head="zero")),
        randomize_head(load_critic(folder, head="zero")),
    )
    lm = AutoModelForCausalLM.from_pretrained(folder)
    found = (policy(padded(), 1.0).values, critic(padded()))
    for row, (sequence, prompt, length) in enumerate(zip(sequences(), PROMPTS, RESPONSES, strict=True)):
        hidden = lm(sequence[None], output_hidden_states=True).hidden_states[-1][0]  # the last one, after the norm
        expected = (hidden @ policy.value_head.weight.T).squeeze(-1)[prompt - 1 : -1]
        for values in found:
            torch.testing.assert_close(values[row, :length], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padding_changes_nothing(folder: str) -> None:
    policy, critic = (
        randomize_head(load_policy(folder, head="zero")),
        randomize_head(load_critic(folder, head="zero")),
    )
    width, inside = max(RESPONSES), padded().mask == 1
    tight, loose = policy(padded(), 1.0, entropy=True), policy(padded(extra=11), 1.0, entropy=True)
    pairs = [(getattr(tight, name), getattr(loose, name)) for name in ("logprobs", "entropy", "values")]
    pairs.append((critic(padded()), critic(padded(extra=11))))
    for one, other in pairs:
        torch.testing.assert_close(one, other[:, :width], atol=1e-5, rtol=1e-5)
        assert one[inside].all() and not one[~inside].any() and not other[:, width:].any()


@torch.no_grad()
def test_tokens_that_are_not_the_policys_own_are_left_out(folder: str) -> None:
    policy, (ids, mask, *_) = load_policy(folder, head=None), padded()
    mask[0, 2:4] = 0
    some = policy(ResponseTokens.of(ids, torch.tensor(PROMPTS), mask), 1.0).logprobs
    torch.testing.assert_close(some, policy(padded(), 1.0).logprobs * mask, atol=1e-5, rtol=0)


def test_value_heads_start_at_zero(tiny_model: Path) -> None:
    assert load_policy(str(tiny_model), head="zero")(padded(), 1.0).values.count_nonzero() == 0
    assert load_critic(str(tiny_model), head="zero")(padded()).count_nonzero() == 0


def test_entropy_is_made_if_asked_for(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model), head=None)
    assert policy(padded(), 1.0).entropy is None
    assert policy(padded(), 1.0, entropy=True).entropy.requires_grad


@torch.no_grad()
def test_a_policy_without_its_adapters_is_the_base_model(folder: str) -> None:
    adapters = lora.Adapters(rank=4, alpha=8.0, targets=(), seed=3)
    policy = load_policy(folder, head=None, adapters=adapters)
    base = load_policy(folder, head=None)(padded(), 0.7).logprobs
    torch.testing.assert_close(policy(padded(), 0.7).logprobs, base, atol=1e-5, rtol=0)  # B begins at zero
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert (policy(padded(), 0.7).logprobs - base).abs().max() > 0.1
    with lora.adapters_off(policy):
        torch.testing.assert_close(policy(padded(), 0.7).logprobs, base, atol=1e-5, rtol=0)
    assert (policy(padded(), 0.7).logprobs - base).abs().max() > 0.1


@torch.no_grad()
def test_merged_weights_are_those_of_the_policy_with_adapters(folder: str, tmp_path: Path) -> None:
    adapters = lora.Adapters(rank=4, alpha=8.0, targets=("v_proj", "up_proj"), seed=3)
    policy = load_policy(folder, head=None, adapters=adapters)
    for name, parameter in policy.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    plain = load_policy(folder, head=None)
    weights = lora.engine_weights(policy)
    names = [weight.name for weight in weights]
    plain.lm.load_state_dict(dict(zip(names, gather.gather_full(weights, torch.float32), strict=True)), strict=False)
    merged = plain(padded(), 1.0).logprobs
    torch.testing.assert_close(merged, policy(padded(), 1.0).logprobs, atol=1e-5, rtol=0)
    assert [name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()] == names


def test_adapters_begin_alike_on_every_rank_and_follow_their_seed(tiny_model: Path) -> None:
    def begun(seed: int) -> dict[str, Tensor]:
        adapters = lora.Adapters(rank=2, alpha=4.0, targets=("q_proj",), seed=seed)
        policy = load_policy(str(tiny_model), head=None, adapters=adapters)
        return {name: p for name, p in policy.named_parameters() if ".lora_A" in name}

    one, again, other = begun(0), begun(0), begun(1)
    assert all(torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("query",), "query: no linear layer of the model is called that"),
        (("q_proj", "v_prj"), "v_prj: no linear layer of the model is called that; nearest: v_proj"),
        (
            ("self_attn.q_prj",),
            "self_attn.q_prj: no linear layer of the model is called that; nearest: self_attn.q_proj",
        ),
        (("all-linear",), "all-linear: leave the setting empty for all but the output layer"),
        (
            ("q_proj", "self_attn"),
            "self_attn: model.layers.0.self_attn is not a linear layer but LlamaAttention: "
            "engines receive adapters of no other",
        ),
    ],
)
def test_each_target_is_a_linear_layer(targets: tuple[str, ...], said: str, tiny_model: Path) -> None:
    adapters = lora.Adapters(rank=2, alpha=4.0, targets=targets, seed=0)
    with pytest.raises(ConfigError) as refused:
        load_policy(str(tiny_model), head=None, adapters=adapters)
    assert str(refused.value) == f"model.lora_targets {said}"


def test_a_normal_value_head_is_small_and_the_same_on_every_rank(tiny_model: Path) -> None:
    one, same = (load_critic(str(tiny_model), head="normal", seed=4).value_head.weight for _ in range(2))
    assert torch.equal(one, same)
    assert float(one.std()) == pytest.approx((one.shape[1] + 1) ** -0.5, rel=0.3)


def test_forgotten_activations_are_computed_again_without_dropout(tiny_model: Path) -> None:
    plain, half, checkpointed = (load_policy(str(tiny_model), head=None) for _ in range(3))
    checkpoint_gradients(checkpointed)
    checkpoint_gradients(half, 0.5)
    saved = []
    for one in (plain, checkpointed, half):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
            loss = one(padded(), 1.0).logprobs.sum()
        loss.backward()
        saved.append(sum(kept))
    assert saved[1] < 0.5 * saved[0]
    assert saved[1] < 0.8 * saved[2] < 0.64 * saved[0]
    for one, *others in zip(plain.parameters(), checkpointed.parameters(), half.parameters(), strict=True):
        for other in others:
            torch.testing.assert_close(one.grad, other.grad, atol=0, rtol=0)
    dropouts = [m for m in checkpointed.modules() if isinstance(m, torch.nn.Dropout) or "Attention" in type(m).__name__]
    assert dropouts and not any(module.training for module in dropouts)


def test_adapters_of_a_model_that_does_not_say_whether_it_is_tied_are_taken() -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    lm = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16))
    lm.config = MllamaConfig()
    lora.check_targets(lm, ["q_proj"])


@pytest.mark.parametrize(("share", "places"), [(1.0, [0, 1, 2, 3]), (0.75, [0, 1, 2]), (0.5, [0, 1]), (0.1, [0])])
def test_a_share_of_the_layers_forgets_its_activations(share: float, places: list[int]) -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 99}
    policy = Policy(OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=32)).eval())
    checkpoint_gradients(policy, share)
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert [place for place, layer in enumerate(layers) if layer.gradient_checkpointing] == places


def test_a_reference_is_frozen(tiny_model: Path) -> None:
    assert not any(parameter.requires_grad for parameter in load_reference(str(tiny_model)).parameters())


def test_engines_get_the_names_in_the_model_folder(folder: str) -> None:
    names = [weight.name for weight in lora.engine_weights(load_policy(folder, head="zero"))]
    assert names == [name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()]
    assert ("lm_head.weight" in names) == folder.endswith("untied")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("architecture", "settings", "accepted"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=30.0), False),
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=None), True),
        (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.0625), False),
        (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=1.0), True),
    ],
)
def test_models_that_change_their_logits_are_refused(
    architecture: Any, settings: PreTrainedConfig, accepted: bool, tmp_path: Path
) -> None:
    architecture(settings).save_pretrained(tmp_path)  # its logits are so small that capping them hardly shows
    if accepted:
        load_policy(str(tmp_path), head=None)
        return
    with pytest.raises(ConfigError, match=f"{tmp_path}.*output layer"):
        load_policy(str(tmp_path), head=None)


def test_layers_that_engines_would_not_get_are_refused(tiny_model: Path, untied_model: Path) -> None:
    def adapted(folder: Path, *targets: str) -> policy.Policy:
        return load_policy(str(folder), head=None, adapters=lora.Adapters(2, 4.0, targets, 0))

    for folder in (tiny_model, untied_model):
        with pytest.raises(ConfigError, match="embed_tokens is not a linear layer"):
            adapted(folder, "embed_tokens", "q_proj")
    with pytest.raises(ConfigError, match="the output layer is tied"):
        adapted(tiny_model, "lm_head", "q_proj")
    names = [weight.name for weight in lora.adapter_weights(adapted(untied_model, "lm_head"))]
    assert names == ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"]


def test_layers_that_drop_out_by_themselves_do_not() -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    lm = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=32, dropout=0.5)).eval()
    policy = Policy(lm)
    checkpoint_gradients(policy)
    one, same = (policy(padded(), 1.0).logprobs for _ in range(2))
    assert torch.equal(one, same)


def compiled(
    rank: int, ranks: int, path: str, adapters: lora.Adapters | None
) -> tuple[list[dict[str, Tensor]], list[int], list[str]]:
    """Log-probabilities and gradients by the names of the weights, without and with; how many graphs there are, then
    also for other shapes; and what they take for unknown."""
    from torch._dynamo.utils import counters

    results, unknown, graphs = [], list[str](), list[int]()
    torch._logging.set_logs(dynamic=logging.INFO)
    said = logging.Handler()
    said.emit = lambda record: unknown.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.fx.experimental.symbolic_shapes").addHandler(said)
    for prepare in (lambda part: None, compile_layers):
        policy = load_policy(path, head=None, adapters=adapters)
        checkpoint_gradients(policy)
        prepare(policy)
        policy.logit_scorer = logprobs.score_logits  # only the layers are compiled: graphs are theirs
        fsdp.shard(policy, Mesh.of("cpu", 1).mesh, torch.float32)
        scored = policy(padded(), 1.0).logprobs
        scored.sum().backward()
        gradients = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
        results.append(gradients | {"logprobs": scored.detach()})
    for tokens in (padded(), padded(extra=3)):
        policy(tokens, 1.0)
        graphs.append(counters["stats"]["unique_graphs"])
    return results, graphs, [each for each in unknown if "create_symbol" in each]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [None, lora.Adapters(4, 8.0, (), 0)], ids=["whole", "adapters"])
def test_compiled_layers_change_neither_results_nor_names(
    on_ranks: OnRanks, tiny_model: Path, adapters: lora.Adapters | None
) -> None:
    (((plain, other), graphs, unknown),) = on_ranks(1, compiled, str(tiny_model), adapters)
    assert graphs[0] == graphs[1] > 0  # of any shape
    # FSDP's modules are no modules to dynamic=True: it would divide by unknown sizes of heads, which takes long.
    assert unknown and not [each for each in unknown if "head_dim" in each]
    policy = load_policy(str(tiny_model), head=None, adapters=adapters)
    assert [*plain] == [*other] == [*(name for name, p in policy.named_parameters() if p.requires_grad), "logprobs"]
    torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-4)


def test_layers_are_not_compiled_without_a_compiler(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train\.compile: this machine has no C\+\+ compiler no-such-compiler"):
        compile_layers(load_policy(str(tiny_model), head=None))
