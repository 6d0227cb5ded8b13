"""An actor of many calls in the process of the test, as its callers see one of Ray."""

import asyncio
from concurrent.futures import Future
from typing import Any

import ray

from rlx.actors import BulkActor


class Remote:
    """A method of an actor that runs on the event loop of the test."""

    def __init__(self, method: Any, delay_s: float, made: list[Any]) -> None:
        self._method, self._delay_s, self._made = method, delay_s, made

    def remote(self, *args: Any) -> "Remote":
        self._made.append(args)
        self._future = asyncio.run_coroutine_threadsafe(self._called(*args), asyncio.get_running_loop())
        return self

    def future(self) -> "Future[Any]":
        return self._future

    async def _called(self, *args: Any) -> Any:
        await asyncio.sleep(self._delay_s)
        return await self._method(*args)


class Handle:
    """The handle of an actor in this process, whose calls take a while; `begun` and `fetched` are its calls."""

    def __init__(self, actor: BulkActor, delay_s: float = 0.005) -> None:
        self.actor, self._delay_s = actor, delay_s
        self.begun: list[Any] = []
        self.fetched: list[Any] = []

    @property
    def submit(self) -> Remote:
        return Remote(self.actor.submit, self._delay_s, self.begun)

    @property
    def next_results(self) -> Remote:
        return Remote(as_ray(self.actor.next_results), self._delay_s, self.fetched)


def as_ray(method: Any) -> Any:
    """The method with Ray's kind of error."""

    async def called(*args: Any) -> Any:
        try:
            return await method(*args)
        except LookupError as error:
            raise ray.exceptions.RayTaskError("next_results", "", error).as_instanceof_cause() from None

    return called
