"""Layers cut over tensor-parallel neighbours against the whole model: an update, a checkpoint, whole runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import STEPS, Done, comparable, small, train
from shared import NothingLeft, OnRanks
from test_checkpoint_files import averaged, files, step, whole, write
from test_policy import padded
from test_update import WAYS, updated
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlx.config import loading, run
from rlx.config.errors import ConfigError
from rlx.mesh import COLLECTIVE_TIMEOUT, Mesh, broadcast_object, gather_objects
from rlx.models import fsdp, tensor_parallel
from rlx.models.loading import load_policy
from rlx.runs import preflight
from rlx.storage import checkpoint_catalog, checkpoint_files
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.training.setup.models import build_models

UNCUT = [way for way in WAYS if "model.lora_rank" not in way]


@pytest.fixture(scope="module")
def qwen3(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a norm for each head, biases, and sizes that leave a remainder when they are cut twice."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    sizes = {"hidden_size": 32, "intermediate_size": 66, "num_hidden_layers": 2, "head_dim": 18, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        lm = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
        for weight in lm.parameters():
            torch.nn.init.normal_(weight, 0.3 if weight.dim() == 1 else 0.0, 0.2)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def settings_of(ranks: int, tp: int, **chosen: Any) -> run.RunConfig:
    sizes = {"parallel": {"tp": tp}, "scaling": {"num_workers": ranks}, "train": {"prompts_per_step": 24}}
    return loading.from_tree(sizes | chosen)


# --- against the whole model


def learnt(policy: Any, weights: Tensor) -> dict[str, Any]:
    """Scores, and their gradients of one loss; every process has the same batch."""
    scored = policy(padded(), 0.7, True)
    loss = ((scored.logprobs + 0.1 * scored.entropy + scored.values) * weights).sum()
    loss.backward()
    gradients = {name: fsdp.full_tensor(p.grad).clone() for name, p in policy.named_parameters()}
    norm = fsdp.clip_gradients(policy, 0.5)
    clipped = {name: fsdp.full_tensor(p.grad).clone() for name, p in policy.named_parameters()}
    found = {"logprobs": scored.logprobs.detach(), "values": scored.values.detach(), "gradients": gradients}
    return found | {"loss": loss.detach(), "norm": norm, "clipped": clipped}


def weights_of_tokens() -> Tensor:
    return torch.randn(padded().mask.shape, generator=torch.Generator().manual_seed(6))


def learnt_on_ranks(rank: int, ranks: int, path: str, tp: int) -> dict[str, Any]:
    """The same, and the shape of one matrix as this process holds it in a forward pass."""
    chosen = settings_of(ranks, tp, model={"critic": "head", "value_head_init": "normal"})
    trained = build_models(chosen, path, Mesh.of("cpu", tp).mesh).trained
    policy: Any = trained["policy"].model
    shapes: list[tuple[int, ...]] = []
    projection = policy.lm.base_model.layers[0].mlp.up_proj
    projection.register_forward_hook(lambda module, given, output: shapes.append(tuple(output.shape)))
    return learnt(policy, weights_of_tokens()) | {"cut": shapes[0]}


@pytest.mark.parametrize(
    ("ranks", "architecture"),
    [
        (2, "tiny_model"),
        (4, "qwen3"),
        pytest.param(2, "qwen3", marks=pytest.mark.slow),
        pytest.param(4, "tiny_model", marks=pytest.mark.slow),
    ],
)
def test_scores_and_gradients_are_those_of_the_whole_model(
    architecture: str, ranks: int, on_ranks: OnRanks, request: pytest.FixtureRequest
) -> None:
    path = str(request.getfixturevalue(architecture))
    policy = load_policy(path, head="normal")
    expected = learnt(policy, weights_of_tokens())
    width: int = policy.lm.config.intermediate_size
    assert expected["norm"] > 0.5 and all(grad.count_nonzero() for grad in expected["gradients"].values())
    for found in on_ranks(ranks, learnt_on_ranks, path, 2):
        assert found.pop("cut")[-1] == width // 2
        scale = float(expected["norm"])
        for name in ("logprobs", "values", "clipped"):
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)
        for name in ("loss", "norm", "gradients"):
            torch.testing.assert_close(found[name], expected[name], atol=1e-6 * max(1.0, scale), rtol=1e-5)


def each_way(rank: int, ranks: int, path: str, tp: int, ways: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """In each way of updating, a few completions at a time."""
    shape = {"parallel.tp": tp, "scaling.num_workers": ranks}
    return [updated(rank, ranks, path, way | shape, 45) for way in ways]


@pytest.mark.parametrize(
    ("architecture", "ways", "ranks"),
    [
        ("tiny_model", UNCUT[:1], 2),
        pytest.param("qwen3", UNCUT[1:2], 2, marks=pytest.mark.slow),
        pytest.param("tiny_model", UNCUT, 2, marks=pytest.mark.slow),
        pytest.param("tiny_model", UNCUT, 4, marks=pytest.mark.slow),
        pytest.param("qwen3", UNCUT, 4, marks=pytest.mark.slow),
    ],
)
def test_an_update_does_not_depend_on_how_layers_are_cut(
    architecture: str, ways: list[dict[str, Any]], ranks: int, on_ranks: OnRanks, request: pytest.FixtureRequest
) -> None:
    path = str(request.getfixturevalue(architecture))
    (alone,) = on_ranks(1, each_way, path, 1, ways)
    first, *others = on_ranks(ranks, each_way, path, 2, ways)
    for way, found, expected in zip(ways, first, alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda m, w=way: f"{w}: {m}")
    for other in others:  # to the last bit: what neighbours hold alike must stay alike
        torch.testing.assert_close(other, first, atol=0, rtol=0)


def told(rank: int, ranks: int) -> tuple[Any, ...]:
    grid = Mesh.of("cpu", 2)
    drawn = [f"replica {grid.dp_rank} of {grid.dp_size}"] if grid.is_leader else None
    sums = grid.all_reduce_sum(torch.tensor([1.0, float(rank)])).tolist()
    return grid.broadcast_from_leader(drawn), sums, gather_objects({rank}), broadcast_object([rank])


@pytest.mark.slow
def test_neighbours_hear_from_their_first_and_count_once(on_ranks: OnRanks) -> None:
    heard, sums, gathered, of_first = zip(*on_ranks(4, told), strict=True)
    assert heard == tuple([f"replica {replica} of 2"] for replica in (0, 0, 1, 1))
    assert sums == ([2.0, 0.0 + 2.0],) * 4  # of ranks 0 and 2
    assert gathered == ([{0}, {1}, {2}, {3}],) * 4
    assert of_first == ([0],) * 4


def waits(rank: int, ranks: int) -> list[float]:
    """The seconds that groups of the mesh wait."""
    groups = Mesh.of("cpu", 2).mesh.get_all_groups()
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.slow
def test_groups_wait_as_long_as_a_rollout_may_take(on_ranks: OnRanks) -> None:
    assert on_ranks(4, waits) == [[COLLECTIVE_TIMEOUT.total_seconds()] * 2] * 4


def said_alone(rank: int, ranks: int) -> tuple[Any, ...]:
    return gather_objects("alone"), broadcast_object("alone")


def test_a_process_alone_hears_itself(on_ranks: OnRanks) -> None:
    assert on_ranks(1, said_alone) == [(["alone"], "alone")]


# --- checkpoints


def trained_of(path: str, ranks: int, tp: int) -> dict[str, ModelAndOptimizer]:
    return build_models(settings_of(ranks, tp), path, Mesh.of("cpu", tp).mesh).trained


def save(rank: int, ranks: int, path: str, tp: int, target: str) -> dict[str, Any]:
    trained = trained_of(path, ranks, tp)
    step(trained)
    average = averaged(trained, 0.5)
    write(checkpoint_files.copy_shards(trained, average), target, rank)
    return whole(trained, average)


def load(rank: int, ranks: int, path: str, tp: int, source: str) -> dict[str, Any]:
    trained = trained_of(path, ranks, tp)
    average = averaged(trained, 0.0)
    checkpoint_files.load_state(files(source), trained, average)
    return whole(trained, average)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ((4, 2), (1, 1)),
        pytest.param((2, 2), (3, 1), marks=pytest.mark.slow),
        pytest.param((1, 1), (4, 2), marks=pytest.mark.slow),
        pytest.param((4, 2), (2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_read_on_any_grid(
    then: tuple[int, int], now: tuple[int, int], on_ranks: OnRanks, qwen3: Path, tmp_path: Path
) -> None:
    written, *_ = on_ranks(then[0], save, str(qwen3), then[1], str(tmp_path))
    for found in on_ranks(now[0], load, str(qwen3), now[1], str(tmp_path)):
        assert _texts(found) == _texts(written)
        torch.testing.assert_close(_numbers(found), _numbers(written), atol=0, rtol=0)


# --- models that cannot be cut


@pytest.mark.parametrize(
    ("chosen", "tp", "message"),
    [
        (GPT2Config(), 2, r"parallel\.tp 2: model gpt2 \(gpt2\) has no tensor-parallel plan"),
        (Phi3Config(), 2, r"parallel\.tp 2: model phi3 cuts layers\.\*\.self_attn\.qkv_proj as "),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=1), 2, "num_key_value_heads 1, not a multiple of 2"),
        (
            LlamaConfig(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
            3,
            "intermediate_size 11008, not a multiple of 3",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(chosen: PreTrainedConfig, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tensor_parallel.layer_plan(chosen, tp)


def test_it_is_refused_before_work_starts(tiny_model: Path, tmp_path: Path) -> None:
    preflight.check_model(small(tiny_model, tmp_path, "cut", parallel__tp=2), str(tiny_model))
    with pytest.raises(ConfigError, match=rf"model {tiny_model} has num_attention_heads 4, not a multiple of 8"):
        three = {"scaling__num_workers": 8, "train__prompts_per_step": 8, "parallel__tp": 8}
        preflight.check_model(small(tiny_model, tmp_path, "cut", **three), str(tiny_model))


# --- whole runs

AHEAD: dict[str, Any] = {"train__ema_decay": 0.5, "rollout__max_staleness": 1}  # checkpoints keep completions too


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def cut(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    """Two neighbours that share one replica's layers."""
    return train(small(tiny_model, storage, "cut", parallel__tp=2, **AHEAD))


