"""Schedulers in real, small sweeps of Tune: whom they stop, and who goes on from whom."""

import itertools
import json
import random
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.tune.schedulers.pbt import _explore

from rlx.config.sweep import DEFAULT_METRIC
from rlx.storage.addresses import open_storage
from rlx.sweeps.choices import PAUSING
from rlx.sweeps.records import TrialRecord, TrialRecords, trial_name
from rlx.sweeps.schedulers.by_name import SCHEDULERS
from rlx.sweeps.schedulers.racing import RaceScheduler
from rlx.sweeps.schedulers.schedule import Schedule
from rlx.sweeps.searchers import ListSearch
from rlx.sweeps.space import MODE, Space
from rlx.sweeps.trial_source import TrialOptions, TrialSource

LAM: Space = {"algorithm.gae_lambda": tune.uniform(0.1, 0.9)}


def sweep(steps: int, every: int) -> Schedule:
    return Schedule(steps, every, LAM)


def trainable() -> Any:
    """Reports the same accuracy at each step, and a line that tells which trials did the steps behind it."""

    def report_steps(settings: dict[str, Any]) -> None:  # by value: Ray's workers do not find this file
        letter = chr(65 + int(tune.get_context().get_trial_name().rpartition("_")[2]))
        step, line, starts = settings["begun"], "", 1
        if handed := tune.get_checkpoint():
            with handed.as_directory() as folder:
                line, starts = json.loads(Path(folder, "past").read_text())
                step, starts = step + len(line), starts + 1
        while step < settings["steps"]:
            step, line = step + 1, line + letter
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "past").write_text(json.dumps([line, starts]))
                accuracy = settings["accuracy"] + 0.001 * settings.get("seed", 0)
                metrics = {"step": step, DEFAULT_METRIC: accuracy, "line": line, "starts": starts}
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))

    # More than half of the session's cluster: there is room for one.
    return tune.with_resources(report_steps, {"cpu": 2.5})


def run(
    name: str,
    accuracies: Sequence[float],
    schedule: Schedule,
    folder: Path,
    *,
    begun: int = 0,
    seeds: Sequence[int] = (),
) -> list[Mapping[str, Any]]:
    """The last report of each trial of a sweep, one at a time, of settings A, B, ... with these accuracies."""
    common = {"steps": schedule.steps, "begun": begun, "algorithm.gae_lambda": 0.5}
    listed = [common | {"accuracy": value} for value in accuracies]
    reports = [(begun, 0.5)] if begun else []
    known = {trial_name(i): TrialRecord(settings={}, reports=reports) for i in range(len(listed))}
    scheduler = SCHEDULERS[name](replace(schedule, known=known, candidates=len(listed)))
    race = scheduler.race if isinstance(scheduler, RaceScheduler) else None
    options = TrialOptions(len(listed), seeds, pausing=name in PAUSING, race=race)
    trials = TrialSource(ListSearch(listed), {}, TrialRecords(open_storage(str(folder))), options)
    tuner = tune.Tuner(
        trainable(),
        tune_config=tune.TuneConfig(
            metric=DEFAULT_METRIC,
            mode=MODE,
            num_samples=-1,
            scheduler=scheduler,
            search_alg=trials,
            reuse_actors=True,
            trial_name_creator=trials.name_of,
            trial_dirname_creator=trials.name_of,
        ),
        run_config=tune.RunConfig(name="tune", storage_path=str(folder), verbose=0),
    )
    on_interrupt = signal.getsignal(signal.SIGINT)  # Tune replaces it and does not restore it
    results = tuner.fit()
    signal.signal(signal.SIGINT, on_interrupt)
    assert not results.errors
    return [result.metrics for result in sorted(results, key=lambda result: Path(result.path).name)]


def steps(reports: Sequence[Mapping[str, Any]]) -> list[int]:
    return [report["step"] for report in reports]


# ---------------------------------------------------------------------------------------------------------------------
# Who is stopped


def test_the_first_rung_is_the_first_evaluation_that_training_can_have_changed() -> None:
    assert sweep(steps=8, every=2).first_rung == 2
    assert sweep(steps=8, every=20).first_rung == 8
    assert sweep(steps=8, every=0).first_rung == 8


