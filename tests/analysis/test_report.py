"""A sweep's analysis from a real MLflow database: files, the page, the best setting run again, the command line."""

import functools
import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pandas as pd
import pytest
import s3
import yaml
from plotly.offline import get_plotlyjs
from sweep_cases import BASE, Run, config, groups_of, log_sweep

from rlx.analysis import loading, report, tables
from rlx.analysis.importance import MIN_GROUPS
from rlx.analysis.loading import Sweep
from rlx.analysis.sentences import summary_sentence
from rlx.analysis.statistics import Group
from rlx.cli import analyze
from rlx.config.errors import ConfigError
from rlx.config.experiment import with_experiment
from rlx.config.loading import from_tree, read_yaml
from rlx.config.sections.base import flatten
from rlx.config.sweep import DEFAULT_METRIC
from rlx.storage.filesystem import StorageError
from rlx.tracking.services import mlflow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "analyze.py"
LR, KIND = "train.actor_lr", "algorithm.advantage"
ALWAYS = {"analysis.html", "evidence.json", "trials.csv", "settings.md", "settings.png"}
TRIALS = ["Any metric", "Best so far"]
Written = Callable[[str], Path]
FIGURES = ["Intervals", "Learning curves", "Cost and result", *TRIALS, "Parallel coordinates", "Slices"]


def seeds(settings: dict[str, Any], *values: float, **more: Any) -> list[Run]:
    """A setting's runs: a seed per value that one ends at."""
    return [Run({**settings, "seed": seed}, {0: 0.1, 4: value}, **more) for seed, value in enumerate(values)]


GRPO = {LR: 3e-4, KIND: "grpo", "algorithm.kl_placement": "reward", "algorithm.kl_estimator": "k1"}
RUNS = [
    *seeds({LR: 1e-4, KIND: "gae"}, 0.5, 0.7, answers={"is it?": "no <b>", "why?": "maybe"}),
    *seeds(GRPO, 0.8, 0.82, answers={"is it?": "yes"}),
    *seeds({LR: 1e-3, KIND: "gae"}, 0.2, 0.3, answers={"is it?": "never"}),
]


def compared(sweep: Sweep, **more: Any) -> dict[str, list[Group]]:
    return report.comparisons(sweep, DEFAULT_METRIC, "max", **more)


def write_report(sweep: Sweep, folder: Path, uri: str, **more: Any) -> list[Path]:
    groups = compared(sweep, **more)
    evidence = report.evidence_of(sweep, groups, uri, DEFAULT_METRIC, "max")
    return report.write_report(sweep, folder, uri, DEFAULT_METRIC, "max", groups, evidence)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> str:
    """A store with several sweeps, which all tests share."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_database, folder)
    uri = mlflow.default_uri(folder)
    log_sweep(uri, "bare", RUNS, [LR, KIND, "seed"])
    log_sweep(uri, "lr", RUNS, [LR, KIND, "seed"], {"rlx.seeds": "2"})
    log_sweep(uri, "wide", [Run({LR: 1e-5 * 2**i}, {0: 0.1, 4: 0.05 * i}) for i in range(MIN_GROUPS)], [LR])
    log_sweep(uri, "nothing-varied", [Run({}, {0: 0.1, 4: 0.5})], [])
    log_sweep(uri, "failed", [Run({LR: 1e-3}, status="FAILED"), Run({LR: 1e-4}, status="FAILED")], [LR])
    lost = [Run({LR: 1e-3, "seed": 0}, {0: 0.1, 4: 0.9}), Run({LR: 1e-3, "seed": 1}, {0: 0.99}, status="FAILED")]
    log_sweep(uri, "lost", [*lost, *seeds({LR: 1e-4}, 0.3, 0.4)], [LR, "seed"])
    log_sweep(uri, "running", [Run({LR: 1e-3}, {0: 0.1, 2: 0.3}, "RUNNING")], [LR])
    stopped = Run({LR: 1e-4}, {0: 0.1, 2: 0.2}, tags={"rlx.stopped": "2"})
    cloned = Run({LR: 1e-3}, {4: 0.9}, tags={"rlx.from": "trial_1@2", "rlx.folder": "/my runs/a"})
    log_sweep(uri, "pbt", [Run({LR: 5e-4}, {0: 0.1, 2: 0.3}, attempts=(cloned,)), stopped], [LR])
    return uri


@pytest.fixture(scope="module")
def written(uri: str, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Gives the folder with the report of a sweep, which is written once."""

    @functools.cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        write_report(loading.load_sweep(uri, "rlx", name), folder, uri)
        return folder

    return write


