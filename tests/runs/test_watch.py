"""A command ends with one line when the cluster that it started dies. Here `sleep` plays Ray's processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

COMMAND = """
import subprocess, sys, time
import ray
from rlx.cluster import watch

ray.is_initialized = lambda: {initialized}
watch._LOOK_S = 0.1
for name in {names}:
    subprocess.Popen(["{folder}/" + name, "60"])
watch.end_with_ray(lambda: "go on like this", print, lambda: {received})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def sleepers(tmp_path: Path) -> Path:
    """A folder with programs that have the names of Ray's and sleep."""
    for name in ("gcs_server", "raylet", "agent"):
        shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    return tmp_path


def start(
    folder: Path, names: list[str], initialized: bool = True, received: int | None = None
) -> subprocess.Popen[str]:
    code = COMMAND.format(folder=folder, names=names, initialized=initialized, received=received)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(autouse=True)
def ended(sleepers: Path) -> Iterator[None]:
    yield
    for process in psutil.process_iter(["exe"]):
        if (process.info["exe"] or "").startswith(str(sleepers)):
            process.kill()


def child(process: subprocess.Popen[str], name: str) -> psutil.Process:
    (found,) = (each for each in psutil.Process(process.pid).children() if each.name() == name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_death_of_either_ends_the_command_and_the_other(name: str, sleepers: Path) -> None:
    process = start(sleepers, ["gcs_server", "raylet", "agent"])
    other = child(process, "raylet" if name == "gcs_server" else "gcs_server")
    os.kill(child(process, name).pid, signal.SIGKILL)
    assert process.wait(20) == 1 and process.stderr
    assert process.stderr.readline() == f"error: Ray's {name} died; go on like this\n"
    assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_death_of_ray_by_a_signal_to_all_is_an_interrupt(sleepers: Path) -> None:
    process = start(sleepers, ["gcs_server", "raylet"], received=int(signal.SIGTERM))
    os.kill(child(process, "raylet").pid, signal.SIGTERM)
    assert process.wait(20) == 143 and process.stderr
    assert process.stderr.readline() == "interrupted: go on like this\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "initialized"), [(["agent"], True), (["gcs_server", "agent"], False)], ids=["joined", "ended by itself"]
)
def test_a_cluster_that_was_joined_or_ended_ends_nothing(names: list[str], initialized: bool, sleepers: Path) -> None:
    process = start(sleepers, names, initialized)
    for each in psutil.Process(process.pid).children():
        each.kill()
    time.sleep(1.0)
    assert process.poll() is None
    process.kill()
    assert process.communicate()[1] == ""
