"""Optimizers: the same step on any number of ranks, as torch's own would take it, and their state in checkpoints."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.mesh import Mesh
from rlx.models.loading import load_policy
from rlx.runs import preflight
from rlx.storage import checkpoint_files
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.storage.filesystem import Storage
from rlx.training.optimizers.choice import set_lr
from rlx.training.optimizers.eight_bit import eight_bit_adamw
from rlx.training.optimizers.groups import hidden_matrices
from rlx.training.setup.models import build_models

RATE, DECAY = 1e-3, 0.1


def policy_of(path: str, name: str) -> ModelAndOptimizer:
    tree = {"train.optimizer": name, "train.actor_lr": RATE, "train.weight_decay": DECAY, "model.reference": "none"}
    config = from_tree(with_overrides({}, tree | {"algorithm.kl_coef": 0.0, "algorithm.advantage": "grpo"}))
    return build_models(config, path, Mesh.of("cpu", 1).mesh).trained["policy"]


def gradient(shape: torch.Size, number: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def steps(trained: ModelAndOptimizer, first: int, count: int) -> dict[str, Tensor]:
    """The weights after a few steps, each with gradients of its number; the learning rate is another in each."""
    for number in range(first, first + count):
        for i, weight in enumerate(trained.model.parameters()):
            assert isinstance(weight, DTensor)
            whole = gradient(weight.shape, 1000 * number + i)
            weight.grad = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        for group in trained.optimizer.param_groups:
            set_lr(group, RATE / (1 + number))
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    return {name: p.full_tensor().detach().clone() for name, p in trained.model.named_parameters()}  # type: ignore[operator]


def saved(rank: int, ranks: int, path: str, folder: str, name: str) -> dict[str, Tensor]:
    """The weights after two steps, a checkpoint and a third step; and whether a rank has all of a moment."""
    trained = policy_of(path, name)
    steps(trained, 0, 2)
    file = Path(folder, f"rank_{rank:05d}.safetensors")
    checkpoint_files.write_shards(checkpoint_files.copy_shards({"policy": trained}, {}), file)
    return steps(trained, 2, 1)


def restored(rank: int, ranks: int, path: str, folder: str, name: str) -> dict[str, Tensor]:
    """The weights after a third step from that checkpoint."""
    trained = policy_of(path, name)
    files = [Storage.local(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    checkpoint_files.load_state(files, {"policy": trained}, {})
    return steps(trained, 2, 1)


def check_ranks_and_checkpoints(on_ranks: OnRanks, path: str, folder: Path, name: str) -> dict[str, Tensor]:
    """The weights of three steps are equal on one and two ranks, and with a checkpoint of two ranks in between."""
    for count in (1, 2):
        (folder / f"{count}").mkdir()
    (alone,) = on_ranks(1, saved, path, str(folder / "1"), name)
    expected: dict[str, Tensor] = alone
    others = [
        *on_ranks(2, saved, path, str(folder / "2"), name),
        *on_ranks(1, restored, path, str(folder / "2"), name),
        *on_ranks(2, restored, path, str(folder / "1"), name),
        *on_ranks(1, restored, path, str(folder / "1"), name),
    ]
    for other in others:
        torch.testing.assert_close(other, expected, atol=0, rtol=0)
    return expected


@pytest.mark.slow
def test_muon_is_that_of_torch_for_hidden_matrices_and_adamw_for_the_rest(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    found = check_ranks_and_checkpoints(on_ranks, str(tiny_model), tmp_path, "muon")
    plain = load_policy(str(tiny_model), head=None)
    hidden = hidden_matrices(plain)
    names = {name.split(".")[-2] for name, p in plain.named_parameters() if p in hidden}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    others = [p for p in plain.parameters() if p not in hidden]
    muon = torch.optim.Muon(list(hidden), weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in others if (p.ndim > 1) == decays], "weight_decay": DECAY * decays} for decays in (0, 1)
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for number in range(3):
        for i, p in enumerate(plain.parameters()):
            p.grad = gradient(p.shape, 1000 * number + i)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = RATE / (1 + number)
        muon.step()
        adamw.step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), atol=1e-5, rtol=0)
        assert (p - before[name]).abs().max() > 3e-4


@pytest.mark.slow
def test_adamw_of_8_bits_is_the_same_on_any_ranks_and_near_that_of_32(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    found = check_ranks_and_checkpoints(on_ranks, str(tiny_model), tmp_path, "adamw_8bit")
    (tmp_path / "exact").mkdir()
    (exact,) = on_ranks(1, saved, str(tiny_model), str(tmp_path / "exact"), "adamw")
    for name, weight in exact.items():
        torch.testing.assert_close(found[name], weight, atol=RATE, rtol=0)
    assert any(not torch.equal(found[name], weight) for name, weight in exact.items())
    small, large = ((tmp_path / each / "rank_00000.safetensors").stat().st_size for each in ("1", "exact"))
    assert small < 0.55 * large  # 4 + 2 x 1.06 bytes a number for 12


def too_small(rank: int, ranks: int) -> str:
    mesh = Mesh.of("cpu", 1).mesh
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(70, 64), mesh, [Shard(0)], src_data_rank=None))
    with pytest.raises(ConfigError) as refused:
        eight_bit_adamw(from_tree({}).train, [{"params": [weight], "lr": 1.0, "weight_decay": 0.0}])
    return str(refused.value)


@pytest.mark.slow
def test_8_bits_are_refused_where_a_rank_has_too_little_of_a_matrix(on_ranks: OnRanks) -> None:
    pytest.importorskip("torchao")
    said = "train.optimizer adamw_8bit: a matrix of 70 x 64 on 2 workers leaves one of them fewer than 4096 numbers"
    assert all(each.startswith(said) for each in on_ranks(2, too_small))


def test_a_missing_torchao_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"^train.optimizer adamw_8bit needs torchao: pip install 'rlx\[torchao\]'$"):
        preflight.check_quickly(from_tree({"train": {"optimizer": "adamw_8bit"}}), has_prompts=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model.lora_rank": 4}, "train.optimizer muon does not work with model.lora_rank: use adamw"),
    ({"parallel.tp": 2, "scaling.num_workers": 2}, "does not work with train.optimizer muon: set only one of them"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_other_optimizers_do_not_work_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tree(with_overrides({}, {"train.optimizer": "muon", **settings}))
