"""Bad input ends in one clear line, before anything is trained and with nothing left behind; --help is quick."""

import importlib.util
import json
import re
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared import LIKE_TINY, NothingLeft

from rlx.cluster import connection
from rlx.cluster.resources import plan_resources
from rlx.config.errors import ConfigError
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.runs import launch, preflight
from rlx.runs.run_folder import finished_metrics
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking.services import artifact_places, mlflow

ROOT = Path(__file__).resolve().parents[2]
Refused = Callable[..., str]
SCRIPTS = ("ppo.py", "ppo_sweep.py", "analyze.py")
SECTIONS = [name for name, field in RunConfig.model_fields.items() if hasattr(field.annotation, "model_fields")]


def call(script: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments" / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def one_line(code: int, stderr: str) -> str:
    """The one line that a refused call ends in."""
    assert code == 1, stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    return stderr.removeprefix("error: ").strip()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Calls a script's main in this process, where Ray is imported already, and gives its one line."""

    def run(script: str, *words: str) -> str:
        code = runpy.run_path(str(ROOT / "experiments" / script))["main"](words)
        shown = capsys.readouterr()
        assert "steps, in" not in shown.out  # nothing is said to run
        return one_line(code, shown.err)

    return run


def folder_with(path: Path, **config: Any) -> str:
    """A model folder with nothing in it but, if given, a config."""
    path.mkdir()
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def begun(config: RunConfig, folder: Storage) -> None:
    """What a run that has begun leaves in its folder first."""
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "x"}))


def assert_nothing_ran(storage: Path) -> None:
    assert not list(storage.glob("runs/*")) and not list(storage.glob("sweeps/*"))
    if (storage / "mlflow.db").exists():
        assert mlflow.client(mlflow.default_uri(storage)).search_runs(["0", "1"]) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.steps=5"], "unexpected argument 'train.steps=5'; here it is --train.steps 5"),
        (["--train.step", "4"], "unknown option --train.step; nearest: --train.steps"),
        (["--train.steps", "none"], "train.steps"),
        (["--train.steps", "0"], "command line: train.steps = 0: input should be greater than 0"),
        (["--config", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["--name", "a/b"], "command line: name = 'a/b': "),
        (["--train.prompts-per-step", "7"], "train.prompts_per_step (7) must be a multiple"),
    ],
)
def test_bad_settings_of_a_run(words: list[str], line: str, refused: Refused, tmp_path: Path) -> None:
    assert line in refused("ppo.py", "--storage", str(tmp_path), *words)
    assert_nothing_ran(tmp_path)


