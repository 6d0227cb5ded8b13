"""Policy and critic against transformers' own forward pass; one PPO update against itself on more ranks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from conftest import OnRanks
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
)

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config import loading
from rlx.config.errors import ConfigError
from rlx.data import prompts, stream
from rlx.mesh import Mesh
from rlx.models import fsdp, logprobs, lora, policy
from rlx.models.loading import checkpoint_gradients, compile_layers, load_critic, load_policy, load_reference
from rlx.models.policy import Policy
from rlx.rollout.weight_sync import gather
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.training import experience, loop, metrics, setup, trainer, update
from rlx.training.experience import Experience
from rlx.types import Completion, Prompt, Sampling, ScoredCompletion

PAD = 0
PROMPTS = (3, 9, 5, 6)  # tokens each
RESPONSES = (7, 2, 1, 5)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 90, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def padded(extra: int = 0) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Token ids with padding after each sequence, `extra` more than needed, the prompts' lengths, the mask, its ones'
    places."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences(), batch_first=True, padding_value=PAD)
    mask = (torch.arange(max(RESPONSES) + extra) < torch.tensor(RESPONSES)[:, None]).float()
    ids = torch.nn.functional.pad(ids, (0, extra), value=PAD)
    return ids, torch.tensor(PROMPTS), mask, mask.nonzero(as_tuple=True)


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
    scored = load_policy(folder, head=None)(*padded(), temperature, entropy=True)
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
    found = (policy(*padded(), 1.0).values, critic(*padded()))
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
    width, inside = max(RESPONSES), padded()[2] == 1
    tight, loose = policy(*padded(), 1.0, entropy=True), policy(*padded(extra=11), 1.0, entropy=True)
    pairs = [(getattr(tight, name), getattr(loose, name)) for name in ("logprobs", "entropy", "values")]
    pairs.append((critic(*padded()), critic(*padded(extra=11))))
    for one, other in pairs:
        torch.testing.assert_close(one, other[:, :width], atol=1e-5, rtol=1e-5)
        assert one[inside].all() and not one[~inside].any() and not other[:, width:].any()


@torch.no_grad()
def test_tokens_that_are_not_the_policys_own_are_left_out(folder: str) -> None:
    policy, (ids, lengths, mask, _) = load_policy(folder, head=None), padded()
    mask[0, 2:4] = 0
    some = policy(ids, lengths, mask, mask.nonzero(as_tuple=True), 1.0).logprobs
    torch.testing.assert_close(some, policy(*padded(), 1.0).logprobs * mask, atol=1e-5, rtol=0)


def test_value_heads_start_at_zero(tiny_model: Path) -> None:
    assert load_policy(str(tiny_model), head="zero")(*padded(), 1.0).values.count_nonzero() == 0
    assert load_critic(str(tiny_model), head="zero")(*padded()).count_nonzero() == 0


def test_entropy_is_made_if_asked_for(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model), head=None)
    assert policy(*padded(), 1.0).entropy is None
    assert policy(*padded(), 1.0, entropy=True).entropy.requires_grad


@torch.no_grad()
def test_a_policy_without_its_adapters_is_the_base_model(folder: str) -> None:
    adapters = lora.Adapters(rank=4, alpha=8.0, targets=(), seed=3)
    policy = load_policy(folder, head=None, adapters=adapters)
    base = load_policy(folder, head=None)(*padded(), 0.7).logprobs
    torch.testing.assert_close(policy(*padded(), 0.7).logprobs, base, atol=1e-5, rtol=0)  # B begins at zero
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert (policy(*padded(), 0.7).logprobs - base).abs().max() > 0.1
    with lora.adapters_off(policy):
        torch.testing.assert_close(policy(*padded(), 0.7).logprobs, base, atol=1e-5, rtol=0)
    assert (policy(*padded(), 0.7).logprobs - base).abs().max() > 0.1


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
    merged = plain(*padded(), 1.0).logprobs
    torch.testing.assert_close(merged, policy(*padded(), 1.0).logprobs, atol=1e-5, rtol=0)
    assert [name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()] == names


def test_adapters_begin_alike_on_every_rank_and_follow_their_seed(tiny_model: Path) -> None:
    def begun(seed: int) -> dict[str, Tensor]:
        adapters = lora.Adapters(rank=2, alpha=4.0, targets=("q_proj",), seed=seed)
        policy = load_policy(str(tiny_model), head=None, adapters=adapters)
        return {name: p for name, p in policy.named_parameters() if ".lora_A" in name}

    one, again, other = begun(0), begun(0), begun(1)
    assert all(torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name]) for name in one)


def test_layers_that_are_not_there_are_refused(tiny_model: Path) -> None:
    adapters = lora.Adapters(rank=2, alpha=4.0, targets=("query",), seed=0)
    with pytest.raises(ConfigError, match=r"model\.lora_targets query: "):
        load_policy(str(tiny_model), head=None, adapters=adapters)


def test_a_normal_value_head_is_small_and_the_same_on_every_rank(tiny_model: Path) -> None:
    one, same = (load_critic(str(tiny_model), head="normal", seed=4).value_head.weight for _ in range(2))
    assert torch.equal(one, same)
    assert float(one.std()) == pytest.approx((one.shape[1] + 1) ** -0.5, rel=0.3)


def test_forgotten_activations_are_computed_again_without_dropout(tiny_model: Path) -> None:
    plain, checkpointed = (load_policy(str(tiny_model), head=None) for _ in range(2))
    checkpoint_gradients(checkpointed)
    saved = []
    for one in (plain, checkpointed):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
            loss = one(*padded(), 1.0).logprobs.sum()
        loss.backward()
        saved.append(sum(kept))
    assert saved[1] < 0.5 * saved[0]
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=0, rtol=0)
    dropouts = [m for m in checkpointed.modules() if isinstance(m, torch.nn.Dropout) or "Attention" in type(m).__name__]
    assert dropouts and not any(module.training for module in dropouts)


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
        with pytest.raises(ConfigError, match="embed_tokens is no linear layer"):
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
    one, same = (policy(*padded(), 1.0).logprobs for _ in range(2))
    assert torch.equal(one, same)


# --- one global batch, cut up


def completions() -> list[Completion]:
    """Two samples of each of 8 prompts, of many lengths."""
    generator = torch.Generator().manual_seed(3)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(6, 90, (count,), generator=generator).tolist())

    prompts = [Prompt(i, tokens(2, 9), "question", "answer") for i in range(8)]
    drawn = [(prompt, k, tokens(1, 12)) for prompt in prompts for k in range(2)]
    return [Completion(prompt, k, ids, (-2.0,) * len(ids), True, 0) for prompt, k, ids in drawn]


ALONE = {"model.reference": "none", "algorithm.kl_coef": 0.0}
# Every estimator, loss, aggregation, place of the KL, kind and level of importance, role and optional loss.
WAYS: list[dict[str, Any]] = [
    {"algorithm.rollout_correction": "tis", "algorithm.whiten_advantages": False},
    {"algorithm.rollout_correction": "tis", "model.critic": "head", "algorithm.entropy_coef": 0.1},
    {"algorithm.advantage": "grpo", "algorithm.rollout_correction": "mask", "algorithm.kl_estimator": "k1+"},
    # With gspo's own clip, 3e-4, rounding may decide whether a response is clipped.
    {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "gspo",
        "algorithm.clip_low": 0.1,
        "algorithm.clip_high": 0.1,
    },
    {"algorithm.advantage": "dr_grpo", "algorithm.policy_loss": "cispo", "model.lora_rank": 4},
    {"algorithm.advantage": "rloo", "algorithm.aggregation": "sequence_mean", "algorithm.normalize_rewards": True},
    {
        "algorithm.advantage": "reinforce++",
        "algorithm.rollout_correction": "tis",
        "algorithm.rollout_correction_level": "sequence",
    },
    {"algorithm.advantage": "reinforce++_baseline", "train.gradient_checkpointing": True, "train.ema_decay": 0.5},
    {"algorithm.advantage": "remax", "algorithm.dual_clip": 1.5, **ALONE},
    {
        "algorithm.advantage": "rloo",
        "algorithm.rollout_correction": "mask",
        "algorithm.rollout_correction_level": "sequence",
        **ALONE,
    },
    {
        "algorithm.advantage": "grpo",
        "algorithm.entropy_coef": 0.1,
        "train.ppo_epochs": 2,
        "model.lora_rank": 4,
        **ALONE,
    },
    {
        "model.lora_rank": 4,
        "algorithm.kl_placement": "loss",
        "algorithm.kl_estimator": "abs+",
        "algorithm.reward_clip": 1.5,
    },
    {"algorithm.ptx_coef": 0.5, "data.ptx_source": "x.csv", "data.ptx_batch": 8, "algorithm.target_kl": 1e-9},
]


ANSWERS = pa.table(
    {
        "question": [f"question {i}" for i in range(12)],
        "answer": [str(7**i) for i in range(12)],
        "token_ids": [list(range(6, 8 + i)) for i in range(12)],
    }
)


def run_of(path: str, way: dict[str, Any], micro_batch_tokens: int, device: str = "cpu") -> trainer.Run:
    """What a rank trains with. Plain gradient descent shows the gradients; Adam would hide their scale."""
    tree = {
        "train": {"ppo_epochs": 1, "num_minibatches": 2, "warmup_steps": 0, "micro_batch_tokens": micro_batch_tokens},
        "algorithm": {"kl_coef": 0.1},
    }
    settings = loading.from_tree(loading.with_overrides(tree, way))
    grid = Mesh.of(device, settings.parallel.tp)
    trained, reference = setup.models(settings, path, grid.mesh)
    trained = {name: ModelAndOptimizer(t.model, torch.optim.SGD(t.model.parameters())) for name, t in trained.items()}
    nothing: Any = None
    return trainer.Run(
        config=settings,
        device=torch.device(device),
        grid=grid,
        trained=trained,
        rates={name: [0.1] for name in trained},
        average=trainer.initial_ema(settings, trained["policy"].model),
        copy=reference,
        rounds=nothing,
        supervised=stream.PromptStream(ANSWERS, 0, grid.dp_rank, grid.dp_size) if settings.data.ptx_source else None,
        held_out=[],
        fleet=nothing,
        sampling=Sampling(0.7, 1.0, -1, 12, ()),
        tokenizer=prompts.load_tokenizer(path),
        scorers={},
        held_out_scorers={},
        tracker=nothing,
        saver=nothing,
        box="",
        kl=AdaptiveKL(settings.algorithm.kl_coef, None, 1.0),
        scores=RunningScores(),
    )


def updated(
    rank: int, ranks: int, path: str, way: dict[str, Any], micro_batch_tokens: int, device: str = "cpu"
) -> dict[str, Tensor]:
    """This rank's prompts through steps 4 to 7 of the loop, twice: summed statistics, and all weights after it."""
    run = run_of(path, way, micro_batch_tokens, device)
    replicas = run.grid.dp_size
    run.rates = {name: [0.03] for name in run.rates}  # with larger steps, rounding in the first shows in the second
    own = [c for c in completions() if c.prompt.id % replicas == run.grid.dp_rank]
    judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {}, greedy_score=0.5) for c in own]
    start = experience.build(judged, PAD).to(run.device)
    for _ in range(2):  # in the second round the policy is no longer the reference
        wave = torch.sin(start.groups[:, None] + torch.arange(start.mask.shape[1], device=device))
        said = loop.compute_logprobs(run, start).logprobs
        batch = replace(start, rollout_logprobs=said + 0.3 * wave * start.mask)
        batch = loop.compute_logprobs(run, batch, run.scores_late)
        batch, kl = loop.compute_advantages(run, batch)
        batch, sums = update.update(run, batch, run.scores_late)
        sums = run.summed(sums | {"kl": kl, "entropy": (batch.entropy * batch.mask).sum()})
    state = {f"{n}.{k}": p for n, t in run.trained.items() for k, p in t.model.named_parameters()}
    state |= {f"average.{name}": p for name, p in run.average.items()}
    result = {name: p.full_tensor().detach().cpu() for name, p in state.items()}
    assert ("ptx/loss" in sums) == (run.supervised is not None)
    everywhere = ("grad_norm/", "updates", "passes")  # what each rank knows of the whole
    shares = {name: value / replicas if name.startswith(everywhere) else value for name, value in sums.items()}
    del shares["positions"]  # padding does depend on how rows are cut
    return result | {name: torch.tensor(value) for name, value in shares.items()}


