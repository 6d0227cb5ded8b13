"""`ray job submit` to a cluster that `ray start` has started: what travels, and what a stop leaves."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import s3
import yaml
from shared import mlflow_history

from rlx.config.experiment import EXPERIMENT_FILE

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STEPS = 100  # it is stopped long before
SMALL = {
    "config": EXPERIMENT_FILE,
    "train.steps": STEPS, "train.prompts-per-step": 8, "train.samples-per-prompt": 2, "rollout.max-tokens": 8,
    "rollout.kv-cache-mib": 16, "eval.every": 10, "eval.num-prompts": 8, "checkpoint.every": 5, "data.num-prompts": 200,
}  # fmt: skip
OF_RAY_DATA = {"_StatsActor", "_AutoscalingCoordinatorActor"}  # without resources: they stay as long as the cluster
SPACE = "from ray import tune\n\ndef space():\n    return {'train.actor_lr': tune.grid_search([1e-4, 2e-4])}\n"


class StartedByHand:
    """A cluster of one node with two CPUs, on ports of its own, that asks for a token."""

    def __init__(self, folder: str) -> None:
        self.folder, self.port, self.metrics_port = folder, s3.free_port(), s3.free_port()
        self.environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        agent_port = s3.free_port()
        ports = {
            "port": s3.free_port(), "dashboard-port": self.port, "dashboard-agent-listen-port": agent_port,
            "metrics-export-port": self.metrics_port,
        }  # fmt: skip
        words = [f"--{name}={port}" for name, port in ports.items()]
        self.process = subprocess.Popen(
            [BIN / "ray", "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}", *words],
            env=self.environment,
        )
        try:
            self.await_answer(f"http://127.0.0.1:{agent_port}/api/local_raylet_healthz")
            self.await_answer(f"http://127.0.0.1:{self.port}/api/version")
        except BaseException:
            self.close()
            raise

    def await_answer(self, address: str) -> None:
        deadline = time.monotonic() + 180
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, address
            try:
                self.get(address).raise_for_status()
                return
            except requests.RequestException:
                time.sleep(0.5)

    def get(self, address: str) -> requests.Response:
        token = self.environment["RAY_AUTH_TOKEN"]
        return requests.get(address, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    def close(self) -> None:
        self.process.terminate()  # it ends all that it has started
        self.process.wait(60)

    def ray(self, *words: str) -> str:
        """What one of Ray's commands prints."""
        address = {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.port}"}
        done = subprocess.run([BIN / "ray", *words], env=self.environment | address, capture_output=True, check=True)
        return done.stdout.decode()

    def listed(self, kind: str, field: str) -> list[str]:
        """A field of each of the actors or placement groups that are not over."""
        rows = yaml.safe_load(self.ray("list", kind, "--format=yaml", "--limit=1000")) or []
        return [str(row[field]) for row in rows if row["state"] not in ("DEAD", "REMOVED")]

    def metric(self, name: str) -> list[str]:
        """The lines of a metric, as Prometheus would read them; Ray gathers metrics every ten seconds."""
        deadline = time.monotonic() + 60
        while True:
            shown = self.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text.splitlines()
            if lines := [line for line in shown if line.startswith(f"ray_{name}{{")]:
                return lines
            assert time.monotonic() < deadline, name
            time.sleep(1)

    def submit(self, name: str, folder: Path, *command: Any) -> None:
        words = ["--working-dir", str(folder), "--submission-id", name, "--no-wait", "--", *map(str, command)]
        self.ray("job", "submit", *words)

    def job(self, name: str) -> tuple[str, str]:
        """A job's status and what it has printed, as `ray job` asks for them, without its seconds of imports."""
        address = f"http://127.0.0.1:{self.port}/api/jobs/{name}"
        return self.get(address).json()["status"], self.get(f"{address}/logs").json()["logs"]

    def wait_for(self, name: str, text: str, seconds: float = 400) -> None:
        """Waits until a job has printed a text."""
        deadline = time.monotonic() + seconds
        while text not in (job := self.job(name))[1]:
            assert job[0] in ("PENDING", "RUNNING") and time.monotonic() < deadline, job
            time.sleep(0.2)

    def ends_well(self, name: str, seconds: float = 400) -> str:
        deadline = time.monotonic() + seconds
        while (job := self.job(name))[0] != "SUCCEEDED":
            assert job[0] in ("PENDING", "RUNNING") and time.monotonic() < deadline, job
            time.sleep(1)
        return job[1]


@pytest.fixture
def cluster() -> Iterator[StartedByHand]:
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as folder:  # sockets in it need short paths
        started = StartedByHand(folder)
        try:
            yield started
        finally:
            started.close()


def test_a_job_that_is_stopped_leaves_nothing_and_another_job_goes_on_with_its_sweep(
    cluster: StartedByHand, tiny_model: Path, tmp_path: Path
) -> None:
    folder, storage = tmp_path / "mine", tmp_path / "storage"
    folder.mkdir()
    (folder / "space.py").write_text(SPACE)
    given = {
        **SMALL,
        "config": EXPERIMENT_FILE,
        "storage": storage,
        "model.path": tiny_model,
        "space": "space.py",
        "search": "grid",
        "name": "s",
    }
    words = [word for key, value in given.items() for word in (f"--{key}", value)]

    cluster.submit("first", folder, BIN / "rlx", "sweep", "--max-concurrent", 1, *words)
    cluster.wait_for("first", f"trial_00000 running  step 10/{STEPS}")
    for metric in ("rlx_step", "rlx_engine_requests", "rlx_engine_cache_demand", "rlx_engine_tokens_total"):
        lines = cluster.metric(metric)
        assert all('run="s.trial_00000"' in line for line in lines), lines
    cluster.ray("job", "stop", "first")
    deadline = time.monotonic() + 60
    while left := {*cluster.listed("actors", "class_name"), *cluster.listed("placement-groups", "name")} - OF_RAY_DATA:
        assert time.monotonic() < deadline, left
        time.sleep(1)

    cluster.submit("second", ROOT, sys.executable, "experiments/ppo_sweep.py", "--resume", "s", "--storage", storage)
    shown = cluster.ends_well("second")
    assert f"trial_00000 running  step 0/{STEPS}" not in shown  # it went on from a checkpoint
    runs = [yaml.safe_load(file.read_text())["mlflow_run"] for file in sorted(storage.glob("sweeps/s/runs/*/run.json"))]
    for run in runs:
        steps = {step: len(values) for step, values in mlflow_history(storage, run)["reward/mean"].items()}
        assert steps == {step: 1 for step in range(1, STEPS + 1)}
    assert len(runs) == 2
