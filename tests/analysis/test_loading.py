"""Sweeps read back from a real MLflow database: trials, their histories and settings, samples, configs, errors."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from sweep_cases import BASE, Run, config, log_run, log_sweep, open_run

from rlx.analysis import loading, tables
from rlx.config.errors import ConfigError, printable
from rlx.config.sections.base import flatten
from rlx.config.sweep import DEFAULT_METRIC
from rlx.tracking.base import TrackedRun
from rlx.tracking.services import mlflow

VARIED = ("train.actor_lr", "algorithm.kl_estimator", "algorithm.adaptive_kl_target")
RUNS = [
    Run({"train.actor_lr": 1e-4, "algorithm.kl_estimator": "k1"}, {0: 0.2, 2: 0.5, 4: 0.4}, answers={"is it?": "no"}),
    Run({"train.actor_lr": 3e-3, "algorithm.kl_estimator": "k3"}, {0: 0.2, 2: 0.6}, tags={"rlx.stopped": "2"}),
    Run(  # before its first evaluation
        {"train.actor_lr": 5e-4, "algorithm.adaptive_kl_target": 0.1}, status="FAILED", tags={"rlx.error": "no memory"}
    ),
]
CLONED = Run(
    {"train.actor_lr": 1e-4},
    {0: 0.2, 2: 0.3, 4: 0.35},
    answers={"is it?": "no"},
    status="KILLED",
    attempts=(
        Run({"train.actor_lr": 2e-4}, {3: 0.5, 4: 0.6}, tags={"rlx.from": "trial_1@2"}, answers={"is it?": "yes"}),
        Run({"train.actor_lr": 3e-4}, {5: 0.8, 6: 0.9}, tags={"rlx.from": "trial_0@4"}),
    ),
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> str:
    """A store with several sweeps, which all tests share."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_database, folder)
    uri = mlflow.default_uri(folder)
    log_sweep(uri, "lr", RUNS[:1], VARIED)  # an older one of the same name
    log_sweep(uri, "lr", RUNS, VARIED, {"rlx.seeds": "1"})
    log_sweep(uri, "cloned", [CLONED, RUNS[0]], ["train.actor_lr"])
    log_sweep(uri, "trial-less", [], [])
    weights = [Run({"reward.functions": {"numeric": 1.0, "exact_match": weight}}, {0: 0.1}) for weight in (0.1, 0.9)]
    log_sweep(uri, "weights", weights, ["reward.functions.exact_match"])
    log_run(uri, "ppo-1", Run({}, {0: 0.1}), experiment="singles")
    log_sweep(uri, "alone", [Run({"train.actor_lr": 1e-3}, {0: 0.1}, "RUNNING")], ["train.actor_lr"])
    return uri


@pytest.fixture(scope="module")
def sweep(uri: str) -> loading.Sweep:
    return loading.load_sweep(uri, "rlx", "lr")


@pytest.mark.slow
def test_names_are_newest_first_and_each_once(uri: str) -> None:
    assert loading.sweep_names(uri, "rlx") == ["alone", "weights", "trial-less", "cloned", "lr"]


def test_a_sweep_is_read_with_its_trials_in_order(sweep: loading.Sweep) -> None:
    assert (sweep.name, sweep.varied) == ("lr", VARIED)
    assert [trial.name for trial in sweep.trials] == ["trial_0", "trial_1", "trial_2"]
    assert [trial.status for trial in sweep.trials] == ["FINISHED", "FINISHED", "FAILED"]
    assert [trial.seconds for trial in sweep.trials] == pytest.approx([8.5, 4.5, math.nan], nan_ok=True)
    assert [trial.stopped_at for trial in sweep.trials] == [None, 2, None]
    assert [trial.error for trial in sweep.trials] == ["", "", "no memory"]
    assert tables.trial_table(sweep, DEFAULT_METRIC, "max")["error"].tolist() == ["", "", "no memory"]


def test_the_recorded_options_are_read(sweep: loading.Sweep) -> None:
    assert sweep.options == {"search": "random", "scheduler": "none", "seeds": "1", "trials": "3", "steps": "4"}


def test_settings_are_numbers_texts_or_nothing(sweep: loading.Sweep) -> None:
    settings = [tuple(trial.settings.values()) for trial in sweep.trials]
    assert settings == [(1e-4, "k1", None), (3e-3, "k3", None), (5e-4, "k1", 0.1)]


