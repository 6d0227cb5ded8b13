"""Sweeps read back from a real MLflow database: ranks checked by hand, figures, files, errors, the command line."""

import argparse
import importlib.util
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from rlx import analysis, report
from rlx.command_line import add_settings, parse
from rlx.config import ConfigError, RunConfig, flatten, from_tree, with_overrides

_SCRIPT = Path(__file__).parents[1] / "experiments" / "analyze.py"
_VARIED = ("train.actor_lr", "algorithm.kl_kind", "algorithm.kl_target")


@dataclass
class Run:
    """What a trial is to look like: settings, accuracy by step, status."""

    settings: dict[str, Any]
    accuracy: dict[int, float] = field(default_factory=dict)
    status: str = "FINISHED"


_RUNS = [
    Run({"train.actor_lr": 1e-4, "algorithm.kl_kind": "k1"}, {0: 0.2, 2: 0.5, 4: 0.4}),
    Run({"train.actor_lr": 3e-3, "algorithm.kl_kind": "k3"}, {0: 0.2, 2: 0.6}),  # stopped early
    Run({"train.actor_lr": 5e-4, "algorithm.kl_target": 0.1}, status="FAILED"),  # before its first evaluation
    Run({"train.actor_lr": 1e-3, "algorithm.value_clip": None}, {0: 0.1, 2: 0.7, 4: 0.6}),
]
_BASE = {
    "train.steps": 4,
    "train.adam_betas": (0.8, 0.9),
    "data.system": "Answer, don't argue.",
    "storage": "/elsewhere",
}


def _config(name: str, settings: Mapping[str, Any]) -> RunConfig:
    return from_tree(with_overrides({}, {**_BASE, **settings, "name": name}))


def _log_run(uri: str, name: str, run: Run, parent: str | None = None, experiment: str = "rlx") -> None:
    """A run as launch and the training loop leave it: tokens at each step, accuracy where it was evaluated."""
    params = {key: value for key, value in flatten(_config(name, run.settings)).items() if value is not None}
    run_id = report.start_run(uri, experiment, name, parent=parent, params=params, tags={"rlx.kind": "run"})
    tracker = report.Tracker(uri, run_id)
    for step in range(max(run.accuracy, default=-1) + 1):
        metrics = {"tokens/total": 100.0 * step, "kl/ref": math.inf if step == 1 else 0.1 * step}
        tracker.log(metrics | ({"eval/accuracy": run.accuracy[step]} if step in run.accuracy else {}), step)
    if run.status != "RUNNING":
        report.end_run(uri, run_id, run.status)


