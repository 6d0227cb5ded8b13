"""Races: who is out, who waits, which seeds are added, whatever the order of reports and after a resume."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from racing import METRIC, Played, Tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from rlx.storage.addresses import open_storage
from rlx.sweeps.records import (
    SweepPlan,
    TrialRecord,
    TrialRecords,
    TrialState,
    number_of,
    place_of,
    trial_name,
)
from rlx.sweeps.schedulers.race import Look, Race
from rlx.sweeps.schedulers.racing import RaceScheduler
from rlx.sweeps.schedulers.schedule import TIME, Schedule
from rlx.sweeps.searchers import ListSearch
from rlx.sweeps.trial_source import TrialOptions, TrialSource
from rlx.sweeps.verdict import race_lines

STEPS, RUNGS = 8, (2, 4, 8)
Curves = Mapping[int, Mapping[int, float]]  # by the trial's number and step

NOISE = [[0.001, -0.002, 0.0005, 0.0012, -0.0003], [-0.0011, 0.0004, 0.0021, -0.0007, 0.0009]]


def schedule(candidates: int = 3, seeds: int = 3, **more: Any) -> Schedule:
    return Schedule(STEPS, 2, {}, candidates=candidates, seeds=seeds, **({"max_seeds": seeds} | more))


def curves(means: Sequence[float], seeds: int, given: Schedule) -> Curves:
    """The second and all later candidates vary a little from seed to seed, differently; nobody learns anything."""
    return {
        number_of(i, k, given.candidates, given.seeds): {
            step: mean + (NOISE[i % 2][k] if i else 0) + 0.02 * k for step in range(1, STEPS + 1)
        }
        for i, mean in enumerate(means)
        for k in range(seeds)
    }


def in_order(running: Sequence[Played]) -> Played:
    return running[0]


def play(
    given: Schedule,
    values: Curves,
    slots: int = 99,
    pick: Callable[[Sequence[Played]], Played] = in_order,
    reports: float = float("inf"),
) -> Tune:
    tune = Tune(RaceScheduler(given), values.__getitem__, pick)
    first = [number for number in range(given.candidates * given.seeds) if trial_name(number) not in ended(given)]
    tune.run(first, slots, reports)
    return tune


def ended(given: Schedule) -> set[str]:
    return {name for name, record in given.known.items() if record.is_over}


def race_of(tune: Tune) -> Race:
    assert isinstance(tune.scheduler, RaceScheduler)
    return tune.scheduler.race


def last_steps(tune: Tune) -> dict[int, int]:
    return {trial.number: trial.last_result[TIME] for trial in tune.trials}


# ---------------------------------------------------------------------------------------------------------------------
# Who is out


def test_a_look_is_taken_at_each_rung_and_for_each_seed_that_may_be_added() -> None:
    assert Race(schedule(max_seeds=5)).looks == [Look(2, 3), Look(4, 3), Look(8, 3), Look(8, 4), Look(8, 5)]
    assert Race(Schedule(7, 0, {}, candidates=2, seeds=2, max_seeds=2)).looks == [Look(7, 2)]


def test_a_setting_that_is_behind_for_certain_stops_at_the_rung_with_all_its_seeds() -> None:
    given = schedule()
    tune = play(given, curves([0.5, 0.3, 0.5001], 3, given))
    assert last_steps(tune) == {0: 8, 1: 8, 2: 8, 3: 2, 4: 2, 5: 2, 6: 8, 7: 8, 8: 8}
    standing = race_of(tune).standings[1]
    assert (race_of(tune).live, standing.look, standing.leader) == ([0, 2], Look(2, 3), 0)
    assert standing.deficit.value == pytest.approx(0.2 - (-0.0011 + 0.0004 + 0.0021) / 3, abs=1e-9)


def test_alpha_is_shared_by_the_looks() -> None:
    """Behind by 0.010, 0.011 and 0.012: a chance of 0.0014, which is less than 0.05 / 3, and more than 0.003 / 3."""
    values = {0: [0.5, 0.611, 0.7], 1: [0.49, 0.6, 0.688], 2: [0.5000001, 0.6110003, 0.7000001]}
    for alpha, left in ((0.05, [0, 2]), (0.003, [0, 1, 2])):
        given = schedule(alpha=alpha)
        found = {3 * i + k: dict.fromkeys(RUNGS, value) for i, row in values.items() for k, value in enumerate(row)}
        assert race_of(play(given, found)).live == left


def test_low_values_can_be_good() -> None:
    given = schedule(mode="min")
    assert race_of(play(given, curves([0.5, 0.3, 0.5001], 3, given))).live == [1]


def test_the_last_setting_runs_to_the_end_alone() -> None:
    given = schedule(max_seeds=5)
    tune = play(given, curves([0.3, 0.31, 0.5], 5, given))
    assert (race_of(tune).live, race_of(tune).is_over) == ([2], True)
    assert last_steps(tune) == dict.fromkeys(range(6), 2) | dict.fromkeys(range(6, 9), 8)


def test_seeds_are_added_to_the_settings_that_are_left_until_one_is() -> None:
    """The first and the third differ by little: by 0.001 on three seeds, the same on the fourth, less on the fifth."""
    given = schedule(max_seeds=5)
    tune = play(given, curves([0.5, 0.3, 0.5001], 5, given))
    assert sorted(last_steps(tune)) == [*range(9), 9, 11, 12, 14]
    assert [place_of(number, 3, 3) for number in (9, 11, 12, 14)] == [(0, 3), (2, 3), (0, 4), (2, 4)]
    assert race_of(tune).standings[0].look == Look(8, 5) and race_of(tune).is_over


def test_numbers_and_places_belong_together() -> None:
    places = [place_of(number, 4, 3) for number in range(20)]
    assert places[:4] == [(0, 0), (0, 1), (0, 2), (1, 0)] and places[12:14] == [(0, 3), (1, 3)]
    assert [number_of(*place, 4, 3) for place in places] == list(range(20))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_setting_with_a_value_that_is_no_number_is_out(value: float) -> None:
    given = schedule()
    values = {number: dict(curve) for number, curve in curves([0.5, 0.5, 0.5], 3, given).items()}
    values[4] |= {4: value}
    assert race_of(play(given, values)).live == [0, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Who waits


def test_trials_wait_at_a_rung_for_those_that_have_not_started() -> None:
    """With one slot each trial does two steps before any does three."""
    given = schedule()
    tune = play(given, curves([0.5, 0.5, 0.5001], 3, given), slots=1, reports=18)
    assert set(last_steps(tune).values()) == {2}
    assert [trial.status for trial in tune.trials] == [Trial.PAUSED] * 8 + [Trial.RUNNING]


def test_who_has_gone_on_past_an_open_rung_waits_at_its_next_step() -> None:
    race = Race(schedule())
    assert [race.waits(0, step) for step in (1, 2, 3)] == [False, True, True]


def test_a_trial_that_failed_for_good_ends_its_setting_at_the_first_rung_that_it_lacks() -> None:
    given = schedule()
    values = curves([0.5, 0.5, 0.5001], 3, given)
    race = Race(given)
    for number in range(9):
        race.report(number, 2, values[number][2])
    race.end(4)
    assert race.live == [0, 1, 2] and race.waits(0, 4)
    for number in (0, 1, 2, 3, 5, 6, 7):
        race.report(number, 4, values[number][4])
    assert race.live == [0, 1, 2]
    race.report(8, 4, values[8][4])
    assert race.live == [0, 2] and race.is_out(3)


# ---------------------------------------------------------------------------------------------------------------------
# Order and resume

CLOSE = [0.5, 0.3, 0.5008, 0.499, 0.45, 0.5002]


def outcome(race: Race) -> tuple[list[int], Mapping[int, Any]]:
    return race.live, race.standings


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_reports_and_the_number_of_slots_change_nothing(seed: int) -> None:
    given = schedule(candidates=6, max_seeds=5)
    values, rng = curves(CLOSE, 5, given), random.Random(seed)
    expected, other = play(given, values), play(given, values, slots=1 + seed, pick=rng.choice)
    assert outcome(race_of(other)) == outcome(race_of(expected))
    assert last_steps(other) == last_steps(expected)


def records_of(tune: Tune, values: Curves) -> dict[str, TrialRecord]:
    """What is recorded of the trials of a sweep that was killed; nothing of those that had not begun."""
    over = {Trial.TERMINATED: TrialState.STOPPED}
    return {
        trial_name(trial.number): TrialRecord(
            settings={},
            state=TrialState.FINISHED if last == STEPS else over.get(trial.status, TrialState.OPEN),
            reports=[(step, values[trial.number][step]) for step in range(2, last + 1, 2)],
        )
        for trial in tune.trials
        if (last := trial.last_result[TIME])
    }


@pytest.mark.parametrize("reports", range(1, 130, 6))
def test_a_sweep_that_was_killed_anywhere_ends_as_if_it_had_not_been(reports: int) -> None:
    given = schedule(candidates=6, max_seeds=5)
    values = curves(CLOSE, 5, given)
    expected, killed = play(given, values), play(given, values, slots=4, reports=reports)
    known = records_of(killed, values)
    resumed = play(
        schedule(candidates=6, max_seeds=5, known=known), values, slots=3, pick=random.Random(reports).choice
    )
    assert outcome(race_of(resumed)) == outcome(race_of(expected))


def test_settings_that_were_out_before_a_failed_trial_is_restarted_stay_out() -> None:
    stopped = TrialRecord(settings={}, state=TrialState.STOPPED, reports=[(2, 0.5)])
    known = {"trial_00003": stopped, "trial_00005": stopped, "trial_00004": TrialRecord(settings={})}
    given = schedule(known=known)
    tune = play(given, curves([0.5, 0.5, 0.5001], 3, given))
    assert race_of(tune).live == [0, 2]
    assert last_steps(tune)[4] < STEPS


# ---------------------------------------------------------------------------------------------------------------------
# The trials that Tune is given, and what is said in the end

SETTINGS = [{"train.ppo_epochs": 1}, {"train.ppo_epochs": 2}, {"train.ppo_epochs": 3}]


def source_of(folder: Path, race: Race, known: Mapping[str, TrialRecord] | None = None) -> TrialSource:
    options = TrialOptions(candidates=3, seeds=[7, 8, 9], pausing=True, race=race)
    return TrialSource(ListSearch(SETTINGS), {}, TrialRecords(open_storage(str(folder))), options, known)


def given_by(source: TrialSource, prefix: str = "id") -> dict[str, dict[str, Any]]:
    """What a source has to give now, by name."""
    given = {}
    while isinstance(settings := source.suggest(trial_id := f"{prefix}{len(given)}"), dict):
        given[source.name_of(SimpleNamespace(trial_id=trial_id))] = settings
    return given


def test_added_seeds_are_given_when_the_race_asks_for_them(tmp_path: Path) -> None:
    given = schedule(max_seeds=4)
    values, race = curves([0.5, 0.3, 0.5001], 4, given), Race(given)
    source = source_of(tmp_path, race)
    assert list(given_by(source)) == [trial_name(i) for i in range(9)]
    assert source.suggest("later") is None
    for step in RUNGS:
        for number in range(9):
            race.report(number, step, values[number][step])
    for number in range(9):
        source.on_trial_complete(f"id{number}", {METRIC: 0.5})
    added = given_by(source, "more")
    assert added == {
        "trial_00009": {"train.ppo_epochs": 1, "seed": 10},
        "trial_00011": {"train.ppo_epochs": 3, "seed": 10},
    }
    assert source.suggest("later") is None
    source.on_trial_complete("more0", error=True)  # its setting is out, so there is nothing left to compare
    race.report(11, STEPS, values[11][STEPS])
    source.on_trial_complete("more1", {METRIC: 0.5})
    assert race.live == [2] and source.suggest("later") == Searcher.FINISHED


def test_added_trials_that_are_open_go_on_after_a_resume(tmp_path: Path) -> None:
    """One belongs to a setting that is left, the other to one that was dropped just before the kill."""
    plain = schedule(max_seeds=4)
    values = curves([0.5, 0.3, 0.5001], 4, plain)
    over = {"settings": {}, "state": TrialState.FINISHED}
    known = {
        trial_name(i): TrialRecord(**over, reports=[(step, values[i][step]) for step in RUNGS]) for i in range(9)
    } | {trial_name(i): TrialRecord(settings={"train.ppo_epochs": i, "seed": 10}) for i in (9, 10)}
    source = source_of(tmp_path, Race(schedule(max_seeds=4, known=known)), known)
    assert {name: settings["train.ppo_epochs"] for name, settings in given_by(source).items()} == {
        "trial_00009": 9,
        "trial_00010": 10,
        "trial_00011": 3,
    }


def test_the_result_is_said_in_sentences() -> None:
    plan = SweepPlan(
        "s", {"train": {"steps": STEPS}, "eval": {"every": 2}}, "x.py", candidates=3, seeds=3, scheduler="race"
    )
    given = schedule()
    for means, said in (
        (
            [0.5, 0.3, 0.5001],
            [
                "ppo_epochs 1 and ppo_epochs 3 tied: after 3 seeds none is shown to be behind",
                "ppo_epochs 2 is out: behind",
            ],
        ),
        (
            [0.3, 0.31, 0.5],
            [
                "ppo_epochs 3 wins with 0.52 at step 2, where it was compared last",
                "ppo_epochs 2 is out: behind ppo_epochs 3 by 0.19 (95 %: 0.1",
            ],
        ),
    ):
        values = curves(means, 3, given)
        records = records_of(play(given, values), values)
        records = {
            name: record.model_copy(update={"settings": SETTINGS[i // 3] | {"seed": i}})
            for i, (name, record) in enumerate(records.items())
        }
        lines = race_lines(plan, records)
        assert all(line.startswith(start) for line, start in zip(lines, said, strict=False)), lines
        assert "3 seeds, step 2)" in lines[1]
        assert (
            lines[-1]
            == "the best setting of a rung is out in at most 5 % of races; a single line is less sure than that"
        )


RACE = SweepPlan(
    "s", {"train": {"steps": STEPS}, "eval": {"every": 2}}, "x.py", candidates=3, seeds=3, scheduler="race"
)


def with_failures(values: Curves, failed: Mapping[int, int]) -> list[str]:
    """What is said of a race one of whose trials, by number, failed after so many steps."""
    states = {number: TrialState.FAILED if number in failed else TrialState.FINISHED for number in range(9)}
    records = {
        trial_name(number): TrialRecord(
            settings=SETTINGS[number // 3],
            state=state,
            reports=[(step, values[number][step]) for step in range(2, failed.get(number, STEPS) + 1, 2)],
        )
        for number, state in states.items()
    }
    return race_lines(RACE, records)


def test_settings_that_all_lost_a_trial_are_not_called_the_only_one() -> None:
    lines = with_failures(curves([0.3, 0.31, 0.5], 3, schedule()), {0: 0, 4: 0, 8: 0})
    assert lines == ["no setting could be compared: every one lost a trial before its first comparison"]


def test_a_setting_whose_trials_failed_since_it_was_compared_does_not_win() -> None:
    lines = with_failures(curves([0.3, 0.31, 0.5], 3, schedule()), {6: 2, 7: 2, 8: 2})
    assert lines[0] == (
        "ppo_epochs 3 is left with 0.52 at step 2, where it was compared last; ppo_epochs 3 has lost 3 trials since"
    )
    tied = with_failures(curves([0.5, 0.3, 0.5001], 3, schedule()), {0: 2, 6: 2})
    assert tied[0].endswith(
        "none is shown to be behind; ppo_epochs 1 has lost 1 trial since; ppo_epochs 3 has lost 1 trial since"
    )
    lost = with_failures(curves([0.5, 0.5, 0.5], 3, schedule()), {0: 0, 3: 0, 8: 4})
    assert lost[0] == "ppo_epochs 3 is left, the only one that could be compared; ppo_epochs 3 has lost 1 trial since"