@pytest.fixture(scope="module")
def script() -> Any:
    """experiments/analyze.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("analyze", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headings(html: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", html)


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr", "wide", "nothing-varied", "failed", "running", "pbt"])
def test_writes_files_and_stores_them_with_the_sweep(uri: str, written: Written, name: str) -> None:
    loaded, folder = loading.load_sweep(uri, "rlx", name), written(name)
    recipe = set() if name in ("failed", "running") else {"best.yaml"}
    assert {path.name for path in folder.iterdir()} == ALWAYS | recipe
    stored = mlflow.artifact_names(uri, loaded.run_id, "analysis")
    assert {Path(file).name for file in stored} == ALWAYS | recipe
    assert len(pd.read_csv(folder / "trials.csv")) == len(loaded.trials)
    run, settings = mlflow.get_run(uri, loaded.run_id), compared(loaded)["settings"]
    luck = "Over many fresh seeds, expect a mean of 0.81 ± 0.14. " if name == "lr" else ""
    text = f"{summary_sentence(settings, DEFAULT_METRIC)} {luck}analysis/analysis.html has the rest."
    assert run.tags["mlflow.note.content"] == text
    expected = {"best/eval/accuracy/expected": pytest.approx(0.81)} if name == "lr" else {}
    assert run.metrics == ({"best/eval/accuracy": settings[0].mean} | expected if recipe else {})
    height, width, _ = matplotlib.image.imread(folder / "settings.png").shape
    assert (height, width) >= (700, 1500)


def test_a_setting_of_which_a_trial_failed_is_not_the_best(uri: str, written: Written) -> None:
    loaded = loading.load_sweep(uri, "rlx", "lost")
    settings = compared(loaded)["settings"]
    assert [group.settings[LR] for group in settings] == [1e-4, 1e-3]
    assert yaml.safe_load((written("lost") / "best.yaml").read_text())["train"]["actor_lr"] == 1e-4
    assert mlflow.get_run(uri, loaded.run_id).metrics["best/eval/accuracy"] == pytest.approx(0.35)
    assert report.best_yaml(loaded, settings[1:], uri) == ""


@pytest.mark.parametrize("name", ["lr", "wide", "nothing-varied", "failed", "running", "pbt"])
def test_the_page_opens_offline_and_each_figure_has_data(written: Written, name: str) -> None:
    html = (written(name) / "analysis.html").read_text()
    assert html.count(get_plotlyjs()) == 1
    without_plotly = html.replace(get_plotlyjs(), "")
    links = re.findall(r'<a href="(.*?)"', without_plotly)
    assert links and all(link.startswith("http://127.0.0.1:5000/#/experiments/") for link in links)
    assert not re.findall(r"\bsrc=|<link|@import|url\(|fetch\(|XMLHttpRequest", without_plotly)
    drawn = re.findall(r'Plotly.newPlot\(\s*"figure-\d+",\s*(\[.*?\]),\s*\{"', without_plotly, re.DOTALL)
    assert len(drawn) == without_plotly.count('class="plotly-graph-div"')
    assert all(json.loads(traces) for traces in drawn)
    assert len(drawn) > 1 or name in ("failed", "running")
    assert len(drawn) > 0 or name == "failed"


def test_the_page_shows_the_options_and_the_result(written: Written) -> None:
    html = (written("lr") / "analysis.html").read_text()
    assert "actor_lr 0.0003, advantage grpo is ahead of actor_lr 0.0001, advantage gae by 0.21; not shown to be" in html
    assert "An interval that reaches beyond the values that eval/accuracy can have says that 2 runs are too few" in html
    assert "search random, scheduler none, seeds 2, trials 6, steps 4" in html
    assert headings(html) == [
        "Settings, ranked",
        "Paired with the best",
        *FIGURES,
        "Importance of each setting",
        "Samples of the best and the worst trial",
        "The best setting",
        "Every trial",
    ]
    assert f"3 settings with a result are too few to tell: at least {MIN_GROUPS} are needed" in html
    assert "Best: trial_3 (actor_lr 0.0003, advantage grpo, seed 1). Worst: trial_4 (" in html
    assert re.search(r"is it\?</td>.*>yes</td>.*>yes</td>.*>never</td>", html)
    assert "why?" not in html  # the best was not asked that


def test_the_page_has_the_curves_of_every_logged_metric(written: Written) -> None:
    html = (written("running") / "analysis.html").read_text()
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', html)
    metrics = {each["name"]: each["curves"] for each in json.loads(data)["metrics"]}
    assert metrics["eval/accuracy"] == [{"steps": 0, "values": [0.1, 0.3]}]
    assert set(metrics) == {"kl/ref", "eval/accuracy", "time/step", "time/eval", "tokens/total"}
    assert re.findall(r"<option>(.*?)</option>", html) == list(metrics)


def test_twelve_settings_have_their_importance(written: Written) -> None:
    html = (written("wide") / "analysis.html").read_text()
    assert '"text":["100%"]' in html
    assert "Not given: MLflow has no prompt that both answered." in html


@pytest.mark.slow
def test_missing_artifacts_are_named_on_the_page(uri: str, tmp_path: Path) -> None:
    loaded = loading.load_sweep(uri, "rlx", "bare")
    for trial in loaded.trials:
        shutil.rmtree(mlflow.client(uri).get_run(trial.run_ids[0]).info.artifact_uri.removeprefix("file://"))
    paths = write_report(loaded, tmp_path, uri)
    assert {path.name for path in paths} == ALWAYS
    html = (tmp_path / "analysis.html").read_text()
    assert "Not given: MLflow has no prompt that both answered." in html
    assert "Not given: its config.yaml is not in MLflow" in html


@pytest.mark.slow
def test_stopped_and_continued_trials_have_a_remark(uri: str, tmp_path: Path) -> None:
    loaded = loading.load_sweep(uri, "rlx", "pbt")
    table = tables.group_table(groups_of(loaded))
    assert table[["actor_lr", "mean", "notes"]].values.tolist() == [
        [1e-3, 0.9, "continued from trial_1@2"],
        [1e-4, 0.2, "stopped at 2"],
    ]
    write_report(loaded, tmp_path, uri)
    html = (tmp_path / "analysis.html").read_text()
    assert "stopped at 2" in html
    assert "The scheduler stopped 1 of 2 at step 2." in html
    assert "Stopped early" in headings(html)
    write_report(replace(loaded, rungs=(1, 2, 4)), tmp_path, uri)  # nobody reached 1, and 4 stopped nobody
    assert "The scheduler stopped 1 of 2 at step 2, none of 1 at step 4." in (tmp_path / "analysis.html").read_text()
    assert len(re.findall(r'<a href="http://127.0.0.1:5000/#/experiments/.*?>trial_1</a>', html)) == 2  # tables
    recipe = (tmp_path / "best.yaml").read_text()
    assert "The trial changed while it ran" in recipe
    assert read_yaml(tmp_path / "best.yaml")["train"]["actor_lr"] == 1e-3


@pytest.mark.slow
def test_values_and_sweeps_are_compared_on_request(uri: str, tmp_path: Path) -> None:
    loaded, other = (loading.load_sweep(uri, "rlx", name) for name in ("lr", "wide"))
    paths = write_report(loaded, tmp_path, uri, by=KIND, against=other)
    more = {f"{name}.{kind}" for name in (f"by_{KIND}", "against_wide") for kind in ("md", "png")}
    assert {path.name for path in paths} == ALWAYS | {"best.yaml"} | more
    html = (tmp_path / "analysis.html").read_text()
    assert "actor_lr 0.02048 differ by 0.25 on one seed: no interval." in html.replace("wide: ", "")
    assert {f"Compared by {KIND}", "Compared against wide"} < set(headings(html))
    bests = compared(loaded, against=other)["against wide"]
    assert [(best.settings["sweep"], best.mean) for best in bests] == [
        ("lr", pytest.approx(0.81)),
        ("wide", pytest.approx(0.55)),
    ]
    assert [
        best.settings["sweep"]
        for best in report.comparisons(other, DEFAULT_METRIC, "min", against=loaded)["against lr"]
    ] == [
        "wide",
        "lr",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The best setting


def test_the_best_setting_gives_the_same_config_again(written: Written) -> None:
    tree = read_yaml(written("lr") / "best.yaml")
    again, ran = flatten(from_tree(with_experiment(tree))), flatten(config("any", GRPO))
    assert {key for key in ran if again[key] != ran[key]} == {"name", "storage"}  # the seed was varied
    assert tree["train"][LR.removeprefix("train.")] == 3e-4
    assert "rollout" not in tree  # all of it is at its default


@pytest.mark.slow
def test_settings_that_are_withheld_stand_in_a_comment_alone(uri: str) -> None:
    loaded = loading.load_sweep(uri, "rlx", "lr")
    settings = compared(loaded)[report.SETTINGS]
    text = report.best_yaml(loaded, settings, uri, lambda trial, tree: {LR: 3e-4, "reward.url": "a\nb: 1"})
    assert "#   train.actor_lr: 0.0003\n" in text and '#   reward.url: "a\\nb: 1"\n' in text
    assert LR.removeprefix("train.") not in str(yaml.safe_load(text)) and yaml.safe_load(text)["algorithm"]


LISTS: dict[str, dict[str, Any]] = {
    "sets": {"eval.sets": [{"name": "held", "samples": 8}, {"name": "mine", "source": "/m.jsonl", "num_prompts": 9}]},
    "sources": {"data.sources": [{"source": "/a.jsonl", "weight": 2.0}, {"source": "/b.jsonl"}], "data.params": {}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
def test_the_best_setting_of_a_sweep_with_lists_of_entries_is_written(
    empty_database: Path, tmp_path: Path, name: str
) -> None:
    uri, out = mlflow.default_uri(tmp_path), tmp_path / "out"
    shutil.copy(empty_database, tmp_path)
    log_sweep(uri, name, [Run({LR: 3e-4, **LISTS[name]}, {0: 0.1, 4: 0.5})], [LR])
    write_report(loading.load_sweep(uri, "rlx", name), out, uri)
    assert {path.name for path in out.iterdir()} == ALWAYS | {"best.yaml"}
    again, ran = from_tree(with_experiment(read_yaml(out / "best.yaml"))), config("any", {LR: 3e-4, **LISTS[name]})
    assert again == ran.model_copy(update={"name": None, "storage": again.storage})
    assert "temperature" not in str(read_yaml(out / "best.yaml"))  # entries without what is at its default


@pytest.mark.slow
def test_a_best_setting_that_cannot_be_written_does_not_take_the_page_down(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "minimal_tree", lambda *_, **__: {"x": object()})
    write_report(loading.load_sweep(uri, "rlx", "nothing-varied"), tmp_path, uri)
    assert {path.name for path in tmp_path.iterdir()} == ALWAYS
    assert "warning: no best.yaml: ('cannot represent an object'" in caplog.text


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_entries_that_are_withheld_stand_in_a_comment(uri: str, name: str) -> None:
    loaded, key = loading.load_sweep(uri, "rlx", "lr"), next(iter(LISTS[name]))
    entries = flatten(config("any", LISTS[name]))[key]
    text = report.best_yaml(loaded, compared(loaded)[report.SETTINGS], uri, lambda *_: {key: entries})
    assert f'#   {key}: [{{"' in text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {KIND: "grpo"},
        *LISTS.values(),
        GRPO,
        {"algorithm.value_clip": None, "checkpoint.keep_last": None},
        {"model.lora_rank": 4, "model.lora_alpha": 8, "seed": 7},
        {"data.source": "/prompts.jsonl", "data.params": {}},
        {"data.params.max_digits": 2},
    ],
)
def test_a_minimal_tree_gives_any_config_again_and_contains_nothing_needless(settings: dict[str, Any]) -> None:
    """Defaults that follow other settings are the hard part: grpo's are not gae's."""
    wanted = config("any", settings)
    tree = report.minimal_tree(wanted)
    again = flatten(from_tree(with_experiment(tree)))
    assert {key for key, value in flatten(wanted).items() if again[key] != value} == {"name", "storage"}
    assert sum(len(each) if isinstance(each, dict) else 1 for each in tree.values()) <= len(settings) + 4


def test_the_best_setting_of_a_sweep_of_before_is_written_in_full_for_a_real_model() -> None:
    before = from_tree(read_yaml(ROOT / "tests" / "config" / "old_run.yaml"))
    again = from_tree(with_experiment(report.minimal_tree(before)))
    assert again == before.model_copy(update={"name": None})
    real = before.model_copy(update={"model": before.model.model_copy(update={"path": "org/name"})})
    tree = report.minimal_tree(real)  # another model had the same defaults, and needs them in writing now
    assert from_tree(with_experiment(tree)) == real.model_copy(update={"name": None})
    assert tree["train"] == {"ppo_epochs": 2, "num_minibatches": 2, "actor_lr": 1e-4, "critic_lr": 1e-4}


def test_a_minimal_tree_keeps_the_varied_settings_and_omits_the_seed() -> None:
    default = flatten(from_tree(with_experiment({})))[LR]
    tree = report.minimal_tree(config("any", {"seed": 3}), without={"seed", *BASE}, keep={LR})
    assert tree == {"train": {"actor_lr": default}}


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def test_the_script_shows_and_writes(uri: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tracking-uri", uri, "--sweep", "lr", "--against", "wide", "--by", KIND, "--out", str(tmp_path)]
    assert script.main(arguments) == 0
    output = capsys.readouterr().out
    assert "|    1 |   0.0003 | grpo " in output
    assert "actor_lr 0.0003, advantage grpo is ahead of" in output
    assert "differ by 0.25 on one seed: no interval." in output
    assert f"{tmp_path}/analysis.html" in output
    assert "Downloading" not in output


@pytest.mark.slow
def test_the_script_ranks_by_another_metric_and_end(
    uri: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--tracking-uri",
        uri,
        "--sweep",
        "wide",
        "--metric",
        "kl/ref",
        "--mode",
        "min",
        "--out",
        str(tmp_path),
    ]
    assert script.main(arguments) == 0
    assert "(kl/ref 0.4 over 1 run against 0.4 over 1 run)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_ranks_by_what_the_sweep_was_judged_by(
    empty_database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, out = mlflow.default_uri(tmp_path), tmp_path / "analysis" / "s"
    shutil.copy(empty_database, tmp_path)
    runs = [Run({LR: 1e-4}, {0: 0.1, 4: 0.9}), Run({LR: 1e-3}, {0: 0.1, 3: 0.5})]
    run_id = log_sweep(uri, "s", runs, [LR], {"rlx.metric": "kl/ref", "rlx.mode": "min"})
    assert analyze.main(["--storage", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "2 trials by kl/ref" in output and "|    1 |    0.001 |" in output
    own, said = (out / "trials.csv").read_text(), mlflow.get_run(uri, run_id).tags["mlflow.note.content"]
    assert analyze.main(["--storage", str(tmp_path), "--metric", "eval/accuracy"]) == 0
    assert "|    1 |   0.0001 |" in capsys.readouterr().out
    assert (out / "trials.csv").read_text() == own != (out / "max_eval_accuracy" / "trials.csv").read_text()
    stored = mlflow.artifact_names(uri, run_id, "analysis/max_eval_accuracy")
    assert "analysis/max_eval_accuracy/analysis.html" in stored
    assert mlflow.get_run(uri, run_id).tags["mlflow.note.content"] == said


@pytest.mark.slow
def test_the_printed_export_names_a_trial_that_has_ended_by_its_address(
    empty_database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(empty_database, tmp_path)
    runs = []
    for seed, status in enumerate(("RUNNING", "FINISHED")):
        settings = {LR: 1e-4, "seed": seed, "storage": "s3://b/kept?region=eu"}
        folder = {"rlx.folder": f"b/kept/sweeps/s/runs/trial_{seed}"}
        runs.append(Run(settings, {0: 0.1, 4: 0.9}, status, folder))
    # By metrics that are no evaluation's, so that nobody looks into the runs' folders.
    log_sweep(mlflow.default_uri(tmp_path), "s", runs, [LR, "seed"], {"rlx.metric": "kl/ref"})
    command = "rlx export 's3://b/kept/sweeps/s/runs/trial_1?region=eu@{}' --register NAME"
    assert analyze.main(["--storage", str(tmp_path)]) == 0
    assert f"its model: {command.format('best')}\n" in capsys.readouterr().out
    for words in (["--mode", "min"], ["--metric", "tokens/total"]):  # the run has kept what is best by kl/ref
        assert analyze.main(["--storage", str(tmp_path), *words]) == 0
        assert f"its model: {command.format('newest')}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_metric_that_no_trial_has_logged_is_refused_before_anything_is_written(
    empty_database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any name may be that of one of eval.sets."""
    uri = mlflow.default_uri(tmp_path)
    shutil.copy(empty_database, tmp_path)
    log_sweep(uri, "s", [Run({LR: 1e-4}, {0: 0.1, 4: 0.9})], [LR])
    trial = loading.load_sweep(uri, "rlx", "s").trials[0]
    mlflow.client(uri).log_metric(trial.run_ids[0], "eval/hard/avg_at_8", 0.5, step=4)
    for metric, said in {
        "eval/hrad/avg@8": "eval/hrad/avg_at_8; nearest: eval/hard/avg_at_8",
        "mismatch/kl": "",
    }.items():
        assert analyze.main(["--storage", str(tmp_path), "--metric", metric]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"error: no trial of sweep s has logged {said or metric}") and err.count("\n") == 1
    assert not (tmp_path / "analysis").exists()
    assert analyze.main(["--storage", str(tmp_path), "--metric", "eval/hard/avg@8"]) == 0


