"""Many calls of an actor as few calls of Ray: what travels together, and what fails alone or with all others."""

import asyncio
import os
import pickle
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import ray
from actor_cases import Handle

from rlx import actors
from rlx.actors import ActorDiedError, BulkActor, BulkCall, BulkCalls, CallFailedError, CallTimeoutError


class Two(Exception):
    """Cannot be unpickled: its text is not what it is made of."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Silent(Exception):
    """Its text cannot be made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError


class Worker(BulkActor):
    """Says when it was called, after a while."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.gate = asyncio.Event()

    async def at_gate(self, number: int) -> int:
        self.asked.append(number)
        await self.gate.wait()
        return number

    async def after(self, seconds: float, number: int) -> int:
        self.asked.append(number)
        await asyncio.sleep(seconds)
        return number

    async def refuse(self, text: str) -> None:
        raise ValueError(text)

    async def fail_with_a_lock(self) -> None:
        error = RuntimeError("locked")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    async def fail_with_two(self) -> None:
        raise Two("a", "b")

    async def fail_silently(self) -> None:
        raise Silent

    async def give_a_lock(self) -> Any:
        return threading.Lock()

    async def give_up(self) -> None:
        raise asyncio.CancelledError


def test_calls_travel_together_and_none_waits_for_another_to_end() -> None:
    worker = Worker()
    handle = Handle(worker)
    calls, ended = BulkCalls(handle, "worker"), list[int]()

    async def made(method: str, *args: Any) -> None:
        ended.append(await calls.call(method, *args, timeout_s=30))

    async def run() -> None:
        slow = asyncio.ensure_future(made("at_gate", 0))
        while not worker.asked:
            await asyncio.sleep(0.005)
        await asyncio.gather(*(made("after", 0.0, number) for number in range(1, 65)))
        worker.gate.set()
        await slow

    asyncio.run(run())
    assert sorted(ended[:-1]) == list(range(1, 65)) and ended[-1] == 0
    assert [len(batch) for _, batch in handle.begun] == [1, 64]
    assert len(handle.fetched) <= 4


def test_a_call_that_fails_fails_alone() -> None:
    calls = BulkCalls(Handle(Worker()), "worker")
    methods = {
        "refuse": "no",
        "fail_with_a_lock": "RuntimeError: locked",
        "fail_with_two": "Two: a and b",
        "fail_silently": "Silent: Silent",
        "give_a_lock": "cannot pickle '_thread.lock' object",
        "give_up": "CancelledError()",
    }

    async def run() -> list[Any]:
        made = [calls.call(method, *["no"] * (method == "refuse"), timeout_s=5) for method in methods]
        made += [calls.call("after", 0.0, threading.Lock(), timeout_s=5), calls.call("after", 30.0, 4, timeout_s=0.1)]
        return await asyncio.gather(*made, calls.call("after", 0.0, 3, timeout_s=5), return_exceptions=True)

    *failed, unsent, late, good = asyncio.run(run())
    assert [str(error) for error in failed] == [f"worker failed: {text}" for text in methods.values()]
    assert all(isinstance(error, CallFailedError) for error in [*failed, unsent])
    assert isinstance(failed[0].cause, ValueError)
    assert isinstance(late, CallTimeoutError) and str(late) == "worker did not answer in time"
    assert good == 3


def test_calls_that_were_given_up_are_not_sent_and_callers_that_left_are_forgotten() -> None:
    worker = Worker()
    handle = Handle(worker)

    async def run(calls: BulkCalls) -> None:
        first = asyncio.ensure_future(calls.call("after", 0.02, 1, timeout_s=5))
        await asyncio.sleep(0.001)  # it is on its way
        second = asyncio.ensure_future(calls.call("after", 0.0, 2, timeout_s=5))
        await asyncio.sleep(0)
        second.cancel()
        assert await first == 1

    for _ in range(3):
        asyncio.run(run(BulkCalls(handle, "worker")))
    assert worker.asked == [1, 1, 1]
    assert worker._callers == {}


def test_calls_go_on_after_their_event_loop_was_stopped() -> None:
    calls, loop = BulkCalls(Handle(Worker()), "worker"), asyncio.new_event_loop()
    loop.create_task(calls.call("after", 30.0, 0, timeout_s=60))
    loop.call_later(0.05, loop.stop)
    loop.run_forever()
    assert asyncio.run(bounded(calls.call("after", 0.0, 1, timeout_s=5))) == 1
    loop.close()


def test_calls_of_an_earlier_process_are_lost_and_later_ones_are_not() -> None:
    handle = Handle(Worker())
    calls = BulkCalls(handle, "worker")

    async def run() -> None:
        early = asyncio.ensure_future(calls.call("after", 30.0, 0, timeout_s=5))
        quick = asyncio.ensure_future(calls.call("after", 0.05, 1, timeout_s=5))
        await asyncio.sleep(0.02)
        handle.actor = Worker()  # the next call is that of another process
        assert await quick == 1
        with pytest.raises(ActorDiedError, match="worker died: it was started again"):
            await early
        assert await calls.call("after", 0.0, 2, timeout_s=5) == 2

    asyncio.run(run())


def test_calls_go_on_on_another_event_loop() -> None:
    calls = BulkCalls(Handle(Worker()), "worker")

    async def given_up() -> None:
        with pytest.raises(CallTimeoutError):
            await calls.call("after", 30.0, 0, timeout_s=0.05)

    asyncio.run(given_up())
    assert asyncio.run(bounded(calls.call("after", 0.0, 1, timeout_s=5))) == 1


def test_a_call_of_an_actor_that_works_has_as_long_as_it_needs() -> None:
    worker, asked = Worker(), list[int]()
    calls = BulkCalls(Handle(worker), "worker")

    async def works() -> bool:
        asked.append(len(asked))
        if len(asked) == 3:
            worker.gate.set()
        return True

    async def rests() -> bool:
        return False

    async def run() -> None:
        assert await calls.call("at_gate", 7, timeout_s=0.02, works=works) == 7 and len(asked) >= 3
        worker.gate.clear()
        with pytest.raises(CallTimeoutError, match="worker did not answer in time"):
            await calls.call("at_gate", 8, timeout_s=0.02, works=rests)

    asyncio.run(bounded(run()))


async def bounded(call: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(call, 2)


@pytest.mark.slow
def test_calls_of_an_actor_that_dies_fail_and_work_again_when_ray_has_started_it(ray_cluster: None) -> None:
    class Dying(BulkActor):  # by value: Ray's workers do not find this file
        async def after(self, seconds: float, number: int) -> int:
            await asyncio.sleep(seconds)
            return number

        async def end(self) -> None:
            os._exit(1)

    actor = ray.remote(Dying).options(num_cpus=0, max_restarts=-1, max_concurrency=100).remote()
    calls = BulkCalls(actor, "worker")

    async def run() -> None:
        early = [asyncio.ensure_future(calls.call("after", 60.0, number, timeout_s=60)) for number in range(3)]
        assert await calls.call("after", 0.0, 7, timeout_s=60) == 7
        with pytest.raises(ActorDiedError, match="worker died"):
            await calls.call("end", timeout_s=60)
        failed = await asyncio.gather(*early, return_exceptions=True)
        assert all(isinstance(error, ActorDiedError) for error in failed)
        await restarted(actor)
        assert await calls.call("after", 0.0, 8, timeout_s=60) == 8

    asyncio.run(run())
    ray.kill(actor)


async def restarted(actor: Any) -> None:
    """Waits for an actor that Ray starts again: until then calls of it may fail at once."""
    for _ in range(300):
        try:
            await asyncio.wrap_future(actor.__ray_ready__.remote().future())
            return
        except ray.exceptions.RayActorError:
            await asyncio.sleep(0.2)
    raise AssertionError("it was not started again")


def test_results_that_nobody_fetches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def outcome() -> list[str]:
        worker = Worker()
        await worker.submit("died", [BulkCall(0, "after", pickle.dumps((0.0, 1)))])
        await asyncio.sleep(0.1)
        monkeypatch.setattr(actors, "_UNFETCHED_S", 0.05)
        await worker.submit("alive", [BulkCall(0, "after", pickle.dumps((5.0, 1)))])
        return list(worker._callers)

    assert asyncio.run(outcome()) == ["alive"]