def refuse(*_: object) -> None:
    raise AssertionError("the policy was asked")


def by_engines(rank: int, ranks: int, path: str) -> tuple[Experience, Experience, dict[str, float]]:
    """What the policy says of completions; what annotate adds if engines said something else; a step on that."""
    ways = ({}, {"algorithm.old_logprobs": "rollout", **ALONE})
    runs = [run_of(path, way | {"train.num_minibatches": 1}, 60) for way in ways]
    start = experience.build([ScoredCompletion(c, float(c.sample), True, {}) for c in completions()], PAD)
    own = loop.compute_logprobs(runs[0], start)
    runs[1].policy.forward = refuse
    theirs = loop.compute_logprobs(runs[1], replace(start, rollout_logprobs=own.logprobs - 0.1 * own.mask))
    del runs[1].policy.forward
    return own, theirs, runs[1].summed(update.update(runs[1], loop.compute_advantages(runs[1], theirs)[0])[1])


def test_the_engines_logprobs_can_be_the_old_ones(on_ranks: OnRanks, tiny_model: Path) -> None:
    own, theirs, sums = on_ranks(1, by_engines, str(tiny_model))[0]
    torch.testing.assert_close(theirs.logprobs, own.logprobs - 0.1 * own.mask)
    torch.testing.assert_close(theirs.entropy, -theirs.logprobs)
    assert sums["policy/ratio"] / sums["updated"] == pytest.approx(math.exp(0.1), abs=1e-5)
    gap = math.exp(0.1) - 1 - 0.1  # k3: r - 1 - log r
    assert sums["first/policy/approx_kl"] / sums["first/updated"] == pytest.approx(gap, abs=1e-5)


