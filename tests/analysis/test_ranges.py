"""The range of a metric, and the part of its axis that a figure shows."""

import math

import pytest

from rlx.analysis.ranges import Range, axis_range, natural_range, reach
from rlx.tracking.metrics import METRICS

ACCURACY = "eval/accuracy"


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (ACCURACY, (0, 1)),
        ("best/eval/ema/accuracy", (0, 1)),
        ("policy/clip_fraction", (0, 1)),
        ("best/eval/aime/avg_at_16", (0, 1)),
        ("eval/accuracy/web", (0, 1)),
        ("best/eval/accuracy/a_se", (0, 1)),  # a source has any name
        ("eval/ema/accuracy/web", (0, 1)),
        ("task/accuracy/web", (0, 1)),
        ("source/fraction/web", (0, 1)),
        ("eval/reward/accuracy", (-math.inf, math.inf)),
        ("eval/aime/pass_at_4_se", (0, math.inf)),
        ("eval/aime/reward", (-math.inf, math.inf)),
        ("response/length_mean", (0, math.inf)),
        ("time/step", (0, math.inf)),
        ("reward/std", (0, math.inf)),
        ("value/explained_variance", (-math.inf, 1)),
        ("kl/ref", (-math.inf, math.inf)),  # an estimate, which can be negative
        ("eval/reward", (-math.inf, math.inf)),
        ("reward/my_accuracy", (-math.inf, math.inf)),  # a function of the user's
    ],
)
def test_what_a_metric_can_be(metric: str, expected: tuple[float, float]) -> None:
    assert natural_range(metric) == expected


def test_whatever_is_a_fraction_is_a_share() -> None:
    fractions = {name for name, meaning in METRICS.items() if meaning.startswith("fraction of")}
    assert len(fractions) > 5
    assert {natural_range(name) for name in fractions} == {(0, 1)}


def test_values_are_clipped_to_the_ends() -> None:
    assert [Range(0, 1).clip(value) for value in (-1, 0.5, 2)] == [0, 0.5, 1]
    assert math.isnan(Range(0, 1).clip(math.nan))
    assert [Range(0, 1).holds(value) for value in (-1, 0, 1, 2, math.nan)] == [False, True, True, False, True]


def test_an_interval_reaches_as_far_as_the_metric() -> None:
    assert reach(ACCURACY, 0.4, 1.44) == pytest.approx((0.4, 0.6))
    assert reach("kl/ref", 0.4, 1.44) == pytest.approx((1.44, 1.44))
    assert all(math.isnan(length) for length in reach(ACCURACY, 0.4, math.nan))


@pytest.mark.parametrize(
    ("metric", "points", "ends", "expected"),
    [
        (ACCURACY, [0.2, 0.7], [], (0.18, 0.72)),
        (ACCURACY, [0.2, 0.7], [-1.0, 1.8], (-0.04, 1.04)),  # up to the ends of the range
        (ACCURACY, [0.4, 0.5], [0.35, 0.55], (0.342, 0.558)),
        ("kl/ref", [0.0, 1.0], [-9.0, 9.0], (-2.2, 3.2)),  # twice as far as the points are from each other
        ("kl/ref", [0.0, 1.0], [math.nan], (-0.04, 1.04)),
        ("kl/ref", [0.5, 0.5], [], (0.48, 0.52)),
        ("kl/ref", [0.0], [], (-0.04, 0.04)),
    ],
)
def test_the_axis_shows_the_points(
    metric: str, points: list[float], ends: list[float], expected: tuple[float, float]
) -> None:
    assert axis_range(metric, points, ends) == pytest.approx(expected)
