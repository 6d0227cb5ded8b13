"""Sharded training state: saved on two ranks, loaded on one to four, bit for bit; malformed files."""

import copy
import json
import math
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from shared import OnRanks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from rlx.models import fsdp, loading, lora
from rlx.storage import checkpoint_files, checkpoint_keys
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_files import CheckpointError, CheckpointReader, ModelAndOptimizer, Shard
from rlx.storage.filesystem import Storage, upload_file

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}


def fresh(path: str, ranks: int, lora_rank: int = 0, **adam: Any) -> dict[str, ModelAndOptimizer]:
    """Policy and critic, sharded; with adapters a policy with a value head alone."""
    mesh = init_device_mesh("cpu", (ranks,))
    adapters = lora.Adapters(lora_rank, 8.0, (), 0) if lora_rank else None
    parts: dict[str, nn.Module] = {
        "policy": loading.load_policy(path, head="normal" if lora_rank else None, adapters=adapters)
    }
    if not lora_rank:
        parts["critic"] = loading.load_critic(path, head="normal")
    trained = {}
    for name, part in parts.items():
        sharded = fsdp.shard(part, mesh, torch.float32)
        learning = [p for p in sharded.parameters() if p.requires_grad]
        trained[name] = ModelAndOptimizer(
            sharded, torch.optim.AdamW(learning, **(ADAM | adam), fused=False, foreach=False)
        )
    return trained


def averaged(trained: Mapping[str, ModelAndOptimizer], decay: float) -> dict[str, Any]:
    """Stands for the average of the policy's weights: other numbers in tensors sharded alike."""
    return {name: decay * p.detach() for name, p in trained["policy"].model.named_parameters()}


def step(trained: Mapping[str, ModelAndOptimizer]) -> None:
    """An optimizer step on gradients that differ between all parameters and are the same on any number of ranks."""
    for part in trained.values():
        for i, parameter in enumerate(p for p in part.model.parameters() if p.requires_grad):
            parameter.grad = parameter.detach() * 0.1 + 0.01 * (i + 1)
        part.optimizer.step()
        part.optimizer.zero_grad()


