"""Trials of a sweep as Tune is given them: numbers, seeds, records, and what a resumed sweep does with those."""

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.tune.search import Searcher

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sweep import DEFAULT_METRIC, SearchName
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage, StorageError
from rlx.sweeps import searchers, tuner
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialRecords, TrialState
from rlx.sweeps.searchers import ListSearch
from rlx.sweeps.space import MODE
from rlx.sweeps.trial_source import TrialOptions, TrialSource

SETTINGS = [{"train.ppo_epochs": 1}, {"train.ppo_epochs": 2}, {"train.ppo_epochs": 3}]


class Recording(Searcher):
    """Suggests 1, 2, 3, ... and keeps what it is told; `waits` for each result before the next suggestion."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__(DEFAULT_METRIC, MODE)
        self.told: dict[str, float | None] = {}
        self.suggested: list[str] = []
        self.waits = waits

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if self.waits and len(self.told) < len(self.suggested):
            return None
        self.suggested.append(trial_id)
        return {"train.ppo_epochs": len(self.suggested)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        assert error == (result is None) and trial_id not in self.told
        self.told[trial_id] = result[DEFAULT_METRIC] if result else None


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    """Of an empty sweep."""
    return open_storage(str(tmp_path / "sweep"))


@dataclass(frozen=True)
class Given:
    """A trial as Tune makes it of a suggestion."""

    trial_id: str
    name: str
    config: dict[str, Any]


class Asked:
    """A sweep's trials, asked for as Tune does."""

    def __init__(self, source: TrialSource, records: TrialRecords) -> None:
        self.source, self.records, self.count, self.is_finished = source, records, 0, False

    def next_trial(self) -> Given | None:
        trial_id = f"id{self.count}"
        settings = self.source.suggest(trial_id)
        self.records.flush()
        self.is_finished = settings == Searcher.FINISHED
        if not isinstance(settings, dict):
            return None
        self.count += 1
        return Given(trial_id, self.source.name_of(SimpleNamespace(trial_id=trial_id)), settings)


def trials(folder: Storage, search: Searcher | None = None, **options: Any) -> Asked:
    """Of a sweep over SETTINGS, as Tune has them before the first."""
    space, records = options.pop("space", {}), TrialRecords(folder)
    chosen = TrialOptions(**{"candidates": 3} | options)
    return Asked(TrialSource(search or ListSearch(SETTINGS), space, records, chosen), records)


def all_of(some: Asked) -> list[Given]:
    given = []
    while trial := some.next_trial():
        given.append(trial)
    return given


def named(given: list[Given]) -> dict[str, dict[str, Any]]:
    return {trial.name: trial.config for trial in given}


def ends(some: Asked, trial: Given, value: float | None) -> None:
    """As Tune tells it; no value: it failed."""
    result = None if value is None else {DEFAULT_METRIC: value, "step": 9}
    some.source.on_trial_complete(trial.trial_id, result, error=value is None)


def write(folder: Storage, name: str, record: TrialRecord) -> None:
    records = TrialRecords(folder)
    records.write(name, record)
    records.flush()


def even(settings: Mapping[str, Any]) -> None:
    if settings["train.ppo_epochs"] % 2:
        raise ConfigError("odd")


def never(settings: Mapping[str, Any]) -> None:
    raise ConfigError("never")


def test_suggestions_that_cannot_work_are_no_trials(folder: Storage, caplog: pytest.LogCaptureFixture) -> None:
    search = Recording()
    given = all_of(some := trials(folder, search, candidates=2, check=even))
    assert named(given) == {"trial_00000": {"train.ppo_epochs": 2}, "trial_00001": {"train.ppo_epochs": 4}}
    assert search.told == {"0": None, "2": None}
    assert caplog.messages == ["suggestions that cannot work are passed over; the first: odd"]
    for trial, value in zip(given, (0.1, 0.2), strict=True):
        ends(some, trial, value)
    assert search.told == {"0": None, "1": 0.1, "2": None, "3": 0.2}


@pytest.mark.parametrize(("mode", "lowest"), [("max", 0.2), ("min", -0.9)])
def test_a_search_is_told_the_lowest_value_of_what_cannot_work(mode: str, lowest: float, folder: Storage) -> None:
    some = trials(folder, search := Recording(), mode=mode, check=even)
    for value in (0.2, 0.9, math.inf if mode == "min" else -math.inf):
        trial = some.next_trial()
        assert trial
        ends(some, trial, value)
    assert search.told["0"] is None and search.told["4"] == lowest


