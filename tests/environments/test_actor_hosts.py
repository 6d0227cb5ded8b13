"""Environments in Ray actors: killed, hanging with the interpreter's lock, and hungry; their episodes go on."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from rlx.config.loading import from_tree, with_overrides
from rlx.environments.host import Action, Beginning, HostSettings
from rlx.environments.pool import ActorHost, EnvironmentPool, start_hosts
from rlx.runs import preflight
from rlx.runs.preflight import PreparedRun
from rlx.runs.processes import RunProcesses
from rlx.runs.train_run import RunError, RunStopped
from rlx.types import EnvironmentFailed, TaskRow

ROW = TaskRow("question", "answer")


class Bad:
    """Repeats what it is told, unless it is told to do something bad."""

    def reset(self, row: TaskRow, seed: int) -> str:
        return row.question

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        if action == "hang":
            re.match(r"(a+)+$", "a" * 64 + "b")  # in C, with the interpreter's lock
        if action == "hungry":
            bytearray(4 << 30)
        if action == "fork" and not os.fork():
            time.sleep(60)
            os._exit(0)
        return f"{action} {seed}", 0.0, False


class Open:
    """Has a file until it is closed; a step takes a while."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def reset(self, row: TaskRow, seed: int) -> str:
        self.file.touch()
        return row.question

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(0.5)
        return action, 0.0, False

    def close(self) -> None:
        self.file.unlink()


@pytest.fixture
def prepared(tiny_model: Path, tmp_path: Path) -> PreparedRun:
    """A run with an environment that opens a file."""
    given = {
        "model.path": str(tiny_model),
        "storage": str(tmp_path / "s"),
        "environment.name": "tests.environments.test_actor_hosts:Open",
        "environment.params": {"file": str(tmp_path / "open")},
    }
    return preflight.prepare(from_tree(with_overrides({}, given)), tables={"train": None})


@pytest.fixture
def actors(ray_cluster: None) -> Iterator[list[Any]]:
    settings = HostSettings("tests.environments.test_actor_hosts:Bad", {}, timeout_s=1.0, concurrency=4, memory_mb=1024)
    started = start_hosts(settings, [{"num_cpus": 0}, {"num_cpus": 0}])
    yield started
    for actor in started:
        ray.kill(actor)


@pytest.mark.slow
def test_episodes_survive_what_happens_to_the_processes(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.environments.pool._MARGIN_S", 2.0)
    told: list[str] = []
    hosts = [ActorHost(actor, timeout_s=1.0) for actor in actors]
    pool = EnvironmentPool(hosts, "run/0/", retries=3, concurrency=4, notify=told.append)  # a host is killed four times

    async def played(key: str, actions: list[str]) -> list[str]:
        texts = [(await pool.start(key, ROW, 3)).text]
        for number, action in enumerate(actions):
            if action == "kill":
                ray.kill(actors[0], no_restart=False)
            try:
                texts.append((await pool.step(key, action, number)).text)
            except EnvironmentFailed as error:
                texts.append(str(error))
                break
        await pool.close(key)
        return texts

    async def all_played() -> list[list[str]]:
        await pool.forget()
        quiet = [played(f"quiet {number}", ["a", "kill", "c"]) for number in range(4)]
        return [
            *await asyncio.gather(*quiet),
            await played("hungry", ["hungry"]),
            await played("hanging", ["a", "hang"]),
        ]

    *quiet, hungry, hanging = asyncio.run(all_played())
    assert quiet == [["question", "a 0", "kill 1", "c 2"]] * 4
    assert hungry[0] == "question" and ("raised MemoryError at" in hungry[1] or "its process ended" in hungry[1])
    assert hanging[:2] == ["question", "a 0"] and "has not answered" in hanging[2]
    assert pool.failures["died"] >= 3  # killed, and hanging twice
    assert asyncio.run(played("after", ["a"])) == ["question", "a 0"]


@pytest.mark.slow
def test_a_process_that_an_environment_has_forked_does_not_hide_that_its_own_has_died(actors: list[Any]) -> None:
    told = list[str]()
    pool = EnvironmentPool([ActorHost(actors[0], timeout_s=1.0)], "r/0/", retries=1, concurrency=4, notify=told.append)

    async def played() -> str:
        await pool.start("forking", ROW, 3)
        await pool.step("forking", "fork", 0)
        os.kill(ray.get(actors[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        return (await pool.step("forking", "b", 1)).text

    assert asyncio.run(played()) == "b 1" and pool.failures["died"] == 1
    assert "its host died: its process ended" in told[0]  # not: has not answered, while the child lives


@pytest.mark.slow
def test_environments_are_closed_when_a_run_ends_and_before_its_processes_do(
    prepared: PreparedRun, ray_cluster: None, tmp_path: Path
) -> None:
    processes, file = RunProcesses("engines"), tmp_path / "open"

    def run(ending: Exception) -> Any:
        with suppress(RunStopped, RunError), processes.lease(prepared):
            assert processes._actors
            (actor,) = processes._actors.environments
            assert not ray.get(actor.start.remote("a/1", Beginning(ROW, 0)), timeout=60.0).failure
            actor.step.remote("a/1", Action("under way", 0))
            assert file.exists()
            raise ending
        assert not file.exists()
        return actor

    assert run(RunStopped("a trial of a sweep")) == run(RunError("failed"))