@pytest.mark.parametrize(("steps", "every"), [(8, 2), (40, 10), (7, 2), (1, 1), (8, 0), (100, 3)])
def test_the_rungs_are_those_of_ray_but_for_the_last_step(steps: int, every: int) -> None:
    schedule = sweep(steps, every)
    (bracket,) = SCHEDULERS["asha"](schedule).inner.inner._brackets  # type: ignore[attr-defined]
    assert schedule.rungs == sorted(step for step, _ in bracket._rungs if step < steps)


@pytest.mark.slow
def test_without_a_scheduler_all_trials_do_all_steps(free_cluster: None, tmp_path: Path) -> None:
    assert steps(run("none", [0.1, 0.2], sweep(8, 2), tmp_path)) == [8, 8]


def test_asha_stops_who_is_below_the_median_of_a_rung(free_cluster: None, tmp_path: Path) -> None:
    """Rungs are 2, 4 and 8. G is at the median 0.4 of the others' at 2, and below their 0.6 at 4."""
    reports = run("asha", [0.5, 0.3, 0.6, 0.1, 0.2, 0.7, 0.4, 0.0], sweep(8, 2), tmp_path)
    assert steps(reports) == [8, 2, 8, 2, 2, 8, 4, 2]


@pytest.mark.slow
def test_median_stops_who_is_below_the_median_of_three_others(free_cluster: None, tmp_path: Path) -> None:
    reports = run("median", [0.5, 0.7, 0.1, 0.2, 0.9], sweep(8, 2), tmp_path)
    assert steps(reports) == [8, 8, 8, 2, 8]
    assert [report["starts"] for report in reports] == [1] * 5  # nobody waits until there are three others


@pytest.mark.slow  # the test of evaluations below brings all to an end, too
def test_hyperband_brings_all_trials_to_an_end(
    free_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bracket has four trials that are let alone; the second compares four at 4 and keeps the better half."""
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "8")
    reports = run("hyperband", [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.5, 0.8], sweep(8, 2), tmp_path)
    assert steps(reports) == [8, 8, 8, 8, 4, 8, 4, 8]


def test_trials_are_judged_at_evaluations_alone(
    free_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 is no step of an evaluation here."""
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "8")
    reports = run("hyperband", [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.5, 0.8], sweep(8, 3), tmp_path)
    assert set(steps(reports)) == {6, 8}
    assert steps(run("median", [0.5, 0.7, 0.1, 0.2, 0.9], sweep(8, 3), tmp_path / "median")) == [8, 8, 8, 3, 8]


def test_a_race_stops_a_setting_and_adds_seeds_to_those_that_are_left(
    free_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are equal and one is far behind: it stops at 2 with both seeds, the others get a third, trials 6 and 8."""
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "9")
    raced = replace(sweep(4, 2), seeds=2, max_seeds=3)
    reports = run("race", [0.9, 0.1, 0.9], raced, tmp_path, seeds=[7, 8])
    assert steps(reports) == [4, 4, 2, 2, 4, 4, 4, 4]
    assert [report["config"]["seed"] for report in reports] == [7, 8, 7, 8, 7, 8, 9, 9]
    assert [report["starts"] for report in reports] == [2, 2, 1, 1, 2, 1, 1, 1]  # all but the last one paused at 2


# ---------------------------------------------------------------------------------------------------------------------
# Populations


@pytest.mark.slow
def test_the_worse_goes_on_from_the_better_with_other_settings(
    free_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4, A has no checkpoint to hand over yet, as nobody was worse; at 8 it has."""
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "2")
    better, worse = run("pbt", [0.9, 0.1], sweep(12, 4), tmp_path)
    assert (better["line"], worse["line"]) == ("A" * 12, "A" * 8 + "B" * 4)
    assert better["config"]["algorithm.gae_lambda"] == 0.5 != worse["config"]["algorithm.gae_lambda"]


