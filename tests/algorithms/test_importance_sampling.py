"""Importance weights by hand, at their bounds and for huge ratios."""

import math

import pytest
import torch
from by_hand import NAN, close, f64

from rlx.algorithms.importance_sampling import IMPORTANCE_WEIGHTS, importance_weights

RATIOS = f64([[0.5, 1.5, 3.0, NAN], [0.25, NAN, 1.0, 2.0], [NAN, NAN, NAN, NAN]])
RATIO_MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])


# old / rollout as in RATIOS; whole responses: 0.5 * 1.5 * 3 = 2.25 and 0.25 * 1 * 2 = 0.5; low 0.4, high 2
ONES = [[1] * 4] * 3
IMPORTANCE_BY_HAND = {
    "none": {"token": ONES, "sequence": ONES},
    "tis": {
        "token": [[0.5, 1.5, 2, 1], [0.25, 1, 1, 2], [1, 1, 1, 1]],
        "sequence": [[2, 2, 2, 1], [0.5, 1, 0.5, 0.5], [1, 1, 1, 1]],
    },
    "mask": {
        "token": [[0.5, 1.5, 0, 1], [0, 1, 1, 2], [1, 1, 1, 1]],
        "sequence": [[0, 0, 0, 1], [0.5, 1, 0.5, 0.5], [1, 1, 1, 1]],
    },
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", IMPORTANCE_BY_HAND)
def test_importance_weights_by_hand(kind: str, level: str) -> None:
    old_logp = f64([[-1.0] * 4] * 3)
    rollout_logp = old_logp - RATIOS.log()
    high = 2 + 1e-12  # the ratio of 2 above comes out of exp and log
    weights = importance_weights(old_logp, rollout_logp, RATIO_MASK, kind, 0.4, high, level)
    close(weights, IMPORTANCE_BY_HAND[kind][level])
    assert importance_weights(old_logp[:0], old_logp[:0], RATIO_MASK[:0], kind, 0.4, high, level).shape == (0, 4)


def test_importance_weights_keep_ratios_on_the_bounds() -> None:
    zero = f64([[0, 0]])
    close(importance_weights(zero, zero, torch.ones(1, 2), "mask", 1.0, 1.0), [[1, 1]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "expected"), [("tis", [2.0, math.exp(-20)]), ("mask", [0.0, 0.0])])
def test_importance_weights_of_huge_log_ratios(kind: str, level: str, expected: list[float]) -> None:
    weights = importance_weights(f64([[1000], [-1000]]), f64([[0], [0]]), torch.ones(2, 1), kind, 0.5, 2.0, level)
    close(weights, f64(expected)[:, None], 1e-12)


def test_importance_weights_are_detached() -> None:
    old_logp = f64([[0.1]]).requires_grad_()
    for kind in IMPORTANCE_WEIGHTS:
        assert not importance_weights(old_logp, f64([[0]]), torch.ones(1, 1), kind, 0.5, 2.0).requires_grad