@pytest.mark.parametrize("name", ["optuna", "hyperopt"])
def test_a_search_goes_on_where_the_best_lies_beside_what_cannot_work(name: SearchName, folder: Storage) -> None:
    space = {"train.num_minibatches": tune.choice([1, 2, 4, 8]), "train.prompts_per_step": tune.choice([4, 8, 16])}

    def check(settings: Mapping[str, Any]) -> None:
        if settings["train.prompts_per_step"] % settings["train.num_minibatches"]:
            raise ConfigError("no")

    some = trials(folder, searchers.searcher(name, space, 30, 0), space=space, candidates=30, check=check)
    while trial := some.next_trial():
        check(trial.config)
        ends(some, trial, trial.config["train.num_minibatches"] / 8 - trial.config["train.prompts_per_step"] / 16)


def test_settings_that_a_search_suggests_go_together(folder: Storage) -> None:
    """A step of 4 prompts and 1 sample of each has no 8 mini-batches."""
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 1}
    plan = SweepPlan("s", {"train": sizes}, "space.py", candidates=12, search="optuna")
    space = {"train.num_minibatches": tune.choice([1, 8]), "train.prompts_per_step": tune.choice([4, 8])}
    room: Any = SimpleNamespace(trials=lambda open_trials: 99)
    source = tuner._trial_source(plan, TrialRecords(folder), space, {}, tuner._options(plan, room, None))
    given = [source.suggest(str(number)) for number in range(12)]
    assert source.suggest("12") == Searcher.FINISHED and len({json.dumps(each) for each in given}) == 3
    for settings in given:
        from_tree(with_overrides(plan.tree, settings))


def test_suggestions_that_a_run_would_be_refused_for_are_no_trials(folder: Storage, tiny_model: Path) -> None:
    """The model has no room for the longer responses."""
    plan = SweepPlan("s", {"model": {"path": str(tiny_model)}}, "space.py", candidates=6, search="optuna")
    space = {"rollout.max_tokens": tune.choice([8, 9, 99_999])}
    room: Any = SimpleNamespace(trials=lambda open_trials: 99)
    source = tuner._trial_source(plan, TrialRecords(folder), space, {}, tuner._options(plan, room, None))
    given = [source.suggest(str(number)) for number in range(6)]
    assert {each["rollout.max_tokens"] for each in given if isinstance(each, dict)} == {8, 9}


def test_a_search_that_suggests_nothing_else_has_its_trials(folder: Storage) -> None:
    assert [each.config for each in all_of(trials(folder, candidates=1, search=Recording(), check=never))] == [
        {"train.ppo_epochs": 101}
    ]


def test_trials_of_before_a_resume_are_not_passed_over(folder: Storage) -> None:
    """A newer rlx may refuse what it took."""
    write(folder, "trial_00000", TrialRecord(settings={"train.ppo_epochs": 1}))
    given = all_of(trials(folder, Recording(), candidates=2, check=even))
    assert [each.config["train.ppo_epochs"] for each in given] == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Records


def test_a_record_is_read_as_it_was_written(folder: Storage) -> None:
    record = TrialRecord(
        settings={
            "train.actor_lr": 0.1 + 0.2,
            "algorithm.target_kl": None,
            "data.system_prompt": "é",
            "x": [0.8, True],
        },
        state=TrialState.FAILED,
        reports=[(2, 1 / 3), (4, 0.0)],
        message="é: out of memory",
        attempts=3,
    )
    write(folder, "trial_00001", record)
    write(folder, "trial_00000", TrialRecord(settings={}))
    assert TrialRecords(folder).all() == {"trial_00000": TrialRecord(settings={}), "trial_00001": record}
    assert (record.is_over, record.step) == (True, 4)
    assert (TrialRecord(settings={}).is_over, TrialRecord(settings={}).step) == (False, 0)


def test_no_record_is_lost_while_the_storage_is_away(folder: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    records, is_away = TrialRecords(folder), threading.Event()

    def once(file: Storage, text: str) -> None:
        if is_away.is_set():
            raise StorageError(file.path)
        file.write_text(text)

    monkeypatch.setattr("rlx.sweeps.records.write_record", once)
    is_away.set()
    for i in range(3):
        records.write(f"trial_{i:05d}", TrialRecord(settings={"seed": i}))
    with pytest.raises(StorageError):
        records.flush()
    is_away.clear()
    records.flush()
    assert [record.settings["seed"] for record in TrialRecords(folder).all().values()] == [0, 1, 2]


def test_a_sweep_without_trials_has_no_records(folder: Storage) -> None:
    assert TrialRecords(folder).all() == {}


def test_a_metric_that_is_no_number_is_read_back(folder: Storage) -> None:
    write(folder, "trial_00000", TrialRecord(settings={}, reports=[(2, math.inf), (4, math.nan)]))
    (_, infinite), (_, unknown) = TrialRecords(folder).read("trial_00000").reports
    assert math.isinf(infinite) and math.isnan(unknown)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "open"}', '{"settings": {}, "state": "lost"}', '{"x": 1}'])
