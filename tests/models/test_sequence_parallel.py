"""Rows shared by sequence-parallel neighbours against one process: scores and gradients, updates, whole runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import STEPS, comparable, small, train
from shared import NothingLeft, OnRanks
from test_packing import shared
from test_tensor_parallel import settings_of
from test_update import WAYS, updated
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from rlx.config.errors import ConfigError
from rlx.mesh import Mesh, SequenceGroup
from rlx.models import fsdp, logprobs, packing
from rlx.models.policy import ResponseTokens
from rlx.runs import preflight
from rlx.storage import checkpoint_catalog
from rlx.training.setup.models import build_models

# --- what is exchanged


def exchanged(rank: int, ranks: int, tokens: int, heads: int) -> list[Tensor]:
    """A row's states `[P, heads, 3]`: its tokens, all tokens in its heads, its tokens again, all tokens."""
    group = SequenceGroup.of(Mesh.of("cpu", 1, ranks).mesh["sequence"])
    whole = torch.arange(tokens * heads * 3.0).view(tokens, heads, 3)
    own = group.share(whole)
    in_heads = group.to_heads(own, tokens)
    return [own, in_heads, group.to_tokens(in_heads), group.gather(own, tokens)]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "heads"), [(6, 4), (7, 2), (1, 6)])
