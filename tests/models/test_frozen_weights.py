"""Frozen weights are held in the precision of the forward pass, which changes no bit of what is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_policy import padded
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlx.config.loading import from_tree, with_overrides
from rlx.mesh import Mesh
from rlx.models import fsdp, lora
from rlx.rollout.weight_sync import gather
from rlx.storage import checkpoint_files
from rlx.storage.filesystem import Storage
from rlx.training.setup import models
from rlx.training.setup.models import Models, build_models

ADAPTERS = {"model.lora_rank": 4, "model.value_head_init": "normal", "model.reference": "copy"}


def built(path: str, ranks: int, held: torch.dtype | None = None, **chosen: Any) -> Models:
    """The models of a run in bfloat16; `held`: frozen weights are held in it instead."""
    tree = {
        "model": {"path": path, "dtype": "bfloat16"},
        "algorithm": {"kl_coef": 0.1},
        "scaling": {"num_workers": ranks},
    }
    config, move = from_tree(with_overrides(tree, chosen)), fsdp._move_weights
    with pytest.MonkeyPatch.context() as patch:
        if held:
            patch.setattr(fsdp, "_move_weights", lambda unit, device, dtype: move(unit, device, held))
            patch.setattr(models._Loader, "frozen_dtype", held)
        made = build_models(config, path, Mesh.of("cpu", config.parallel.tp).mesh)
    with torch.no_grad():
        for name, weight in made.trained["policy"].model.named_parameters():
            if ".lora_B" in name:  # it begins at zero
                fill = torch.linspace(-0.3, 0.3, weight.numel()).view(weight.shape)
                weight.copy_(torch.distributed.tensor.distribute_tensor(fill, weight.device_mesh, weight.placements))
    return made


def local(weight: Any) -> Tensor:
    shard: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return shard.detach()


def learnt(made: Models) -> dict[str, Tensor]:
    """All that a policy, and its reference, say of some tokens, before and after a step; and the gradients between."""
    policy, found = made.trained["policy"].model, dict[str, Tensor]()
    for step in range(2):
        with torch.no_grad(), lora.adapters_off(policy):
            found[f"off {step}"] = policy(padded(), 0.7).logprobs
        said = policy(padded(), 0.7, entropy=True)
        found |= {f"{name} {step}": getattr(said, name).detach() for name in ("logprobs", "entropy", "values")}
        (said.logprobs + 0.1 * said.entropy + said.values).sum().backward()
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        assert all(p.grad.dtype is torch.float32 and local(p.grad).isfinite().all() for p in trained.values())
        found |= {f"{name} {step}": local(p.grad).clone() for name, p in trained.items()}
        with torch.no_grad():
            for p in trained.values():
                p.sub_(0.05 * p.grad)
                p.grad = None
    return found | {"reference": made.reference(padded(), 0.7).logprobs}


def frozen_bytes(made: Models) -> int:
    """Bytes of the frozen weights that this rank holds, the reference's too; trained ones have to be float32."""
    weights = [p for each in (made.trained["policy"].model, made.reference) for p in each.parameters()]
    assert {p.dtype for p in weights if p.requires_grad} == {torch.float32}
    return sum(local(p).nbytes for p in weights if not p.requires_grad)


def both_ways(
    rank: int, ranks: int, path: str, chosen: dict[str, Any], unit: int
) -> list[tuple[int, dict[str, Tensor]]]:
    """With frozen weights in float32 and in bfloat16, their bytes and what is computed."""
    fsdp.UNIT = unit
    ways = [built(path, ranks, held, **ADAPTERS, **chosen) for held in (torch.float32, None)]
    return [(frozen_bytes(made), learnt(made)) for made in ways]


