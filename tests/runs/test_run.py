"""Whole runs with the real parts: Ray Train, FSDP, vLLM and MLflow, on a small model.

One set of engines and workers does all of them, one after another (shared.py).
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from run_cases import STEPS, Done, artifact, comparable, sample_rows, small, train
from shared import KEPT, NothingLeft

import rlx
from rlx.config.loading import from_tree
from rlx.config.sections.base import flatten
from rlx.data.record import RECORD
from rlx.runs import run_folder, train_run
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.tracking import metrics
from rlx.tracking.services import mlflow

ONLY_WHEN_ASKED_FOR = {
    "tokens/policy_per_episode",
    "tokens/environment_per_episode",
    "time/environment",
    "reward/running_mean",
    "reward/running_std",
    "reward/code_limited",
    "reward/judge_failed",
    "reward/task_late",
    "reward/mean/SOURCE",
    "source/fraction/SOURCE",
    "source/generated/SOURCE",
    "task/accuracy/SOURCE",
    "eval/accuracy/SOURCE",
    "eval/reward/SOURCE",
    "groups/generated",
    "eval/failed_fraction",
    "eval/ema/failed_fraction",
    "eval/ema/accuracy",
    "eval/ema/reward",
    "eval/ema/length",
    "kl/loss",
    "ptx/loss",
    "policy/dual_clip_fraction",
    "policy/left_out_fraction",
}
GROUPS_ASKED_FOR = ("curriculum/", "episode/", "eval/SET/", "schedule/")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    shutil.copy(empty_database, folder)
    return folder


@pytest.fixture(scope="module")
def run(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    return train(small(tiny_model, storage, "whole"))


@pytest.fixture(scope="module")
def hurt(run: Done, tiny_model: Path, storage: Path) -> tuple[Done, list[str]]:
    """A run of which one engine is killed and then one train worker; and what was said of it."""
    victims = {0: kill_an_engine_that_generates, 2: lambda: newest_process("ray::RayTrainWorker").kill()}
    messages: list[str] = []

    def kill(metrics: dict[str, Any], checkpoint: str | None) -> None:
        victims.pop(metrics["step"], lambda: None)()

    config = small(tiny_model, storage, "hurt", checkpoint__every=1)
    return train(config, on_report=kill, notify=messages.append), messages


@pytest.fixture(scope="module")
def branch(run: Done, tiny_model: Path, storage: Path) -> Done:
    """A new run that starts with all of the state of the undisturbed run after half of its steps."""
    source = f"{run.result.folder}/{checkpoint_catalog.checkpoint_name(STEPS // 2)}"
    start = {"checkpoint__init_from": source, "checkpoint__init_state": "all"}
    return train(small(tiny_model, storage, "branch", **start))


def newest_process(name: str) -> psutil.Process:
    """Of the processes of that name, the one that began last: other tests may have some too."""
    found = [process for process in psutil.process_iter(["cmdline"]) if name in " ".join(process.info["cmdline"] or [])]
    return max(found, key=lambda process: process.create_time())


def kill_an_engine_that_generates() -> None:
    """At another moment it would be sent weights, and its loss be told in other words."""
    engine = KEPT.engines[0]
    while True:
        pid, generates = ray.get(
            engine.__ray_call__.remote(lambda one: (os.getpid(), bool(one._thread._engine.result()._running)))
        )
        if generates:
            os.kill(pid, signal.SIGKILL)
            return


def test_engines_and_trainers_agree_at_every_step(run: Done) -> None:
    gaps = run.history["mismatch/max_abs"]
    assert sorted(gaps) == [1, 2, 3, 4]
    assert all(0 < value <= 1e-4 for values in gaps.values() for value in values)


def test_every_metric_is_reported_by_its_name(run: Done) -> None:
    named = {name.replace("NAME", "task").replace("METRIC", "eval/accuracy") for name in metrics.METRICS}
    default = {name for name in named - ONLY_WHEN_ASKED_FOR if not name.startswith(GROUPS_ASKED_FOR)}
    default -= {"system/eval/accuracy"}
    assert {name for name in run.history if not name.startswith("system/")} == default
    reported = default - {"best/eval/accuracy"} | {"step"}
    assert {key for metrics, _ in run.reports for key in metrics} == reported


def test_the_first_step_is_on_policy(run: Done) -> None:
    first = {name: by_step[1][0] for name, by_step in run.history.items() if 1 in by_step}
    assert abs(first["kl/ref"]) <= 1e-6
    assert first["staleness/mean"] == 0
    assert first["kl/coef"] == run.config.algorithm.kl_coef
    assert first["policy/grad_norm"] > 0 and first["value/grad_norm"] > 0
    assert run.history["kl/ref"][STEPS][0] != 0  # by then the policy has moved


def test_mlflow_holds_each_step_once(run: Done) -> None:
    per_step = {name: sorted(by_step) for name, by_step in run.history.items()}
    assert all(len(values) == 1 for by_step in run.history.values() for values in by_step.values())
    assert per_step["reward/mean"] == per_step["time/step"] == [1, 2, 3, 4]
    assert per_step["eval/accuracy"] == [0, 2, 4]
    assert per_step["time/checkpoint"] == [2, 4]
    assert set(per_step["time/checkpoint_write"]) <= {3, 4}  # with a report after it


def test_mlflow_holds_the_config_and_the_samples(run: Done) -> None:
    record = mlflow.client(mlflow.default_uri(run.storage)).get_run(run.result.mlflow_run)
    assert record.info.status == "FINISHED"
    assert record.data.params == {k: str(v) for k, v in flatten(run.config).items() if v is not None}
    saved = yaml.safe_load(artifact(run, "config.yaml").read_text())
    assert saved == run_folder.saved_config(open_storage(run.result.folder)) == run.config.model_dump(mode="json")
    assert from_tree(saved) == run.config
    assert f"Completions of run {run.config.name}</title>" in artifact(run, "completions.html").read_text()
    assert [len(sample_rows(run, step)) for step in (0, 2, 4)] == [6, 6, 6]  # rank 0's half of the held-out prompts


def test_the_folder_has_the_checksums_of_all_prompts(run: Done) -> None:
    known = (open_storage(run.result.folder) / RECORD).read_json()
    manifest = checkpoint_catalog.complete_checkpoints(open_storage(run.result.folder))[-1].manifest
    assert manifest
    tokens, answers = (manifest.cursor[key] for key in ("token_digest", "answer_digest"))
    assert set(known) == {"train", "held_out"}
    assert known["train"]["digest"] == [tokens, answers]


def test_the_result_is_the_last_report(run: Done) -> None:
    assert [metrics["step"] for metrics, _ in run.reports] == [0, 1, 2, 3, 4]
    metrics, checkpoint = run.reports[-1]
    assert run.result.metrics == metrics and checkpoint == f"{run.result.folder}/step_{STEPS:06d}"
    assert run.result.metrics["reward/mean"] == run.history["reward/mean"][STEPS][0]
    assert run_folder.finished_metrics(open_storage(run.result.folder), STEPS) == run.result.metrics


def test_resume_of_the_public_face_gives_a_finished_run_at_once(run: Done) -> None:
    result = rlx.resume("whole", storage=run.config.storage)
    assert (result.name, result.path) == ("whole", run.result.folder)
    assert result.metrics == json.loads((Path(result.path) / "result.json").read_text())
    assert result.checkpoint == run.reports[-1][1]


def test_checkpoints_are_whole(run: Done) -> None:
    told = [Path(path).name for _, path in run.reports if path]
    assert told == ["step_000002", "step_000004"]
    for found in checkpoint_catalog.list_checkpoints(open_storage(run.result.folder)):
        assert found.manifest
        checkpoint_catalog.verify(found, found.manifest.files)
        assert set(found.manifest.files) == {"rank_00000.safetensors", "rank_00001.safetensors"}
        assert found.manifest.metrics["reward/mean"] == run.history["reward/mean"][found.step][0]
        assert found.manifest.config == run.config.model_dump(mode="json")


def test_a_run_that_starts_with_the_state_of_another_goes_on_as_that_one(run: Done, branch: Done) -> None:
    assert [metrics["step"] for metrics, _ in branch.reports] == [2, 3, 4]
    assert comparable(branch.history, range(2, 5)) == comparable(run.history, range(2, 5))
    assert branch.result.mlflow_run != run.result.mlflow_run


@pytest.mark.slow  # kills things
def test_a_run_whose_parts_die_is_the_undisturbed_one(run: Done, hurt: tuple[Done, list[str]]) -> None:
    done, messages = hurt
    assert comparable(done.history, range(5)) == comparable(run.history, range(5))
    lost = next(message for message in messages if "left out until it is back" in message)
    assert re.fullmatch(r"engine [01] (died: its process ended|is gone) - left out until it is back", lost)
    steps = [metrics["step"] for metrics, _ in done.reports]
    assert sorted(set(steps)) == [0, 1, 2, 3, 4] and len(steps) <= 7  # some may have been done twice


@pytest.mark.slow  # a process that stands still is killed only after half a minute
def test_a_run_whose_worker_hangs_after_the_last_report_is_over_all_the_same(
    run: Done, nothing_left: NothingLeft, tiny_model: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_run, "_LAST_RECORDS_S", 2.0)

    def hang(metrics: dict[str, Any], checkpoint: str | None) -> None:
        if metrics["step"] == 1:
            newest_process("ray::RayTrainWorker").suspend()

    done = train(small(tiny_model, storage, "hangs", train__steps=1), on_report=hang)
    assert done.result.metrics["step"] == 1
    KEPT.close()
    nothing_left(15)
