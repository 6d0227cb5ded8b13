"""Packed rows by torch's kernel: in bfloat16 they are as near to float32 as padded rows are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_packing import shared
from test_policy import randomize_head
from test_update import trainer_of
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlx.models import loading, packing
from rlx.models.loading import load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def scored(path: str, dtype: torch.dtype, is_packed: bool, compiled: bool = False) -> list[Tensor]:
    """Log-probabilities, entropies and values, and the gradients of their sums, in float32."""
    torch._dynamo.reset()
    policy: Any = randomize_head(load_policy(path, head="zero")).to("cuda", dtype)
    if is_packed:
        packing.enable(policy.lm)
    if compiled:
        loading.compile_layers(policy)
    tokens = tree_map_only(Tensor, Tensor.cuda, shared())
    inputs = tokens if is_packed else tokens._replace(packing=None)
    for _ in range(2):
        output = policy(inputs, 0.7, entropy=True)
    (output.logprobs.sum() + output.entropy.sum() + output.values.sum()).backward()
    gradients = torch.cat([p.grad.flatten().float() for p in policy.parameters()])
    return [grid.detach() for grid in output] + [gradients]


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_rows_are_as_exact_as_padded_ones(tiny_model: Path, compiled: bool) -> None:
    exact = scored(str(tiny_model), torch.float32, False)
    padded, packed = (scored(str(tiny_model), torch.bfloat16, way, compiled) for way in (False, True))
    for true, one, other in zip(exact, padded, packed, strict=True):
        assert (other - true).norm() < 1.5 * (one - true).norm() + 1e-3 * true.norm()
        assert (other - true).norm() < 0.05 * true.norm()


def default(rank: int, ranks: int, path: str) -> list[bool]:
    ways = ({"scaling.use_gpu": True, "model.dtype": "bfloat16"}, {"scaling.use_gpu": True})
    return [trainer_of(path, way, 60, "cuda").policy.packs for way in ways]


def test_updates_in_bfloat16_are_packed(on_ranks: OnRanks, tiny_model: Path) -> None:
    assert on_ranks(1, default, str(tiny_model))[0] == [True, False]
