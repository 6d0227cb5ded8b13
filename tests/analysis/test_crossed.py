"""Means of tables of seeds and questions, against numbers worked out by hand and against simulated tables."""

import math

import numpy as np
import pytest
from scipy import stats

from rlx.analysis.comparison.crossed import (
    Component,
    CrossedMean,
    Spread,
    crossed_mean,
    half_width,
    holm,
    sampling_variance,
)

TABLE = np.array([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])


def test_components_are_those_of_the_mean_squares() -> None:
    """Three seeds, four questions, mean 5/12. Means of seeds 3/4, 1/4, 1/4: mean square 4 (1/6) / 2 = 1/3. Means of
    questions 2/3, 0, 2/3, 1/3: mean square 3 (11/36) / 3 = 11/36. The total 35/12 less 2/3 and 11/12 leaves 16/12 for 6
    degrees: 2/9."""
    found = crossed_mean(TABLE)
    assert found.value == pytest.approx(5 / 12)
    assert found.spread == pytest.approx(Spread((1 / 3 - 2 / 9) / 4, (11 / 36 - 2 / 9) / 3, 2 / 9))
    assert sum(found.spread.of_mean(3, 4)) == pytest.approx((1 / 3 + 11 / 36 - 2 / 9) / 12)


def test_the_half_widths_of_seeds_and_questions_are_added_as_squares() -> None:
    """The same table: 1/3 by seed, with two degrees, and 11/36 - 2/9 by question, with three; means of four questions
    are known to 1/4."""
    found, by_seed, by_question = crossed_mean(TABLE), 1 / 3 / 12 + (1 / 4) ** 2 / 12 / 3, (11 / 36 - 2 / 9) / 12
    assert found.error == pytest.approx(math.sqrt(by_seed + by_question))
    ends = stats.t.ppf(0.975, 2) ** 2 * by_seed + stats.t.ppf(0.975, 3) ** 2 * by_question
    assert found.half_width == pytest.approx(math.sqrt(ends))
    assert half_width(found.parts, found.chance) == pytest.approx(5 / 12)
    assert crossed_mean(TABLE.T).half_width == pytest.approx(found.half_width)


def test_means_that_are_equal_by_luck_prove_no_more_than_their_resolution() -> None:
    """Two seeds with 1/3 each, of three questions: the mean is known to (1/3) / sqrt(12) / sqrt(2)."""
    found = crossed_mean(np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    assert found.spread.seed == found.spread.question == 0
    assert found.error == pytest.approx(1 / 3 / 24**0.5)
    assert found.chance == pytest.approx(2 * stats.t.sf(24**0.5, 1))


@pytest.mark.parametrize("seeds", [2, 3])
def test_equal_settings_are_no_less_alike_because_they_are_judged_by_few_questions(seeds: int) -> None:
    """2000 pairs, 32 questions: the chance is below 0.01 in at most as many, up to chance."""
    rng = np.random.default_rng(seeds)
    right = rng.uniform(size=(2000, 2, seeds, 32)) < 0.8
    chances = [crossed_mean(first.astype(float) - second).chance for first, second in right]
    assert np.mean(np.array(chances) <= 0.01) <= 0.015


@pytest.mark.parametrize("axis", [0, 1])
def test_one_seed_or_one_question_leaves_the_t_test_over_the_others(axis: int) -> None:
    values = np.array([0.1, 0.4, 0.3])
    found = crossed_mean(np.expand_dims(values, axis))
    expected = stats.ttest_1samp(values, 0)
    assert found.chance == pytest.approx(expected.pvalue)
    assert found.ends == pytest.approx(expected.confidence_interval(0.95))
    assert math.isnan(found.spread.seed if axis == 0 else found.spread.question)


def test_means_of_runs_that_differ_equally_by_luck_prove_no_more_than_their_resolution() -> None:
    """Two runs of each setting, shares of 256 questions, both 1/64 apart: known to (1/256) / sqrt(12) / sqrt(2)."""
    found = crossed_mean(np.full((2, 1), 1 / 64), 1 / 256)
    assert found.chance == pytest.approx(2 * stats.t.sf(4 * 24**0.5, 1))


def test_one_value_has_no_interval() -> None:
    found = crossed_mean(np.array([[0.3]]))
    assert found.value == 0.3
    assert math.isnan(found.half_width)


def test_values_that_are_all_equal_have_no_chance_in_them() -> None:
    assert crossed_mean(np.zeros((3, 4))).chance == 1
    assert crossed_mean(np.full((3, 4), 0.25)).chance == pytest.approx(0)


@pytest.mark.parametrize(("seeds", "degrees"), [(1, 15), (2, 1), (3, 2)])
def test_a_difference_that_all_questions_share_is_known_to_its_resolution(seeds: int, degrees: int) -> None:
    """One setting has all of 16 questions right, the other none: the mean of a seed is known to (1/16) / sqrt(12), of a
    single one to 1 / sqrt(12) / sqrt(16)."""
    found = crossed_mean(np.ones((seeds, 16)), 1.0)
    error = 1 / 192**0.5 if seeds == 1 else 1 / 16 / 12**0.5 / seeds**0.5
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, degrees) * error)


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
@pytest.mark.parametrize(("of_seed", "of_question"), [(0.0, 0.1), (0.01, 0.1), (0.03, 0.3), (0.05, 0.0)])
def test_intervals_hold_the_true_mean(seeds: int, of_seed: float, of_question: float) -> None:
    """500 tables of 200 questions: 0.95 to 0.975, with two seeds to 0.99, up to 2.5 standard errors."""
    rng = np.random.default_rng(seeds)
    held = 0
    for _ in range(500):
        table = of_seed * rng.standard_normal((seeds, 1)) + of_question * rng.standard_normal(200)
        found = crossed_mean(table + 0.4 * rng.standard_normal((seeds, 200)))
        held += abs(found.value) <= found.half_width
    assert 0.925 <= held / 500 <= (0.995 if seeds == 2 else 0.985)


def test_sampling_is_what_a_share_of_so_many_samples_varies_by() -> None:
    """Shares 1/4 and 1 of four samples: 3/16 / 3 and 0, on average 1/32."""
    assert sampling_variance(np.array([[0.25, 1.0]]), 4) == pytest.approx(1 / 32)
    assert math.isnan(sampling_variance(np.array([[0.0, 1.0]]), 1))


def test_chances_of_several_comparisons_are_corrected_step_by_step() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_difference_of_nothing_is_certain() -> None:
    assert CrossedMean(0.5, 0.0, [Component(0.0, 2)], Spread(0, 0, 0)).chance == 0
