"""How far settings are behind the best one on the same seeds, against numbers worked out by hand."""

import numpy as np
import pytest
from scipy import stats

from rlx.analysis.paired import deficits

SEEDS = np.array([0.5, 0.61 + 1e-9, 0.7])  # what a seed adds to every setting


def test_two_settings_are_compared_by_the_paired_t_test() -> None:
    """Gaps of 0.10, 0.11 and 0.12: mean 0.11, standard error 0.01 / sqrt(3), t 19.05, p 0.00137 with 2 degrees."""
    gaps = np.array([0.10, 0.11, 0.12])
    better, worse = deficits(np.array([SEEDS, SEEDS - gaps]))  # 0.5 and 0.5 + 1e-9 show how fine values are
    assert worse.value == pytest.approx(0.11, abs=1e-8) and better.value == pytest.approx(-0.11, abs=1e-8)
    assert worse.half_width == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)
    assert (better.leader, worse.leader) == (1, 0)
    assert better.chance > 0.99
    assert worse.chance == pytest.approx(0.001372, abs=0.001)  # of 10 000 directions


def test_looks_make_intervals_wider() -> None:
    values = np.random.RandomState(1).standard_normal((3, 5))
    once, twice = (deficits(values, looks)[0].half_width for looks in (1, 2))
    assert twice / once == pytest.approx(stats.t.ppf(1 - 0.05 / 3, 4) / stats.t.ppf(0.975, 4))


def test_the_luck_of_the_others_is_off_the_low_end() -> None:
    """Of the last one's others the first has the best mean, 0.7. Seed 0 judges it by 0.8, for seed 1 finds it better;
    seed 1 judges the second by 0.3: 0.55 on average."""
    values = np.array([[0.8, 0.6], [0.9, 0.3], [0.1, 0.2]])
    last = deficits(values)[2]
    assert last.luck == pytest.approx(0.7 - 0.55)
    assert last.ends == pytest.approx((last.value - last.half_width - last.luck, last.value + last.half_width))
    assert [deficit.luck for deficit in deficits(values[1:])] == [0, 0]  # two settings: nobody was chosen


@pytest.mark.parametrize(("seeds", "gap"), [(2, 3.0), (3, 1.5), (5, 0.6), (8, 0.3)])
def test_the_chance_is_that_of_the_paired_t_test(seeds: int, gap: float) -> None:
    values = np.random.RandomState(seeds).standard_normal((2, seeds))
    values[1] -= gap
    expected = stats.ttest_rel(values[0], values[1], alternative="greater").pvalue
    assert deficits(values)[1].chance == pytest.approx(expected, abs=0.01)


def test_what_all_runs_of_a_seed_share_makes_no_difference() -> None:
    values = np.random.RandomState(1).standard_normal((4, 5))
    shared = deficits(values + 100 * np.arange(5))
    for one, other in zip(deficits(values), shared, strict=True):
        assert tuple(one) == pytest.approx(tuple(other), abs=0.01)


def test_a_setting_is_behind_whoever_has_the_best_mean() -> None:
    """The last is behind the first by 0.5, 0.4 and 0.6."""
    found = deficits(np.array([[0.9, 0.8, 1.0], [0.7, 0.7, 0.7], [0.4, 0.4, 0.4]]))
    assert [deficit.leader for deficit in found] == [1, 0, 0]
    assert [deficit.value for deficit in found] == pytest.approx([-0.2, 0.2, 0.5])


def test_gaps_that_are_equal_by_luck_prove_less_than_their_resolution() -> None:
    """Shares of ten questions: each is known to 0.05, so a gap has a standard deviation of 0.1 / sqrt(6)."""
    worse = deficits(np.array([[0.5, 0.6, 0.8], [0.4, 0.5, 0.7]]))[1]
    assert worse.value == pytest.approx(0.1)
    assert worse.half_width == pytest.approx(4.302653 * 0.1 / 6**0.5 / 3**0.5, rel=1e-5)
    assert worse.chance == pytest.approx(stats.t.sf(6**0.5 * 3**0.5, 2), abs=0.003)


def test_settings_that_are_equal_are_not_behind() -> None:
    for deficit in deficits(np.full((3, 3), 0.5)):
        assert (deficit.value, deficit.half_width, deficit.chance) == (0, 0, 1)


def test_others_count_as_far_as_they_could_be_the_reason() -> None:
    """Ten others that are hardly ahead, or like the leader, change nothing; ten that are level and vary much more are
    more chances to be unlucky, but not ten times more."""
    drawn = np.random.RandomState(3).standard_normal((12, 3))
    wild = 6 * (drawn[2:] - drawn[2:].mean(axis=1, keepdims=True))

    def chance(*others: np.ndarray) -> float:
        return deficits(np.vstack([drawn[0], *others, drawn[1] - 6]))[-1].chance

    alone = chance()
    assert chance(drawn[2:] / 2 - 4) == alone
    assert chance(drawn[0] + 0.001 * drawn[2:]) == pytest.approx(alone, rel=0.2)
    assert 2 * alone < chance(drawn[1] - 6 + wild) < 4 * alone
