"""Environments in Ray actors: killed, hanging with the interpreter's lock, and hungry; their episodes go on."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlx.environments.host import HostSettings
from rlx.environments.pool import ActorHost, EnvironmentPool, start_hosts
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
        return f"{action} {seed}", 0.0, False


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
    assert hungry == ["question", "raised MemoryError: "] or "its process ended" in hungry[1]
    assert hanging[:2] == ["question", "a 0"] and "has not answered" in hanging[2]
    assert pool.failures["died"] >= 3  # killed, and hanging twice
    assert asyncio.run(played("after", ["a"])) == ["question", "a 0"]
