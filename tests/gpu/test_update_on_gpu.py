"""What of the update shows on GPUs only: compiled layers, and shards in host memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_update import trainer_of, updated
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OFFLOAD: dict[str, Any] = {"model.offload": ["critic", "reference"], "scaling.use_gpu": True}
WAYS: list[dict[str, Any]] = [OFFLOAD, {"train.compile": True, "train.gradient_checkpointing": True}]


def on_gpu(rank: int, ranks: int, path: str) -> list[dict[str, Tensor]]:
    return [updated(rank, ranks, path, way, 60, "cuda") for way in ({}, *WAYS)]


def test_an_update_is_the_same_compiled_and_with_shards_in_host_memory(on_ranks: OnRanks, tiny_model: Path) -> None:
    for plain, *others in on_ranks(torch.cuda.device_count(), on_gpu, str(tiny_model)):
        for way, found in zip(WAYS, others, strict=True):
            torch.testing.assert_close(found, plain, atol=3e-5, rtol=1e-4, msg=lambda m, w=way: f"{w}: {m}")


def offloaded(rank: int, ranks: int, path: str) -> list[tuple[int, set[str]]]:
    return [homes(rank, ranks, path, way) for way in ({}, OFFLOAD)]


def homes(rank: int, ranks: int, path: str, way: dict[str, Any]) -> tuple[int, set[str]]:
    """GPU memory that a run's models take, and where the critic's weights and its optimizer's state are."""
    gc.collect()  # what there was before refers to itself
    before = torch.cuda.memory_allocated()
    critic = (run := trainer_of(path, way, 60, "cuda")).models["critic"].model
    optimizer = torch.optim.AdamW(critic.parameters(), fused=True)
    for parameter in critic.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [*critic.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    assert run.reference is not None
    return torch.cuda.memory_allocated() - before, {tensor.to_local().device.type for tensor in tensors}


def test_what_is_offloaded_takes_no_gpu_memory(on_ranks: OnRanks, tiny_model: Path) -> None:
    for (whole, on_device), (left, at_home) in on_ranks(torch.cuda.device_count(), offloaded, str(tiny_model)):
        assert (on_device, at_home) == ({"cuda"}, {"cpu"})
        assert left < 0.3 * whole  # the policy's weights, of six times as much
