"""A setting with several seeds is one trial to Ray's schedulers: they see its mean, and its trials end together."""

from collections.abc import Mapping, Sequence

import pytest
from racing import METRIC, Played, Tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from rlx.config.sweep import SchedulerName
from rlx.sweeps.records import TrialRecord, TrialState, number_of, place_of, trial_name
from rlx.sweeps.schedulers.by_name import SCHEDULERS
from rlx.sweeps.schedulers.schedule import TIME, Schedule

STEPS = 8


def in_step(running: Sequence[Played]) -> Played:
    """The trials report in turn."""
    return min(running, key=lambda trial: (trial.last_result[TIME], trial.number))


def scheduler_of(name: SchedulerName, candidates: int, seeds: int, known: Mapping[str, TrialRecord]) -> TrialScheduler:
    return SCHEDULERS[name](Schedule(STEPS, 2, {}, known=known, candidates=candidates, seeds=seeds))


def last_steps(
    name: SchedulerName,
    accuracies: Sequence[Sequence[float]],
    slots: int = 99,
    known: Mapping[str, TrialRecord] | None = None,
) -> list[list[int]]:
    """The last step of each candidate on each seed, of trials that report the same accuracy at every step."""
    candidates, seeds = len(accuracies), len(accuracies[0])

    def values_of(number: int) -> dict[int, float]:
        candidate, seed_index = place_of(number, candidates, seeds)
        return dict.fromkeys(range(1, STEPS + 1), accuracies[candidate][seed_index])

    tune = Tune(scheduler_of(name, candidates, seeds, known or {}), values_of, in_step)
    failed = {number for number in range(candidates * seeds) if trial_name(number) in (known or {})}
    tune.run([number for number in range(candidates * seeds) if number not in failed], slots)
    assert {trial.status for trial in tune.trials} == {Trial.TERMINATED}
    ends = {trial.number: trial.last_result[TIME] for trial in tune.trials}
    return [[ends.get(number_of(i, k, candidates, seeds), 0) for k in range(seeds)] for i in range(candidates)]


def test_asha_stops_a_setting_whose_mean_is_low_with_all_its_seeds() -> None:
    """Means 0.5, 0.3 and 0.6: the second is stopped when its last seed has done two steps, its first one step later."""
    assert last_steps("asha", [[0.9, 0.1], [0.35, 0.25], [0.2, 1.0]]) == [[8, 8], [3, 2], [8, 8]]


def test_a_setting_with_one_seed_is_judged_as_before() -> None:
    assert last_steps("asha", [[0.5], [0.3], [0.6], [0.1]]) == [[8], [2], [8], [2]]


def test_median_stops_a_setting_whose_mean_is_low_with_all_its_seeds() -> None:
    """The third has the best run of all, and a mean of 0.45 below the 0.5, 0.6 and 0.7 of the others."""
    assert last_steps("median", [[0.5, 0.5], [0.6, 0.6], [0.9, 0.0], [0.7, 0.7]])[2] == [8, 8]  # nobody to compare with
    stopped = last_steps("median", [[0.5, 0.5], [0.6, 0.6], [0.7, 0.7], [0.9, 0.0]])
    assert stopped == [[8, 8], [8, 8], [8, 8], [3, 2]]


@pytest.mark.parametrize("slots", [1, 3, 99])
def test_hyperband_keeps_the_settings_with_the_better_means(slots: int) -> None:
    """The first bracket has four settings that are let alone; the second compares four at 4 and keeps two."""
    means = [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.5, 0.8]
    ends = last_steps("hyperband", [[mean + 0.2, mean - 0.2] for mean in means], slots)
    assert [max(each) == STEPS and min(each) == STEPS for each in ends[:4]] == [True] * 4
    assert [min(each) for each in ends[4:]] == [4, 8, 4, 8]


def test_a_setting_of_which_a_seed_failed_is_judged_by_the_others() -> None:
    failed = {"trial_00003": TrialRecord(settings={}, state=TrialState.FAILED)}
    assert last_steps("asha", [[0.5, 0.5], [0.4, 0.9], [0.6, 0.6]], known=failed) == [[8, 8], [2, 0], [8, 8]]


class Told:
    """A scheduler of candidates with two seeds that a test tells what their trials did."""

    def __init__(self, candidates: int) -> None:
        self.scheduler = scheduler_of("asha", candidates, 2, {})
        self.scheduler.set_search_properties(METRIC, "max")
        self.trials = [Played(number, {}) for number in range(2 * candidates)]
        for trial in self.trials:
            self.scheduler.on_trial_add(None, trial)

    def report(self, number: int, step: int, value: float) -> str:
        return self.scheduler.on_trial_result(None, self.trials[number], {TIME: step, METRIC: value})


def test_a_rung_that_others_reported_before_a_seed_failed_is_judged() -> None:
    """The second setting is behind at 2, but not at 4 and 6, which its other seed has reported by then."""
    told = Told(candidates=2)
    assert [told.report(number, step, 0.5) for step in (2, 4) for number in (0, 1)] == ["CONTINUE"] * 4
    assert [told.report(2, 2, 0.1), told.report(2, 4, 0.9)] == ["CONTINUE"] * 2
    told.scheduler.on_trial_error(None, told.trials[3])
    assert told.report(2, 6, 0.9) == "STOP"


def test_the_rungs_of_a_setting_whose_last_seed_failed_count_for_the_others() -> None:
    told = Told(candidates=2)
    for step in (2, 4, 6):
        told.report(0, step, 0.5)
    told.scheduler.on_trial_complete(None, told.trials[0], {TIME: 8, METRIC: 0.5})
    told.scheduler.on_trial_error(None, told.trials[1])
    assert [told.report(2, 2, 0.1), told.report(3, 2, 0.1)] == ["CONTINUE", "STOP"]


def test_a_seed_that_fails_on_the_way_is_missed_from_then_on_and_back_when_it_is_tried_again() -> None:
    told = Told(candidates=2)
    scheduler, trials, report = told.scheduler, told.trials, told.report
    assert [report(0, 2, 0.5), report(1, 2, 0.5), report(2, 2, 0.1)] == ["CONTINUE"] * 3
    scheduler.on_trial_error(None, trials[3])
    scheduler.on_trial_add(None, trials[3])  # Tune tries it again
    assert report(2, 3, 0.1) == "CONTINUE"
    assert report(3, 2, 0.2) == "STOP" and report(2, 4, 0.9) == "STOP"
