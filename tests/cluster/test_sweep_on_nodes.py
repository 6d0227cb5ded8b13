"""Sweeps on a cluster of Ray nodes, whose processes have different working and temporary folders; the storage is S3.

All nodes are on this machine (ray.cluster_utils), so they share its disk; nothing here relies on that but the path of
the tiny model.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3
from ray.cluster_utils import Cluster
from shared import History, mlflow_history

from rlx.config.experiment import EXPERIMENT_FILE
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.sweeps import plans
from rlx.sweeps.records import TrialRecords

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "ppo_sweep.py"
STEPS = 12
SMALL = {
    "config": EXPERIMENT_FILE,
    "train.steps": STEPS, "train.prompts-per-step": 8, "train.samples-per-prompt": 2, "rollout.max-tokens": 8,
    "rollout.kv-cache-mib": 16, "eval.every": 2, "eval.num-prompts": 8, "checkpoint.every": 2, "data.num-prompts": 200,
}  # fmt: skip
SEATS = {
    "rollout.resources-per-engine": "{CPU: 0.5, engines: 1}",
    "scaling.resources-per-worker": "{CPU: 0.5, workers: 1}",
}


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # they go when this process ends


def temporary() -> dict[str, str]:
    """The environment of processes with temporary files of their own. (Sockets in them need short paths.)"""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="n", dir="/tmp"))
    return {"TMPDIR": _FOLDERS[-1].name, "RAY_TMPDIR": "/tmp"}


class Machines:
    """A Ray cluster whose nodes start in folders of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.count = folder, monkeypatch, 0
        self.cluster = Cluster()
        self.add(num_cpus=1)  # the head

    def add(self, **resources: Any) -> Any:
        place = self.folder / f"node{self.count}"
        place.mkdir()
        self.count += 1
        with self.patch.context() as patch:
            patch.chdir(place)
            for name, value in temporary().items():
                patch.setenv(name, value)
            if self.count == 1:
                return self.cluster.add_node(include_dashboard=True, dashboard_port=s3.free_port(), **resources)
            # An address of its own: otherwise the driver might join through this node instead of the head.
            return self.cluster.add_node(node_ip_address=f"127.0.0.{self.count + 1}", **resources)

    @property
    def address(self) -> str:
        return str(self.cluster.address)


