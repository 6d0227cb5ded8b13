"""What a number of seeds and questions can show."""

import math

import numpy as np
import pytest
from scipy import stats

from rlx.analysis.comparison.crossed import Spread, crossed_mean
from rlx.analysis.comparison.power import ASSUMED, detectable, options


def test_the_luck_of_seeds_alone_is_that_of_a_t_test() -> None:
    """Variance 0.0003 by seed, none by question: three seeds have an error of 0.01 with two degrees of freedom."""
    gap = detectable(Spread(0.0003, 0.0, 0.0), 3, 100)
    widest = stats.t.ppf(0.975, 2)
    shown = stats.nct.sf(widest, 2, gap / 0.01) + stats.nct.cdf(-widest, 2, gap / 0.01)
    assert shown == pytest.approx(0.8, abs=0.01)


def test_one_seed_shows_nothing_of_a_setting() -> None:
    assert math.isinf(detectable(ASSUMED, 1, 256))


def test_settings_that_never_differ_by_chance_show_everything() -> None:
    assert detectable(Spread(0, 0, 0), 3, 10) == 0


def test_four_of_five_sweeps_show_the_smallest_difference() -> None:
    rng, spread, shown = np.random.default_rng(0), Spread(0.01**2, 0.1**2, 0.15), 0
    gap = detectable(spread, 5, 200)
    for _ in range(300):
        noise = 0.01 * rng.standard_normal((5, 1)) + 0.1 * rng.standard_normal(200)
        found = crossed_mean(gap + noise + math.sqrt(0.15) * rng.standard_normal((5, 200)))
        shown += found.value > found.half_width
    assert 0.7 < shown / 300 < 0.9


def test_more_seeds_cost_training_and_more_questions_cost_answers() -> None:
    plan, more, many, questions = options(ASSUMED, 3, 256)
    assert plan[:2] == (3, 256) and plan.training == plan.answers == 1
    assert more.training == pytest.approx(5 / 3) and more.shows < plan.shows
    assert many.seeds == 8 and many.shows < more.shows
    assert (questions.training, questions.answers) == (1, 4) and questions.shows < plan.shows
