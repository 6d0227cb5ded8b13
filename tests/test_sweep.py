"""Sweeps: what a search space may hold, how many trials fit, and real ones that stop early, die and are resumed."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import NothingLeft, Script, mlflow_history

from rlx import launch, report, sweep
from rlx.config import ConfigError, from_tree
from rlx.launch import Plan
from rlx.storage import Storage, open_storage
from rlx.sweep import Sweep, load_space

# ---------------------------------------------------------------------------------------------------------------------
# Search spaces and room


def space_file(folder: Path, body: str) -> str:
    path = folder / "space.py"
    path.write_text(f"from ray import tune\n\ndef space():\n    return {body}\n")
    return str(path)


def test_a_space_is_read(tmp_path: Path) -> None:
    path = space_file(tmp_path, "{'train.epochs': tune.choice([1, 2]), 'train.actor_lr': tune.loguniform(1e-5, 1e-3)}")
    assert list(load_space(path, {})) == ["train.epochs", "train.actor_lr"]
    shipped = Path(__file__).resolve().parent.parent / "search_spaces"
    assert all(load_space(str(path), {}) for path in shipped.glob("*.py"))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("{'train.actor_rl': tune.choice([1])}", "unknown setting train.actor_rl; nearest: train.actor_lr"),
        ("{'train.epochs': tune.choice([1, 0])}", "train.epochs = 0: input should be greater than 0"),
        ("{'train.epochs': tune.grid_search([2, -1])}", "train.epochs = -1: input should be greater than 0"),
        ("{'algorithm.lam': tune.uniform(0.5, 1.5)}", "algorithm.lam = 1.5: input should be less than or equal to 1"),
        ("{'train.prompts_per_step': 7}", "train.prompts_per_step (7) must be a multiple of"),
    ],
)
def test_a_space_that_does_not_fit_the_config_is_refused(body: str, line: str, tmp_path: Path) -> None:
    path = space_file(tmp_path, body)
    with pytest.raises(ConfigError) as error:
        load_space(path, {})
    assert str(error.value).startswith(f"--space {path}: ") and line in str(error.value)


def test_a_space_must_be_a_file_with_the_function(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.py: no such file"):
        load_space(str(tmp_path / "none.py"), {})
    (tmp_path / "other.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"other\.py: it has no function space"):
        load_space(str(tmp_path / "other.py"), {})


def test_a_grid_needs_lists_of_values(tmp_path: Path) -> None:
    space = load_space(space_file(tmp_path, "{'algorithm.lam': tune.uniform(0, 1)}"), {})
    with pytest.raises(ConfigError, match=r"--search grid needs a list of values for algorithm.lam: use tune.choice"):
        sweep.SEARCHES["grid"](space)


@pytest.mark.parametrize(
    ("workers", "engines", "cluster", "trials"),
    [
        ([{"CPU": 0.5}], [{"CPU": 0.5}], {"CPU": 2.0}, 2),
        ([{"CPU": 0.5}], [{"CPU": 0.5}], {"CPU": 1.9}, 1),
        ([{"CPU": 0.1}] * 3, [{"CPU": 0.1}], {"CPU": 1.2}, 3),  # 1.2 / 0.4 is a little less than 3 in floating point
        ([{"CPU": 1.0, "GPU": 1.0}] * 2, [{"GPU": 1.0}], {"CPU": 64.0, "GPU": 8.0}, 2),
        ([{"CPU": 1.0, "GPU": 1.0}], [{"CPU": 1.0}], {"CPU": 64.0}, 0),
    ],
)
def test_whole_plans_that_fit(
    workers: list[dict[str, float]], engines: list[dict[str, float]], cluster: dict[str, float], trials: int
) -> None:
    assert Plan(workers, engines).fits([cluster]) == trials


def test_each_bundle_of_a_plan_is_on_one_node() -> None:
    plan = Plan([{"CPU": 2.0}], [{"CPU": 1.0}])
    assert plan.fits([{"CPU": 1.0}] * 8) == 0
    assert plan.fits([{"CPU": 2.0}, {"CPU": 1.0}]) == 1
    assert plan.fits([{"CPU": 3.0}, {"CPU": 2.0}, {"CPU": 1.0}]) == 2


def test_concurrency_never_exceeds_the_room(ray_cluster: None) -> None:
    tree = {"scaling": {"num_workers": 2}, "train": {"prompts_per_step": 8}}
    assert sweep.concurrency(Sweep("s", tree, "")) == 2  # of 1.5 CPU each, in 4
    assert sweep.concurrency(Sweep("s", tree, "", max_concurrent=1)) == 1
    assert sweep.concurrency(Sweep("s", tree, "", max_concurrent=9)) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Real sweeps


@dataclass
class News:
    """What a sweep told who watches it."""

    metrics: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    def watch(self, trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], state: str) -> None:
        self.states[trial] = state
        if metrics:
            self.metrics.setdefault(trial, []).append(metrics)


def prepared(model: Path, folder: Path, patterns: list[str], **options: Any) -> tuple[Sweep, Storage]:
    """A sweep over what counts as an answer: `()` finds it in every completion, `(?!)` in none."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{i} + 1 =", "answer": ""}) + "\n" for i in range(60)))
    tree = {
        "storage": str(folder / "storage"),
        "model": {"path": str(model)},
        "data": {"source": str(prompts), "max_prompt_tokens": 32},
        "train": {"steps": 10, "prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 4, "kv_cache_mib": 16},
        "eval": {"every": 2, "size": 6},
        "checkpoint": {"every": 2},
    }
    space = space_file(folder, f"{{'reward.answer_pattern': tune.choice({patterns!r})}}")
    storage = open_storage(tree["storage"])
    launch.connect(from_tree(tree))
    made = Sweep("s", tree, space, trials=len(patterns), search="grid", **options)
    return sweep.create_sweep(made, storage), storage


def children(plan: Sweep, storage: Storage) -> dict[str, Any]:
    """MLflow's runs below the sweep's, by trial."""
    client = report.client(report.default_uri(Path(storage.path)))
    experiment = client.get_experiment_by_name("rlx").experiment_id
    runs = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{plan.mlflow_run}'")
    return {run.info.run_name.rpartition(".")[2]: run for run in runs}


def status_of(plan: Sweep, storage: Storage) -> str:
    return str(report.client(report.default_uri(Path(storage.path))).get_run(plan.mlflow_run).info.status)


def test_a_sweep_stops_bad_trials_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, nothing_left: NothingLeft
) -> None:
    plan, storage = prepared(tiny_model, tmp_path, ["()", "(?!)", "(?!)"], scheduler="asha", max_concurrent=2)
    news = News()
    results = sweep.run(plan, storage, watch=news.watch)
    nothing_left(15)

    assert [result.error for result in results] == [None] * 3
    assert set(news.states.values()) == {"finished"} and len(news.states) == 3
    runs = children(plan, storage)
    assert sorted(runs) == sorted(news.states)
    assert {run.info.status for run in runs.values()} == {status_of(plan, storage)} == {"FINISHED"}
    accuracy = {name: run.data.metrics["eval/accuracy"] for name, run in runs.items()}
    assert accuracy == {"trial_00000": 1.0, "trial_00001": 0.0, "trial_00002": 0.0}
    last = {name: max(mlflow_history(Path(storage.path), run.info.run_id)["reward/mean"]) for name, run in runs.items()}
    assert last["trial_00000"] == 10
    assert 2 <= min(last.values()) < 10  # one at least was stopped, after its first evaluation
    assert all(run.data.params["train.steps"] == "10" for run in runs.values())


