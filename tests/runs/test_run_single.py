"""A whole run of one step on one rank with one engine, the critic a head on the policy; nothing of it is to be left."""

import shutil
from pathlib import Path

import pytest
import s3
from conftest import NothingLeft
from run_cases import Done, artifact, sample_rows, small, train

from rlx.data import reasoning_gym, sources
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking import outbox
from rlx.tracking.tracker import OutboxTracker


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    shutil.copy(empty_database, folder)
    return folder


@pytest.fixture(scope="module")
def head(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    """One optimizer step per round of rollouts."""
    one = {"scaling__num_workers": 1, "rollout__num_engines": 1, "train__ppo_epochs": 1, "train__num_minibatches": 1}
    config = small(tiny_model, storage, "head", model__critic="head", train__steps=1, **one)
    folder = open_storage(config.storage) / "runs" / "head"
    return train(config, keep=False, on_report=lambda metrics, _: leave(folder) if metrics["step"] else None)


def leave(folder: Storage) -> None:
    """A record, as a process leaves it that has ended before MLflow took it."""
    process = OutboxTracker(f"http://127.0.0.1:{s3.free_port()}", folder, "ended")
    process.log_text("late.txt", "at last")
    assert process.close(0) == 1


def test_rewards_are_what_the_scorer_says(head: Done) -> None:
    check = sources.answer_checker(head.config.data, head.config.eval.seed, head.config.eval.num_prompts)
    answers = {row["question"]: row for row in reasoning_gym.generated_questions(head.config.data, 10_000_000, 12)}
    for step in (0, 1):
        rows = sample_rows(head, step)
        expected = [check(row["completion"].strip(), row["answer"], answers[row["prompt"]]["entry"]) for row in rows]
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


def test_nothing_is_left_of_the_run(head: Done, nothing_left: NothingLeft) -> None:
    nothing_left(5)
