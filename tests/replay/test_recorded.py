"""Which checkpoint a replay starts from, with which settings, and whose runs are taken."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from replay_cases import run_of
from test_run_folder import put, settings

from rlx.config.errors import ConfigError
from rlx.replay import branches, recorded, verifying
from rlx.replay.recorded import RecordedRun
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import read_checkpoint
from rlx.tracking import changes
from rlx.tracking.services import mlflow


@pytest.mark.parametrize(("step", "start"), [(1, None), (10, None), (11, 10), (20, 10), (21, 20), (30, 20)])
def test_a_replay_starts_from_the_newest_checkpoint_before(step: int, start: int | None, tmp_path: Path) -> None:
    branch = branches.branch_to(run_of(tmp_path), step)
    assert (branch.start.step if branch.start else None) == start
    assert branch.steps == range(start + 1 if start else 0, step + 1)
    tree = branch.tree()
    address = f"{tmp_path}/runs/a/step_{start:06d}" if start else None
    assert tree["checkpoint"]["init_from"] == address
    assert tree["checkpoint"]["init_state"] == ("all" if start else "weights")


@pytest.mark.parametrize("step", [0, 31])
def test_there_must_be_such_a_step(step: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--step {step}: run a has steps 1 to 30"):
        branches.branch_to(run_of(tmp_path), step)


def test_settings_that_a_resume_changed_hold_from_the_resume_on(tmp_path: Path) -> None:
    """The run went on from step 10 with another learning rate, which the checkpoint of step 20 has."""
    run_of(tmp_path, steps=(10,), train__actor_lr=1e-3)
    run = run_of(tmp_path, steps=(20,), train__actor_lr=2e-3)
    rates = [run.settings_of(step, trust=True)["train"]["actor_lr"] for step in (1, 10, 11, 20, 21)]
    assert rates == [1e-3, 1e-3, 2e-3, 2e-3, 2e-3]


def test_a_step_is_not_done_again_where_nothing_tells_its_settings(tmp_path: Path) -> None:
    """The run went on from step 20 with another learning rate; of its older checkpoints only the best is left."""
    run_of(tmp_path, steps=(10,), train__actor_lr=1e-3)
    run = run_of(tmp_path, steps=(22, 30), train__actor_lr=2e-3)
    said = "--step 15: a resume of run a changed train.actor_lr between steps 10 and 22, and the checkpoint where"
    with pytest.raises(ConfigError, match=f"^{said} it began is deleted: nothing tells the settings of the steps"):
        branches.branch_to(run, 15)
    assert verifying.replayable(run, range(31), 3) == [1, 2, 3, 23, 24, 25]
    assert branches.branch_to(run, 10).start is None and branches.branch_to(run, 23).start == run.at(22)


def test_steps_before_a_deleted_end_are_not_done_again_where_rates_follow_the_end(tmp_path: Path) -> None:
    """The run ended with step 3, with 6 and with 9, its rate falling to 0 each time; two checkpoints are left."""
    folder = open_storage(str(tmp_path / "runs" / "a"))
    for end, following in ((3, 6), (6, 9)):
        run_of(tmp_path, steps=(end,), train__lr_schedule="linear", train__steps=end)
        start = read_checkpoint(folder / f"step_{end:06d}")
        changes.note_changes(folder, settings(name="a", train__lr_schedule="linear", train__steps=following), start)
    shutil.rmtree(folder.path + "/step_000003")
    run = run_of(tmp_path, steps=(9,), train__lr_schedule="linear", train__steps=9)
    assert verifying.replayable(run, range(10), 10) == [7, 8, 9]
    said = "--step 2: a resume of run a changed train.steps between steps 0 and 6, and the checkpoint where it began"
    with pytest.raises(ConfigError, match=f"^{said} is deleted"):
        branches.branch_to(run, 2)


def test_steps_after_a_checkpoint_at_which_a_resume_has_noted_its_changes_are_done_again(tmp_path: Path) -> None:
    """Others between it and the next one may have been deleted."""
    run_of(tmp_path, steps=(10,), train__actor_lr=1e-3)
    folder = open_storage(str(tmp_path / "runs" / "a"))
    changes.note_changes(folder, settings(name="a", train__actor_lr=2e-3), read_checkpoint(folder / "step_000010"))
    run = run_of(tmp_path, steps=(22, 30), train__actor_lr=2e-3)
    assert run.unknown_at(15) == [] and run.settings_of(15)["train"]["actor_lr"] == 2e-3


def test_a_step_is_done_again_where_no_checkpoint_was_deleted(tmp_path: Path) -> None:
    run_of(tmp_path, steps=(10,), train__actor_lr=1e-3, checkpoint__keep_last=None)
    run = run_of(tmp_path, steps=(22, 30), train__actor_lr=2e-3, checkpoint__keep_last=None)
    assert run.unknown_at(15) == [] and run.settings_of(15)["train"]["actor_lr"] == 2e-3


@pytest.mark.parametrize(
    ("address", "storage"),
    [
        ("/data/runs/a", "/data"),
        ("/data/sweeps/s/runs/trial_00001.2", "/data"),
        ("s3://bucket/runs/runs/a?region=eu", "s3://bucket/runs?region=eu"),
        ("s3://bucket/x/sweeps/s/runs/trial_00000", "s3://bucket/x"),
    ],
)
def test_the_storage_of_a_run_follows_from_its_address(address: str, storage: str, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert RecordedRun(address, run.folder, run.newest, ()).storage == storage


def test_code_and_models_of_somebody_else_are_taken_on_trust_alone(tmp_path: Path) -> None:
    run_of(tmp_path, reward__functions={"their_code:score": 1.0})
    (tmp_path / "runs" / "a" / "signature").write_text("0:0")
    put(tmp_path / "runs" / "a", 20, signature="0:0", train__steps=30, reward__functions={"their_code:score": 1.0})
    run = RecordedRun.read("a", str(tmp_path))
    assert run.settings_of(10)  # this checkpoint is signed
    for step in (11, 21):
        with pytest.raises(ConfigError, match=r"did not write run 'a', .*their_code:score"):
            run.settings_of(step)
    assert run.settings_of(11, given={"reward.functions": {}}) == run.settings_of(11, trust=True)


def test_a_run_without_records_cannot_be_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, "elsewhere", tracking__backends=("tensorboard",))
    with pytest.raises(ConfigError, match="was not recorded in MLflow"):
        recorded.logged_metrics(run)
    run = run_of(tmp_path, "waiting")
    (tmp_path / "runs" / "waiting" / "run.json").write_text(json.dumps({"key": "k"}))
    with pytest.raises(ConfigError, match=r"still wait in .*outbox: resume it first"):
        recorded.logged_metrics(run)


def test_the_store_that_somebody_else_names_is_not_asked_unless_trusted(tmp_path: Path) -> None:
    """The question would carry the user's own key for MLflow, or make a database wherever the address says."""
    evil = tmp_path / "evil.db"
    run = run_of(tmp_path, "strange", tracking__uri=f"sqlite:///{evil}")
    folder = tmp_path / "runs" / "strange"
    (folder / "signature").write_text("0:0")
    (folder / "run.json").write_text(json.dumps({"key": "k", "mlflow_run": "0" * 32}))
    with pytest.raises(ConfigError, match=r"did not write run 'strange', .*tracking\.uri"):
        recorded.logged_metrics(run)
    assert not evil.exists()


