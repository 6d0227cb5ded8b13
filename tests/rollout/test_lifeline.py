"""How a process that ended is told from one that hangs, with an actor that Ray starts again."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from rlx.actors import Lifeline, is_dead


@pytest.fixture
def actor(ray_cluster: None) -> Iterator[Any]:
    class Slow:  # by value: Ray's workers do not find this file
        async def __init__(self) -> None:  # type: ignore[misc]
            await asyncio.sleep(1.0)

        async def lives(self) -> None:
            await asyncio.Event().wait()

        @ray.method(max_task_retries=-1)  # as an engine's `probe`: it answers once Ray has started the process again
        async def pid(self) -> int:
            return os.getpid()

    made = ray.remote(Slow).options(num_cpus=0, max_restarts=-1, max_concurrency=10).remote()
    yield made
    ray.kill(made)


def soon(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


@pytest.mark.slow
def test_a_process_that_hangs_has_not_ended(actor: Any) -> None:
    pid, lifeline = ray.get(actor.pid.remote()), Lifeline(actor)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)
    assert not lifeline.is_broken and not is_dead(actor)
    os.kill(pid, signal.SIGKILL)
    assert soon(lambda: lifeline.is_broken)
    assert not is_dead(actor)  # Ray starts it again
    assert ray.get(actor.pid.remote(), timeout=30) != pid
    assert not Lifeline(actor).is_broken


@pytest.mark.slow
def test_what_cannot_start_is_dead(ray_cluster: None) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ValueError("no such model")

    made = ray.remote(Broken).options(num_cpus=0, max_restarts=-1).remote()
    assert soon(lambda: is_dead(made))
