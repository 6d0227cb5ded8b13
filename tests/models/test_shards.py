"""Models that were saved in bfloat16 are cut unit by unit; only what is cut is float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.loading import from_tree
from rlx.mesh import Mesh
from rlx.models import fsdp, loading, packing
from rlx.training.setup.models import build_models


@pytest.fixture(scope="module")
def half(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as it is after it was saved in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def cut(rank: int, ranks: int, path: str) -> tuple[dict[str, Tensor], list[int]]:
    """All models of a PPO run by name, and how many float32 numbers a rank held that were not cut, unit by unit."""
    whole: list[int] = []
    move, fsdp.UNIT = fsdp._move_weights, 1  # each layer is a unit

    def counted(unit: Any, device: str, dtype: torch.dtype) -> None:
        move(unit, device, dtype)
        whole.append(float32_numbers(models[-1]))

    models: list[nn.Module] = []
    shard = fsdp.shard

    def watched(model: nn.Module, *given: Any, **named: Any) -> nn.Module:
        models.append(model)
        return shard(model, *given, **named)

    fsdp._move_weights, fsdp.shard = counted, watched
    config = from_tree({"model": {"path": path}, "algorithm": {"kl_coef": 0.01}})
    made = build_models(config, path, Mesh.of("cpu", 1).mesh)
    assert all(isinstance(model, FSDPModule) for model in models) and len(models) == 3
    named = {name: part.model for name, part in made.trained.items()} | {"reference": made.reference}
    weights = {f"{name} {key}": weight for name, model in named.items() for key, weight in model.named_parameters()}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    return {name: fsdp.full_tensor(weight).detach().clone() for name, weight in weights.items()}, whole


def float32_numbers(model: nn.Module) -> int:
    weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    return sum(weight.numel() for weight in weights if weight.dtype is torch.float32)


@pytest.mark.parametrize(("share", "sizes"), [(0.5, [2, 2]), (0.25, [1, 3]), (1.0, []), (0.0, [])])
def test_a_unit_has_only_layers_that_are_computed_again_or_none(share: float, sizes: list[int]) -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    for place, layer in enumerate(layers):
        layer.gradient_checkpointing = place < 4 * share
    assert [len(unit) for unit in fsdp._units(layers)] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rank_holds_a_whole_model_in_float32(on_ranks: OnRanks, half: Path, ranks: int) -> None:
    policy = loading.load_policy(str(half), head=None)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in fsdp.decoder_layers(policy)]
    rest = sum(p.numel() for p in policy.parameters()) - sum(sizes)
    expected = {f"policy {name}": weight for name, weight in policy.named_parameters()}
    for weights, whole in on_ranks(ranks, cut, str(half)):
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
        # A layer at a time, and at last what is in no layer; the critic's new head is float32 from the start.
        assert max(whole) <= max(*sizes, rest) + 2 * policy.lm.config.hidden_size
        assert len(whole) == 3 * (len(sizes) + 1)


def test_packed_rows_are_tried_in_the_precision_of_the_file(half: Path) -> None:
    policy = loading.load_policy(str(half), head=None, dtype="auto")
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    assert packing.obstacle(policy.lm) is None
