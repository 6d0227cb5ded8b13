"""Rungs in tokens or GPU-seconds: trials are compared at equal amounts, whatever a step of them takes."""

from collections.abc import Sequence
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from rlx.config.sweep import DEFAULT_METRIC, RungUnit, SchedulerName
from rlx.sweeps.records import trial_name
from rlx.sweeps.schedulers.by_name import SCHEDULERS
from rlx.sweeps.schedulers.schedule import Schedule

Report = tuple[int, float, float]
"""step, tokens or seconds so far, accuracy"""


class Shown:
    """A trial as schedulers see it."""

    is_saving = False

    def __init__(self, number: int) -> None:
        self.trial_id, self.status = trial_name(number), Trial.RUNNING

    def __str__(self) -> str:
        return self.trial_id


class Controller:
    def __init__(self, trials: Sequence[Shown]) -> None:
        self.trials = trials

    def get_trials(self) -> Sequence[Shown]:
        return self.trials

    def stop_trial(self, trial: Shown) -> None:
        trial.status = Trial.TERMINATED


def decided(name: SchedulerName, schedule: Schedule, reports: Sequence[tuple[int, Report]], metric: str) -> list[str]:
    """What a scheduler says of each report, of (trial, report) in the order in which they come."""
    trials = [Shown(number) for number in range(schedule.candidates * schedule.seeds)]
    scheduler: TrialScheduler = SCHEDULERS[name](schedule)
    scheduler.set_search_properties(DEFAULT_METRIC, "max")
    controller: Any = Controller(trials)
    for trial in trials:
        scheduler.on_trial_add(controller, trial)
    said = []
    for number, (step, amount, accuracy) in reports:
        result = {"step": step, metric: amount, DEFAULT_METRIC: accuracy}
        said.append(scheduler.on_trial_result(controller, trials[number], result))
        if said[-1] == TrialScheduler.STOP:
            scheduler.on_trial_complete(controller, trials[number], result)
    return said


def by(rungs: RungUnit, candidates: int = 2, seeds: int = 1, **more: Any) -> Schedule:
    return Schedule(16, 2, {}, candidates=candidates, seeds=seeds, rung_by=rungs, **more)


# Both learn 0.1 of accuracy with every 64 tokens; the second draws twice as many in a step.
SLOW = [(0, (0, 0.0, 0.0)), (0, (2, 64.0, 0.1)), (0, (4, 128.0, 0.2)), (0, (6, 192.0, 0.3)), (0, (8, 256.0, 0.4))]
FAST = [(1, (0, 0.0, 0.0)), (1, (2, 128.0, 0.2)), (1, (4, 256.0, 0.4))]


def test_who_draws_more_in_a_step_is_not_ahead_of_who_learns_as_much_of_a_token() -> None:
    """By steps the slow one is at 0.1 where the fast one is at 0.2; by tokens both are at 0.2 after 128."""
    assert decided("asha", by("steps"), [*FAST, *SLOW[:2]], "tokens/total")[-1] == "STOP"
    assert decided("asha", by("tokens"), [*FAST, *SLOW], "tokens/total") == ["CONTINUE"] * 8


def test_who_learns_less_of_a_token_is_stopped_though_it_is_ahead_at_a_step() -> None:
    """After two steps the wasteful one is at 0.2, after 128 tokens; the thrifty one comes there with 0.3."""
    thrifty = [(0, (2, 64.0, 0.15)), (0, (4, 128.0, 0.3)), (0, (6, 192.0, 0.4))]
    wasteful = (1, (2, 128.0, 0.2))
    assert decided("asha", by("tokens"), [*thrifty, wasteful], "tokens/total")[-1] == "STOP"
    assert decided("asha", by("steps"), [*thrifty, wasteful], "tokens/total")[-1] == "CONTINUE"


def test_the_value_at_a_rung_lies_between_two_evaluations() -> None:
    """At 128 tokens: 0.1 + 0.4 * (128 - 96) / (192 - 96) = 0.2333; another one has 0.23 or 0.24 there."""
    first = [(0, (2, 96.0, 0.1)), (0, (4, 192.0, 0.5))]
    for accuracy, expected in ((0.23, "STOP"), (0.24, "CONTINUE")):
        other = [(1, (2, 64.0, 0.2)), (1, (4, 128.0, accuracy))]
        assert decided("asha", by("tokens"), [*first, *other], "tokens/total")[-1] == expected


def test_a_rung_that_was_passed_on_the_way_to_a_later_one_judges_nobody_later() -> None:
    """The first goes from 64 to 512 at once: it is never judged at 128 and 256, with what it learned long after."""
    leaps = [(0, (2, 64.0, 0.1)), (0, (4, 512.0, 0.2)), (0, (6, 600.0, 0.9)), (0, (8, 700.0, 0.9))]
    other = [(1, (2, 64.0, 0.1)), (1, (4, 128.0, 0.1)), (1, (6, 256.0, 0.1))]
    assert decided("asha", by("tokens"), [*leaps, *other], "tokens/total") == ["CONTINUE"] * 7


def test_seconds_count_for_each_gpu_and_seeds_are_averaged() -> None:
    """Means of two seeds on two GPUs: 64 GPU-seconds with 0.3, and 64 with 0.2, which 0.5 of one seed does not save."""
    better = [(0, (2, 30.0, 0.2)), (1, (2, 34.0, 0.4))]
    worse = [(2, (2, 20.0, 0.5)), (3, (2, 44.0, -0.1))]
    said = decided("asha", by("gpu-seconds", seeds=2, gpus=2.0), [*better, *worse], "time/total")
    assert said == ["CONTINUE", "CONTINUE", "CONTINUE", "STOP"]


def test_median_compares_with_what_others_had_at_as_many_tokens() -> None:
    """Three others have a mean of 0.2 up to 100 tokens, and 0.1 up to step 2. Who has 0.15 is between these."""
    others = [(n, report) for n in range(3) for report in ((2, 50.0, 0.1), (4, 100.0, 0.3), (6, 150.0, 0.5))]
    low = (3, (2, 100.0, 0.15))
    assert decided("median", by("tokens", candidates=4), [*others, low], "tokens/total")[-1] == "STOP"
    assert decided("median", by("steps", candidates=4), [*others, low], "tokens/total")[-1] == "CONTINUE"
