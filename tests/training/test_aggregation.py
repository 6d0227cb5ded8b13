"""Metrics over ranks, by hand: on one rank and on two, of which each has a part of the values; two neighbours."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared import OnRanks

from rlx.mesh import Mesh
from rlx.training.aggregation import (
    Deviation,
    EffectiveFraction,
    ExplainedVariance,
    Maximum,
    Mean,
    Minimum,
    Ratio,
    Total,
    Updates,
    largest,
    over_ranks,
)

SCORES = [1.0, 2.0, 2.0, 7.0]
ROUNDED = 2**24  # the next whole number is not a float32


def trainer_of(mesh: Mesh) -> Any:
    """The parts of a trainer that aggregation needs."""
    return SimpleNamespace(mesh=mesh, device=torch.device("cpu"), aggregates={})


def updates(own: slice) -> Updates:
    """One metric of each kind; `own` of the four values of each are this rank's."""
    scores, grid = SCORES[own], torch.tensor(SCORES)[own]
    returns = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 99.0]])[own]
    values = torch.tensor([[0.0, 0.0], [2.0, 4.0], [4.0, 5.0], [6.0, 0.0]])[own]
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])[own]
    return {
        "mean": (Mean, scores),
        "mean of tensors": (Mean, grid),
        "mean of booleans": (Mean, grid > 1.5),
        "mean of large numbers": (Mean, [ROUNDED + score for score in scores]),
        "total": (Total, [ROUNDED + 1.0 for _ in scores]),
        "largest": (Maximum, [-score for score in scores]),
        "least": (Minimum, scores),
        "ratio": (Ratio, grid.sum(), len(scores) / 2),
        "deviation": (Deviation, scores),
        "deviation/of.equal": (Deviation, [0.1 for _ in scores]),
        "effective": (EffectiveFraction, grid),
        "explained": (ExplainedVariance, values, returns, mask),
        "explained of equal": (ExplainedVariance, values, torch.full_like(returns, 0.1), mask),
    }


BY_HAND = {
    "mean": 3.0,
    "mean of tensors": 3.0,
    "mean of booleans": 0.75,
    "mean of large numbers": ROUNDED + 3.0,
    "total": 4 * ROUNDED + 4.0,
    "largest": -1.0,
    "least": 1.0,
    "ratio": 12 / 2,
    "deviation": math.sqrt((4 + 1 + 1 + 16) / 4),
    "deviation/of.equal": 0.0,
    "effective": 12**2 / (4 * (1 + 4 + 4 + 49)),
    # Residuals 0 1 0 -1 0 0 0: their squares sum up to 2. Returns 0 to 6 are 3 +- 0, 1, 2 and 3: 28.
    "explained": 1 - 2 / 28,
    "explained of equal": 0.0,
}


def aggregated(rank: int, ranks: int) -> list[dict[str, float]]:
    """Two steps: all metrics; then some of them, with other values."""
    trainer, size = trainer_of(Mesh.of("cpu", 1)), 4 // ranks
    whole = over_ranks(trainer, updates(slice(rank * size, (rank + 1) * size)))
    some: Updates = {"mean": (Mean, [float(rank)]), "largest": (Maximum, float(rank)), "ratio": (Ratio, 0.0, 0.0)}
    some |= {
        "mean of tensors": (Mean, torch.zeros(0)),
        "deviation": (Deviation, []),
        "effective": (EffectiveFraction, []),
    }
    some |= {"explained": (ExplainedVariance, *torch.zeros(3, 1, 2))}
    again = over_ranks(trainer, some)
    return [whole, again]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_kind_by_hand(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, aggregated)
    whole, again = results[0]
    assert whole == pytest.approx(BY_HAND, rel=1e-12, abs=1e-8)
    # Nothing of the first step is left, and metrics of no values are left out, as a ratio to nothing is.
    assert again == {"mean": (ranks - 1) / 2, "largest": ranks - 1}
    assert all(other == results[0] for other in results)


def with_nan(rank: int, ranks: int) -> dict[str, float]:
    """One of the ranks has a nan, another no value at all for one of the means."""
    value = math.nan if rank == 0 else 1.0
    nans: Updates = {f"{i}": (kind, [value]) for i, kind in enumerate((Mean, Total, Maximum, Deviation))}
    nans |= {"ratio": (Ratio, value, 1.0), "no value here": (Mean, [5.0] * rank)}
    return over_ranks(trainer_of(Mesh.of("cpu", 1)), nans)


def test_a_nan_stays_visible(on_ranks: OnRanks) -> None:
    for result in on_ranks(2, with_nan):
        assert result.pop("no value here") == 5.0
        assert all(math.isnan(value) for value in result.values()), result


def of_neighbours(rank: int, ranks: int) -> dict[str, float]:
    """Two replicas of two neighbours, whose second says something else."""
    own = rank + 0.5
    sums: Updates = {"mean": (Mean, [own]), "total": (Total, own), "ratio": (Ratio, own, 1.0)}
    return over_ranks(trainer_of(Mesh.of("cpu", 2)), sums | {"largest": (Maximum, own)})


def test_the_first_of_tensor_parallel_neighbours_counts(on_ranks: OnRanks) -> None:
    expected = {"mean": 1.5, "total": 3.0, "ratio": 1.5, "largest": 3.5}  # of ranks 0 and 2; the maximum of all
    assert on_ranks(4, of_neighbours) == [expected] * 4


NUMBERS = torch.tensor([0.5, 0.0, 2.0, 0.25, 2.0, 1e-30, 3e4, 0.5000001])


def in_order(rank: int, ranks: int) -> list[float]:
    """The numbers of all ranks, from the largest down to one more than there are; of no numbers at all."""
    mesh, own = Mesh.of("cpu", 1), NUMBERS[rank::ranks]
    return [largest(mesh, own, count) for count in range(1, 10)] + [largest(mesh, own[:0], 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_largest_numbers_of_all_ranks(ranks: int, on_ranks: OnRanks) -> None:
    expected = NUMBERS.sort(descending=True).values.tolist()
    assert on_ranks(ranks, in_order) == [[*expected, expected[-1], math.inf]] * ranks


def counted(rank: int, ranks: int) -> list[Any]:
    """The names of the collective calls of an aggregation."""
    called: list[Any] = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "barrier"):
        call = getattr(dist, name)
        setattr(dist, name, lambda *args, _name=name, _call=call, **rest: (called.append(_name), _call(*args, **rest)))
    over_ranks(trainer_of(Mesh.of("cpu", 1)), updates(slice(2 * rank, 2 * rank + 2)))
    return called


def test_all_metrics_travel_in_two_calls(on_ranks: OnRanks) -> None:
    assert on_ranks(2, counted) == [["all_reduce"] * 2] * 2
