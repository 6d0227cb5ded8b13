"""Whole runs on one rank with one engine: one that is killed and resumed on S3, and one that leaves nothing."""

import shutil
from pathlib import Path

import pytest
import s3
import yaml
from run_cases import Done, artifact, comparable, sample_rows, small, train
from shared import KEPT, NothingLeft, Script

from rlx.data import reasoning_gym, sources
from rlx.runs import launch
from rlx.runs.run_folder import saved_config
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking import outbox
from rlx.tracking.services import mlflow
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.tracker import OutboxTracker
from rlx.types import GivenAnswer

pytestmark = pytest.mark.slow  # no other run has processes of this shape


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    shutil.copy(empty_database, folder)
    return folder


ONE = {"scaling__num_workers": 1, "rollout__num_engines": 1}


@pytest.fixture(scope="module")
def run(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    return train(small(tiny_model, storage, "undisturbed", **ONE))


@pytest.fixture(scope="module")
def resumed(run: Done, tiny_model: Path, storage: Path) -> Done:
    """A run on S3 whose driver is killed on its way, and what its resume makes of it."""
    there = f"s3://{s3.BUCKET}/runs"
    config = small(tiny_model, there, "killed", tracking__uri=mlflow.default_uri(storage), **ONE)
    (storage / "killed.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    script = Script(storage / "killed.txt", "ppo.py", "--config", str(storage / "killed.yaml"))
    try:
        script.wait_for("step 3/4")
        script.kill()
        assert checkpoint_catalog.complete_checkpoints(open_storage(there) / "runs" / "killed")[-1].step >= 2
    finally:
        for process in script.processes():
            process.kill()
    return train(config, resume=True, records=storage)


@pytest.fixture(scope="module")
def head(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    """The critic a head on the policy, one optimizer step per round of rollouts. Nothing of it is to be left."""
    once = {"train__ppo_epochs": 1, "train__num_minibatches": 1, "train__steps": 2}
    every = {"eval__every": 1, "checkpoint__every": 1, "checkpoint__keep_last": None}
    config = small(tiny_model, storage, "head", model__critic="head", **once, **every, **ONE)
    folder = open_storage(config.storage) / "runs" / "head"
    return train(config, keep=False, on_report=lambda metrics, _: leave(folder) if metrics["step"] == 1 else None)


def leave(folder: Storage) -> None:
    """A record, as a process leaves it that has ended before MLflow took it."""
    process = OutboxTracker([MLflowService(f"http://127.0.0.1:{s3.free_port()}")], folder, "ended")
    process.log_text("late.txt", "at last")
    assert process.close(0) == 1


def test_a_run_that_was_killed_and_resumed_is_the_undisturbed_one(run: Done, resumed: Done) -> None:
    assert resumed.reports[0][0]["step"] >= 2  # the newest checkpoint's own, which the driver may not have heard of
    assert comparable(resumed.history, range(5)) == comparable(run.history, range(5))


def test_a_resumed_run_is_the_same_mlflow_run(resumed: Done) -> None:
    assert sorted(resumed.history["reward/mean"]) == [1, 2, 3, 4]
    assert all(len(values) == 1 for by_step in resumed.history.values() for values in by_step.values())
    record = mlflow.client(mlflow.default_uri(resumed.storage)).get_run(resumed.result.mlflow_run)
    assert (record.info.status, record.data.tags["rlx.attempt"]) == ("FINISHED", "2")
    folder = open_storage(resumed.config.storage) / "runs" / "killed"
    assert saved_config(folder) == resumed.config.model_dump(mode="json")
    assert [found.step for found in checkpoint_catalog.complete_checkpoints(folder)] == [2, 4]


def test_rewards_are_what_the_scorer_says(head: Done) -> None:
    check = sources.answer_checker(head.config.data, head.config.eval.seed, head.config.eval.num_prompts)
    answers = {row["question"]: row for row in reasoning_gym.generated_questions(head.config.data, 10_000_000, 12)}
    for step in (0, 1):
        rows = sample_rows(head, step)
        given = [GivenAnswer(row["completion"].strip(), "", answers[row["prompt"]]["entry"]) for row in rows]
        expected = check(given)
        assert len(rows) == len(answers) and [row["score"] for row in rows] == expected
        assert head.history["eval/reward"][step][0] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
        right = sum(score >= 1 for score in expected) / len(expected)
        assert head.history["eval/accuracy"][step][0] == pytest.approx(right, rel=1e-6)


def test_one_optimizer_step_starts_at_ratio_one(head: Done) -> None:
    """The update's forward pass is that of the old policy: no ratio, no clipping, and whitened advantages sum to 0."""
    first = {name: by_step[1][0] for name, by_step in head.history.items() if 1 in by_step}
    assert abs(first["policy/approx_kl"]) <= 1e-9
    assert first["policy/clip_fraction"] == first["value/clip_fraction"] == 0
    assert abs(first["policy/loss"]) <= 1e-5
    assert first["value/loss"] > 0
    assert first["mismatch/max_abs"] <= 1e-4
    assert "value/grad_norm" not in first  # a head has no optimizer of its own


def test_at_the_end_of_a_run_what_its_processes_have_left_is_sent(head: Done) -> None:
    assert artifact(head, "late.txt").read_text() == "at last"
    assert outbox.pending(open_storage(head.result.folder)) == 0


def test_ray_train_is_given_every_checkpoint_with_the_metrics_of_its_own_step(head: Done) -> None:
    train, folder = head.result.train, head.result.folder
    assert train and train.error is None
    given = {Path(checkpoint.path).name: metrics for checkpoint, metrics in train.best_checkpoints}
    assert list(given) == ["step_000001", "step_000002"]
    for name, metrics in given.items():
        own = next(report for report, _ in head.reports if report["step"] == int(name.rpartition("_")[2]))
        compared = [key for key in own if key.startswith(("reward/", "eval/", "kl/"))]
        assert len(compared) > 5 and {key: metrics[key] for key in compared} == {key: own[key] for key in compared}
    assert launch._TRAIN_RECORD in open_storage(folder).names()  # Ray Train's own record, which a resume deletes
    assert (train.checkpoint.path, train.metrics["step"]) == (f"{folder}/step_000002", 2)


def test_nothing_is_left_of_the_run(head: Done, nothing_left: NothingLeft) -> None:
    KEPT.close()
    nothing_left(5)
