"""Services that one process writes to, and the actor through which all others do."""

from pathlib import Path

import pytest
import ray

from rlx.runs import relay
from rlx.storage.filesystem import Storage
from rlx.tracking.base import Failure, Reach, RunStatus
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.services.tensorboard import TensorBoardService, events
from rlx.tracking.tracker import OutboxTracker


def test_all_processes_of_a_run_write_through_one_actor(ray_cluster: None, tmp_path: Path) -> None:
    board, server = TensorBoardService(tmp_path / "tb"), MLflowService("http://127.0.0.1:9")
    far = relay.reachable([board, server])
    assert far[1] is server and (far[0].name, far[0].reach) == ("tensorboard", Reach.ANYWHERE)
    assert relay.from_driver([board, server], far) == far
    folder = Storage.local(tmp_path / "run")
    driver, rank_0 = (OutboxTracker([far[0]], folder, writer) for writer in ("driver", "rank_0"))
    driver.open("rlx", "one", params={}, tags={"rlx.kind": "run"})
    for step in range(3):
        rank_0.log({"reward/mean": step / 8}, step)
        driver.log_text("events.txt", f"step {step}")
    assert rank_0.close(60) == 0
    driver.end(RunStatus.FINISHED)
    assert driver.close(60) == 0
    (file,) = (tmp_path / "tb" / "one").glob("events*")
    values = [(event.step, each) for event in events(file) for each in event.summary.value]
    assert [step for step, each in values if each.tag == "reward/mean"] == [0, 1, 2]
    assert sum(each.tag == "events.txt/text_summary" for _, each in values) == 3


@pytest.mark.slow
def test_the_actor_gets_the_variables_of_wandb_from_the_driver(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    from rlx.tracking.services.wandb import WandbService

    (far,) = relay.reachable([WandbService(tmp_path)])
    assert far.browse_command() == f"wandb sync {tmp_path}/wandb/offline-run-*"  # as the actor answers


@pytest.mark.slow  # kills things
def test_an_actor_that_dies_comes_back_and_refuses_nothing(ray_cluster: None, tmp_path: Path) -> None:
    far = relay.start_relay(TensorBoardService(tmp_path / "tb"))
    folder = Storage.local(tmp_path / "run")
    driver = OutboxTracker([far], folder, "driver")
    driver.open("rlx", "one", params={}, tags={})
    driver.log({"reward/mean": 0.5}, 0)
    assert driver.close(60) == 0
    ray.kill(far.actor, no_restart=False)
    again = OutboxTracker([far], folder, "driver")
    for step in (1, 2):
        again.log({"reward/mean": 0.5}, step)
    assert again.close(60) == 0
    found = [event for file in (tmp_path / "tb" / "one").glob("events*") for event in events(file)]
    steps = [event.step for event in found for each in event.summary.value if each.tag == "reward/mean"]
    assert sorted(steps) == [0, 1, 2]
    ray.kill(far.actor)
    assert far.failure(OSError("disk full")) is Failure.AWAY and "disk full" in far.cause(OSError("disk full"))
