"""What bench/racing.py says of made-up sweeps, on a few of them: what the analysis promises, it keeps."""

from argparse import Namespace

import numpy as np
import pytest
from racing import EQUAL, TYPICAL, Kind, Sayings, judge, said

from rlx.analysis.comparison.winner import corrected_best

SWEEPS = 60


@pytest.fixture(scope="module")
def identical() -> Sayings:
    return judge(Kind("all identical", EQUAL, TYPICAL), 3, 128, SWEEPS)


def test_intervals_of_pairs_hold_the_true_difference(identical: Sayings) -> None:
    assert len(identical.paired) == SWEEPS and np.mean(identical.paired) > 0.88


def test_each_setting_is_compared_with_the_one_that_seems_best(identical: Sayings) -> None:
    assert len(identical.to_best) == 11 * SWEEPS and np.mean(identical.to_best) > 0.9


def test_of_identical_settings_a_winner_is_seldom_named(identical: Sayings) -> None:
    assert identical.named <= identical.wrong + 3 and identical.wrong <= 6  # 0.05 of 60 are 3


def test_the_corrected_best_is_right_where_the_best_mean_is_too_high(identical: Sayings) -> None:
    assert np.mean(identical.seen) > 0.02
    assert abs(np.mean(identical.fresh)) < 0.01
    assert np.mean(identical.held) > 0.85


def test_a_winner_that_is_far_ahead_is_named_and_is_the_best() -> None:
    sayings = judge(Kind("far", (0.8, 0.3), (0.002, 0.002)), 5, 256, 20)
    assert (sayings.named, sayings.wrong) == (20, 0)
    assert np.mean(np.abs(sayings.seen)) < 0.03


def test_a_row_of_the_table_has_all_figures() -> None:
    row = said(Kind("two", EQUAL[:2], TYPICAL[:2]), Namespace(seeds=3, questions=64, sweeps=5))
    assert row.startswith("| two | ") and row.count("|") == 7


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_correction_is_right_for_any_number_of_seeds(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    errors = [corrected_best(rng.standard_normal((6, seeds)), 1.0).fresh.value for _ in range(400)]
    assert abs(np.mean(errors)) < 0.12