def _log_sweep(uri: str, name: str, runs: Sequence[Run], varied: Sequence[str] = _VARIED) -> None:
    tags = {"rlx.kind": "sweep", "rlx.space": json.dumps(list(varied))}
    parent = report.start_run(uri, "rlx", name, parent=None, params={"trials": len(runs)}, tags=tags)
    for i, run in enumerate(runs):
        _log_run(uri, f"{name}.trial_{i}", run, parent)
    report.end_run(uri, parent, "FINISHED")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with several sweeps; making its tables takes seconds, so all tests share it."""
    uri = report.default_uri(tmp_path_factory.mktemp("store"))
    _log_sweep(uri, "lr", _RUNS[:1])  # an older one of the same name
    _log_sweep(uri, "lr", _RUNS)
    _log_sweep(uri, "same", [Run({"train.epochs": 2}, {0: 0.5, 2: 0.5})] * 3, ["train.epochs"])
    _log_sweep(uri, "nothing-varied", [Run({}), Run({})], [])
    _log_sweep(uri, "trial-less", [])
    _log_run(uri, "ppo-1", Run({}, {0: 0.1}))
    _log_run(uri, "ppo-1", Run({}, {0: 0.1}), experiment="singles")
    _log_sweep(uri, "alone", [Run({"train.actor_lr": 1e-3}, {0: 0.1}, "RUNNING")])
    return uri


@pytest.fixture(scope="module")
def sweep(uri: str) -> analysis.Sweep:
    return analysis.load_sweep(uri, "rlx", "lr")


@pytest.fixture(scope="module")
def script() -> Any:
    """experiments/analyze.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("analyze", _SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_mlflow(uri: str, run_id: str) -> set[str]:
    return {file.path for file in report.client(uri).list_artifacts(run_id, "analysis")}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def test_names_are_newest_first_and_each_once(uri: str) -> None:
    assert analysis.sweep_names(uri, "rlx") == ["alone", "trial-less", "nothing-varied", "same", "lr"]


def test_a_sweep_is_read_with_its_trials_in_order(sweep: analysis.Sweep) -> None:
    assert (sweep.name, sweep.varied) == ("lr", _VARIED)
    assert [trial.name for trial in sweep.trials] == ["trial_0", "trial_1", "trial_2", "trial_3"]
    assert [trial.status for trial in sweep.trials] == ["FINISHED", "FINISHED", "FAILED", "FINISHED"]
    assert all(0 <= trial.seconds < 60 for trial in sweep.trials)


def test_settings_are_numbers_texts_or_nothing(sweep: analysis.Sweep) -> None:
    settings = [tuple(trial.settings.values()) for trial in sweep.trials]
    assert settings == [(1e-4, "k1", None), (3e-3, "k3", None), (5e-4, "k1", 0.1), (1e-3, "k1", None)]


def test_history_has_a_row_per_step_and_nan_where_nothing_finite_was_logged(sweep: analysis.Sweep) -> None:
    history = sweep.trials[0].history
    assert list(history.index) == [0, 1, 2, 3, 4]
    assert list(history.columns) == list(analysis.WATCHED)
    assert history["eval/accuracy"].dropna().to_dict() == {0: 0.2, 2: 0.5, 4: 0.4}
    assert sweep.trials[0].curve("kl/ref").index.tolist() == [0, 2, 3, 4]  # infinite at step 1
    assert sweep.trials[2].history.empty


def test_other_metrics_are_read_when_asked_for(uri: str) -> None:
    loaded = analysis.load_sweep(uri, "rlx", "lr", ["policy/entropy", "kl/ref"])
    assert loaded.metrics == (*analysis.WATCHED, "policy/entropy")
    assert loaded.trials[0].curve("policy/entropy").empty


def test_the_newest_sweep_is_the_default_and_a_running_trial_has_no_duration(uri: str) -> None:
    newest = analysis.load_sweep(uri, "rlx")
    assert newest.name == "alone"
    assert newest.trials[0].status == "RUNNING"
    assert math.isnan(newest.trials[0].seconds)


@pytest.mark.parametrize(
    ("experiment", "name", "metric", "message"),
    [
        ("rlx", "samee", "kl/ref", "no sweep 'samee' in experiment 'rlx'; nearest: same"),
        ("rlxx", None, "kl/ref", "no experiment 'rlxx' in .*; nearest: rlx"),
        ("singles", None, "kl/ref", "no sweep in experiment 'singles'"),
        ("rlx", "trial-less", "kl/ref", "sweep 'trial-less' has no trials yet"),
        ("rlx", "lr", "eval/acuracy", "unknown metric 'eval/acuracy'; nearest: eval/accuracy"),
    ],
)
def test_what_is_not_there_is_named_with_the_nearest(
    uri: str, experiment: str, name: str | None, metric: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        analysis.load_sweep(uri, experiment, name, [metric])
    assert "\n" not in str(error.value)


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no MLflow database"):
        analysis.sweep_names(f"sqlite:///{tmp_path}/mlflow.db", "rlx")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Ranks and commands


def test_ranks_by_the_last_value_then_the_best(sweep: analysis.Sweep) -> None:
    table = analysis.rank(sweep)
    values = table[["rank", "trial", "final", "best", "first", "steps", "tokens/total"]].values.tolist()
    assert values[:3] == [
        [1, "trial_3", 0.6, 0.7, 0.1, 4, 400],
        [2, "trial_1", 0.6, 0.6, 0.2, 2, 200],
        [3, "trial_0", 0.4, 0.5, 0.2, 4, 400],
    ]
    assert values[3][:2] == [4, "trial_2"]
    assert all(math.isnan(value) for value in values[3][2:5])
    assert table["steps"].iloc[3] == 0
    assert list(table["status"]) == ["FINISHED", "FINISHED", "FINISHED", "FAILED"]


def test_min_turns_the_order_and_the_best_around(sweep: analysis.Sweep) -> None:
    table = analysis.rank(sweep, mode="min")
    assert list(table["trial"]) == ["trial_0", "trial_3", "trial_1", "trial_2"]
    assert list(table["best"][:3]) == [0.2, 0.1, 0.2]


def test_equal_trials_keep_their_order(uri: str) -> None:
    table = analysis.rank(analysis.load_sweep(uri, "rlx", "same"))
    assert list(table["trial"]) == ["trial_0", "trial_1", "trial_2"]


def test_a_metric_that_was_not_loaded_is_refused(sweep: analysis.Sweep) -> None:
    with pytest.raises(ConfigError, match="unknown metric 'policy/loss'"):
        analysis.rank(sweep, "policy/loss")


@pytest.mark.parametrize("number", [0, 2, 3])
def test_the_rerun_command_gives_the_same_config(sweep: analysis.Sweep, number: int) -> None:
    """Varied settings, those that were set for all trials, and one that was unset though it has a default."""
    python, path, *words = shlex.split(analysis.rerun_command(sweep.trials[number]))
    assert (python, path) == ("python", "experiments/ppo.py")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_settings(parser)
    again = flatten(from_tree(with_overrides({}, parse(parser, words)[1])))
    wanted = flatten(_config("any", _RUNS[number].settings))
    assert {key for key in wanted if again[key] != wanted[key]} == {"name", "storage"}


def test_the_rerun_command_leaves_out_settings_that_the_run_did_not_have_yet(uri: str) -> None:
    assert analysis._options({"train.steps": "40", "seed": "3"}, ["seed"]) == {
        "seed": "3",
        "algorithm.value_clip": "null",  # it may have been unset, which is not logged
        "checkpoint.keep": "null",
        "checkpoint.best_by": "null",
    }


def test_the_table_is_markdown_with_numbers_a_person_can_read(sweep: analysis.Sweep) -> None:
    head, rule, first, *_, last = analysis.format_table(analysis.rank(sweep)).splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert head.startswith("| rank | trial ")
    assert set(rule) == set("|-")
    assert cells[:8] == ["1", "trial_3", "0.001", "k1", "-", "0.6", "0.7", "0.1"]
    assert last.split("|")[6].strip() == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.67, "12,346"), (16384, "16,384"), (9.1734e-5, "9.173e-5"), (0.0, "0"), (None, "-"), (math.nan, "-")],
)
def test_numbers_as_text(value: float | None, text: str) -> None:
    assert analysis._text(value) == text