@pytest.mark.slow  # whole runs with cold starts, of parts that the tests above hold together
def test_a_run_with_cut_layers_is_that_of_one_process(cut: Done, tiny_model: Path, storage: Path) -> None:
    alone = train(small(tiny_model, storage, "alone", scaling__num_workers=1, **AHEAD))
    found, expected = (comparable(done.history, range(STEPS + 1)) for done in (cut, alone))
    assert found.keys() == expected.keys()
    for name, by_step in expected.items():
        for number, values in by_step.items():
            assert found[name][number] == pytest.approx(values, rel=1e-3, abs=1e-4), (name, number)
    assert found["mismatch/max_abs"][1][0] <= 1e-4  # later steps train on completions of older weights


@pytest.mark.slow  # whole runs with cold starts, of parts that the tests above hold together
def test_a_run_with_cut_layers_continues_exactly(cut: Done, tiny_model: Path, storage: Path) -> None:
    source = f"{cut.result.folder}/{checkpoint_catalog.checkpoint_name(STEPS // 2)}"
    start = {"checkpoint__init_from": source, "checkpoint__init_state": "all"}
    branch = train(small(tiny_model, storage, "branch", parallel__tp=2, **AHEAD, **start))
    assert comparable(branch.history, range(2, 5)) == comparable(cut.history, range(2, 5))


def _texts(state: Any) -> Any:
    """The entries of a nested state that are text."""
    if isinstance(state, dict):
        return {key: _texts(value) for key, value in state.items()}
    return state if isinstance(state, str) else None


def _numbers(state: Any) -> Any:
    """A nested state without its texts."""
    if isinstance(state, dict):
        return {key: _numbers(value) for key, value in state.items() if not isinstance(value, str)}
    return state
