"""What of the update shows on GPUs only: compiled layers, shards in host memory, and how much memory logits take."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OnRanks
from test_update import trainer_of, updated
from torch import Tensor, nn

from rlx.models import logprobs
from rlx.models.logprobs import token_logprobs

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


def peak(chunk: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Tensor]]:
    """GPU memory that both passes need beside their inputs, and the results, of a vocabulary of today's size."""
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    vocabulary, tokens, hidden = 151_936, 4096, 256
    generator = torch.Generator("cuda").manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    nn.init.normal_(head.weight, std=0.05, generator=generator)
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen, spread = token_logprobs(head, states, targets, 0.7, entropy=True)
    assert spread is not None and states.grad is None
    (chosen + spread).sum().backward()
    assert states.grad is not None
    return torch.cuda.max_memory_allocated() - before, [chosen.detach(), spread.detach(), states.grad.float()]


def test_logits_take_a_few_chunks_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    all_logits = 151_936 * 4096
    most, whole = peak(all_logits, monkeypatch)
    least, chunked = peak(2**26, monkeypatch)
    assert most > 12 * all_logits
    assert least < 0.3 * most
    assert least < 30 * 2**26 + 4 * 151_936 * 256  # bytes: a chunk's tensors, and the weights' gradients
    for one, other in zip(chunked, whole, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()
