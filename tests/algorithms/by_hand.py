"""What the tests of rlx.algorithms share: tensors, comparisons, a random batch."""

import math
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

NAN, INF = math.nan, math.inf
few = settings(max_examples=40, deadline=None)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: Any, tolerance: float = 1e-9) -> None:
    expected = expected if isinstance(expected, Tensor) else f64(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def random_batch(seed: int, rows: int = 6, length: int = 5) -> dict[str, Any]:
    """Arguments of policy_loss, ratios spread over both sides of the clip range; row 0 has no response token."""
    make = torch.Generator().manual_seed(seed)
    logp, noise, advantages = torch.randn(3, rows, length, generator=make, dtype=torch.float64).unbind()
    mask = (torch.rand(rows, length, generator=make) < 0.7).long()
    mask[0], mask[1] = 0, 1
    weights = torch.rand(rows, length, generator=make, dtype=torch.float64)
    return {"logp": logp, "old_logp": logp + 0.4 * noise, "advantages": advantages, "mask": mask, "weights": weights}