def test_a_damaged_record_is_named(text: str, folder: Storage) -> None:
    write(folder, "trial_00000", TrialRecord(settings={}))
    (folder / "trials" / "trial_00001.json").write_text(text)
    with pytest.raises(ConfigError, match=r"trials/trial_00001\.json is damaged: it is not what rlx wrote"):
        TrialRecords(folder).all()


# ---------------------------------------------------------------------------------------------------------------------
# A new sweep


def test_trials_are_numbered_in_the_order_of_the_search_and_recorded_before_they_start(folder: Storage) -> None:
    new = trials(folder, space={"rollout.max_tokens": 8})
    first = new.next_trial()
    assert first and named([first]) == {"trial_00000": {"rollout.max_tokens": 8, "train.ppo_epochs": 1}}
    assert TrialRecords(folder).all() == {"trial_00000": TrialRecord(settings=first.config)}
    assert not new.is_finished
    rest = all_of(new)
    assert {name: each["train.ppo_epochs"] for name, each in named(rest).items()} == {
        "trial_00001": 2,
        "trial_00002": 3,
    }
    assert new.is_finished


def test_a_search_without_an_end_gives_as_many_settings_as_asked_for(folder: Storage) -> None:
    assert [trial.config["train.ppo_epochs"] for trial in all_of(trials(folder, Recording(), candidates=5))] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_each_setting_runs_with_all_seeds_before_the_next(folder: Storage) -> None:
    given = all_of(trials(folder, candidates=2, seeds=[7, 8, 9]))
    assert [(trial.config["train.ppo_epochs"], trial.config["seed"]) for trial in given] == [
        (epochs, seed) for epochs in (1, 2) for seed in (7, 8, 9)
    ]
    assert [trial.name for trial in given] == [f"trial_{i:05d}" for i in range(6)]


def test_no_more_are_given_than_may_be_there_at_once(folder: Storage) -> None:
    room = [2]
    new = trials(folder, limit=lambda open_trials: room[0])
    first, second = all_of(new)
    assert not new.is_finished
    ends(new, first, 0.5)
    assert named(all_of(new)) == {"trial_00002": {"train.ppo_epochs": 3}}
    assert not new.is_finished
    ends(new, second, None)
    assert new.next_trial() is None and new.is_finished


def test_a_node_that_joins_is_used_at_once(folder: Storage) -> None:
    room = [1]
    new = trials(folder, limit=lambda open_trials: room[0])
    assert len(all_of(new)) == 1
    room[0] = 3
    assert len(all_of(new)) == 2


def test_processes_stay_while_a_paused_trial_may_need_one(folder: Storage) -> None:
    new = trials(folder, pausing=True)
    given = all_of(new)
    assert not new.is_finished
    for trial in given:
        ends(new, trial, 0.5)
    assert new.next_trial() is None and new.is_finished


# ---------------------------------------------------------------------------------------------------------------------
# What the search is told


def test_a_search_is_told_the_mean_over_seeds_once_all_are_over(folder: Storage) -> None:
    search = Recording()
    new = trials(folder, search, candidates=2, seeds=[0, 1, 2])
    given = all_of(new)
    for trial, value in zip(given[:2], (0.5, 1.0), strict=True):
        ends(new, trial, value)
    ends(new, given[4], 0.25)
    assert search.told == {}
    ends(new, given[2], 0.0)
    assert search.told == {"0": 0.5}
    ends(new, given[3], None)
    ends(new, given[5], 0.75)
    assert search.told == {"0": 0.5, "1": 0.5}  # the mean of 0.25 and 0.75: one failed


def test_a_search_for_low_values_is_told_that_they_are_high(folder: Storage) -> None:
    search = Recording()
    some = trials(folder, search, candidates=2, metric="eval/length", mode="min")
    for trial, length in zip(all_of(some), (7.0, 3.0), strict=True):
        some.source.on_trial_complete(trial.trial_id, {"eval/length": length, DEFAULT_METRIC: 1.0})
    assert search.told == {"0": -7.0, "1": -3.0}


