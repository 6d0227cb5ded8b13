"""The thread that steps an engine: jobs and steps in order, results to their callers, and the end after an error."""

import asyncio
import os
from collections.abc import Callable

import pytest

from rlx.rollout.engine_thread import EngineThread, Report


class Counter:
    """Each job names how many steps it takes."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.left: dict[str, int] = {}

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