def late_or_not(rank: int, ranks: int, path: str, way: dict[str, Any], late: bool) -> tuple[Experience, dict[str, Any]]:
    """The same completions through steps 4 to 7 of the loop: the batch after them; weights and statistics."""
    run = run_of(path, way, 60)
    assert run.scores_late
    own = [c for c in completions() if c.prompt.id % ranks == rank]
    judged = [ScoredCompletion(c, float(c.prompt.id % 3 + c.sample), True, {}) for c in own]
    start = experience.build(judged, PAD)
    said = loop.compute_logprobs(run, start).logprobs
    start = replace(start, rollout_logprobs=said - 0.3 * torch.sin(torch.arange(said.shape[1])) * start.mask)
    forward = run.policy.forward
    if late and run.config.train.num_minibatches == 1:
        run.policy.forward = refuse
    batch = loop.compute_logprobs(run, start, late)
    run.policy.forward = forward
    first, *others = experience.minibatches(batch, run.config.train.num_minibatches)
    assert bool(first.logprobs.any()) != late
    assert all(other.logprobs.any() for other in others)
    batch, _ = loop.compute_advantages(run, batch)
    batch, own_sums = update.update(run, batch, late)
    sums: dict[str, Any] = run.summed(own_sums)
    selection = run.selection()
    selection.add(judged)
    sums |= run.summed(metrics.rollout_sums(run, batch, selection))
    return batch, sums | {name: p.full_tensor().detach() for name, p in run.policy.named_parameters()}


