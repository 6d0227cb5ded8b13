"""The thread that steps an engine: jobs and steps in order, results to their callers, turns of engines on one GPU, and
the end after an error."""

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rlx.rollout.engine_thread import DeviceTurn, EngineThread, Report


class Counter:
    """Each job names how many steps it takes."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.left: dict[str, int] = {}
        self.turn = DeviceTurn("counter", None)

    @property
    def is_busy(self) -> bool:
        return bool(self.left)

    def step(self) -> None:
        for name in list(self.left):
            self.left[name] -= 1
            if self.left[name] == 0:
                del self.left[name]
                self.report({name: "done"})

    def count(self, name: str, steps: int) -> None:
        if steps > 100:
            self.report({name: ValueError("too many")})
        else:
            self.left[name] = steps

    def divide(self, name: str, by: int) -> None:
        self.report({name: 6 // by})


class Noting(Counter):
    """Ends the jobs of a step together; notes how many there were at each."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.seen: list[int] = []

    def step(self) -> None:
        self.seen.append(len(self.left))
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = {name: "done" for name, left in self.left.items() if not left}
        self.left = {name: left for name, left in self.left.items() if left}
        if ended:
            self.report(ended)


class Sharing(Counter):
    """Notes its name at each step; two of them are on the same device, each with so much patience."""

    def __init__(self, name: str, device: str, steps: list[str], patience_s: float, report: Report) -> None:
        super().__init__(report)
        self.name, self.steps, self.turn = name, steps, DeviceTurn(device, patience_s)

    def step(self) -> None:
        if self.left:
            self.steps.append(self.name)
            time.sleep(0.002)
        super().step()


def drawn_by_two(device: str, patience_s: float) -> list[str]:
    """The names of two engines on a device, one for each step, in the order of their steps; both are asked twice."""
    steps: list[str] = []

    async def run() -> None:
        threads = [EngineThread(partial(Sharing, name, device, steps, patience_s)) for name in "ab"]
        for thread in threads:
            await thread.started()
        for _ in range(2):
            await asyncio.gather(*(thread.submit(Counter.count, 50) for thread in threads))

    asyncio.run(run())
    assert sorted(steps) == ["a"] * 100 + ["b"] * 100
    return steps


def runs(steps: list[str]) -> int:
    """How many times in a row one engine stepped."""
    return len(list(itertools.groupby(steps)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return uuid.uuid4().hex


def test_engines_on_one_device_step_in_turns(device: str) -> None:
    assert runs(drawn_by_two(device, patience_s=60.0)) <= 4


def test_an_engine_that_has_waited_for_too_long_steps_at_the_same_time(device: str) -> None:
    assert runs(drawn_by_two(device, patience_s=0.001)) > 4


def test_the_turn_of_a_process_ends_with_it(device: str) -> None:
    take = f"from rlx.rollout.engine_thread import DeviceTurn as Turn; turn = Turn({device!r}, 60.0); turn.take()"
    command = [sys.executable, "-c", f"{take}; print('has it', flush=True); import time; time.sleep(100)"]
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout and holder.stdout.readline() == "has it\n"
        mine, began = DeviceTurn(device, 0.2), time.monotonic()
        mine.take()
        assert time.monotonic() - began >= 0.2
        mine.leave()
        holder.kill()
    patient, began = DeviceTurn(device, 60.0), time.monotonic()
    patient.take()
    assert time.monotonic() - began < 30.0


def test_jobs_end_with_what_is_reported() -> None:
    async def run() -> list[object]:
        thread = EngineThread(Counter)
        assert isinstance(await thread.started(), Counter)
        jobs = [thread.submit(Counter.count, steps) for steps in (3, 1, 101)]
        return await asyncio.gather(*jobs, thread.submit(Counter.divide, 2), return_exceptions=True)

    *counted, refused, quotient = asyncio.run(run())
    assert counted == ["done", "done"]
    assert str(refused) == "too many" and isinstance(refused, ValueError)
    assert quotient == 3


def test_jobs_of_one_pass_of_the_loop_begin_before_any_step_and_end_in_one_pass() -> None:
    async def run() -> None:
        thread = EngineThread(Noting)
        engine = await thread.started()
        jobs = [thread.submit(Counter.count, 2) for _ in range(500)]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        assert all(job.done() for job in jobs)
        assert engine.seen[:2] == [500, 500] and set(engine.seen[2:]) <= {0}

    asyncio.run(run())


def test_an_engine_that_does_not_start_says_why() -> None:
    def make(report: Report) -> Counter:
        raise KeyError("no such model")

    async def run() -> None:
        await EngineThread(make).started()

    with pytest.raises(RuntimeError, match="KeyError: 'no such model'"):
        asyncio.run(run())


def test_after_an_error_all_jobs_fail_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def later(loop: asyncio.AbstractEventLoop, delay: float, end: Callable[[int], None], code: int) -> None:
        assert end is os._exit
        ended.append(code)

    async def run() -> list[BaseException]:
        monkeypatch.setattr(type(asyncio.get_running_loop()), "call_later", later)
        thread = EngineThread(Counter)
        await thread.started()
        jobs = [thread.submit(Counter.count, 100), thread.submit(Counter.divide, 0)]
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            thread.submit(Counter.count, 1)
        return [error for error in errors if isinstance(error, BaseException)]

    errors = asyncio.run(run())
    assert [str(error) for error in errors] == ["ZeroDivisionError: integer division or modulo by zero"] * 2
    assert ended == [1]