def test_tokens_are_exchanged_for_heads_and_back(tokens: int, heads: int, on_ranks: OnRanks) -> None:
    whole = torch.arange(tokens * heads * 3.0).view(tokens, heads, 3)
    found = on_ranks(2, exchanged, tokens, heads)
    each = -(-tokens // 2)
    for rank, (own, in_heads, back, gathered) in enumerate(found):
        assert torch.equal(in_heads, whole.chunk(2, 1)[rank]) and torch.equal(gathered, whole)
        inside = max(0, min(each, tokens - rank * each))
        assert len(own) == len(back) == each
        assert torch.equal(back[:inside], whole[rank * each :][:inside]) and torch.equal(back[:inside], own[:inside])


@pytest.mark.slow
def test_fewer_heads_than_neighbours_are_repeated(on_ranks: OnRanks) -> None:
    whole = torch.arange(5 * 2 * 3.0).view(5, 2, 3)
    found = [in_heads for _, in_heads, _, _ in on_ranks(4, exchanged, 5, 2)]
    assert [torch.equal(states, whole[:, rank // 2, None]) for rank, states in enumerate(found)] == [True] * 4


# --- scores and gradients


def config_of(ranks: int, sp: int, **chosen: Any) -> Any:
    return settings_of(ranks, 1, parallel={"sp": sp}, **chosen | {"train": {"prompts_per_step": 24, "packing": True}})


def learnt_on_ranks(rank: int, ranks: int, path: str, sp: int, more: dict[str, Any]) -> dict[str, Any]:
    """What a policy with a value head and a critic say of completions that share prompts, and gradients of a loss.

    And how many tokens a layer of the policy has seen.
    """
    with_head = {"critic": "head", "value_head_init": "normal", "reference": "none"}
    grid = Mesh.of("cpu", 1, sp)
    found: dict[str, Any] = {}
    for model in (with_head, with_head | {"critic": "separate"}):
        config = config_of(ranks, sp, model=model | more, algorithm={"kl_coef": 0})
        trained = build_models(config, path, grid.mesh).trained
        policy: Any = trained["policy"].model
        layer, seen = policy.lm.base_model.layers[0].mlp, list[int]()
        layer.register_forward_hook(lambda module, given, output, seen=seen: seen.append(output.shape[1]))
        tokens, weights = shared(), weights_of(shared())
        output = policy(tokens, 0.7, True)
        values = trained["critic"].model(tokens) if "critic" in trained else output.values
        with torch.no_grad():
            found["entropy alone"] = policy(tokens, 0.7, True).entropy
        ((output.logprobs + 0.1 * output.entropy + values) * weights).sum().backward()
        found |= {f"{model['critic']}/logprobs": output.logprobs, f"{model['critic']}/values": values}
        for name, each in trained.items():
            gradients = {n: p.grad.full_tensor() for n, p in each.model.named_parameters() if p.requires_grad}
            found |= {f"{model['critic']}/{name}/{n}": gradient.clone() for n, gradient in gradients.items()}
        found["seen"] = seen[0]
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}


def weights_of(tokens: Any) -> Tensor:
    return torch.randn(tokens.mask.shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(("ranks", "sp"), [(4, 2), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (2, 4))])
def test_scores_and_gradients_are_those_of_one_process(
    ranks: int, sp: int, on_ranks: OnRanks, tiny_model: Path
) -> None:
    (alone,), found = (on_ranks(n, learnt_on_ranks, str(tiny_model), s, {}) for n, s in ((1, 1), (ranks, sp)))
    row = alone.pop("seen")
    assert row % sp  # the last process's share is filled up
    for each in found:
        assert each.pop("seen") == -(-row // sp)
        assert each.keys() == alone.keys()
        worst = max(float((each[name] - alone[name]).abs().max()) for name in alone)
        print(f"{ranks} ranks, sp {sp}: largest difference {worst:.1e}")
        for name, expected in alone.items():
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(
                each[name], expected, atol=1e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
        torch.testing.assert_close(each, found[0], atol=0, rtol=0)  # to the last bit


@pytest.mark.slow  # its sibling has all weights
def test_adapters_learn_from_shared_rows(on_ranks: OnRanks, tiny_model: Path) -> None:
    more = {"lora_rank": 4, "lora_targets": ["q_proj", "up_proj"]}
    (alone,), found = (on_ranks(n, learnt_on_ranks, str(tiny_model), n, more) for n in (1, 2))
    row = alone.pop("seen")
    for each in found:
        assert each.pop("seen") < row
        torch.testing.assert_close(each, alone, atol=1e-5, rtol=1e-5)


def stored(rank: int, ranks: int, path: str) -> int:
    """Bytes that a forward pass over a long completion stores for the backward pass."""
    config = config_of(ranks, ranks, model={"critic": "head", "reference": "none"}, algorithm={"kl_coef": 0})
    policy: Any = build_models(config, path, Mesh.of("cpu", 1, ranks).mesh).trained["policy"].model
    ids, prompts = torch.arange(6, 86).repeat(1, 13), torch.tensor([40])
    tokens = ResponseTokens.of(ids, prompts, torch.ones(1, 1000))
    row = packing.pack_row(ids, prompts, torch.tensor([1000]), torch.tensor([0]), tokens.token_index)
    sizes: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        policy(tokens._replace(packing=row), 1.0)
    return sum(sizes.values())


@pytest.mark.slow
def test_each_neighbour_stores_its_share_of_a_long_row(on_ranks: OnRanks, tiny_model: Path) -> None:
    (alone,), (first, other) = (on_ranks(ranks, stored, str(tiny_model)) for ranks in (1, 2))
    print(f"{alone / 2**20:.1f} MiB alone, {first / 2**20:.1f} and {other / 2**20:.1f} shared")
    assert max(first, other) < 0.55 * alone


# --- updates


def each_way(rank: int, ranks: int, path: str, sp: int, ways: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """In each way of updating, a few completions and of these a few tokens at a time, with layers in units."""
    shape = {"parallel.sp": sp, "scaling.num_workers": ranks, "train.packing": True}
    logprobs.CHUNK, fsdp.UNIT = 700, 1
    return [updated(rank, ranks, path, way | shape, 45) for way in ways]


COMPILED = {"algorithm.advantage": "grpo", "train.compile": True}
FEW = [WAYS[0], WAYS[10]]
"""PPO with a critic and a reference; GRPO with adapters, two epochs, and log-probabilities from the first pass"""


@pytest.mark.parametrize(
    ("ways", "ranks", "sp"),
    [
        (FEW, 2, 2),
        pytest.param(WAYS, 2, 2, marks=pytest.mark.slow),
        pytest.param(WAYS, 4, 2, marks=pytest.mark.slow),
        pytest.param(WAYS, 4, 4, marks=pytest.mark.slow),
        pytest.param([COMPILED], 2, 2, marks=pytest.mark.slow),
    ],
)
def test_an_update_does_not_depend_on_who_shares_rows(
    ways: list[dict[str, Any]], ranks: int, sp: int, on_ranks: OnRanks, tiny_model: Path
) -> None:
    (alone,) = on_ranks(1, each_way, str(tiny_model), 1, ways)
    first, *others = on_ranks(ranks, each_way, str(tiny_model), sp, ways)
    for way, found, expected in zip(ways, first, alone, strict=True):
        worst = max(float((found[name] - expected[name]).abs().max()) for name in expected if expected[name].dim())
        print(f"{ranks} ranks, sp {sp}, {way}: largest difference of a weight {worst:.1e}")
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda m, w=way: f"{w}: {m}")
    for other in others:
        torch.testing.assert_close(other, first, atol=0, rtol=0)


@pytest.mark.slow
def test_shards_in_host_memory_change_nothing(on_ranks: OnRanks, tiny_model: Path) -> None:
    half = {"scaling.use_gpu": True, "model.dtype": "bfloat16"}  # the settings alone; the ranks compute on CPUs
    ways = [half, half | {"model.offload": ["critic", "reference"]}]
    for plain, other in on_ranks(2, each_way, str(tiny_model), 2, ways):
        torch.testing.assert_close(other, plain, atol=0, rtol=0)


@pytest.mark.slow
def test_neighbours_have_a_leader_and_weights_are_cut_over_all_ranks(on_ranks: OnRanks) -> None:
    assert on_ranks(4, shape_of) == [((rank // 2, 2), (rank % 2 == 0, 2), 4, [rank // 2]) for rank in range(4)]


def shape_of(rank: int, ranks: int) -> tuple[Any, ...]:
    grid = Mesh.of("cpu", 1, 2)
    told = grid.broadcast_from_leader([grid.dp_rank] if grid.is_leader else None)
    return (grid.dp_rank, grid.dp_size), (grid.is_leader, grid.neighbours), grid.shards, told


# --- what cannot be shared


@pytest.mark.parametrize(
    ("settings", "sp", "message"),
    [
        (LlamaConfig(hidden_size=48, num_attention_heads=6), 4, "it has 6 attention heads, not a multiple of 4"),
        (LlamaConfig(hidden_size=24, num_attention_heads=4), 2, "its attention heads have 6 numbers each"),
        (MistralConfig(), 2, "some of its layers do not attend to all earlier tokens"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}),
            2,
            r"its positions (dynamic) depend on how long a worker's part of a row is",
        ),
        (LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=1), 4, None),
    ],
)
def test_models_whose_rows_cannot_be_shared_are_known(settings: PreTrainedConfig, sp: int, message: str | None) -> None:
    assert packing.config_obstacle(settings, sp) == message


def test_they_are_refused_before_work_starts(tiny_model: Path, tmp_path: Path) -> None:
    preflight.check_model(small(tiny_model, tmp_path, "shared", parallel__sp=2), str(tiny_model))
    eight = small(tiny_model, tmp_path, "shared", scaling__num_workers=8, parallel__sp=8)
    with pytest.raises(ConfigError, match=rf"^parallel\.sp 8: model\.path {tiny_model}: it has 4 attention heads, not"):
        preflight.check_model(eight, str(tiny_model))


# --- whole runs


@pytest.mark.slow  # whole runs with cold starts, of parts that the tests above hold together
def test_a_run_that_shares_rows_is_that_of_one_process_and_goes_on_there(
    nothing_left: NothingLeft, tiny_model: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"train__ema_decay": 0.5, "rollout__max_staleness": 1}  # checkpoints keep completions too
    alone = {"scaling__num_workers": 1, "train__packing": True}
    done = train(small(tiny_model, tmp_path, "shared", parallel__sp=2, **more))
    expected = comparable(train(small(tiny_model, tmp_path, "alone", **alone, **more)).history, range(STEPS + 1))
    source = f"{done.result.folder}/{checkpoint_catalog.checkpoint_name(STEPS // 2)}"
    start = {"checkpoint__init_from": source, "checkpoint__init_state": "all"}
    branch = train(small(tiny_model, tmp_path, "branch", **alone, **more, **start))
    for history, steps in ((done.history, range(STEPS + 1)), (branch.history, range(STEPS // 2 + 1, STEPS + 1))):
        found = comparable(history, steps)
        assert found.keys() == expected.keys()
        for name, by_step in expected.items():
            for number in set(by_step) & set(steps):
                assert found[name][number] == pytest.approx(by_step[number], rel=1e-3, abs=1e-4), (name, number)