def both(rank: int, ranks: int, path: str, way: dict[str, Any]) -> list[tuple[Experience, dict[str, Any]]]:
    return [late_or_not(rank, ranks, path, way, late) for late in (False, True)]


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("importance", ["none", "tis"])
def test_the_first_pass_of_an_update_gives_old_logprobs_as_one_before_it(
    on_ranks: OnRanks, tiny_model: Path, minibatches: int, importance: str
) -> None:
    way = {"train.num_minibatches": minibatches, "train.ppo_epochs": 2, "algorithm.rollout_correction": importance}
    (before, expected), (late, found) = on_ranks(
        2, both, str(tiny_model), way | {"algorithm.advantage": "grpo", **ALONE}
    )[0]
    assert set((late.groups % 2).tolist()) == {0, 1}  # completions were dealt over both ranks
    torch.testing.assert_close(late.logprobs, before.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(late.ref_logprobs, before.ref_logprobs, atol=1e-5, rtol=0)
    first = len(late.scores) // minibatches
    torch.testing.assert_close(late.entropy[:first], -late.logprobs[:first])
    torch.testing.assert_close(late.entropy[first:], before.entropy[first:])
    assert expected["updates"] == 2 * 2 * minibatches  # on two ranks
    if minibatches == 1:  # nothing has an exact one
        del found["entropy"], expected["entropy"]
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5)


