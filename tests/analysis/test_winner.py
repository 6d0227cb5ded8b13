"""The best setting without its luck."""

import math

import numpy as np
import pytest
from scipy import stats

from rlx.analysis.comparison.winner import corrected_best

VALUES = np.array([[0.92, 0.5, 0.7], [0.6, 0.8, 0.6], [0.1, 0.2, 0.1]])


def test_each_seed_judges_the_winner_of_the_others() -> None:
    """Seed 0: the others find 0.6 and 0.7, so the second, which it gives 0.6. Seed 1: 0.8 and 0.6, the first, 0.5.
    Seed 2: 0.71 and 0.7, the first, 0.7. Their mean is 0.6, the best mean 0.7067."""
    winner = corrected_best(VALUES, 1.0)
    assert (winner.candidate, winner.seen) == (0, pytest.approx(2.12 / 3))
    assert winner.fresh.value == pytest.approx(0.6)
    assert winner.luck == pytest.approx(winner.seen - 0.6)
    error = math.sqrt((VALUES[0].var(ddof=1) + 0.1**2 / 12) / 3)  # values are 0.1 apart
    assert winner.fresh.half_width == pytest.approx(stats.t.ppf(0.975, 2) * error + winner.luck)


def test_low_can_be_good() -> None:
    winner = corrected_best(VALUES, sign=-1)
    assert winner.candidate == 2
    assert winner.fresh.value == pytest.approx(0.4 / 3)


def test_a_clear_winner_has_no_luck_to_lose() -> None:
    winner = corrected_best(np.array([[0.9, 0.8, 0.85], [0.1, 0.2, 0.1]]), 1.0)
    assert winner.fresh.value == pytest.approx(winner.seen)
    assert winner.luck == pytest.approx(0)


def test_runs_that_are_equal_by_luck_are_known_to_their_resolution() -> None:
    """Three runs with 0.9, in a sweep whose values are 0.1 apart."""
    winner = corrected_best(np.array([[0.9, 0.9, 0.9], [0.2, 0.1, 0.3]]), 1.0)
    assert winner.fresh.half_width == pytest.approx(stats.t.ppf(0.975, 2) * 0.1 / 12**0.5 / 3**0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_luck_is_never_bad(sign: float) -> None:
    rng = np.random.default_rng(0)
    assert min(corrected_best(rng.standard_normal((4, 3)), sign).luck for _ in range(200)) > -1e-9


def test_the_corrected_best_is_right_on_average() -> None:
    """Twelve equal settings, 400 sweeps: the best mean is 1.6 standard errors too high, the corrected one is not."""
    rng = np.random.default_rng(0)
    winners = [corrected_best(rng.standard_normal((12, 3)), 1.0) for _ in range(400)]
    assert np.mean([winner.seen for winner in winners]) > 0.8
    assert abs(np.mean([winner.fresh.value for winner in winners])) < 0.1
    assert np.mean([abs(winner.fresh.value) <= winner.fresh.half_width for winner in winners]) > 0.92