# ---------------------------------------------------------------------------------------------------------------------
# Figures and files


@pytest.mark.parametrize("name", ["lr", "alone", "same", "nothing-varied"])
def test_files_are_written_and_stored_in_mlflow(uri: str, name: str, tmp_path: Path) -> None:
    """Also one trial only, equal settings and values, and no setting and no value at all."""
    loaded = analysis.load_sweep(uri, "rlx", name)
    paths = analysis.write(loaded, tmp_path / "new", uri)
    names = ["trials.csv", "trials.md", "learning_curves.png", "parallel_coordinates.png"]
    assert [path.name for path in paths] == names
    assert _in_mlflow(uri, loaded.run_id) == {f"analysis/{file}" for file in names}
    table = pd.read_csv(paths[0])
    assert list(table["trial"]) == list(analysis.rank(loaded)["trial"])
    for path in paths[2:]:
        height, width, _ = matplotlib.image.imread(path).shape
        assert height == 840
        assert width >= 1000


def test_curves_are_drawn_for_trials_with_values_and_named_by_rank(sweep: analysis.Sweep) -> None:
    figure = analysis.curves_figure(sweep)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts[::2]] == [
        "1  trial_3   0.6",
        "2  trial_1   0.6",
        "3  trial_0   0.4",
    ]
    assert axes.texts[1].get_text() == "actor_lr=0.001, kl_kind=k1, kl_target=-"
    np.testing.assert_array_equal(axes.lines[-2].get_ydata(), [0.1, 0.7, 0.6])  # the best is on top
    assert "1 of 4 trials have none" in figure.texts[1].get_text()