def test_an_entry_of_a_setting_is_read_from_it(uri: str) -> None:
    trials = loading.load_sweep(uri, "rlx", "weights").trials
    assert [trial.settings for trial in trials] == [{"reward.functions.exact_match": weight} for weight in (0.1, 0.9)]


def test_history_has_a_row_per_step_and_nan_where_nothing_was_logged(sweep: loading.Sweep) -> None:
    history = sweep.trials[0].history
    assert list(history.index) == [0, 1, 2, 3, 4]
    assert list(history.columns) == list(loading.WATCHED)
    assert history["eval/accuracy"].dropna().to_dict() == {0: 0.2, 2: 0.5, 4: 0.4}
    assert sweep.trials[0].curve("kl/ref").index.tolist() == [0, 2, 3, 4]  # infinite at step 1
    assert sweep.trials[0].logged("kl/ref").tolist() == pytest.approx([0, math.inf, 0.2, 0.3, 0.4])
    assert sweep.trials[2].history.empty


def test_other_metrics_are_read_on_request(uri: str) -> None:
    loaded = loading.load_sweep(uri, "rlx", "lr", ["policy/entropy", "kl/ref"])
    assert loaded.metrics == (*loading.WATCHED, "policy/entropy")
    assert loaded.trials[0].curve("policy/entropy").empty


def test_a_running_trial_has_what_it_took_so_far(uri: str) -> None:
    (trial,) = loading.load_sweep(uri, "rlx", "alone").trials
    assert (trial.status, trial.seconds) == ("RUNNING", 0.5)


def test_only_held_out_accuracies_have_a_number_of_questions(sweep: loading.Sweep) -> None:
    metrics = ("eval/accuracy", "eval/ema/accuracy", "eval/reward", "task/accuracy")
    assert [sweep.num_questions_of(metric) for metric in metrics] == [256, 256, None, None]


@pytest.mark.slow
def test_the_accuracy_of_a_source_has_the_questions_of_the_source(tmp_path: Path, empty_database: Path) -> None:
    """Two sources share seven questions: four are of the first, three of the second.

    Only two were different ones when that was counted, so no source has more.
    """
    shutil.copy(empty_database, tmp_path)
    uri, metric = mlflow.default_uri(tmp_path), "eval/accuracy/accuracy"  # a source may be called so
    sources = [{"source": "a.csv", "name": "accuracy"}, {"source": "b.csv", "name": "web"}]
    log_sweep(uri, "two", [Run({"data.sources": sources, "eval.num_prompts": 7}, {0: 0.1})], [])
    read = loading.load_sweep(uri, "rlx", "two", [metric])
    names = ("eval/accuracy", metric, "eval/accuracy/web", "eval/ema/accuracy/web", "eval/accuracy/other")
    assert [read.num_questions_of(name) for name in names] == [7, 4, 3, 3, None]
    assert read.num_questions_of("eval/reward/web") is None
    mlflow.client(uri).log_metric(read.trials[0].run_ids[0], "eval/questions", 2.0)
    assert loading.load_sweep(uri, "rlx", "two").num_questions_of("eval/accuracy/web") == 2


@pytest.mark.slow
def test_the_questions_are_those_of_the_first_trial_that_was_evaluated(tmp_path: Path, empty_database: Path) -> None:
    """A trial that failed before its run began has no evaluation and no config, and may have few settings."""
    shutil.copy(empty_database, tmp_path)
    uri = mlflow.default_uri(tmp_path)
    sources = {"data.sources": [{"source": "a.csv"}, {"source": "b.csv"}], "eval.num_prompts": 70}
    parent = log_sweep(uri, "s", [Run(sources, {0: 0.1})], [])
    trial = loading.load_sweep(uri, "rlx", "s").trials[0]
    mlflow.client(uri).log_metric(trial.run_ids[0], "eval/questions", 30.0)
    tags = {"rlx.kind": "run", "mlflow.parentRunId": parent}
    open_run(uri, "s.trial_failed", "rlx", tags, {"eval.num_prompts": "70", "seed": "1"}, at=1)
    read = loading.load_sweep(uri, "rlx", "s")
    assert [each.name for each in read.trials] == ["trial_failed", "trial_0"]
    names = ("eval/accuracy", "eval/accuracy/a", "eval/accuracy/b")
    assert [read.num_questions_of(name) for name in names] == [30, 30, 30]
    assert read.options["steps"] == "4"