def test_an_unknown_key_in_a_file_is_named_with_the_nearest(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train:\n  stepz: 3\n")
    for script in ("ppo.py", "ppo_sweep.py"):
        line = refused(script, "--storage", str(tmp_path), "--config", str(tmp_path / "run.yaml"))
        assert line == f"{tmp_path}/run.yaml: unknown setting train.stepz; nearest: train.steps"
    assert_nothing_ran(tmp_path)


def test_models_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    empty = folder_with(tmp_path / "empty")
    short = folder_with(tmp_path / "short", max_position_embeddings=64)
    cases = {
        str(tmp_path / "none"): f"model.path {tmp_path}/none: no such folder",
        empty: f"model.path {empty}: not a Hugging Face model, it has no config.json",
        short: f"data.max_prompt_tokens + rollout.max_tokens = 144, but {short} has 64 positions",
    }
    for path, line in cases.items():
        words = ["--storage", str(tmp_path / "storage"), *LIKE_TINY, "--model.path", path]
        assert refused("ppo.py", *words) == line
    assert_nothing_ran(tmp_path / "storage")


def test_a_sweep_refuses_a_model_that_is_not_there(refused: Refused, tmp_path: Path) -> None:
    line = refused("ppo_sweep.py", "--storage", str(tmp_path), "--model.path", "/nowhere/model")
    assert line == "model.path /nowhere/model: no such folder"
    assert_nothing_ran(tmp_path)


def test_names_that_are_not_there_or_taken(refused: Refused, tmp_path: Path) -> None:
    config = from_tree({"storage": str(tmp_path), "name": "mine", "train": {"steps": 2}})
    folder = open_storage(config.storage) / "runs" / "mine"
    begun(config, folder)
    storage = ["--storage", str(tmp_path)]
    assert refused("ppo.py", *storage, "--resume", "other") == f"no run 'other' in {tmp_path}/runs"
    assert "expected a run's name" in refused("ppo.py", *storage, "--resume", "mine@2")
    renamed = refused("ppo.py", *storage, "--resume", "mine", "--name", "x")
    assert renamed == "name x: run 'mine' keeps its name; --from mine starts another one"
    line = refused("ppo.py", *storage, "--name", "mine")
    assert line == f"run 'mine' exists in {tmp_path}/runs/mine: --resume mine continues it"
    assert "no sweep other" in refused("ppo_sweep.py", *storage, "--resume", "other")


def test_resuming_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = from_tree({"storage": str(tmp_path), "name": "mine", "train": {"steps": 2}})
    folder = open_storage(config.storage) / "runs" / "mine"
    begun(config, folder)
    (folder / "result.json").write_text(json.dumps({"step": 2, "eval/accuracy": 0.25}))
    main = runpy.run_path(str(ROOT / "experiments" / "ppo.py"))["main"]
    assert main(["--storage", str(tmp_path), "--resume", "mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run mine is finished: 2 steps, held-out 0.250",
        f"rlx train --resume mine --train.steps 4 --storage {tmp_path} goes on with it",
    ]
    assert main(["--storage", str(tmp_path), "--resume", "mine", "--train.steps", "1"]) == 0
    assert "--train.steps 4" in capsys.readouterr().out  # fewer than it has done are no way on
    assert finished_metrics(folder, steps=2) is not None and finished_metrics(folder, steps=3) is None


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path, empty_database: Path) -> dict[str, Any]:
    """The tree of a small run, on a storage that has MLflow's database already."""
    (tmp_path / "storage").mkdir()
    shutil.copy(empty_database, tmp_path / "storage")
    data = {"params": {}, "max_prompt_tokens": 32}
    storage = {"name": "x", "storage": str(tmp_path / "storage")}
    model, rollout = {"path": str(tiny_model)}, {"max_tokens": 8}
    return over_experiment(storage | {"model": model, "data": data, "eval": {"num_prompts": 2}, "rollout": rollout})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"question": "1 + 1 =", "answer": "2"}\n{"question": \n', "{path}:2: malformed JSON"),
        pytest.param(
            "".join(f'{{"question": "{number} {"+ 1 " * 40}", "answer": "2"}}\n' for number in range(72)),
            "no prompt is left: 70 of 70 training prompts of data.source {path} are longer",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["malformed", "too long"],
)
def test_prompts_that_cannot_be_used(
    text: str, line: str, config: dict[str, Any], tmp_path: Path, ray_cluster: None, nothing_left: NothingLeft
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    run = from_tree(with_overrides(config, {"data.source": str(path)}))
    storage = open_storage(run.storage)
    with pytest.raises(ConfigError) as error:
        launch.run(preflight.prepare(run), storage / "runs" / "x")
    assert line.format(path=path) in str(error.value) and "\n" not in str(error.value)
    assert_nothing_ran(Path(run.storage))
    nothing_left(10)


@pytest.mark.slow
def test_an_empty_prompt_file_ends_the_script_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    path, storage = tmp_path / "prompts.jsonl", tmp_path / "storage"
    path.write_text("\n")
    words = ["--storage", str(storage), *LIKE_TINY, "--model.path", str(tiny_model), "--data.source", str(path)]
    done = call("ppo.py", *words, "--data.params", "{}")
    assert one_line(done.returncode, done.stderr) == f"data.source {path}: there are no rows in it"
    assert_nothing_ran(storage)


def test_more_workers_than_the_cluster_has(config: dict[str, Any], ray_cluster: None) -> None:
    run = from_tree(with_overrides(config, {"scaling.num_workers": 9, "train.prompts_per_step": 18}))
    with pytest.raises(ConfigError, match=r"9 workers and 1 engine need 5 CPU but the cluster has 4$"):
        connection.connect(run, plan_resources(run))
    gpus = from_tree(with_overrides(config, {"scaling.use_gpu": True}))
    with pytest.raises(ConfigError, match=r"need 2 GPU but the cluster has 0$"):
        connection.connect(gpus, plan_resources(gpus))


def test_paths_are_kept_good_for_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.csv").write_text("question,answer\n")
    monkeypatch.chdir(tmp_path)
    config = from_tree({"model": {"path": "model"}, "data": {"source": "rows.csv"}, "storage": "s3://bucket/x"})
    assert preflight.absolute_paths(config) == {
        "model.path": f"{tmp_path}/model",
        "data.source": f"{tmp_path}/rows.csv",
        "storage": "s3://bucket/x",
    }
    sets = [{"name": "a", "source": "rows.csv", "temperature": 0.0, "samples": 1}, {"name": "b"}]
    (own, held_out) = preflight.absolute_paths(from_tree({"eval": {"sets": sets}}))["eval.sets"]
    assert own == sets[0] | {"source": f"{tmp_path}/rows.csv"} and held_out == {"name": "b", "samples": 4}
    assert preflight.absolute_paths(RunConfig()) == {
        "storage": f"{tmp_path}/storage"
    }  # "tiny" and a dataset are no paths
    named = from_tree({"model": {"path": "org/name"}, "reward": {"functions": {"model": 1}, "model": "org/judge"}})
    assert preflight.absolute_paths(named) == {"storage": f"{tmp_path}/storage"}


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sqlite:///m/x.db", "sqlite:///{here}/a%%20b/m/x.db"),
        ("sqlite:///../x%20y.db?timeout=3", "sqlite:///{here}/x%20y.db?timeout=3"),
        *((same, same) for same in ("sqlite:////m/x.db?a=b", "sqlite:///file:x.db?uri=true", "sqlite:///:memory:")),
        *((same, same) for same in ("http://host:5000", "postgresql://host/db", "databricks")),
    ],
)
def test_a_database_is_the_same_one_from_any_working_directory(
    uri: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a%20b").mkdir()
    monkeypatch.chdir(tmp_path / "a%20b")
    config = from_tree({"tracking": {"uri": uri}})
    absolute = preflight.absolute_paths(config)["tracking.uri"]
    assert absolute == expected.format(here=tmp_path).replace("%%", "%25")
    if "x.db" in uri and "file:" not in uri:
        assert artifact_places.database(absolute) == artifact_places.database(uri).resolve()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--algorithm.policy-loss", "gspo"],
            "algorithm.policy_loss is ppo in run mine, which cannot change now: start a new run",
        ),
        (["--model.lora-rank", "8"], "model.lora_rank is 0 in run mine"),
        (["--seed", "1"], "seed is 0 in run mine"),
        (["--train.ema-decay", "0.9"], "train.ema_decay is None in run mine"),
        # Taken with the run's own importance, which the default would refuse; the next obstacle is named.
        (["--rollout.top-p", "0.9", "--algorithm.advantage", "rloo"], "algorithm.advantage is gae in run mine"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused(
    words: list[str], message: str, refused: Refused, tmp_path: Path
) -> None:
    folder = open_storage(str(tmp_path)) / "runs" / "mine"
    config = from_tree({"name": "mine", "storage": str(tmp_path), "algorithm": {"rollout_correction": "tis"}})
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "x"}))
    assert message in refused("ppo.py", "--storage", str(tmp_path), "--resume", "mine", *words)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_quick(script: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = call(script, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 3
    if script != "analyze.py":
        headings = re.findall(r"^(\w+):$", done.stdout, re.MULTILINE)
        assert len(SECTIONS) >= 10 and set(SECTIONS) <= set(headings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "present", "absent"),
    [
        ("train", ["--train.steps", "--train.actor-lr"], ["--eval.every", "--config", "algorithm:"]),
        ("entropy", ["--algorithm.entropy-coef", "--algorithm.exact-entropy"], ["--train.steps", "model:"]),
        ("num-generations", ["--train.samples-per-prompt"], ["--train.steps"]),  # TRL's name
        ("actor_lr", ["--train.actor-lr"], ["--train.critic-lr"]),
    ],
)
def test_help_with_a_word_shows_the_settings_about_it(word: str, present: list[str], absent: list[str]) -> None:
    for script in ("ppo.py", "ppo_sweep.py"):
        shown = call(script, "--help", word)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert all(text in shown.stdout for text in present)
        assert not any(text in shown.stdout for text in absent)


def test_help_with_a_word_that_no_setting_is_about(refused: Refused) -> None:
    assert "--help trian: no setting is about that; nearest: train" in refused("ppo.py", "--help", "trian")


def test_scripts_run_from_anywhere(tmp_path: Path) -> None:
    done = call("ppo.py", "--train.steps", "x", cwd=tmp_path)
    assert one_line(done.returncode, done.stderr).startswith("command line: train.steps = 'x': ")
    assert not list(tmp_path.iterdir())


def test_a_gguf_file_without_the_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "model.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    main = runpy.run_path(str(ROOT / "experiments" / "make_smollm2.py"))["main"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "folder"), "--gguf", str(file)])
    assert "with the package gguf: pip install 'rlx[smollm2]'" in capsys.readouterr().err
