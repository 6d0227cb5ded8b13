"""Sharded training state: saved on two ranks, loaded on one, two and four, to the last bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OnRanks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from rlx import checkpoint, config, worker
from rlx.checkpoint import Trained

MANIFEST: dict[str, Any] = {"step": 3, "kl": {"coef": 0.1}, "cursor": [1, 17], "run": None, "é": 1e-9}


def fresh(path: str, ranks: int, lora_rank: int) -> dict[str, Trained]:
    settings = config.from_tree({"model": {"lora_rank": lora_rank}})
    return worker._models(settings, path, init_device_mesh("cpu", (ranks,)))[0]


def averaged(trained: dict[str, Trained], decay: float) -> dict[str, Any]:
    """Stands for the average of the policy's weights: other numbers in tensors sharded alike."""
    return {name: decay * p.detach() for name, p in trained["policy"].model.named_parameters()}


def step(trained: dict[str, Trained]) -> None:
    """An optimizer step on gradients that differ between all parameters and are the same on any number of ranks."""
    for part in trained.values():
        for i, parameter in enumerate(p for p in part.model.parameters() if p.requires_grad):
            parameter.grad = parameter.detach() * 0.1 + 0.01 * (i + 1)
        part.optimizer.step()
        part.optimizer.zero_grad()


def whole(trained: dict[str, Trained], average: dict[str, Any]) -> dict[str, Any]:
    """All parameters, their average and the whole optimizer state, gathered, by name."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    states = {name: get_state_dict(part.model, part.optimizer, options=options) for name, part in trained.items()}
    gathered = {name: parameters | moments for name, (parameters, moments) in states.items()}
    return gathered | {"average": {name: p.full_tensor() for name, p in average.items()}}


def save(rank: int, ranks: int, path: str, target: str, lora_rank: int) -> tuple[dict[str, Any], list[str]]:
    """This rank's files end up beside those of the others, as Ray Train merges them."""
    trained = fresh(path, ranks, lora_rank)
    for _ in range(3):
        step(trained)
    average = averaged(trained, 0.5)
    with checkpoint.written(trained, average, MANIFEST, rank) as folder:
        shutil.copytree(folder, target, dirs_exist_ok=True)
        files = sorted(file.name for file in Path(folder).iterdir())
    assert not Path(folder).exists()
    step(trained)  # what it would come to
    return whole(trained, average), files


def load(rank: int, ranks: int, path: str, source: str, lora_rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    trained = fresh(path, ranks, lora_rank)
    average = averaged(trained, 0.0)
    manifest = checkpoint.load(source, trained, average)
    step(trained)
    return whole(trained, average), manifest


@pytest.fixture(scope="module")
def saved(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, on_ranks(2, save, str(tiny_model), str(folder), 0)


def test_each_rank_writes_its_own_shards(saved: tuple[Path, list[Any]]) -> None:
    folder, results = saved
    assert [files for _, files in results] == [[".metadata", "__0_0.distcp", "manifest.json"], ["__1_0.distcp"]]
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes)
    assert json.loads((folder / "manifest.json").read_text()) == MANIFEST


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_continues_exactly(
    ranks: int, on_ranks: OnRanks, saved: tuple[Path, list[Any]], tiny_model: Path
) -> None:
    folder, ((expected, _), _) = saved
    (found, manifest), *_ = on_ranks(ranks, load, str(tiny_model), str(folder), 0)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert manifest == MANIFEST
    for part, norm in (("policy", "lm.model.norm"), ("critic", "backbone.norm")):  # there was something to restore
        assert found[part][f"state.{norm}.weight.step"] == 4
        assert found[part][f"state.{norm}.weight.exp_avg"].count_nonzero() > 0


def test_adapters_continue_exactly_on_another_number_of_ranks(
    on_ranks: OnRanks, tiny_model: Path, saved: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    (expected, _), _ = on_ranks(2, save, str(tiny_model), str(tmp_path), 4)
    ((found, _),) = on_ranks(1, load, str(tiny_model), str(tmp_path), 4)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    kept = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    tensors = [name for name in kept if name.startswith(("policy.model.", "policy.optimizer.state."))]
    assert tensors and all(".lora_" in name or ".value_head." in name for name in tensors)
    assert any(".lora_B." in name and "exp_avg_sq" in name for name in kept)


def reloaded(rank: int, ranks: int, path: str, source: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The optimizers' settings and whether they have state, after a load into a run with other settings."""
    settings = config.from_tree({"train": {"weight_decay": 0.5, "adam_betas": [0.5, 0.6], "actor_lr": 0.125}})
    trained = worker._models(settings, path, init_device_mesh("cpu", (ranks,)))[0]
    before = [dict(part.optimizer.param_groups[0], params=None) for part in trained.values()]
    checkpoint.load(source, trained, averaged(trained, 0.0))
    after = [dict(part.optimizer.param_groups[0], params=None) for part in trained.values()]
    assert after == before
    return after, [bool(part.optimizer.state) for part in trained.values()]


def test_settings_of_optimizers_are_the_runs_own(
    on_ranks: OnRanks, saved: tuple[Path, list[Any]], tiny_model: Path
) -> None:
    ((groups, stepped),) = on_ranks(1, reloaded, str(tiny_model), str(saved[0]))
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.5, (0.5, 0.6))] * 2
    assert stepped == [True, True]


def save_half(rank: int, ranks: int, path: str, target: str) -> list[bool]:
    """A checkpoint while the critic warms up."""
    trained = fresh(path, ranks, 0)
    step({"critic": trained["critic"]})
    with checkpoint.written(trained, averaged(trained, 0.5), MANIFEST, rank) as folder:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    return [bool(part.optimizer.state) for part in trained.values()]


def test_an_optimizer_that_has_not_stepped_is_left_so(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    assert on_ranks(2, save_half, str(tiny_model), str(tmp_path)) == [[False, True]] * 2
    ((_, stepped),) = on_ranks(1, reloaded, str(tiny_model), str(tmp_path))
    assert stepped == [False, True]


@pytest.mark.parametrize("missing", ["manifest.json", ".metadata", "everything"])
def test_a_folder_without_a_checkpoint_is_named(missing: str, saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    if missing != "everything":
        shutil.copytree(saved[0], folder)
        (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"no checkpoint in {folder}: ") as error:
        checkpoint.load(str(folder), {}, {})
    assert "\n" not in str(error.value)
