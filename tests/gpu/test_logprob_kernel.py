"""The kernels that score logits, against float64: on a GPU, or anywhere by Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest -m gpu tests/gpu/test_logprob_kernel.py
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rlx.models import logprobs
from rlx.models.logprobs import kernel_scores, token_logprobs

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not os.environ.get("TRITON_INTERPRET"), reason="needs a GPU"),
]
DEVICE = "cuda" if ON_GPU else "cpu"
BFLOAT16 = 2**-8 if ON_GPU else 2**-7  # rounded to the nearest; the interpreter cuts digits off
LOSSES: dict[str, tuple[float, float]] = {"both": (1.0, 1.0), "log-probabilities": (1.0, 0.0), "entropy": (0.0, 1.0)}
SIZES = [(5, 7), (3, 65), (1, 4096), (2, 5000), (1, 151_936)]


def drawn(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).to(DEVICE, dtype)
    return logits, torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)


def loss_of(results: tuple[Tensor, Tensor | None], loss: str) -> Tensor:
    """A sum in which each token has another weight; what has the weight 0 is not in the graph."""
    chosen, spread = results
    weights = torch.linspace(-1.0, 2.0, len(chosen), device=DEVICE, dtype=chosen.dtype) + 0.1
    first, second = LOSSES[loss]
    parts = [(weights * chosen).sum()] if first else []
    if second:
        assert spread is not None
        parts.append((weights.flip(0) * spread).sum())
    return sum(parts, start=weights.new_zeros(()))


def exact(logits: Tensor, targets: Tensor, temperature: float, loss: str) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and the gradient in the logits, in float64; of -inf logits what is in the limit."""
    held = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(held / temperature, -1)
    chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
    spread = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    loss_of((chosen, spread), loss).backward()
    assert held.grad is not None
    return chosen.detach(), spread.detach(), held.grad


def assert_exact(
    logits: Tensor, targets: Tensor, temperature: float, loss: str, view: Callable[[Tensor], Tensor] = torch.clone
) -> None:
    """Within 1e-5 of the size of what is exact; a gradient in bfloat16 within its rounding."""
    held = logits.detach().requires_grad_()
    chosen, spread = kernel_scores(view(held), targets, temperature, loss != "log-probabilities")
    loss_of((chosen, spread), loss).backward()
    assert held.grad is not None and held.grad.dtype == logits.dtype
    one, two, three = exact(logits, targets, temperature, loss)
    torch.testing.assert_close(chosen.double(), one, atol=1e-5, rtol=1e-6)
    if spread is not None:
        torch.testing.assert_close(spread.double(), two, atol=1e-5, rtol=1e-6)
    rounding = 1e-5 if logits.dtype == torch.float32 else BFLOAT16
    torch.testing.assert_close(held.grad.double(), three, rtol=rounding, atol=1e-5 * three.abs().max().item())


@pytest.mark.parametrize(("rows", "vocabulary"), SIZES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_gradients(rows: int, vocabulary: int, loss: str, temperature: float, dtype: torch.dtype) -> None:
    assert_exact(*drawn(rows, vocabulary, dtype), temperature, loss)


@pytest.mark.parametrize(
    "view",
    [
        lambda logits: torch.cat([logits, logits], 1)[:, : logits.shape[1]],
        lambda logits: logits.t().clone().t(),
        lambda logits: torch.stack([logits, logits], 2)[..., 1],
    ],
    ids=["columns", "transposed", "every second"],
)
def test_logits_that_are_parts_of_others(view: Callable[[Tensor], Tensor]) -> None:
    assert_exact(*drawn(3, 4500), 0.7, "both", view)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_large_logits(temperature: float) -> None:
    logits, targets = drawn(4, 5000)
    assert_exact(logits + 1e4, targets, temperature, "both")
    assert_exact((logits - 1e4).bfloat16(), targets, temperature, "both")
    assert_exact(logits * 2500, targets, temperature, "log-probabilities")


def test_tokens_that_cannot_be() -> None:
    """Logits of -inf: the first block alone, all but the target, the target itself, and a whole row."""
    logits, targets = drawn(4, 9000)
    targets[:] = 8999
    logits[0, :4096] = logits[1, :8999] = -torch.inf
    assert_exact(logits[:2], targets[:2], 0.7, "both")
    logits[2, 8999] = logits[3] = -torch.inf
    held = logits.clone().requires_grad_()
    chosen, spread = kernel_scores(held.clone(), targets, 1.0, True)
    assert spread is not None
    spread[:3].sum().backward()
    assert held.grad is not None and held.grad[:3].isfinite().all() and held.grad[2, 8999] == 0
    assert (chosen[2].item(), spread[1].item()) == (-torch.inf, 0)
    assert chosen[3].isnan() and spread[3].isnan()


def test_a_target_outside_the_vocabulary_is_not_a_number() -> None:
    logits, targets = drawn(2, 65)
    targets[:] = torch.tensor([-100, 65])
    assert kernel_scores(logits, targets, 1.0, False)[0].isnan().all()


# --- what shows on a GPU alone


def peak(chunk: int, stored: int, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Tensor]]:
    """GPU memory that both passes need beside their inputs, and the results, of a vocabulary of today's size."""
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    monkeypatch.setattr(logprobs, "runs_kernels", lambda device: kernel)
    vocabulary, tokens, hidden = 151_936, 4096, 256
    generator = torch.Generator("cuda").manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    nn.init.normal_(head.weight, std=0.05, generator=generator)
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen, spread = token_logprobs(head, states, targets, 0.7, entropy=True, stored_logits=stored)
    assert spread is not None and states.grad is None
    (chosen + spread).sum().backward()
    assert states.grad is not None
    return torch.cuda.max_memory_allocated() - before, [chosen.detach(), spread.detach(), states.grad.float()]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_logits_take_their_own_bytes_and_a_few_gradients_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    all_logits, weights = 151_936 * 4096, 151_936 * 256
    most, whole = peak(all_logits, 0, False, monkeypatch)
    assert most > 12 * all_logits
    few, many = 2**26, 2**27  # float32 numbers: 4 bytes each
    for chunk, stored, limit in ((all_logits, 0, 2 * all_logits), (few, 0, 4 * few), (few, many, 4 * (few + many))):
        least, scored = peak(chunk, stored, True, monkeypatch)
        assert least < 1.1 * limit + 3 * 2 * weights, (chunk, stored)
        for one, other in zip(scored, whole, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_gpu_takes_the_kernels() -> None:
    assert logprobs.runs_kernels(torch.device("cuda"))
