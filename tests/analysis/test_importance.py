"""Which of two settings matters, where there is something to say."""

import pytest
from sweep_cases import sweep, trial

from rlx.analysis.importance import FEWEST, importance, numbers, on_log_scale
from rlx.analysis.statistics import groups
from rlx.config.errors import ConfigError

LR, KIND = "train.actor_lr", "algorithm.kl_estimator"


def made(count: int = FEWEST, **more: object) -> list:
    """Settings whose value follows the learning rate alone."""
    kinds = ["k1", "k3", "abs", None]
    trials = (trial(i, {LR: 10.0 ** (i / 4 - 5), KIND: kinds[i * 7 % 4]}, {9: 0.05 * i}, **more) for i in range(count))
    return groups(sweep(*trials))


@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_decides_comes_first_and_shares_add_up_to_one(mode: str) -> None:
    shares = importance(made(), mode)
    assert list(shares) == [LR, KIND]
    assert shares[LR] > 0.8
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)


def test_it_is_the_same_at_each_call() -> None:
    assert importance(made()) == importance(made())


def test_a_setting_with_one_value_has_no_share() -> None:
    found = groups(sweep(*(trial(i, {LR: float(i), KIND: "k1"}, {9: 0.1 * i}) for i in range(FEWEST))))
    assert importance(found) == {LR: 1.0}


def test_settings_without_a_result_do_not_count() -> None:
    with pytest.raises(
        ConfigError, match=f"^{FEWEST - 1} settings with a result are too few to tell: at least {FEWEST}"
    ):
        importance(made(FEWEST - 1))
    with pytest.raises(ConfigError, match=r"^0 settings with a result"):
        importance(made(status="RUNNING"))


def test_settings_that_changed_within_a_trial_are_refused() -> None:
    with pytest.raises(ConfigError, match="changed within trials"):
        importance(made(origins=("trial_00001@6",)))


def test_scales() -> None:
    assert on_log_scale([1e-4, 1e-2])
    assert not on_log_scale([0.0, 100.0])
    assert not on_log_scale([1, 10])
    assert numbers([1, 2.5]) == [1.0, 2.5]
    assert numbers([1, None]) is None
    assert numbers(["k1"]) is None