@pytest.mark.parametrize(
    ("model", "ranks", "unit", "chosen"),
    [
        ("tiny_model", 1, fsdp.UNIT, {}),
        ("untied_model", 2, 1, {"train.gradient_checkpointing": True}),  # each layer is a unit
        ("tiny_model", 2, fsdp.UNIT, {}),
    ],
)
def test_half_of_the_memory_holds_the_same_model(
    model: str, ranks: int, unit: int, chosen: dict[str, Any], on_ranks: OnRanks, request: pytest.FixtureRequest
) -> None:
    path = str(request.getfixturevalue(model))
    for (wide, expected), (narrow, found) in on_ranks(ranks, both_ways, path, chosen, unit):
        assert wide == 2 * narrow > 0
        assert any(".lora_A" in name and gradient.any() for name, gradient in expected.items())
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def cut_references(rank: int, ranks: int, path: str) -> list[tuple[set[torch.dtype], Tensor]]:
    """The types of a reference's weights that are cut over tensor-parallel ranks, and its scores."""
    ways = [built(path, ranks, held, **{"parallel.tp": ranks}).reference for held in (torch.float32, None)]
    return [({p.dtype for p in each.parameters()}, each(padded(), 0.7).logprobs) for each in ways]


def test_a_reference_with_cut_layers_is_held_so_too(on_ranks: OnRanks, tiny_model: Path) -> None:
    for (wide, expected), (narrow, found) in on_ranks(2, cut_references, str(tiny_model)):
        assert (wide, narrow) == ({torch.float32}, {torch.bfloat16})
        assert torch.equal(found, expected)


def merged(rank: int, ranks: int, path: str) -> list[tuple[Tensor, Tensor]]:
    """Each weight that engines are sent, and what the policy's own weights add up to in float32."""
    policy: Any = built(path, ranks, **ADAPTERS).trained["policy"].model
    weights = lora.engine_weights(policy)
    sent = dict(zip((w.name for w in weights), gather.gather_full(weights, torch.float32), strict=True))
    own = {name.removeprefix("lm."): fsdp.full_tensor(p).float() for name, p in policy.named_parameters()}
    own, pairs = {name.replace(".base_layer.", "."): weight for name, weight in own.items()}, []
    scale = policy.lm.base_model.layers[0].self_attn.q_proj.scaling["default"]
    for name, weight in sent.items():
        down, up = (own.get(f"{name.removesuffix('weight')}lora_{side}.default.weight") for side in "AB")
        pairs.append((weight, own[name] if down is None or up is None else own[name] + scale * (up @ down)))
    return pairs


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_merged_in_float32(on_ranks: OnRanks, tiny_model: Path, ranks: int) -> None:
    for pairs in on_ranks(ranks, merged, str(tiny_model)):
        assert all(torch.equal(sent.float(), expected) for sent, expected in pairs)
        assert any(sent.dtype is torch.float32 and (sent != sent.bfloat16()).any() for sent, _ in pairs)


def started(rank: int, ranks: int, path: str, folder: str) -> list[tuple[Tensor, Tensor]]:
    """The adapters of a reference that is read from a checkpoint of float32, and those in the checkpoint."""
    made = built(path, ranks, **ADAPTERS)
    policy = made.trained["policy"]
    file = Path(folder, "rank_00000.safetensors")
    checkpoint_files.write_shards(checkpoint_files.copy_shards({"policy": policy}, {}), file)
    files = [Storage.local(file)]
    assert not any("base_layer" in name for name in checkpoint_files.CheckpointReader(files).names)
    checkpoint_files.read_reference(files, policy, made.reference)
    own = {name: local(p) for name, p in policy.model.named_parameters() if ".lora_" in name}
    theirs = dict(made.reference.named_parameters())
    return [(local(theirs[name]), weight) for name, weight in own.items()]


def test_a_frozen_copy_is_read_from_a_checkpoint_of_float32(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    (pairs,) = on_ranks(1, started, str(tiny_model), str(tmp_path))
    assert len(pairs) > 0
    for held, saved in pairs:
        assert saved.dtype is torch.float32 and saved.any() and torch.equal(held, saved.bfloat16())
