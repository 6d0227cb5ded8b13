"""A run or a sweep whose driver is killed or interrupted: what is left, and what its resume makes of it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shared import KILLED_S, LIKE_TINY, History, Script, assert_all_end, mlflow_history

from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.tracking import outbox
from rlx.tracking.metrics import MEASURED
from rlx.tracking.services import mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Start = Callable[..., Script]

SMALL = [
    "--train.prompts-per-step",
    "8",
    "--train.samples-per-prompt",
    "2",
    "--eval.every",
    "2",
    "--eval.num-prompts",
    "12",
]


def words(storage: Path, model: Path, name: str, steps: int) -> list[str]:
    run = ["--storage", str(storage), "--model.path", str(model), "--name", name, "--train.steps", str(steps)]
    return [*run, *LIKE_TINY, *SMALL, "--checkpoint.every", "2"]


def history(storage: Path, name: str) -> History:
    whole = mlflow_history(storage, outbox.run_id(open_storage(str(storage)) / "runs" / name))
    return {key: by_step for key, by_step in whole.items() if not key.startswith(MEASURED)}


def status(storage: Path, run_id: str) -> str:
    return str(mlflow.client(mlflow.default_uri(storage)).get_run(run_id).info.status)


def newest(storage: Path, name: str) -> int:
    """The step of a run's newest whole checkpoint."""
    return checkpoint_catalog.complete_checkpoints(open_storage(str(storage)) / "runs" / name)[-1].step


def test_a_killed_run_resumes_as_if_nothing_had_been(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    whole = script("ppo.py", *words(tmp_path, tiny_model, "whole", 6))
    assert whole.process.wait(300) == 0, whole.output.read_text()
    killed = script("ppo.py", *words(tmp_path, tiny_model, "killed", 6))
    killed.wait_for("step 3/6")
    killed.kill()
    assert_all_end(killed, KILLED_S)

    resumed = script("ppo.py", "--storage", str(tmp_path), "--resume", "killed")
    assert resumed.process.wait(300) == 0, resumed.output.read_text()
    output = resumed.output.read_text()
    assert not any(f"step {step}/6" in output for step in range(3)) and "step 6/6" in output
    assert history(tmp_path, "killed") == history(tmp_path, "whole")
    assert sorted(history(tmp_path, "killed")["reward/mean"]) == [1, 2, 3, 4, 5, 6]
    assert_all_end(resumed, 10)


def test_ctrl_c_ends_a_run_cleanly(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    run = script("ppo.py", *words(tmp_path, tiny_model, "stopped", 500))
    run.wait_for("step 3/500")
    run.interrupt()
    assert run.process.wait(40) == 130, run.output.read_text()
    assert_all_end(run, 5)
    assert run.output.read_text().endswith(
        f"interrupted: rlx train --resume stopped --storage {tmp_path} continues the run from its newest checkpoint\n"
    )
    assert newest(tmp_path, "stopped") == run.step()
    assert status(tmp_path, outbox.run_id(open_storage(str(tmp_path)) / "runs" / "stopped")) == "KILLED"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_batch_systems_and_closed_terminals_end_a_run_as_ctrl_c_does(
    number: int, code: int, tiny_model: Path, tmp_path: Path, script: Start
) -> None:
    run = script("ppo.py", *words(tmp_path, tiny_model, "stopped", 500), "--checkpoint.every", "0")
    run.wait_for("step 3/500")
    run.process.send_signal(number)
    assert run.process.wait(40) == code, run.output.read_text()
    assert_all_end(run, 5)
    assert newest(tmp_path, "stopped") == run.step() >= 3


def test_sigterm_during_the_start_leaves_nothing(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    run = script("ppo.py", *words(tmp_path, tiny_model, "early", 500))
    run.wait_for("starting")
    time.sleep(1.0)
    run.process.terminate()
    assert run.process.wait(60) == 143, run.output.read_text()
    assert_all_end(run, KILLED_S)


def test_a_second_ctrl_c_ends_a_run_at_once(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    slow = ["--train.prompts-per-step", "512", "--train.samples-per-prompt", "8", "--checkpoint.grace-s", "500"]
    run = script("ppo.py", *words(tmp_path, tiny_model, "stopped", 500), *slow)
    run.wait_for("step 1/500")
    run.interrupt()
    run.wait_for("interrupt again to end at once")
    run.interrupt()
    assert run.process.wait(20) == 130, run.output.read_text()
    assert_all_end(run, 5)


def test_ctrl_c_before_the_first_step(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    run = script("ppo.py", *words(tmp_path, tiny_model, "early", 500))
    run.wait_for("starting")
    time.sleep(5)
    run.interrupt()
    assert run.process.wait(20) == 130, run.output.read_text()
    assert_all_end(run, 5)
    assert "Traceback" not in run.output.read_text()


def test_ctrl_c_ends_a_sweep_that_can_go_on(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    sweep = script("ppo_sweep.py", *words(tmp_path, tiny_model, "stopped", 500), "--trials", "2")
    sweep.wait_for("step 2/500")
    sweep.interrupt()
    sweep.wait_for("interrupted: ending the trials", 5)
    assert sweep.process.wait(30) == 130, sweep.output.read_text()
    assert_all_end(sweep, 5)
    way_on = f"rlx sweep --resume stopped --storage {tmp_path} continues the sweep"
    assert sweep.output.read_text().endswith(f"interrupted: {way_on}\n")
    client = mlflow.client(mlflow.default_uri(tmp_path))
    runs = client.search_runs([client.get_experiment_by_name("rlx").experiment_id])
    assert {run.info.status for run in runs} == {"KILLED"}
