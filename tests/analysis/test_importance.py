"""The importance of two settings of which one decides the result."""

import optuna
import pytest
from sweep_cases import groups_of, sweep, trial

from rlx.analysis.importance import MIN_GROUPS, importance, numbers, on_log_scale
from rlx.config.errors import ConfigError

LR, KIND = "train.actor_lr", "algorithm.kl_estimator"


def settings_of(count: int = MIN_GROUPS, **more: object) -> list:
    """Settings whose value follows the learning rate alone."""
    kinds = ["k1", "k3", "abs", None]
    trials = (trial(i, {LR: 10.0 ** (i / 4 - 5), KIND: kinds[i * 7 % 4]}, {9: 0.05 * i}, **more) for i in range(count))
    return groups_of(sweep(*trials))


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_deciding_setting_is_first_and_shares_add_up_to_one(mode: str) -> None:
    shares = importance(settings_of(), mode)
    assert list(shares) == [LR, KIND]
    assert shares[LR] > 0.8
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)


@pytest.mark.slow
def test_repeated_calls_agree() -> None:
    assert importance(settings_of(), "max") == importance(settings_of(), "max")


def test_a_setting_with_one_value_has_no_share() -> None:
    groups = groups_of(sweep(*(trial(i, {LR: float(i), KIND: "k1"}, {9: 0.1 * i}) for i in range(MIN_GROUPS))))
    assert importance(groups, "max") == {LR: 1.0}


def test_settings_without_a_result_do_not_count() -> None:
    with pytest.raises(
        ConfigError, match=f"^{MIN_GROUPS - 1} settings with a result are too few to tell: at least {MIN_GROUPS}"
    ):
        importance(settings_of(MIN_GROUPS - 1), "max")
    with pytest.raises(ConfigError, match=r"^0 settings with a result"):
        importance(settings_of(status="RUNNING"), "max")


def test_results_that_do_not_differ_are_refused() -> None:
    alike = sweep(*(trial(i, {LR: 10.0 ** (i / 4 - 5)}, {9: 0.5}) for i in range(MIN_GROUPS)))
    with pytest.raises(ConfigError, match=r"^all settings have the same result, or nearly$"):
        importance(groups_of(alike), "max")


def test_a_forest_without_differences_gives_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Encountered zero total variance in all trees.")

    monkeypatch.setattr(optuna.importance, "get_param_importances", fail)
    with pytest.raises(ConfigError, match=r"^all settings have the same result, or nearly$"):
        importance(settings_of(), "max")


def test_settings_that_changed_within_a_trial_are_refused() -> None:
    with pytest.raises(ConfigError, match="changed within trials"):
        importance(settings_of(origins=("trial_00001@6",)), "max")


def test_scales() -> None:
    assert on_log_scale([1e-4, 1e-2])
    assert not on_log_scale([0.0, 100.0])
    assert not on_log_scale([1, 10])
    assert numbers([1, 2.5]) == [1.0, 2.5]
    assert numbers([1, None]) is None
    assert numbers(["k1"]) is None