@pytest.fixture
def machines(tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes clusters; the environment leads to S3."""
    made: list[Machines] = []
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

    def make() -> Machines:
        folder = tmp_path / f"cluster{len(made)}"
        folder.mkdir()
        made.append(Machines(folder, monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.cluster.shutdown()


class Driver:
    """ppo_sweep.py in a working folder of its own."""

    def __init__(self, folder: Path, address: str, *words: str, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        self.output = folder / f"output{time.time_ns()}.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words, *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | temporary() | {"RAY_ADDRESS": address},
                start_new_session=True,
            )

    def wait_for(self, text: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def ends_well(self, seconds: float = 400) -> str:
        assert self.process.wait(seconds) == 0, self.output.read_text()
        return self.output.read_text()


def announce_end(node: Any, address: str, seconds: int) -> None:
    """Tells Ray, as a cloud's autoscaler does, that a node will be taken away."""
    ray_command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", address]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    when = ["--node-id", node.node_id, "--deadline-remaining-seconds", str(seconds)]
    subprocess.run([*ray_command, *reason, *when], check=True, capture_output=True)


def space_file(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rates = [1e-4 * (i + 1) for i in range(count)]
    file = folder / "space.py"
    body = f"{{'train.actor_lr': tune.grid_search({rates})}}"
    file.write_text(f"from ray import tune\n\ndef space():\n    return {body}\n")
    return file


def begun(driver: Path, nodes: Machines, bucket: str, model: Path, space: Path, **changes: Any) -> Driver:
    """A sweep called s over all of a space, which has begun on a cluster."""
    words = {"storage": bucket, "model.path": model, "space": space, "search": "grid", "name": "s"}
    return Driver(driver, nodes.address, **words, **(SMALL | changes), **SEATS)


def histories(driver: Path, storage: Storage, name: str) -> dict[str, History]:
    """What MLflow's database in the driver's folder holds of each trial."""
    runs = storage / "sweeps" / name / "runs"
    ids = {run: (runs / run / "run.json").read_json()["mlflow_run"] for run in runs.names()}
    return {run: mlflow_history(driver / "storage", run_id) for run, run_id in ids.items()}


def assert_complete(driver: Path, storage: Storage, name: str, trials: int) -> None:
    """Every step of every trial is in MLflow once, and every trial has finished."""
    found = histories(driver, storage, name)
    assert len(found) == trials
    for history in found.values():
        steps = {step: len(values) for step, values in history["reward/mean"].items()}
        assert steps == {step: 1 for step in range(1, STEPS + 1)}
    records = TrialRecords(storage / "sweeps" / name).all()
    assert {str(record.state) for record in records.values()} == {"finished"}


def test_a_sweep_over_three_nodes_loses_the_node_of_a_trial(
    machines: Any, bucket: str, tiny_model: Path, tmp_path: Path
) -> None:
    nodes, driver, storage = machines(), tmp_path / "driver", open_storage(bucket)
    lost = nodes.add(num_cpus=1, resources={"engines": 1})  # the trial's process is beside its engine
    nodes.add(num_cpus=1, resources={"workers": 1})
    space = space_file(tmp_path / "elsewhere", 2)
    sweep = begun(driver, nodes, bucket, tiny_model, space)
    sweep.wait_for("on 3 nodes")
    sweep.wait_for(f"trial_00000 running  step 6/{STEPS}")
    nodes.cluster.remove_node(lost, allow_graceful=False)
    nodes.add(num_cpus=1, resources={"engines": 1})
    shown = sweep.ends_well()
    assert shown.count(f"trial_00000 running  step 0/{STEPS}") == 1  # it went on from a checkpoint
    assert shown.count("trial_00000: its process was killed - it is started again") == 1
    assert_complete(driver, storage, "s", trials=2)


def test_a_sweep_goes_on_on_another_cluster_and_uses_a_node_that_joins_late(
    machines: Any, bucket: str, tiny_model: Path, tmp_path: Path
) -> None:
    first, driver, storage = machines(), tmp_path / "driver", open_storage(bucket)
    first.add(num_cpus=1, resources={"engines": 1, "workers": 1})
    space = space_file(tmp_path / "elsewhere", 3)
    killed = begun(driver, first, bucket, tiny_model, space)
    killed.wait_for(f"trial_00000 running  step 6/{STEPS}")
    killed.process.kill()
    first.cluster.shutdown()
    space.unlink()

    second = machines()
    second.add(num_cpus=1, resources={"engines": 1, "workers": 1})
    resumed = Driver(driver, "", "--resume", "s", storage=bucket, **{"ray-address": second.address})
    resumed.wait_for("1 at once on 2 nodes")
    resumed.wait_for("trial_00000 running")
    second.add(num_cpus=1, resources={"engines": 1, "workers": 1})
    resumed.wait_for("trial_00001 running", 120)
    assert "trial_00000 finished" not in resumed.output.read_text()  # both run at the same time
    shown = resumed.ends_well()
    assert f"trial_00000 running  step 0/{STEPS}" not in shown
    assert_complete(driver, storage, "s", trials=3)
    plan = plans.saved_sweep(storage, "s")
    assert json.dumps(plan.tree)  # it can be resumed again from the storage alone


def test_a_step_gets_a_checkpoint_when_the_node_is_about_to_be_taken_away(
    machines: Any, bucket: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.2")
    nodes, driver, storage = machines(), tmp_path / "driver", open_storage(bucket)
    nodes.add(num_cpus=1, resources={"engines": 1})
    leaving = nodes.add(num_cpus=1, resources={"workers": 1})
    long = {"checkpoint.every": 0, "train.steps": 10 * STEPS}
    sweep = begun(driver, nodes, bucket, tiny_model, space_file(tmp_path / "elsewhere", 1), **long)
    sweep.wait_for(f"trial_00000 running  step 2/{10 * STEPS}")
    announce_end(leaving, nodes.address, seconds=15)
    nodes.add(num_cpus=1, resources={"workers": 1})
    shown = sweep.ends_well()
    assert shown.count("trial_00000 running  step 0/") == 1  # it went on from the checkpoint
    run = storage / "sweeps" / "s" / "runs" / "trial_00000"
    steps = [each.step for each in checkpoint_catalog.complete_checkpoints(run)]
    assert len(steps) == 2 and 2 < steps[0] < steps[1] == 10 * STEPS