def test_each_setting_has_its_scale(sweep: analysis.Sweep) -> None:
    texts = [text.get_text() for text in analysis.parallel_coordinates_figure(sweep).axes[0].texts]
    assert texts[:2] == ["actor_lr", "train, log scale"]
    assert texts[2:6] == ["0.0001", "0.0005", "0.001", "0.003"]
    assert texts[6:10] == ["kl_kind", "algorithm", "k1", "k3"]
    assert texts[-2:] == ["eval/accuracy", "final"]


def test_scales() -> None:
    assert analysis._setting_scale([1e-4, 1e-2, 1e-3]).heights == pytest.approx([0, 1, 0.5])
    assert analysis._setting_scale([1, 10, 5.5]) == ([0, 1, 0.5], [(0, "1"), (0.5, "5.5"), (1, "10")], "")
    assert analysis._setting_scale([0.0, 100.0]).note == ""  # no logarithm of 0
    assert analysis._setting_scale([3, 3]) == ([0.5, 0.5], [(0.5, "3")], "")
    assert analysis._setting_scale([None, 2]) == ([0.25, 0.75], [(0.25, "-"), (0.75, "2")], "")
    many = analysis._setting_scale([0.1 * i for i in range(11)])
    assert [text for _, text in many.ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


@pytest.mark.parametrize("heights", [[], [0.5], [1.0, 1.0, 1.0], [0.0, 0.0], [0.9, 0.2, 0.21, 0.95]])
def test_names_keep_apart_and_in_order(heights: list[float]) -> None:
    placed = analysis._apart(heights, 0.1)
    for i, one in enumerate(heights):
        assert 0 <= placed[i] <= 1
        for j, other in enumerate(heights):
            if one > other or (one == other and i < j):
                assert placed[i] >= placed[j] + 0.1 - 1e-9


def test_long_names_lose_their_middle() -> None:
    assert analysis._shortened("a" * 20) == "a" * 20
    assert analysis._shortened("sweep-of-everything.trial_00017") == "sweep-of...ial_00017"


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def test_the_script_shows_and_writes(uri: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--tracking-uri", uri, "--sweep", "lr", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "|    1 | trial_3 |" in shown
    assert "python experiments/ppo.py --train.actor-lr 0.001 --algorithm.kl-kind k1" in shown
    assert f"{tmp_path}/learning_curves.png" in shown


def test_the_script_takes_the_newest_sweep_of_a_storage(
    uri: str, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Path(uri.removeprefix("sqlite:///")).parent
    assert script.main(["--storage", str(storage)]) == 0
    shown = capsys.readouterr().out
    assert "sweeps, newest first: alone, trial-less, nothing-varied, same, lr;" in shown
    assert "sweep alone: 1 trials" in shown
    assert (storage / "analysis" / "alone" / "trials.csv").is_file()


def test_the_script_fails_in_one_line(
    uri: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "no MLflow database": ["--storage", str(tmp_path)],
        "no storage folder": ["--storage", str(tmp_path / "missing")],
        "unknown metric 'kl/reff'; nearest: kl/ref": ["--tracking-uri", uri, "--metric", "kl/reff"],
        "no sweep 'samee'": ["--tracking-uri", uri, "--sweep", "samee"],
    }
    for message, words in wrong.items():
        assert script.main(words) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}")
        assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