@pytest.mark.parametrize(("tag", "value"), [("rlx.metric", "no/such"), ("rlx.mode", "MAX")])
def test_a_record_that_says_something_else_is_damaged(
    empty_database: Path, tmp_path: Path, tag: str, value: str
) -> None:
    uri = mlflow.default_uri(tmp_path)
    shutil.copy(empty_database, tmp_path)
    log_sweep(uri, "s", [Run({LR: 1e-4}, {0: 0.1})], [LR], {tag: value})
    with pytest.raises(ConfigError, match=f"^the record of sweep s is damaged: its tag {tag}$"):
        loading.load_sweep(uri, "rlx", "s")


@pytest.mark.slow  # the script starts again; which sweep is the newest is in test_loading, too
def test_the_script_takes_the_newest_sweep_of_a_storage(
    uri: str, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Path(uri.removeprefix("sqlite:///")).parent
    assert script.main(["--storage", str(storage)]) == 0
    output = capsys.readouterr().out
    assert "sweeps, newest first: pbt, running, lost, failed, nothing-varied, wide, lr, bare;" in output
    assert "sweep pbt: 2 trials" in output
    assert "its model: rlx export '/my runs/a@best' --register NAME" in output
    assert (storage / "analysis" / "pbt" / "trials.csv").is_file()


@pytest.mark.slow
def test_the_script_fails_in_one_line(
    uri: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "no MLflow database": ["--storage", str(tmp_path)],
        "no storage folder": ["--storage", str(tmp_path / "missing")],
        "tracking.uri http://127.0.0.1:9: no server answers there": ["--tracking-uri", "http://u:secret@127.0.0.1:9"],
        "unknown metric 'kl/reff'; nearest: kl/ref": ["--tracking-uri", uri, "--metric", "kl/reff"],
        "no sweep 'widee'": ["--tracking-uri", uri, "--sweep", "widee"],
        "no sweep 'lrr'": ["--tracking-uri", uri, "--sweep", "lr", "--against", "lrr"],
        "--by seedd: sweep lr varies": ["--tracking-uri", uri, "--sweep", "lr", "--by", "seedd"],
    }
    for message, arguments in wrong.items():
        assert script.main([*arguments, "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}")
        assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_analysis_before_stays(uri: str, tmp_path: Path) -> None:
    loaded = loading.load_sweep(uri, "rlx", "lr")
    with s3.small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "analysis.html").write_text("before")
        with pytest.raises(StorageError, match=rf"^the analysis cannot be written to {disk}: No space left on device"):
            write_report(loaded, disk, uri)
        assert [path.name for path in disk.iterdir()] == ["analysis.html"]
        assert (disk / "analysis.html").read_text() == "before"
