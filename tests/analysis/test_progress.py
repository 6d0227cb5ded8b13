"""The best value so far, and the rungs at which a scheduler stopped trials."""

import math
from dataclasses import replace

import pytest
from sweep_cases import sweep, trial

from rlx.analysis.progress import Rung, best_so_far, find_rungs, rung_table
from rlx.config.sweep import DEFAULT_METRIC

LR = "train.actor_lr"
HALVED = sweep(
    trial(0, {LR: 1.0}, {0: 0.1, 2: 0.5, 4: 0.6, 8: 0.7}, end_ms=400),
    trial(1, {LR: 2.0}, {0: 0.1, 2: 0.2}, stopped_at=2, end_ms=100),
    trial(2, {LR: 3.0}, {0: 0.1, 2: 0.4, 4: 0.3}, stopped_at=4, end_ms=300),
    trial(3, {LR: 4.0}, {0: 0.1, 2: 0.3}, stopped_at=2, end_ms=200),
    trial(4, {LR: 5.0}, {0: 0.1, 2: 0.9}, status="RUNNING"),
    trial(5, {LR: 6.0}, {}, status="FAILED", end_ms=50),
)


def test_trials_count_in_the_order_in_which_they_ended() -> None:
    finishes = best_so_far(HALVED, DEFAULT_METRIC, "max")
    assert [finish.trial.name[-1] for finish in finishes] == ["1", "3", "2", "0"]
    assert [finish.value for finish in finishes] == [0.2, 0.3, 0.3, 0.7]
    assert [finish.best for finish in finishes] == [0.2, 0.3, 0.3, 0.7]
    assert [finish.best for finish in best_so_far(HALVED, DEFAULT_METRIC, "min")] == [0.2] * 4


def test_a_rung_is_a_step_at_which_trials_were_stopped() -> None:
    assert find_rungs(HALVED, DEFAULT_METRIC) == [Rung(2, 5, 2), Rung(4, 2, 1)]
    assert find_rungs(sweep(trial(0, {LR: 1.0}, {2: 0.5})), DEFAULT_METRIC) == []


def test_a_rung_that_stopped_nobody_is_one_too_if_a_trial_has_reached_it() -> None:
    judged = replace(HALVED, rungs=(2, 4, 8, 16))
    assert find_rungs(judged, DEFAULT_METRIC) == [Rung(2, 5, 2), Rung(4, 2, 1), Rung(8, 1, 0)]
    assert list(rung_table(judged, DEFAULT_METRIC, "max"))[2:5] == ["at 2", "at 4", "at 8"]
    nobody = replace(sweep(trial(0, {LR: 1.0}, {2: 0.5})), rungs=(2, 4))
    assert find_rungs(nobody, DEFAULT_METRIC) == [Rung(2, 1, 0)]


def test_a_seed_that_was_further_when_its_setting_was_stopped_counts_where_it_was_judged() -> None:
    """It ends a step after the rung, and has begun another one; or, evaluated at each second step, after the next."""
    others = [trial(number, {LR: 1.0}, {0: 0.1, 2: 0.5, 4: 0.6, 8: 0.7}) for number in range(4)]
    first = trial(4, {LR: 2.0}, {0: 0.1, 2: 0.2}, stopped_at=2)
    second = trial(5, {LR: 2.0}, {0: 0.1, 2: 0.3, 4: 0.9}, stopped_at=3)
    assert second.last_step == 3
    assert find_rungs(sweep(*others, first, second), DEFAULT_METRIC) == [Rung(2, 6, 2)]
    further = trial(5, {LR: 2.0}, {0: 0.1, 2: 0.3, 4: 0.9, 6: 0.9}, stopped_at=7)
    judged = replace(sweep(*others, first, further), rungs=(2, 4, 8))
    assert find_rungs(judged, DEFAULT_METRIC) == [Rung(2, 6, 1), Rung(4, 5, 1), Rung(8, 4, 0)]


def test_a_trial_that_was_stopped_with_no_finite_value_counts_where_it_was_stopped() -> None:
    first = trial(0, {LR: 1.0}, {0: 0.1, 2: 0.4, 4: 0.5, 10: 0.6})
    second = trial(1, {LR: 2.0}, {0: 0.1, 2: 0.2, 4: math.inf}, stopped_at=4)
    third = trial(2, {LR: 3.0}, {0: 0.1, 2: math.inf}, stopped_at=2)
    diverged = sweep(first, second, third)
    assert find_rungs(diverged, DEFAULT_METRIC) == [Rung(2, 3, 1), Rung(4, 2, 1)]
    by_tokens = replace(diverged, rung_by="tokens")
    assert find_rungs(by_tokens, DEFAULT_METRIC) == [Rung(128, 3, 1), Rung(256, 2, 1), Rung(512, 1, 0)]


def test_rungs_in_tokens_are_those_that_were_passed_last_at_an_evaluation() -> None:
    """100 tokens a step, so evaluations come after 200, 400 and 800, past the rungs 128, 256 and 512."""
    by_tokens = replace(HALVED, rung_by="tokens")
    assert find_rungs(by_tokens, DEFAULT_METRIC) == [Rung(128, 5, 2), Rung(256, 2, 1), Rung(512, 1, 0)]
    table = rung_table(by_tokens, DEFAULT_METRIC, "max")
    assert list(table)[2:5] == ["at 128 tokens", "at 256 tokens", "at 512 tokens"]
    assert table["at 128 tokens"][0] == pytest.approx(0.1 + 0.4 * 128 / 200)
    assert table["at 256 tokens"].tolist()[:2] == pytest.approx([0.5 + 0.1 * 56 / 200, 0.4 - 0.1 * 56 / 200])


def test_rungs_in_gpu_seconds_count_the_gpus_of_a_trial() -> None:
    one = trial(0, {LR: 1.0}, {0: 0.1, 2: 0.5})
    one.history["time/total"] = [math.nan, 3.0]
    on_two = replace(sweep(one), rung_by="gpu-seconds", planned={"gpus": 2.0})
    assert find_rungs(on_two, DEFAULT_METRIC) == [Rung(4, 1, 0)]
    assert list(rung_table(on_two, DEFAULT_METRIC, "max"))[2] == "at 4 GPU-seconds"


def test_the_table_of_rungs_has_a_value_for_each_trial_that_was_there() -> None:
    table = rung_table(HALVED, DEFAULT_METRIC, "max")
    assert list(table) == ["trial", "actor_lr", "at 2", "at 4", "final", "steps", "stopped"]
    assert table["trial"].str[-1].tolist() == ["0", "2", "4", "3", "1", "5"]  # farthest first, then best first
    assert table["at 2"].tolist()[:5] == [0.5, 0.4, 0.9, 0.3, 0.2]
    assert table["at 4"].tolist()[:2] == [0.6, 0.3] and math.isnan(table["at 4"][2])
    assert table["stopped"].fillna(0).tolist() == [0, 4, 0, 2, 2, 0]