def whole(trained: Mapping[str, ModelAndOptimizer], average: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters, their average and the whole optimizer state, gathered and copied, by name."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    states = {name: get_state_dict(part.model, part.optimizer, options=options) for name, part in trained.items()}
    gathered = {name: parameters | moments for name, (parameters, moments) in states.items()}
    return copy.deepcopy(gathered | {"average": {name: p.full_tensor() for name, p in average.items()}})


def files(folder: str | Path) -> list[Storage]:
    return [Storage.local(file) for file in sorted(Path(folder).iterdir())]


def write(shards: Mapping[str, Shard], folder: str | Path, rank: int = 0) -> list[Storage]:
    checkpoint_files.write_shards(shards, Path(folder, f"rank_{rank:05d}.safetensors"))
    return files(folder)


def save(rank: int, ranks: int, path: str, target: str, lora_rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saves the state after three steps; returns it and the state after a fourth, before files are written."""
    trained = fresh(path, ranks, lora_rank)
    for _ in range(3):
        step(trained)
    average = averaged(trained, 0.5)
    state = whole(trained, average)
    shards = checkpoint_files.copy_shards(trained, average)
    step(trained)
    after = whole(trained, average)
    for tensor in average.values():
        tensor.zero_()
    write(shards, target, rank)
    return state, after


def load(rank: int, ranks: int, path: str, source: str, lora_rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    trained = fresh(path, ranks, lora_rank)
    average = averaged(trained, 0.0)
    checkpoint_files.load_state(files(source), trained, average)
    state = whole(trained, average)
    step(trained)
    return state, whole(trained, average)


Saved = tuple[Path, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, on_ranks(2, save, str(tiny_model), str(folder))[0]


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 4))])
def test_any_number_of_ranks_continues_exactly(ranks: int, on_ranks: OnRanks, saved: Saved, tiny_model: Path) -> None:
    folder, (state, after) = saved
    (found, found_after), *_ = on_ranks(ranks, load, str(tiny_model), str(folder))
    torch.testing.assert_close(found, state, atol=0, rtol=0)
    torch.testing.assert_close(found_after, after, atol=0, rtol=0)
    for part, norm in (("policy", "lm.model.norm"), ("critic", "backbone.norm")):  # there was something to restore
        assert (found[part][f"state.{norm}.weight.step"], found_after[part][f"state.{norm}.weight.step"]) == (3, 4)
        assert found[part][f"state.{norm}.weight.exp_avg"].count_nonzero() > 0
        assert not found[part][f"{norm}.weight"].equal(found_after[part][f"{norm}.weight"])
    assert found["average"]["lm.model.norm.weight"].equal(0.5 * found["policy"]["lm.model.norm.weight"])


def test_each_rank_writes_its_own_shards(saved: Saved) -> None:
    folder, _ = saved
    first, second = files(folder)
    assert [first.name, second.name] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    sizes = [file.size() or 0 for file in (first, second)]
    assert 0 < max(sizes) < 1.2 * min(sizes)


def tensor_bytes(file: Path) -> int:
    """Of a safetensors file: what comes after eight bytes and the header whose length they say."""
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


def test_a_checkpoint_takes_its_tensors_and_little_more(saved: Saved, tiny_model: Path) -> None:
    folder, _ = saved
    policy = list(loading.load_policy(str(tiny_model), head=None).parameters())
    both = policy + list(loading.load_critic(str(tiny_model), head="normal").parameters())
    # Each weight has two moments; each tensor a count of steps, on one rank; the policy's have an average.
    needed = 4 * (3 * sum(p.numel() for p in both) + len(both) + sum(p.numel() for p in policy))
    paths = [Path(file.path) for file in files(folder)]
    assert (
        needed <= sum(tensor_bytes(path) for path in paths) <= 1.001 * needed
    )  # what aligns the header is a byte or so
    assert sum(path.stat().st_size for path in paths) <= 1.05 * needed


def test_weights_with_two_names_are_saved_once(saved: Saved, tiny_model: Path) -> None:
    unique = dict(loading.load_policy(str(tiny_model), head=None).named_parameters())
    with CheckpointReader(files(saved[0])) as parts:
        kept = {name for name in parts.names if name.startswith("policy.model.")}
        assert kept == {f"policy.model.{name}" for name in unique}
        assert sum(parts.read_full(name).numel() for name in kept) == sum(p.numel() for p in unique.values())
    assert "policy.model.lm.lm_head.weight" not in kept  # the embedding under another name


def test_the_files_are_readable_by_safetensors_itself(saved: Saved) -> None:
    with CheckpointReader(files(saved[0])) as parts:
        seen: dict[str, int] = {}
        for file in files(saved[0]):
            with safe_open(file.path, "pt") as opened:
                layout = json.loads(opened.metadata()["layout"])
                assert set(layout) == set(opened.keys())
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    tensor, offset = opened.get_tensor(name), layout[name]["offset"]
                    area = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
                    assert parts.read_full(name)[area].equal(tensor)
                    seen[name] = seen.get(name, 0) + tensor.numel()
        assert seen == {name: parts.read_full(name).numel() for name in parts.names}


@pytest.mark.slow
def test_adapters_continue_exactly_on_another_number_of_ranks(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    (state, after), _ = on_ranks(2, save, str(tiny_model), str(tmp_path), 4)
    ((found, found_after),) = on_ranks(1, load, str(tiny_model), str(tmp_path), 4)
    torch.testing.assert_close(found, state, atol=0, rtol=0)
    torch.testing.assert_close(found_after, after, atol=0, rtol=0)
    with CheckpointReader(files(tmp_path)) as parts:
        kept = [name for name in parts.names if not name.startswith("average.")]
    assert kept and all(".lora_" in name or ".value_head." in name for name in kept)
    assert any(".lora_B." in name and name.endswith(".exp_avg_sq") for name in kept)


def reloaded(rank: int, ranks: int, path: str, source: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The optimizers' settings and whether they have state, after a load into a run with other settings."""
    trained = fresh(path, ranks, lr=0.125, betas=(0.5, 0.6), weight_decay=0.5)
    before = [dict(part.optimizer.param_groups[0], params=None) for part in trained.values()]
    checkpoint_files.load_state(files(source), trained, averaged(trained, 0.0))
    after = [dict(part.optimizer.param_groups[0], params=None) for part in trained.values()]
    assert after == before
    return after, [bool(part.optimizer.state) for part in trained.values()]


def test_settings_of_optimizers_are_the_runs_own(on_ranks: OnRanks, saved: Saved, tiny_model: Path) -> None:
    ((groups, stepped),) = on_ranks(1, reloaded, str(tiny_model), str(saved[0]))
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in groups] == [(0.125, 0.5, (0.5, 0.6))] * 2
    assert stepped == [True, True]


def save_half(rank: int, ranks: int, path: str, target: str) -> list[bool]:
    """A checkpoint while the critic warms up."""
    trained = fresh(path, ranks)
    step({"critic": trained["critic"]})
    write(checkpoint_files.copy_shards(trained, averaged(trained, 0.5)), target, rank)
    return [bool(part.optimizer.state) for part in trained.values()]


@pytest.mark.slow
def test_an_optimizer_that_has_not_stepped_is_left_so(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    assert on_ranks(2, save_half, str(tiny_model), str(tmp_path)) == [[False, True]] * 2
    ((_, stepped),) = on_ranks(1, reloaded, str(tiny_model), str(tmp_path))
    assert stepped == [False, True]


def load_without_pickle(rank: int, ranks: int, path: str, source: str) -> int:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    trained = fresh(path, ranks)
    average = averaged(trained, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Unpickler", "_Unpickler", "load", "loads"):
            patch.setattr(pickle, name, refused)
        patch.setattr(torch, "load", refused)
        checkpoint_files.load_state(files(source), trained, average)
    return sum(int(tensor.full_tensor().count_nonzero()) for tensor in average.values())


@pytest.mark.slow
def test_nothing_is_unpickled(on_ranks: OnRanks, saved: Saved, tiny_model: Path) -> None:
    (count,) = on_ranks(1, load_without_pickle, str(tiny_model), str(saved[0]))
    assert count > 0


def test_the_names_of_tensors_in_a_checkpoint_stay_as_they_are() -> None:
    """Other names would make every earlier checkpoint unreadable."""
    assert checkpoint_keys.model_weight("policy", "lm.norm.weight") == "policy.model.lm.norm.weight"
    assert checkpoint_keys.optimizer_state("critic", "head.bias", "exp_avg") == "critic.optimizer.head.bias.exp_avg"
    assert checkpoint_keys.ema_weight("lm.norm.weight") == "average.lm.norm.weight"
    assert checkpoint_keys.queued_round(0, "position") == "ahead.0.position"
    keys = ["policy.model.x", "critic.optimizer.x.step", "average.critic.model.y"]
    assert [checkpoint_keys.has_weights(keys, model) for model in ("policy", "critic")] == [True, False]
    assert [checkpoint_keys.has_optimizer_state(keys, model) for model in ("policy", "critic")] == [False, True]


# ---------------------------------------------------------------------------------------------------------------------
# Without a process group


def linear(rows: int = 3, bias: bool = True) -> ModelAndOptimizer:
    """Weights 0, 1, 2, ... and an optimizer that has stepped once."""
    layer = nn.Linear(2, rows, bias=bias)
    optimizer = torch.optim.AdamW(layer.parameters(), **ADAM)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    step({"policy": (trained := ModelAndOptimizer(layer, optimizer))})
    return trained


def test_weights_alone_leave_optimizers_fresh_and_other_models_as_they_are(tmp_path: Path) -> None:
    kept = linear()
    there = write(checkpoint_files.copy_shards({"policy": kept}, {}), tmp_path)
    policy, critic = nn.Linear(2, 3), nn.Linear(2, 3)
    before = critic.weight.clone()
    trained = {
        name: ModelAndOptimizer(part, torch.optim.AdamW(part.parameters()))
        for name, part in (("policy", policy), ("critic", critic))
    }
    checkpoint_files.load_weights(there, trained)
    torch.testing.assert_close(policy.state_dict(), kept.model.state_dict(), atol=0, rtol=0)
    assert critic.weight.equal(before) and not trained["policy"].optimizer.state


def test_a_value_head_that_a_checkpoint_lacks_stays_fresh(tmp_path: Path) -> None:
    kept, policy = linear(), nn.Linear(2, 3)
    there = write(checkpoint_files.copy_shards({"policy": kept}, {}), tmp_path)
    policy.value_head = nn.Linear(2, 1)
    before = copy.deepcopy(policy.value_head.state_dict())
    trained = ModelAndOptimizer(policy, torch.optim.AdamW(policy.parameters()))
    checkpoint_files.load_weights(there, {"policy": trained})
    assert policy.weight.equal(kept.model.weight)
    torch.testing.assert_close(policy.value_head.state_dict(), before, atol=0, rtol=0)
    policy.other = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"has no policy\.model\.other\.\w+: it is of another model"):
        checkpoint_files.load_weights(there, {"policy": trained})


def test_no_run_starts_from_a_checkpoint_without_a_policy(tmp_path: Path) -> None:
    there = write(checkpoint_files.copy_shards({"critic": linear()}, {"policy.model.weight": torch.zeros(1)}), tmp_path)
    critic = linear()
    before = copy.deepcopy(critic.model.state_dict())
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no weights of a policy$"):
        checkpoint_files.load_weights(there, {"critic": critic, "policy": linear()})
    torch.testing.assert_close(critic.model.state_dict(), before, atol=0, rtol=0)


def test_a_checkpoint_is_read_straight_from_s3(bucket: str, tmp_path: Path) -> None:
    kept, other = linear(), linear()
    step({"policy": kept})
    (file,) = write(checkpoint_files.copy_shards({"policy": kept}, {}), tmp_path)
    remote = open_storage(bucket) / file.name
    upload_file(Path(file.path), remote)
    checkpoint_files.load_state([remote], {"policy": other}, {})
    torch.testing.assert_close(other.model.state_dict(), kept.model.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(other.optimizer.state_dict(), kept.optimizer.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "text"),
    [
        (linear(bias=False), linear(), "the checkpoint has no policy.model.bias: it is of another model"),
        (linear(3), linear(4), "policy.model.weight is [3, 2] in the checkpoint, [4, 2] in this model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_one_line(
    saved_as: ModelAndOptimizer, loaded_as: ModelAndOptimizer, text: str, tmp_path: Path
) -> None:
    there = write(checkpoint_files.copy_shards({"policy": saved_as}, {}), tmp_path)
    with pytest.raises(CheckpointError) as refused:
        checkpoint_files.load_state(there, {"policy": loaded_as}, {})
    assert str(refused.value) == text


def test_a_missing_average_is_named(tmp_path: Path) -> None:
    there = write(checkpoint_files.copy_shards({"policy": linear()}, {}), tmp_path)
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no average\.weight: it is of another model$"):
        checkpoint_files.load_state(there, {"policy": linear()}, {"weight": torch.zeros(3, 2)})
    with (
        CheckpointReader(there) as parts,
        pytest.raises(CheckpointError, match=r"^the checkpoint has no average\.weight$"),
    ):
        parts.read_full("average.weight")


def test_a_tensor_that_is_not_in_full_is_refused(tmp_path: Path) -> None:
    shards = checkpoint_files.copy_shards({"policy": linear()}, {})
    part = Shard(shards["policy.model.weight"].local[:2], (0, 0), (3, 2))
    there = write(shards | {"policy.model.weight": part}, tmp_path)
    with pytest.raises(CheckpointError, match=r"^policy\.model\.weight is not in full in the checkpoint$"):
        checkpoint_files.load_state(there, {"policy": linear()}, {})


def with_header(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


LAYOUT = {"layout": json.dumps({"policy.model.weight": {"offset": [0, 0], "shape": [3, 2]}})}
TENSOR = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
NONE = {
    "empty": b"",
    "short": b"\x01\x02",
    "text": b"this is a text and no tensors are in it",
    "a length without end": b"\xff" * 8 + b"{}",
    "no json": with_header(b"\xff\xfe{"),
    "a list": with_header([]),
    "a number": with_header(5),
    "no layout": with_header({"policy.model.weight": TENSOR}),
    "not in the layout": with_header({"__metadata__": LAYOUT, "other": TENSOR}),
    "a layout that is none": with_header({"__metadata__": {"layout": "[]"}, "policy.model.weight": TENSOR}),
    "another kind of numbers": with_header({"__metadata__": LAYOUT, "policy.model.weight": TENSOR | {"dtype": "F8"}}),
    "another size": with_header({"__metadata__": LAYOUT, "policy.model.weight": TENSOR | {"shape": [4, 2]}}),
    "no offsets": with_header({"__metadata__": LAYOUT, "policy.model.weight": {"dtype": "F32", "shape": [3, 2]}}),
    "a tensor that is cut": with_header({"__metadata__": LAYOUT, "policy.model.weight": TENSOR})[:-1],
}


@pytest.mark.parametrize("content", NONE.values(), ids=NONE.keys())
def test_a_malformed_file_is_named_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank_00000.safetensors").write_bytes(content)
    layer = nn.Linear(2, 3, bias=False)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors|policy\.model\.weight") as refused:
        checkpoint_files.load_state(
            files(tmp_path), {"policy": ModelAndOptimizer(layer, torch.optim.AdamW(layer.parameters()))}, {}
        )
    assert "\n" not in str(refused.value)


def test_the_safetensors_file_of_another_program_is_refused(tmp_path: Path) -> None:
    save_file({"policy.model.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^model\.safetensors is not a file of a checkpoint: ") as refused:
        CheckpointReader(files(tmp_path))
    assert "\n" not in str(refused.value)


def test_every_kind_of_number_is_kept(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    tensors: dict[str, Tensor] = {str(kind): torch.tensor([0, 1, 3], dtype=kind) for kind in kinds}
    tensors |= {"bool": torch.tensor([[True], [False]]), "scalar": torch.tensor(7.5), "nan": torch.tensor([math.nan])}
    there = write({n: Shard(t, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors.items()}, tmp_path)
    with CheckpointReader(there) as parts:
        found = {name: parts.read_full(name) for name in parts.names}
    torch.testing.assert_close(found, tensors, atol=0, rtol=0, equal_nan=True)


Cuts = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rows=Cuts, columns=Cuts, data=st.data())
def test_any_part_is_read_from_pieces_cut_in_any_way(rows: list[int], columns: list[int], data: st.DataObject) -> None:
    """Pieces of so many rows and columns each, a file per row of pieces."""
    height, width = sum(rows), sum(columns)
    tensor = torch.arange(height * width, dtype=torch.float32).view(height, width)
    with tempfile.TemporaryDirectory() as folder:
        for i, high in enumerate(rows):
            for j, wide in enumerate(columns):
                top, left = sum(rows[:i]), sum(columns[:j])
                piece = Shard(tensor[top : top + high, left : left + wide], (top, left), (height, width))
                write({"x": piece}, folder, i * len(columns) + j)
        first = (data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1)))
        size = (data.draw(st.integers(1, height - first[0])), data.draw(st.integers(1, width - first[1])))
        with CheckpointReader(files(folder)) as parts:
            found = parts.read("x", first, size, (height, width))
            assert parts.read_full("x").equal(tensor)
    assert found.equal(tensor[first[0] : first[0] + size[0], first[1] : first[1] + size[1]])
