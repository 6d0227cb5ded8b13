"""rlx.adaptive against numbers worked out by hand, and against the properties that training relies on."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms.adaptive import LR_SCHEDULES, AdaptiveKL, RunningScores, lr_scale

few = settings(max_examples=60, deadline=None)


# --- the KL coefficient


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.6, 1 + 0.1 * 256 / 1000),  # 6.6 / 6 - 1 = 0.1
        (6.0, 1.0),
        (60.0, 1 + 0.2 * 256 / 1000),  # 9, clipped to 0.2
        (0.0, 1 - 0.2 * 256 / 1000),  # -1, clipped to -0.2
    ],
)
def test_adaptive_kl_by_hand(kl: float, factor: float) -> None:
    control = AdaptiveKL(init=0.05, target=6.0, horizon=1000)
    assert control.coef == 0.05
    control.update(kl, 256)
    assert control.coef == pytest.approx(0.05 * factor, rel=1e-12)
    control.update(kl, 256)
    assert control.coef == pytest.approx(0.05 * factor**2, rel=1e-12)


def test_adaptive_kl_without_target_is_fixed() -> None:
    control = AdaptiveKL(init=0.05, target=None, horizon=10)
    control.update(100.0, 10_000)
    assert control.coef == 0.05


def test_adaptive_kl_refuses_a_horizon_that_could_turn_the_sign() -> None:
    control = AdaptiveKL(init=0.05, target=6.0, horizon=100)
    control.update(0.0, 499)
    assert control.coef == pytest.approx(0.05 * (1 - 0.2 * 4.99), rel=1e-9)
    with pytest.raises(ValueError, match="horizon"):
        control.update(0.0, 500)


def test_a_fixed_coefficient_is_the_settings_own_whatever_the_state() -> None:
    control = AdaptiveKL(0.1, None, 1000)
    control.load_state_dict(AdaptiveKL(0.005, None, 1000).state_dict())
    assert control.coef == 0.1


@pytest.mark.parametrize("state", [AdaptiveKL(0.0, None, 1000).state_dict(), {"coef": 0.0}])
def test_a_coefficient_that_becomes_adaptive_begins_at_its_setting(state: dict[str, float]) -> None:
    control = AdaptiveKL(0.05, 6.0, 1000)
    control.load_state_dict(state)
    assert control.coef == 0.05


def test_adaptive_kl_continues_from_its_state() -> None:
    control = AdaptiveKL(init=0.05, target=6.0, horizon=1000)
    control.update(9.0, 100)
    resumed = AdaptiveKL(init=0.7, target=6.0, horizon=1000)
    resumed.load_state_dict(control.state_dict())
    assert resumed == control
    control.update(5.5, 100)
    resumed.update(5.5, 100)
    assert resumed.coef == control.coef != 0.05


@few
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 499)), max_size=20))
def test_adaptive_kl_follows_the_sign_of_the_error_and_stays_positive(steps: list[tuple[float, float]]) -> None:
    control = AdaptiveKL(init=0.05, target=6.0, horizon=100)
    for kl, n in steps:
        before = control.coef
        control.update(kl, n)
        assert control.coef > 0
        assert control.coef >= before if kl > 6 else control.coef <= before


# --- running scores


def test_running_scores_by_hand() -> None:
    # scores 1, 2 and then 6: mean 9 / 3 = 3, squared deviations 4 + 1 + 9 = 14, variance 14 / 2 = 7
    running = RunningScores()
    running.update(2, 1 + 2, 1 + 4)
    assert running.shift_and_scale() == pytest.approx((1.5, 1 / math.sqrt(0.5 + 1e-8)), rel=1e-12)
    running.update(1, 6, 36)
    assert running.shift_and_scale() == pytest.approx((3, 1 / math.sqrt(7 + 1e-8)), rel=1e-12)


@few
@given(st.lists(st.lists(st.floats(-100, 100), max_size=6), max_size=6))
def test_running_scores_are_those_of_all_scores_at_once(steps: list[list[float]]) -> None:
    running = RunningScores()
    for scores in steps:
        running.update(len(scores), sum(scores), sum(score**2 for score in scores))
    everything = [score for scores in steps for score in scores]
    mean, scale = running.shift_and_scale()
    assert mean == pytest.approx(statistics.mean(everything) if everything else 0, abs=1e-9)
    variance = statistics.variance(everything) if len(everything) > 1 else 0
    assert scale**-2 == pytest.approx(variance + 1e-8, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("score", [0.0, 0.1, -7.3, 98765.4])  # the last one's variance rounds to below 0
@pytest.mark.parametrize("count", [1, 2, 99])
def test_constant_scores_normalise_to_zero(score: float, count: int) -> None:
    running = RunningScores()
    for _ in range(count):
        running.update(1, score, score**2)
    mean, scale = running.shift_and_scale()
    assert scale == pytest.approx(1e4, rel=1e-3)
    assert (score - mean) * scale == pytest.approx(0, abs=1e-5)


def test_running_scores_continue_from_their_state() -> None:
    running, resumed = RunningScores(), RunningScores(count=9, total=9, squares=9)
    running.update(3, 9, 41)
    resumed.load_state_dict(running.state_dict())
    assert resumed == running
    running.update(1, 5, 25)
    resumed.update(1, 5, 25)
    assert resumed.shift_and_scale() == running.shift_and_scale() == pytest.approx((14 / 4, (17 / 3 + 1e-8) ** -0.5))


# --- the learning rate

# 4 steps of warm-up, then 8 steps: progress 0, 1/8, ..., 1, and beyond the end
SCHEDULES_BY_HAND: dict[str, dict[int, float]] = {
    "constant": {0: 1 / 4, 3: 1, 4: 1, 8: 1, 12: 1, 99: 1},
    "linear": {0: 1 / 4, 2: 3 / 4, 3: 1, 4: 1, 5: 7 / 8, 8: 1 / 2, 11: 1 / 8, 12: 0, 99: 0},
    # (1 + cos(pi / 4)) / 2 at progress 1/4, where cos is sqrt(1/2)
    "cosine": {1: 2 / 4, 4: 1, 6: (1 + math.sqrt(0.5)) / 2, 8: 1 / 2, 10: (1 - math.sqrt(0.5)) / 2, 12: 0, 99: 0},
}


@pytest.mark.parametrize("kind", SCHEDULES_BY_HAND)
def test_lr_scale_by_hand(kind: str) -> None:
    expected = SCHEDULES_BY_HAND[kind]
    assert {step: lr_scale(step, 4, 12, kind) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_every_schedule_has_a_case_by_hand() -> None:
    assert set(LR_SCHEDULES) == set(SCHEDULES_BY_HAND)


@pytest.mark.parametrize("kind", LR_SCHEDULES)
@few
@given(st.integers(0, 30), st.integers(1, 60))
def test_lr_scale_rises_to_one_and_never_again(kind: str, warmup: int, total: int) -> None:
    scales = [lr_scale(step, warmup, total, kind) for step in range(warmup + total)]
    assert all(0 <= scale <= 1 for scale in scales)
    assert scales[:warmup] == sorted(set(scales[:warmup]))
    assert scales[warmup:] == sorted(scales[warmup:], reverse=True)
    assert scales[warmup] == 1


def test_lr_scale_without_warmup_starts_at_one() -> None:
    assert [lr_scale(step, 0, 2, "linear") for step in range(3)] == [1, 1 / 2, 0]


def test_lr_scale_with_nothing_but_warmup() -> None:
    assert [lr_scale(step, 2, 2, "cosine") for step in range(4)] == pytest.approx([1 / 2, 1, 1, 0])


def test_unknown_lr_schedule_is_refused_even_during_warmup() -> None:
    with pytest.raises(ValueError, match=r"'step'.* constant, linear, cosine"):
        lr_scale(0, 10, 100, "step")
