"""The sums of gae without a loop over tokens: against the loop, for any mask, and for any number of padded columns."""

import pytest
import torch
from torch import Tensor

from rlx.algorithms.advantages import discounted_sums, gae


def looped_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Equation 16 of arXiv 1506.02438, token by token from the end, without the tokens where the mask is 0."""
    advantages = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        following = later = 0.0
        for column in reversed(mask[row].nonzero().flatten().tolist()):
            value = float(values[row, column])
            later = float(rewards[row, column]) + gamma * following - value + gamma * lam * later
            following, advantages[row, column] = value, later
    return advantages, (advantages + values) * mask


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 100])
def test_it_equals_the_loop(width: int, gamma: float, lam: float) -> None:
    draw = torch.Generator().manual_seed(width)
    rewards, values = torch.randn(2, 5, width, generator=draw, dtype=torch.float64)
    mask = (torch.rand(5, width, generator=draw) < 0.7).double()
    for found, expected in zip(
        gae(rewards, values, mask, gamma, lam), looped_gae(rewards, values, mask, gamma, lam), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_padding_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 33, generator=draw)
    mask = torch.ones(3, 33)
    wider = [torch.nn.functional.pad(each, (0, 95)) for each in (rewards, values, mask)]
    for found, expected in zip(gae(*wider, 0.99, 0.95), gae(rewards, values, mask, 0.99, 0.95), strict=True):
        assert torch.equal(found[:, :33], expected) and not found[:, 33:].any()


def test_sums_by_hand() -> None:
    terms, factors = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[0.5, 1.0, 2.0, 9.0]])
    assert discounted_sums(terms, factors).tolist() == [[1 + 0.5 * (2 + 3 + 2 * 4), 2 + 3 + 2 * 4, 3 + 2 * 4, 4.0]]