def test_a_continued_trial_has_one_history_and_its_last_settings(uri: str) -> None:
    trial, other = loading.load_sweep(uri, "rlx", "cloned").trials
    assert trial.curve("eval/accuracy").to_dict() == {0: 0.2, 2: 0.3, 3: 0.5, 4: 0.6, 5: 0.8, 6: 0.9}
    assert list(trial.history.columns) == list(loading.WATCHED)
    assert trial.settings == {"train.actor_lr": 3e-4}
    assert trial.origins == ("trial_1@2", "trial_0@4")
    assert (trial.status, len(trial.run_ids)) == ("FINISHED", 3)
    assert trial.seconds == 12.5  # steps that a continuation replaced do not count
    assert [list(each.index) for each in trial.histories] == [[0, 1, 2, 3, 4], [3, 4], [5, 6]]
    assert (other.origins, len(other.run_ids)) == ((), 1)


@pytest.mark.slow
def test_a_setting_that_became_none_has_no_value_of_before(uri: str) -> None:
    key = "algorithm.adaptive_kl_target"
    runs = [Run({key: 0.1}, {0: 0.2}, attempts=(Run({}, {1: 0.3}, tags={"rlx.from": "trial_1@0"}),))]
    log_sweep(uri, "unset", runs, [key, "train.actor_lr"])
    (trial,) = loading.load_sweep(uri, "rlx", "unset").trials
    assert trial.settings == {key: None, "train.actor_lr": config("x", {}).train.actor_lr}
    assert loading.run_config(uri, trial).algorithm.adaptive_kl_target is None


@pytest.mark.slow
def test_the_config_of_a_continued_trial_has_its_last_settings_as_they_were(uri: str) -> None:
    """Lists, dicts and booleans, which are texts in MLflow."""
    first: dict[str, Any] = {
        "train.adam_betas": (0.9, 0.95),
        "algorithm.whiten_advantages": True,
        "reward.functions.numeric": 0.1,
    }
    after: dict[str, Any] = {
        "train.adam_betas": (0.8, 0.99),
        "algorithm.whiten_advantages": False,
        "reward.functions.numeric": 0.2,
    }
    first["data.sources"], after["data.sources"] = (
        [{"source": f"{name}.jsonl"}, {"source": "c.jsonl"}] for name in "ab"
    )
    attempt = Run(after, {1: 0.3}, tags={"rlx.from": "trial_1@0"})
    log_sweep(uri, "typed", [Run(first, {0: 0.2}, attempts=(attempt,))], list(first))
    (trial,) = loading.load_sweep(uri, "rlx", "typed").trials
    assert loading.run_config(uri, trial) == config("typed.trial_0", after)


def test_every_metric_is_read_over_all_attempts(uri: str) -> None:
    history = loading.every_metric(uri, loading.load_sweep(uri, "rlx", "cloned").trials[0])
    assert set(history) == {"eval/accuracy", "kl/ref", "time/step", "time/eval", "tokens/total"}
    assert history["eval/accuracy"].dropna().to_dict() == {0: 0.2, 2: 0.3, 3: 0.5, 4: 0.6, 5: 0.8, 6: 0.9}


def test_trials_have_the_time_of_their_end(uri: str, sweep: loading.Sweep) -> None:
    ends = [trial.end_ms for trial in sweep.trials]
    assert None not in ends and ends == sorted(ends)
    assert loading.load_sweep(uri, "rlx", "alone").trials[0].end_ms is None
    assert sweep.experiment_id == loading.mlflow.find_experiment(uri, "rlx")


