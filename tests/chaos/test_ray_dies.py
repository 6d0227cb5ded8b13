"""Ray's own processes are killed under a run and a sweep: one line says it, nothing is left, a resume goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from shared import KILLED_S, Script, assert_all_end
from test_kill import words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Start = Callable[..., Script]


def kill_child(script: Script, name: str) -> None:
    """Kills the process of that name below a driver."""
    (found,) = (child for child in psutil.Process(script.process.pid).children(True) if name in child.name())
    os.kill(found.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_run_whose_cluster_dies_says_how_to_go_on(name: str, tiny_model: Path, tmp_path: Path, script: Start) -> None:
    run = script("ppo.py", *words(tmp_path, tiny_model, "hurt", 500))
    run.wait_for("step 3/500")
    kill_child(run, name)
    assert run.process.wait(30) == 1, run.output.read_text()
    said = run.output.read_text().splitlines()[-1]
    way_on = f"rlx train --resume hurt --storage {tmp_path} continues the run from its newest checkpoint"
    assert said == f"error: Ray's {name} died; {way_on}"
    assert_all_end(run, KILLED_S)
    resumed = script("ppo.py", "--storage", str(tmp_path), "--resume", "hurt", "--train.steps", "6")
    assert resumed.process.wait(300) == 0, resumed.output.read_text()


def test_a_sweep_whose_cluster_dies_says_how_to_go_on(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    sweep = script("ppo_sweep.py", *words(tmp_path, tiny_model, "hurt", 500), "--trials", "2")
    sweep.wait_for("step 2/500")
    kill_child(sweep, "gcs_server")
    assert sweep.process.wait(30) == 1, sweep.output.read_text()
    said = sweep.output.read_text().splitlines()[-1]
    assert said == f"error: Ray's gcs_server died; rlx sweep --resume hurt --storage {tmp_path} continues the sweep"
    assert_all_end(sweep, KILLED_S)


def test_a_signal_to_all_processes_is_an_interrupt(tiny_model: Path, tmp_path: Path, script: Start) -> None:
    run = script("ppo.py", *words(tmp_path, tiny_model, "stopped", 500))
    run.wait_for("step 3/500")
    os.killpg(run.process.pid, signal.SIGTERM)  # as batch systems do
    assert run.process.wait(60) == 143, run.output.read_text()
    said = run.output.read_text().splitlines()[-1]
    way_on = f"rlx train --resume stopped --storage {tmp_path} continues the run from its newest checkpoint"
    assert said == f"interrupted: {way_on}"
    assert_all_end(run, KILLED_S)
