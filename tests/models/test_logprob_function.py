"""Scores whose gradient is written over the logits, with torch's operations in the place of the GPU's kernels."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_logprobs import HEADS, HIDDEN, LargestTensor, inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlx.models import logprobs
from rlx.models.logprobs import InPlaceScores, runs_kernels, score_logits, token_logprobs

TOKENS, VOCABULARY = 37, 50


def token_scores(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Tensor:
    """See `logprob_kernel.token_scores`; the first two rows: the largest logit, the logarithm of the sum in nats."""
    largest = logits.float().max(-1).values
    log_sums = ((logits.float() - largest[:, None]) / temperature).logsumexp(-1)
    log_p = (logits.float() - largest[:, None]) / temperature - log_sums[:, None]
    chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
    rows = [largest, log_sums, chosen] + ([-(log_p.exp() * log_p).sum(-1)] if entropy else [])
    return torch.stack(rows)


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    scores: Tensor,
    temperature: float,
    upstream: tuple[Tensor, Tensor | None],
) -> None:
    """See `logprob_kernel.write_gradient`."""
    largest, log_sums = scores[:2]
    log_p = (logits.float() - largest[:, None]) / temperature - log_sums[:, None]
    slope = upstream[0][:, None].expand_as(log_p)
    if upstream[1] is not None:
        slope = slope + upstream[1][:, None] * (log_p + scores[3][:, None])
    gradient = -log_p.exp() * slope
    gradient[torch.arange(len(logits)), targets] += upstream[0]
    logits.copy_(gradient / temperature)


PASSES = SimpleNamespace(token_scores=token_scores, write_gradient=write_gradient)
in_place = partial(InPlaceScores.apply, PASSES)


def leaf(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, VOCABULARY, generator=generator)
    return logits.to(dtype).requires_grad_(), torch.randint(VOCABULARY, (TOKENS,), generator=generator)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both": lambda chosen, spread: (chosen * chosen.detach() + 2 * spread).sum(),
    "log-probabilities": lambda chosen, spread: chosen.sum(),
    "entropy": lambda chosen, spread: spread.square().sum(),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": torch.clone,
    "columns": lambda logits: torch.cat([logits, logits], 1)[:, :VOCABULARY],
    "transposed": lambda logits: logits.t().clone().t(),
    "one row, many times": lambda logits: logits[:1].clone().expand(TOKENS, -1),
    "one token": lambda logits: logits[:1].clone(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_the_function_of_score_logits(view: str, loss: str, temperature: float) -> None:
    found = []
    for scorer in (score_logits, in_place):
        logits, targets = leaf()
        seen = VIEWS[view](logits)
        results = scorer(seen, targets[: len(seen)], temperature, True)
        LOSSES[loss](*results).backward()
        found.append([*results, logits.grad])
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=1e-5)


def test_the_gradient_lies_where_the_logits_were() -> None:
    logits, targets = leaf(torch.bfloat16)
    held, seen = logits.clone(), list[Tensor]()
    held.register_hook(seen.append)
    in_place(held, targets, 1.0, False)[0].sum().backward()
    assert seen[0].data_ptr() == held.data_ptr()
    assert seen[0].dtype == torch.bfloat16


def test_logits_that_are_needed_twice_raise() -> None:
    logits, targets = leaf()
    held = logits.clone()
    first, second = (in_place(held, targets, temperature, False)[0].sum() for temperature in (1.0, 0.5))
    first.backward(retain_graph=True)
    for loss in (first, second):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_logits_that_are_computed_again_may_be_needed_twice() -> None:
    logits, targets = leaf()
    scored = checkpoint(lambda: in_place(logits.clone(), targets, 1.0, False)[0], use_reentrant=False)
    one, same = (torch.autograd.grad(scored.sum(), logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, same)
    assert one.count_nonzero() > 0


def test_gradients_of_gradients_raise() -> None:
    logits, targets = leaf()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(in_place(logits.clone(), targets, 1.0, False)[0].sum(), logits, create_graph=True)


def test_without_gradients_nothing_is_kept_or_changed() -> None:
    logits, targets = leaf()
    before = logits.detach().clone()
    with torch.no_grad():
        chosen, spread = in_place(logits, targets, 0.7, False)
    assert spread is None and not chosen.requires_grad
    assert torch.equal(logits, before)


# --- chunks


def gradients(kind: str, entropy: bool, stored: int) -> list[Tensor]:
    torch.manual_seed(1)
    head, (hidden, targets) = HEADS[kind](), inputs()
    chosen, spread = token_logprobs(head, hidden, targets, 0.7, entropy, stored_logits=stored)
    loss = chosen.square().sum() + (0 if spread is None else spread.sum())
    trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    return [chosen, *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize("stored", [0, 14 * VOCABULARY, 2**30])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_chunks_in_place_are_those_of_score_logits(
    kind: str, entropy: bool, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", 7 * VOCABULARY)
    expected = gradients(kind, entropy, stored)
    monkeypatch.setattr(logprobs, "runs_kernels", lambda device: True)
    monkeypatch.setattr(logprobs, "kernel_scores", in_place)
    torch.testing.assert_close(gradients(kind, entropy, stored), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("dtype", "chunk", "stored"), [(torch.float32, 4, 9), (torch.bfloat16, 8, 21)])
def test_chunks_and_stored_logits_fill_their_bytes(
    dtype: torch.dtype, chunk: int, stored: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is 4 float32 tokens or 8 in bfloat16; of the 37, those of the last chunks that fit 12 tokens' float32."""
    sizes, addresses = list[int](), dict[int, int]()

    def scored(logits: Tensor, *others: object) -> tuple[Tensor, Tensor | None]:
        sizes.append(len(logits))
        return in_place(logits, *others)

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and tensor.shape[1] == VOCABULARY and len(tensor) != HIDDEN:
            addresses[tensor.data_ptr()] = len(tensor)
        return tensor

    monkeypatch.setattr(logprobs, "CHUNK", 4 * VOCABULARY)
    monkeypatch.setattr(logprobs, "runs_kernels", lambda device: True)
    monkeypatch.setattr(logprobs, "kernel_scores", scored)
    head, (hidden, targets) = HEADS["plain"]().to(dtype), inputs()
    with LargestTensor() as recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(head, hidden.to(dtype), targets, 0.7, entropy, stored_logits=12 * VOCABULARY)
    assert max(sizes) == chunk
    assert sum(addresses.values()) == stored
    assert recorder.elements == HIDDEN * VOCABULARY  # the weights, transposed; all logits are more than twice as many