@pytest.mark.slow
def test_the_run_of_a_trial_with_one_attempt_is_asked_for_once(
    uri: str, sweep: loading.Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, get_run = list[str](), mlflow.get_run

    def noted(uri: str, run_id: str) -> TrackedRun:
        asked.append(run_id)
        return get_run(uri, run_id)

    monkeypatch.setattr(mlflow, "get_run", noted)
    loading.trial_address(uri, sweep.trials[0])
    assert asked == [*sweep.trials[0].run_ids]
    asked.clear()
    cloned = loading.load_sweep(uri, "rlx", "cloned").trials[0]
    loading.trial_address(uri, cloned)
    assert asked == [cloned.run_ids[0], cloned.run_ids[-1]]


@pytest.mark.slow
def test_samples_are_the_newest(uri: str, sweep: loading.Sweep) -> None:
    assert loading.samples(uri, sweep.trials[0]).values.tolist() == [["is it?", "no", "yes", 0.0]]
    cloned = loading.load_sweep(uri, "rlx", "cloned").trials[0]  # its last run has none, the one before it has
    assert loading.samples(uri, cloned)["completion"].tolist() == ["yes"]
    assert loading.samples(uri, sweep.trials[1]).empty


def test_samples_are_read_with_and_without_a_step(uri: str) -> None:
    log_sweep(uri, "stepless", [Run({}, {0: 0.1}, answers={"is it?": "yes"})], [])
    (trial,) = loading.load_sweep(uri, "rlx", "stepless").trials
    before = loading.samples(uri, trial)
    table = json.dumps({"columns": list(loading.SAMPLE_COLUMNS), "data": [["is it?", "yes", "yes", 1.0]]})
    mlflow.client(uri).log_text(trial.run_ids[0], table, "samples/step_000010.json")
    after = loading.samples(uri, trial)
    assert before.to_dict("list") == after.to_dict("list")
    assert list(after) == list(loading.SAMPLE_COLUMNS)


def test_the_config_of_a_trial_is_the_one_it_ended_with(uri: str, sweep: loading.Sweep) -> None:
    assert loading.run_config(uri, sweep.trials[2]) == config("lr.trial_2", RUNS[2].settings)
    cloned = loading.run_config(uri, loading.load_sweep(uri, "rlx", "cloned").trials[0])
    assert flatten(cloned)["train.actor_lr"] == 3e-4
    assert flatten(cloned)["data.system_prompt"] == BASE["data.system_prompt"]


@pytest.mark.slow
def test_a_config_that_is_missing_or_of_another_version_is_an_error(uri: str) -> None:
    log_sweep(uri, "foreign", [Run({}, {0: 0.1})], [])
    (trial,) = loading.load_sweep(uri, "rlx", "foreign").trials
    mlflow.client(uri).log_text(trial.run_ids[0], "train: {stepps: 3}", "config.yaml")
    with pytest.raises(ConfigError, match=r"config.yaml of trial_0: unknown setting train.stepps"):
        loading.run_config(uri, trial)
    log_sweep(uri, "bare", [Run({}, {0: 0.1})], [])
    (trial,) = loading.load_sweep(uri, "rlx", "bare").trials
    artifacts = Path(mlflow.client(uri).get_run(trial.run_ids[0]).info.artifact_uri.removeprefix("file://"))
    (artifacts / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"trial_0 has no config.yaml in MLflow"):
        loading.run_config(uri, trial)


@pytest.mark.parametrize(
    ("experiment", "name", "metric", "message"),
    [
        ("rlx", "alonee", "kl/ref", "no sweep 'alonee' in experiment 'rlx'; nearest: alone"),
        ("rlxx", None, "kl/ref", "no experiment 'rlxx' in .*; nearest: rlx"),
        ("singles", None, "kl/ref", "no sweep in experiment 'singles'"),
        ("rlx", "trial-less", "kl/ref", "sweep 'trial-less' has no trials yet"),
        ("rlx", "lr", "eval/acuracy", "unknown metric 'eval/acuracy'; nearest: eval/accuracy"),
    ],
)
def test_a_missing_name_is_refused_with_the_nearest(
    uri: str, experiment: str, name: str | None, metric: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        loading.load_sweep(uri, experiment, name, [metric])
    assert "\n" not in str(error.value)


def test_a_missing_database_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no MLflow database"):
        loading.sweep_names(f"sqlite:///{tmp_path}/mlflow.db", "rlx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tags", "name"),
    [
        ({"rlx.space": "5"}, "space"),
        ({"rlx.planned": "[1]"}, "planned"),
        ({"rlx.rungs": "{"}, "rungs"),
        ({"rlx.rung_by": "hours"}, "rung_by"),
    ],
)
def test_a_damaged_record_is_one_line(tags: dict[str, str], name: str, tmp_path: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, tmp_path)
    log_sweep(store := mlflow.default_uri(tmp_path), "s", RUNS[:1], VARIED, tags)
    with pytest.raises(ConfigError, match=rf"the record of sweep s is damaged: its tag rlx\.{name}"):
        loading.load_sweep(store, "rlx", "s")


def test_what_a_stranger_calls_a_sweep_is_no_path(tmp_path: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, tmp_path)
    store, tags = mlflow.default_uri(tmp_path), {"rlx.kind": "sweep"}
    mlflow.MLflowService(store).make_run("key", "rlx", "../../out", parent=None, params={}, tags=tags, at=1)
    with pytest.raises(ConfigError, match=r"no sweep of rlx has such a name: \.\./\.\./out"):
        loading.load_sweep(store, "rlx")


def test_what_controls_terminals_is_shown() -> None:
    assert printable("a\x1b[2J\n") == r"a\x1b[2J\n"