def scores_late(rank: int, ranks: int, path: str) -> list[bool]:
    grpo = {"algorithm.advantage": "grpo", **ALONE}
    others = ({"algorithm.advantage": "gae"}, {"model.reference": "auto"}, {"rollout.num_chunks": 2})
    ways = (grpo, *(grpo | other for other in others), grpo | {"algorithm.old_logprobs": "rollout"})
    return [run_of(path, way, 60).scores_late for way in ways]


def test_nothing_is_scored_late_that_is_asked_for_before(on_ranks: OnRanks, tiny_model: Path) -> None:
    assert on_ranks(1, scores_late, str(tiny_model))[0] == [True, False, False, False, False]


def each_way(rank: int, ranks: int, path: str) -> list[dict[str, Tensor]]:
    """In each way, all of a mini-batch at once and then a few completions, and of these a few tokens, at a time."""
    results = []
    for way in WAYS:
        for tokens, logprobs.CHUNK, fsdp.UNIT in ((100_000, 2**26, 2**27), (45, 700, 1)):
            results.append(updated(rank, ranks, path, way, tokens))
    return results


@pytest.fixture(scope="module")
def on_one_rank(on_ranks: OnRanks, tiny_model: Path) -> list[dict[str, Tensor]]:
    return on_ranks(1, each_way, str(tiny_model))[0]


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[" ".join(map(str, way.values())) for way in WAYS])
def test_an_update_does_not_depend_on_micro_batches(
    number: int, on_one_rank: list[dict[str, Tensor]], tiny_model: Path
) -> None:
    whole, cut = on_one_rank[2 * number : 2 * number + 2]
    torch.testing.assert_close(cut, whole, atol=3e-6, rtol=1e-5)
    before = dict(load_policy(str(tiny_model), head="zero").named_parameters())
    for name, after in whole.items():  # nothing was equal only because nothing moved
        start = before.get(name.removeprefix("policy.").replace(".base_layer", ""), torch.zeros(()))
        frozen = WAYS[number].get("model.lora_rank", 0) > 0 and "lora_" not in name and "value_head" not in name
        if name.startswith("policy.") and frozen:
            assert torch.equal(after, start), name
        elif name.startswith("policy."):
            assert (after - start).abs().max() > 1e-5, name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_update_does_not_depend_on_the_number_of_ranks(
    ranks: int, on_ranks: OnRanks, on_one_rank: list[dict[str, Tensor]], tiny_model: Path
) -> None:
    for rank, results in enumerate(on_ranks(ranks, each_way, str(tiny_model))):
        for way, found, expected in zip([w for w in WAYS for _ in range(2)], results, on_one_rank, strict=True):
            where = f"rank {rank}, {way}"
            torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5, msg=lambda m, w=where: f"{w}: {m}")


def scattered(rank: int, ranks: int, path: str) -> list[tuple[list[bool], dict[str, Tensor]]]:
    """Whether a first micro-batch leaves gradients in shards, and the weights after both, without and with."""
    found = []
    for run in (run_of(path, {"train.num_minibatches": 1}, 60) for _ in range(2)):
        run.scattered = frozenset({"policy", "critic"} if found else ())
        own = [c for c in completions() if c.prompt.id % ranks == rank]
        start = experience.build([ScoredCompletion(c, float(c.prompt.id + c.sample), True, {}) for c in own], PAD)
        batch, _ = loop.compute_advantages(run, loop.compute_logprobs(run, start))
        (micros,), (size,) = run.cut([batch]), update.denominators(run, [batch])
        assert len(micros) > 1
        run.reduce_gradients(False)
        update.backward(run, micros[0], size, False)
        reduced = [p.grad is not None for t in run.trained.values() for p in t.model.parameters()]
        update.accumulate(run, micros[1:], size, 0, False)
        update.optimizer_step(run, 0)
        weights = {f"{n} {k}": p for n, t in run.trained.items() for k, p in t.model.named_parameters()}
        found.append((reduced, {name: p.full_tensor().detach() for name, p in weights.items()}))
    return found


def test_gradients_that_a_rank_never_has_in_full_are_the_same(on_ranks: OnRanks, tiny_model: Path) -> None:
    for (whole, expected), (reduced, weights) in on_ranks(2, scattered, str(tiny_model)):
        assert not any(whole)
        assert all(reduced)
        torch.testing.assert_close(weights, expected, atol=3e-6, rtol=1e-5)


