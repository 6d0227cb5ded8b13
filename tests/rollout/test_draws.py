"""Which engine draws a turn of an episode, and what becomes of the turn when the engine is lost or gets weights."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from rlx.actors import ActorDiedError, CallFailedError, CallTimeoutError, PromptRefusedError
from rlx.rollout.base import Output, Request
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.episodes import draws as module
from rlx.rollout.episodes.draws import EngineDraws
from rlx.rollout.episodes.episode import GeneratedTurn
from rlx.rollout.episodes.player import NoEngineError
from rlx.types import Sampling

REQUEST = Request((1, 2), 0, Sampling(1.0, 1.0, -1, 4, ()))
OUTPUT = Output((3,), (-1.0,), True)


class Call:
    """A call of an engine, which the test answers."""

    def __init__(self, version: int) -> None:
        self.version, self.answer = version, Future[Any]()


class Generate:
    def __init__(self, on_call: Callable[[Call], None]) -> None:
        self.calls: list[Call] = []
        self._on_call = on_call

    def begin(self, requests: list[Request], version: int) -> Call:
        assert requests == [REQUEST]
        self.calls.append(Call(version))
        self._on_call(self.calls[-1])
        return self.calls[-1]


class Engine:
    """The handle of an engine; what a call does to itself is given, and what it says of its steps, one by one."""

    def __init__(self, *on_calls: Callable[[Call], None], steps: Iterable[int] = ()) -> None:
        left = list(on_calls)
        self.generate = Generate(lambda call: (left.pop(0) if left else good)(call))
        self.steps = iter(steps)


def good(call: Call) -> None:
    call.answer.set_result(([OUTPUT], 0.5))


def lost(call: Call) -> None:
    call.answer.set_exception(ActorDiedError("engine died"))


def open_(call: Call) -> None:
    """Stays unanswered until the test answers it."""


class Calls:
    """The calls of an engine, without Ray."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    async def call(
        self, method: str, *args: Any, timeout_s: float, works: Callable[[], Awaitable[bool]] | None = None
    ) -> Any:
        if method == "steps":
            steps = next(self.engine.steps, None)
            if steps is None:
                raise CallTimeoutError(self.name)
            return steps
        assert works
        call = asyncio.wrap_future(getattr(self.engine, method).begin(*args).answer)
        while not (await asyncio.wait([call], timeout=timeout_s))[0]:
            if not await works():
                raise CallTimeoutError(self.name)
        return call.result()


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines whose processes were ended; they are called without Ray."""
    ended: list[Any] = []
    monkeypatch.setattr(module, "BulkCalls", Calls)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: ended.append(actor))
    return ended


def drawing(*engines: Engine, rank: int = 0, timeout_s: float = 5.0) -> EngineDraws:
    return EngineDraws(EnginePool(engines, seed=0, rank=rank, timeout_s=timeout_s), version=7)


def test_a_turn_is_drawn_with_the_version_that_the_engines_hold() -> None:
    draws = drawing(Engine())
    assert asyncio.run(draws(REQUEST, None)) == GeneratedTurn(OUTPUT, 7, 0, 0.5)
    draws.hold()
    draws.release(8)
    assert asyncio.run(draws(REQUEST, 0)).version == 8


def test_an_episode_stays_with_its_engine_until_that_one_has_far_more_to_do() -> None:
    busy, idle = Engine(*[open_] * 11), Engine(*[open_] * 2)
    draws = drawing(busy, idle)

    async def asked(count: int) -> list[int]:
        turns.extend(asyncio.ensure_future(draws(REQUEST, 0)) for _ in range(count))
        await asyncio.sleep(0)
        return [len(engine.generate.calls) for engine in (busy, idle)]

    async def run() -> None:
        assert await asked(9) == [9, 0]  # while at most 2 x 0 + 8 turns run on it
        assert await asked(1) == [9, 1]
        assert await asked(3) == [11, 2]  # while at most 2 x 1 + 8
        for call in (*busy.generate.calls, *idle.generate.calls):
            good(call)
        assert [each.engine for each in await asyncio.gather(*turns)] == [0] * 9 + [1, 0, 0, 1]
        assert (await draws(REQUEST, 0)).engine == 0  # what has ended counts no more

    turns: list[asyncio.Future[GeneratedTurn]] = []
    asyncio.run(run())


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 2), (2, 3), (3, 0)])
def test_ranks_begin_with_different_engines_also_when_one_is_lost(rank: int, first: int) -> None:
    draws = drawing(*(Engine() for _ in range(4)), rank=rank)
    draws.pool.lost[1] = "gone"
    assert asyncio.run(draws(REQUEST, None)).engine == first


def test_a_turn_of_a_lost_engine_is_drawn_by_another(killed: list[Any]) -> None:
    draws = drawing(Engine(lost), Engine())
    assert asyncio.run(draws(REQUEST, 0)).engine == 1
    assert draws.pool.lost == {0: "engine died"} and not killed
    assert asyncio.run(draws(REQUEST, 0)).engine == 1  # whose engine is gone


def test_without_an_engine_there_is_no_turn() -> None:
    draws = drawing(Engine(lost), Engine(lost))
    with pytest.raises(NoEngineError):
        asyncio.run(draws(REQUEST, None))
    assert sorted(draws.pool.lost) == [0, 1]


def test_an_engine_that_failed_before_it_got_newer_weights_is_asked_again() -> None:
    def outdated(call: Call) -> None:
        draws.release(8)
        lost(call)

    engine = Engine(outdated)
    draws = drawing(engine)
    assert asyncio.run(draws(REQUEST, None)) == GeneratedTurn(OUTPUT, 8, 0, 0.5)
    assert draws.pool.lost == {} and [call.version for call in engine.generate.calls] == [7, 8]


def test_an_engine_that_hangs_is_ended_whatever_it_was_asked_with(killed: list[Any]) -> None:
    hanging = Engine(lambda call: draws.release(8))
    draws = drawing(hanging, Engine(), timeout_s=0.01)
    assert asyncio.run(draws(REQUEST, 0)).engine == 1
    assert draws.pool.lost == {0: "engine 0 did not answer in time"} and killed == [hanging]


@pytest.mark.parametrize("steps", [(), (5, 5), (5, 9, 9), (0, 1, 2, 2)])
def test_an_engine_that_steps_no_more_is_ended(steps: Sequence[int], killed: list[Any]) -> None:
    engine = Engine(open_, steps=steps)
    with pytest.raises(NoEngineError):
        asyncio.run(drawing(engine, timeout_s=0.01)(REQUEST, 0))
    assert next(engine.steps, None) is None and killed == [engine]


def test_an_engine_that_steps_has_as_long_as_it_needs(killed: list[Any]) -> None:
    def steps() -> Iterator[int]:
        yield from (1, 2)
        good(engine.generate.calls[0])
        yield 3

    engine = Engine(open_, steps=steps())
    assert asyncio.run(drawing(engine, timeout_s=0.01)(REQUEST, 0)).engine == 0 and not killed


def test_a_refused_turn_is_told_and_no_engine_is_lost() -> None:
    draws = drawing(Engine(lambda call: call.answer.set_exception(CallFailedError("engine 0", ValueError("too long")))))
    with pytest.raises(PromptRefusedError, match="too long"):
        asyncio.run(draws(REQUEST, None))
    assert draws.pool.lost == {} and asyncio.run(draws(REQUEST, None)).engine == 0


def test_no_turn_begins_while_the_engines_get_weights() -> None:
    engine = Engine()
    draws = drawing(engine)

    async def run() -> GeneratedTurn:
        draws.hold()
        turn = asyncio.ensure_future(draws(REQUEST, None))
        await asyncio.sleep(0.03)
        assert engine.generate.calls == [] and not turn.done()
        draws.release(9)
        return await turn

    assert asyncio.run(run()).version == 9