def test_a_value_that_is_not_finite_counts_as_that_of_a_failed_trial(folder: Storage) -> None:
    search = Recording()
    new = trials(folder, search, candidates=2, seeds=[0, 1])
    for trial, value in zip(all_of(new), (math.nan, -math.inf, math.inf, 0.5), strict=True):
        ends(new, trial, value)
    assert search.told == {"0": None, "1": 0.5}


def test_a_setting_of_which_all_seeds_failed_has_failed(folder: Storage) -> None:
    search = Recording()
    new = trials(folder, search, candidates=1, seeds=[0, 1])
    for trial in all_of(new):
        ends(new, trial, None)
    assert search.told == {"0": None}


def test_a_search_that_waits_for_results_is_asked_again(folder: Storage) -> None:
    new = trials(folder, Recording(waits=True), candidates=2)
    (first,) = all_of(new)
    assert new.next_trial() is None and not new.is_finished
    ends(new, first, 0.1)
    assert [trial.name for trial in all_of(new)] == ["trial_00001"]


def test_numbers_of_numpy_become_pythons(folder: Storage) -> None:
    (trial,) = all_of(
        trials(folder, ListSearch([{"train.ppo_epochs": np.int64(2), "algorithm.gae_lambda": np.float64(0.1)}]))
    )
    assert [type(value) for value in trial.config.values()] == [int, float]
    assert TrialRecords(folder).read("trial_00000").settings == {"train.ppo_epochs": 2, "algorithm.gae_lambda": 0.1}


# ---------------------------------------------------------------------------------------------------------------------
# A sweep that goes on


def after(folder: Storage, **changes: dict[str, Any]) -> None:
    """Leaves a sweep of three trials, of which some have changed since."""
    all_of(trials(folder))
    for name, change in changes.items():
        write(folder, name, TrialRecords(folder).read(name).model_copy(update=change))


FINISHED = {"state": TrialState.FINISHED, "reports": [(5, 0.25), (10, 0.5)]}
STOPPED = {"state": TrialState.STOPPED, "reports": [(5, 0.125)]}
FAILED = {"state": TrialState.FAILED, "reports": [(5, 0.25)], "message": "out of memory"}


def test_open_trials_go_on_under_their_names_and_the_rest_follows(folder: Storage) -> None:
    first = trials(folder)
    assert first.next_trial() and first.next_trial()
    resumed = all_of(trials(folder))
    assert named(resumed) == {f"trial_{i:05d}": each for i, each in enumerate(SETTINGS)}
    assert len(TrialRecords(folder).all()) == 3


def test_seeds_that_had_not_started_follow(folder: Storage) -> None:
    first = trials(folder, candidates=2, seeds=[7, 8])
    for _ in range(3):  # killed within the second setting
        first.next_trial()
    resumed = named(all_of(trials(folder, candidates=2, seeds=[7, 8])))
    assert [(each["train.ppo_epochs"], each["seed"]) for each in resumed.values()] == [(1, 7), (1, 8), (2, 7), (2, 8)]


def test_what_is_over_is_not_given_again(folder: Storage) -> None:
    after(folder, trial_00000=FINISHED, trial_00001=STOPPED)
    assert list(named(all_of(trials(folder)))) == ["trial_00002"]


def test_settings_that_were_changed_on_the_way_are_kept(folder: Storage) -> None:
    after(folder, trial_00001={"settings": {"train.ppo_epochs": 99}})
    assert named(all_of(trials(folder)))["trial_00001"] == {"train.ppo_epochs": 99}


def test_a_search_is_told_of_what_is_over_in_its_order(folder: Storage) -> None:
    after(folder, trial_00000=FINISHED, trial_00001=FAILED)
    search = Recording(waits=True)
    (open_one,) = all_of(trials(folder, search))
    assert open_one.name == "trial_00002"
    assert search.told == {"0": 0.5, "1": None}


def test_a_search_is_told_the_mean_over_seeds_of_both_parts_of_a_sweep(folder: Storage) -> None:
    all_of(trials(folder, candidates=1, seeds=[0, 1]))
    write(folder, "trial_00000", TrialRecord(settings={"train.ppo_epochs": 1, "seed": 0}, **FINISHED))
    search = Recording()
    resumed = trials(folder, search, candidates=1, seeds=[0, 1])
    (second,) = all_of(resumed)
    assert search.told == {}
    ends(resumed, second, 1.0)
    assert search.told == {"0": 0.75}


def test_a_sweep_that_is_over_has_nothing_to_give(folder: Storage) -> None:
    after(folder, trial_00000=FINISHED, trial_00001=FAILED, trial_00002=STOPPED)
    over = trials(folder)
    assert over.next_trial() is None and over.is_finished