def test_gradients_are_scattered_where_they_would_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (ModelAndOptimizer(torch.nn.Linear(10, size, bias=False), None) for size in (10, 11))
    monkeypatch.setattr(logprobs, "stored_logits_on_gpu", lambda share: int(share * 200))
    alone = {"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}
    two = alone | {"num_workers": 2}
    for scaling, expected in ((two, {"large"}), (alone, set()), ({"num_workers": 2}, set())):
        assert setup.scattered(loading.from_tree({"scaling": scaling}), {"small": small, "large": large}) == expected


OFFLOAD: dict[str, Any] = {"model.offload": ["critic", "reference"], "scaling.use_gpu": True}


def offloaded(rank: int, ranks: int, path: str) -> list[dict[str, Tensor]]:
    return [updated(rank, ranks, path, way, 60) for way in ({}, OFFLOAD)]


def test_shards_in_host_memory_change_nothing(on_ranks: OnRanks, tiny_model: Path) -> None:
    for plain, other in on_ranks(2, offloaded, str(tiny_model)):
        torch.testing.assert_close(other, plain, atol=0, rtol=0)


def compiled(rank: int, ranks: int, path: str, adapters: lora.Adapters | None) -> tuple[list[dict[str, Tensor]], int]:
    """Log-probabilities and gradients by the names of the weights, without and with; and how many graphs there are."""
    from torch._dynamo.utils import counters

    results = []
    for prepare in (lambda part: None, compile_layers):
        policy = load_policy(path, head=None, adapters=adapters)
        checkpoint_gradients(policy)
        prepare(policy)
        policy.logit_scorer = logprobs.score_logits  # only the layers are compiled: graphs are theirs
        fsdp.shard(policy, Mesh.of("cpu", 1).mesh, torch.float32)
        scored = policy(*padded(), 1.0).logprobs
        scored.sum().backward()
        gradients = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
        results.append(gradients | {"logprobs": scored.detach()})
    return results, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [None, lora.Adapters(4, 8.0, (), 0)], ids=["whole", "adapters"])
def test_compiled_layers_change_neither_results_nor_names(
    on_ranks: OnRanks, tiny_model: Path, adapters: lora.Adapters | None
) -> None:
    (((plain, other), graphs),) = on_ranks(1, compiled, str(tiny_model), adapters)
    assert graphs > 0
    policy = load_policy(str(tiny_model), head=None, adapters=adapters)
    assert [*plain] == [*other] == [*(name for name, p in policy.named_parameters() if p.requires_grad), "logprobs"]
    torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-4)