def test_chunks_are_an_eighth_of_what_may_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def scored(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        sizes.append(len(logits))
        return score_logits(logits, *others)

    monkeypatch.setattr(logprobs, "CHUNK", 4 * VOCABULARY)
    head, (hidden, targets) = HEADS["plain"](), inputs()
    for kernel, expected in ((True, [16, 16, 5]), (False, [4] * 9 + [1])):
        monkeypatch.setattr(logprobs, "runs_kernels", lambda device, kernel=kernel: kernel)
        monkeypatch.setattr(logprobs, "kernel_scores", scored)
        sizes.clear()
        token_logprobs(head, hidden, targets, 0.7, False, scored, stored_logits=8 * 16 * VOCABULARY)
        assert sizes == expected


@pytest.mark.parametrize(
    ("device", "module", "compiler", "expected"),
    [
        ("cuda", "triton", "gcc", True),
        ("cpu", "triton", "gcc", False),
        ("cuda", None, "gcc", False),
        ("cuda", "triton", None, False),
    ],
)
def test_kernels_need_a_gpu_triton_and_a_compiler(
    device: str, module: str | None, compiler: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(logprobs, "find_spec", lambda name: module)
    monkeypatch.setattr(logprobs.shutil, "which", lambda name: compiler)
    assert runs_kernels.__wrapped__(torch.device(device)) is expected