@pytest.mark.slow
def test_a_killed_trial_leaves_nothing(tiny_model: Path, tmp_path: Path, nothing_left: NothingLeft) -> None:
    plan, storage = prepared(tiny_model, tmp_path, ["()"])
    news = News()

    def kill_at_step_2(trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], what: str) -> None:
        news.watch(trial, settings, metrics, what)
        if what == "running" and metrics.get("step") == 2:
            os.kill(metrics["pid"], signal.SIGKILL)

    (result,) = sweep.run(plan, storage, watch=kill_at_step_2)
    nothing_left(15)
    assert result.error is not None
    assert news.states == {"trial_00000": "failed"}
    assert [run.info.status for run in children(plan, storage).values()] == ["FAILED"]


@pytest.mark.slow
def test_a_watcher_that_fails_does_not_end_the_sweep(
    tiny_model: Path, tmp_path: Path, nothing_left: NothingLeft, caplog: pytest.LogCaptureFixture
) -> None:
    plan, storage = prepared(tiny_model, tmp_path, ["()"])

    def broken(trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], what: str) -> None:
        raise BrokenPipeError("the terminal is gone")

    (result,) = sweep.run(plan, storage, watch=broken)
    assert result.error is None and result.metrics["step"] == 10
    assert "the sweep goes on: BrokenPipeError" in caplog.text
    nothing_left(15)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_sweep_is_resumed(tiny_model: Path, tmp_path: Path, script: Any) -> None:
    storage = open_storage(str(tmp_path / "storage"))
    words = ["--storage", storage.path, "--model.path", str(tiny_model), "--name", "s"]
    small = ["--train.prompts-per-step", "4", "--eval.size", "6", "--train.steps", "8", "--checkpoint.every", "2"]
    first: Script = script("ppo_sweep.py", *words, *small, "--trials", "3", "--max-concurrent", "1")
    first.wait_for("trial_00000 finished")
    first.wait_for("trial_00001 running  step 5/8")
    first.kill()
    plan = sweep.saved_sweep(storage, "s")
    before = children(plan, storage)
    finished = mlflow_history(Path(storage.path), before["trial_00000"].info.run_id)

    second: Script = script("ppo_sweep.py", "--storage", storage.path, "--resume")
    assert second.process.wait(400) == 0, second.output.read_text()
    runs = children(plan, storage)
    assert sorted(runs) == ["trial_00000", "trial_00001", "trial_00002"]
    assert {run.info.status for run in runs.values()} == {status_of(plan, storage)} == {"FINISHED"}
    assert mlflow_history(Path(storage.path), runs["trial_00000"].info.run_id) == finished
    assert {name: run.data.tags.get("rlx.attempt") for name, run in runs.items()} == {
        "trial_00000": None,
        "trial_00001": "2",
        "trial_00002": None,
    }
    for run in runs.values():
        steps = mlflow_history(Path(storage.path), run.info.run_id)["reward/mean"]
        assert {step: len(values) for step, values in steps.items()} == {step: 1 for step in range(1, 9)}
    assert "trial_00001 running  step 0/8" not in second.output.read_text()