def test_layers_are_not_compiled_without_a_compiler(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train\.compile: this machine has no C\+\+ compiler no-such-compiler"):
        compile_layers(load_policy(str(tiny_model), head=None))


# --- single parts of an update, on one rank


def averages(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    """One weight before an optimizer step and after it, its average, and what engines get meanwhile and afterwards."""
    run = run_of(path, {"train.ema_decay": 0.75}, 100_000)
    weight = dict(run.policy.named_parameters())["lm.model.norm.weight"]
    found = {"before": weight.full_tensor().detach().clone()}
    weight.grad = torch.ones_like(weight)
    pushed: list[Tensor] = []
    run.push = lambda starting=False: pushed.append(weight.full_tensor().detach().clone())  # type: ignore[method-assign]
    for trained in run.trained.values():
        for parameter in trained.model.parameters():
            parameter.grad = torch.ones_like(parameter)
    update.optimizer_step(run, 0)
    with run.averaged():
        found["meanwhile"] = weight.full_tensor().detach().clone()
    found |= {"after": weight.full_tensor().detach(), "average": run.average["lm.model.norm.weight"].full_tensor()}
    return found | {"pushed": torch.stack(pushed)}


def test_the_average_of_the_weights_by_hand(on_ranks: OnRanks, tiny_model: Path) -> None:
    found = on_ranks(2, averages, str(tiny_model))[0]
    expected = 0.75 * found["before"] + 0.25 * found["after"]
    assert (found["after"] - found["before"]).abs().min() > 1e-6
    torch.testing.assert_close(found["average"], expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(found["meanwhile"], expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(found["pushed"], torch.stack([expected, found["after"]]), atol=1e-7, rtol=0)


def stepped(rank: int, ranks: int, path: str) -> list[list[float]]:
    """The learning rates of policy and critic in optimizer steps around the end of the critic's warm-up."""
    way = {"train.critic_warmup": 2, "train.warmup_steps": 2, "train.steps": 4, "train.lr_schedule": "linear"}
    run = run_of(path, way, 100_000)
    rates = []
    for run.step, number in ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1)):
        for trained in run.trained.values():
            for parameter in trained.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
        update.optimizer_step(run, number)
        rates.append([run.trained[name].optimizer.param_groups[0]["lr"] for name in ("policy", "critic")])
    return rates


def test_learning_rates_follow_the_schedule_of_each_model(on_ranks: OnRanks, tiny_model: Path) -> None:
    (rates,) = on_ranks(1, stepped, str(tiny_model))
    policy, critic = zip(*rates, strict=True)
    assert policy[0] == pytest.approx(1e-3)  # SGD's own: the policy has not stepped
    assert policy[1:] == pytest.approx([0.05, 0.1, 0.1, 0.05])  # 4 optimizer steps, 2 of them warm-up
    assert critic == pytest.approx([0.1 * (1 - place / 6) for place in (1, 2, 3, 4, 5)])  # 8, and 2 of warm-up


def spoilt(rank: int, ranks: int, path: str) -> list[str]:
    """What updates say whose advantages, or returns, are no numbers."""
    said = []
    stopping = {"algorithm.target_kl": 1.0, "train.ppo_epochs": 3}
    for way, column in (({}, "advantages"), (stopping, "advantages"), ({}, "returns")):
        run = run_of(path, way, 60)
        batch = loop.compute_logprobs(
            run, experience.build([ScoredCompletion(c, 1.0, True, {}) for c in completions()], PAD)
        )
        batch = loop.compute_advantages(run, batch)[0]
        try:
            update.update(run, replace(batch, **{column: math.nan * getattr(batch, column)}))
        except FloatingPointError as error:
            said.append(str(error))
    return said


def test_a_gradient_that_is_not_finite_ends_the_run(on_ranks: OnRanks, tiny_model: Path) -> None:
    (said,) = on_ranks(1, spoilt, str(tiny_model))
    words = "step 1: a gradient norm of the {} is not finite; its weights are spoilt, and neither sent nor saved"
    models = ("policy", "policy", "critic")
    assert [line.partition("; a lower")[0] for line in said] == [words.format(name) for name in models]


def advantages(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    """Of two prompts with two responses each, two tokens long, with the KL in the reward."""
    found = {}
    for kind in ("rloo", "grpo", "reinforce++", "remax"):
        way = {"algorithm.advantage": kind, "algorithm.kl_placement": "reward", "algorithm.kl_estimator": "k1"}
        run = run_of(path, way | {"algorithm.whiten_advantages": False}, 100_000)
        prompts = [Prompt(i, (7, 8), "question", "answer") for i in range(2)]
        rows = [Completion(prompts[i // 2], i % 2, (9, 10), (-1.0, -1.0), True, 0) for i in range(4)]
        scores = (1.0, 0.0, 2.0, 2.0)
        judged = [ScoredCompletion(*pair, True, {}, greedy_score=0.5) for pair in zip(rows, scores, strict=True)]
        kl = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [2.0, 3.0]])  # kl_coef is 0.1
        batch = replace(experience.build(judged, PAD), logprobs=kl, ref_logprobs=torch.zeros(4, 2))
        found[kind] = loop.compute_advantages(run, batch)[0].advantages
    return found


def test_the_kl_in_the_reward_is_compared_within_groups(on_ranks: OnRanks, tiny_model: Path) -> None:
    (found,) = on_ranks(1, advantages, str(tiny_model))
    # Rewards less the KL: 0.9 and 0; 1.5 and 1.5. Two alike responses say nothing.
    torch.testing.assert_close(found["rloo"], torch.tensor([[0.9, 0.9], [-0.9, -0.9], [0.0, 0.0], [0.0, 0.0]]))
    half = 0.5**0.5  # 0.45 / std of (0.9, 0)
    expected = torch.tensor([[half, half], [-half, -half], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(found["grpo"], expected, atol=1e-5, rtol=0)
    # Token by token: what follows of the KL is taken off.
    torch.testing.assert_close(found["reinforce++"], torch.tensor([[0.9, 1.0], [0.0, 0.0], [1.5, 1.7], [1.5, 1.7]]))
    torch.testing.assert_close(found["remax"], torch.tensor([[0.4, 0.5], [-0.5, -0.5], [1.0, 1.2], [1.0, 1.2]]))