def test_everything_that_was_logged_is_read_by_step(tmp_path: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, tmp_path)
    uri = mlflow.default_uri(tmp_path)
    client = mlflow.client(uri)
    run_id = client.create_run("0").info.run_id
    for step, value in ((1, 0.1), (2, 1 / 3), (2, 7.0)):  # a resume may change settings: the last values count
        client.log_metric(run_id, "policy/loss", value, step=step, timestamp=int(value * 100))
    client.log_metric(run_id, "eval/reward", 2.0, step=2)
    assert recorded.metrics_of(uri, run_id) == {1: {"policy/loss": 0.1}, 2: {"policy/loss": 7.0, "eval/reward": 2.0}}
    with pytest.raises(ConfigError, match=f"MLflow at {uri}: "):
        recorded.metrics_of(uri, "no-such-run")


def test_steps_near_a_checkpoint_can_be_done_again(tmp_path: Path) -> None:
    run, logged = run_of(tmp_path), range(31)
    assert verifying.replayable(run, logged, 3) == [1, 2, 3, 11, 12, 13, 21, 22, 23]
    assert verifying.replayable(run, range(13), 3) == [1, 2, 3, 11, 12]
    steps = verifying.replayable(run, logged, 3)
    drawn = verifying.drawn_steps(steps, 4, seed=1)
    assert drawn == sorted(set(drawn)) == verifying.drawn_steps(steps, 4, seed=1) and set(drawn) <= set(steps)
    assert len(drawn) == 4 and verifying.drawn_steps([5], 3, seed=1) == [5]
    with pytest.raises(ConfigError, match="no step that was logged can be done again"):
        verifying.drawn_steps([], 3, seed=1)


@pytest.mark.parametrize(("asked", "last"), [(6, 8), (9, 9)])
def test_steps_that_a_resume_with_fewer_gave_up_are_no_steps_of_the_run(asked: int, last: int, tmp_path: Path) -> None:
    """The run was to do 400 steps, was killed at step 11, and went on from step 8 with fewer steps."""
    run_of(tmp_path, steps=(4, 8), train__steps=400)
    run = run_of(tmp_path, steps=(), train__steps=asked)
    assert verifying.replayable(run, range(12), 10) == list(range(1, last + 1))
    assert [branches.branch_to(run, step).until for step in range(1, last + 1)] == list(range(1, last + 1))
    with pytest.raises(ConfigError, match=f"--step 11: run a has steps 1 to {last}"):
        branches.branch_to(run, 11)


def test_settings_of_an_older_checkpoint_are_compared_with_the_newest(tmp_path: Path) -> None:
    assert verifying.facts_of_settings(run_of(tmp_path)).agrees
    changed = settings(name="a", train__steps=60, algorithm__clip_high=0.3)
    (tmp_path / "runs" / "a" / "config.yaml").write_text(yaml.safe_dump(changed))
    fact = verifying.facts_of_settings(RecordedRun.read("a", str(tmp_path)))
    assert (fact.recorded, fact.here) == ("not signed by this user", "checkpoints differ in algorithm.clip_high")
    assert fact.agrees is False


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert verifying.facts_of_checkpoints(run).agrees
    (tmp_path / "runs" / "a" / "step_000020" / "rank_00000.safetensors").write_text("y")
    fact = verifying.facts_of_checkpoints(run)
    assert fact.agrees is False and "step_000020" in fact.here and "checksum differs" in fact.here