@pytest.mark.slow
def test_after_a_resume_the_next_change_is_due_when_it_would_have_been(
    free_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go on at 5; there are evaluations at 8, where A has no checkpoint to hand over, and at 12."""
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "2")
    better, worse = run("pbt", [0.9, 0.1], sweep(16, 4), tmp_path, begun=4)
    assert (better["line"], worse["line"]) == ("A" * 12, "A" * 8 + "B" * 4)


@pytest.mark.slow
def test_nobody_goes_on_from_another_after_the_last_step(
    free_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "2")
    better, worse = run("pbt", [0.9, 0.1], sweep(8, 4), tmp_path)
    assert (better["line"], worse["line"]) == ("A" * 8, "B" * 8)


def test_settings_stay_within_their_domains_however_often_they_change() -> None:
    space = {
        "train.actor_lr": tune.loguniform(1e-5, 1e-3),
        "train.ppo_epochs": tune.randint(1, 5),
        "rollout.max_tokens": tune.qrandint(5, 38, 8),
        "algorithm.value_clip": tune.quniform(0.2, 0.6, 0.2),
        "algorithm.gae_lambda": tune.uniform(0.5, 1.0),
        "algorithm.target_kl": tune.choice([None, 0.05]),
    }
    population = SCHEDULERS["pbt"](Schedule(8, 2, space))
    random.seed(0)
    settings: dict[str, Any] = {key: domain.sample() for key, domain in space.items()}
    seen: dict[str, set[Any]] = {key: set() for key in space}
    for _ in range(2000):
        settings, _ = _explore(
            settings, population._hyperparam_mutations, 0.05, (1.2, 0.8), population._custom_explore_fn
        )
        for key, value in settings.items():
            seen[key].add(value)
    assert 1e-5 <= min(seen["train.actor_lr"]) < 2e-5 and 5e-4 < max(seen["train.actor_lr"]) <= 1e-3
    assert seen["train.ppo_epochs"] == {1, 2, 3, 4}
    assert min(seen["algorithm.gae_lambda"]) == 0.5 and max(seen["algorithm.gae_lambda"]) == 1.0
    assert seen["rollout.max_tokens"] == {8, 16, 24, 32}
    assert seen["algorithm.value_clip"] == {0.2, 0.4, 0.6}
    assert seen["algorithm.target_kl"] == {None, 0.05}


def test_settings_that_do_not_go_together_are_those_of_before() -> None:
    """Prompts of a step are to be a multiple of 2 workers x 4 mini-batches: no trial gets another number."""
    tree, key = {"scaling": {"num_workers": 2}}, "train.prompts_per_step"
    given = [{key: 40}, {key: 48}, {key: 56}, {key: 64}]
    last: set[int] = set()
    for seed in range(40):
        schedule = Schedule(8, 2, {key: tune.randint(8, 65)}, seed=seed, tree=tree)
        *others, worst = [trial.config[key] for trial in looked_at(schedule, given)]
        assert others == [40, 48, 56]
        last.add(worst)
    assert {32, 48, 64} <= last and all(each % 8 == 0 for each in last)  # 0.8 and 1.2 times 40, or as before


def test_a_population_draws_the_same_with_the_same_seed_whoever_else_draws() -> None:
    def drawn(seed: int) -> list[Any]:
        random.seed(next(others))
        np.random.seed(next(others))
        state = random.getstate(), np.random.get_state()[1].tolist()
        trials = looked_at(
            Schedule(8, 2, LAM, seed=seed), [{"algorithm.gae_lambda": 0.3 + 0.01 * n} for n in range(16)]
        )
        assert state == (random.getstate(), np.random.get_state()[1].tolist())
        return [trial.config for trial in trials]

    others = itertools.count()
    assert drawn(1) == drawn(1) != drawn(2)


class InTune:
    """A trial that runs, and Tune's controller, as far as a population knows them."""

    def __init__(self, number: int, config: dict[str, Any]) -> None:
        self.number, self.config, self.trial_id, self.status = number, config, trial_name(number), "RUNNING"
        self.evaluated_params, self.experiment_tag = dict(config), ""
        manager = SimpleNamespace(checkpoint_config=tune.CheckpointConfig())
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)

    def __str__(self) -> str:
        return self.trial_id

    def is_finished(self) -> bool:
        return False

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag


def looked_at(schedule: Schedule, settings: Sequence[dict[str, Any]]) -> list[InTune]:
    """Trials with these settings after two evaluations, by a population; the first one is the best, and so on."""
    population = SCHEDULERS["pbt"](schedule)
    population.set_search_properties(DEFAULT_METRIC, MODE)
    trials = [InTune(number, config) for number, config in enumerate(settings)]
    controller = SimpleNamespace(
        get_trials=lambda: trials,
        pause_trial=lambda trial, should_checkpoint: None,
        _schedule_trial_save=lambda trial, result: "a checkpoint",
    )
    for trial in trials:
        population.on_trial_add(controller, trial)
    for step in (2, 4):
        for trial in trials:
            population.on_trial_result(controller, trial, {"step": step, DEFAULT_METRIC: -float(trial.number)})
    return trials
