"""Log-probabilities and entropy in chunks against the whole at once: values, gradients, and what is ever held."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.models import logprobs
from rlx.models.logprobs import sixteenth_of_gpu, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 37, 16, 50


class LowRank(nn.Module):
    """A frozen output layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, VOCABULARY, bias=False))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + 2 * self.adapter(hidden)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(HIDDEN, VOCABULARY, bias=False),
    "bias": lambda: nn.Linear(HIDDEN, VOCABULARY),
    "adapter": LowRank,
}


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden.requires_grad_(), torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def values_and_gradients(
    head: nn.Module, temperature: float, entropy: bool, chunked: bool, stored: int = 0
) -> dict[str, Tensor]:
    """Log-probabilities and entropies, and the gradients of a sum in which each token has another weight."""
    hidden, targets = inputs()
    if chunked:
        chosen, spread = token_logprobs(head, hidden, targets, temperature, entropy, stored_logits=stored)
    else:
        distribution = torch.distributions.Categorical(logits=head(hidden) / temperature)
        chosen, spread = distribution.log_prob(targets), distribution.entropy()
    weights = torch.linspace(-1, 1, TOKENS)
    total = (weights * chosen).sum()
    if entropy:
        total = total + (weights.square() * spread).sum()
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad} | {"hidden": hidden}
    gradients = dict(zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True))
    return gradients | {"logprobs": chosen} | ({"entropy": spread} if entropy else {})


@pytest.mark.parametrize(("share", "expected"), [(1.0, 2**31), (0.25, 2**29), (2.0, 2**31)])
def test_a_sixteenth_is_of_the_gpu_memory_that_a_process_has(
    share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=128 << 30))
    assert sixteenth_of_gpu(share) == expected


@pytest.mark.parametrize("stored", [0, 14 * VOCABULARY, 2**30])
@pytest.mark.parametrize("chunk", [1, 7 * VOCABULARY, 37 * VOCABULARY, 2**26])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", HEADS)
def test_chunks_give_the_values_and_gradients_of_all_logits_at_once(
    kind: str, temperature: float, entropy: bool, chunk: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    head = HEADS[kind]()
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    expected, results = (values_and_gradients(head, temperature, entropy, chunked, stored) for chunked in (False, True))
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert value.count_nonzero() > 0, name
        torch.testing.assert_close(results[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_entropy_is_none_unless_asked_for() -> None:
    assert token_logprobs(HEADS["plain"](), *inputs(), 1.0, entropy=False)[1] is None


def test_half_precision_logits_are_normalised_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", 5 * VOCABULARY)
    head, (hidden, targets) = HEADS["plain"]().bfloat16(), inputs()
    logits = head(hidden.bfloat16()).float()
    chosen, spread = token_logprobs(head, hidden.bfloat16(), targets, 1.0, entropy=True)
    expected = torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)
    assert spread is not None and chosen.dtype == spread.dtype == torch.float32
    torch.testing.assert_close(chosen, expected, atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest(entropy: bool, stored_logits: int = 0) -> tuple[int, int]:
    """Elements of the largest tensor of both passes, and the number of logits that are stored between the passes."""
    head, (hidden, targets) = HEADS["bias"](), inputs()
    stored: dict[int, int] = {}  # by address

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and tensor.shape[1] == VOCABULARY and len(tensor) != HIDDEN:
            stored[tensor.data_ptr()] = tensor.numel()
        return tensor

    with LargestTensor() as recorder:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chosen, spread = token_logprobs(head, hidden, targets, 0.7, entropy, stored_logits=stored_logits)
            stored_in_forward = sum(stored.values())
        (chosen.sum() if spread is None else (chosen + spread).sum()).backward()
    return recorder.elements, stored_in_forward


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_is_as_large_as_all_logits(entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = 2 if entropy else 1
    assert largest(entropy) == (TOKENS * VOCABULARY, tables * TOKENS * VOCABULARY)
    monkeypatch.setattr(logprobs, "CHUNK", 4 * VOCABULARY)
    # No chunk is stored, or the last two; with entropy only the last one, which has a single token.
    for stored_logits, tokens in ((0, 0), (8 * VOCABULARY, 1 if entropy else 5)):
        elements, stored = largest(entropy, stored_logits)
        assert elements == HIDDEN * VOCABULARY  # the gradient of the weights; a chunk has 4 x VOCABULARY
        assert stored == tables * tokens * VOCABULARY <= stored_logits
