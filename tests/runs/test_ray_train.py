"""What the driver and the workers of a group leave for each other, with Ray Train's own workers."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from rlx.runs import ray_train
from rlx.runs.ray_train import WorkerSpec
from rlx.storage.filesystem import Storage


def workers(mailbox: str, done: Path, may_go_on: Path) -> Callable[[], None]:
    """What each of them runs: the first rank is done with its first job only once it may be; another is at once."""

    def work() -> None:
        jobs = ray_train.jobs(mailbox)
        next(jobs)
        if ray.train.get_context().get_world_rank():
            done.touch()
        else:
            while not may_go_on.exists():
                time.sleep(0.05)
        next(jobs)

    return work  # a function within another travels whole: workers cannot import this file


def comes(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


def test_a_job_has_ended_once_every_worker_is_done_with_it(ray_cluster: None, tmp_path: Path) -> None:
    job = WorkerSpec({}, "", Storage.local(tmp_path), "")
    mailbox, done, may_go_on = ray_train.new_mailbox(), tmp_path / "done", tmp_path / "go on"
    trainer = DataParallelTrainer(
        workers(mailbox, done, may_go_on),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=RunConfig(name="jobs", storage_path=str(tmp_path)),
    )
    group = threading.Thread(target=trainer.fit, daemon=True)
    group.start()
    ended = partial(ray_train.has_ended, ray_train.post_job(mailbox, 1, job))
    assert comes(done.exists)
    time.sleep(0.5)  # in which the rank that is done would say so for all
    assert not ended()
    may_go_on.touch()
    assert comes(ended)
    ray_train.post_job(mailbox, 2, job)  # which lets the workers go
    assert comes(lambda: not group.is_alive())
    ray_train.clear(mailbox)
