"""One process of environments: live episodes by key, time limits, tools, and what becomes of errors. Without Ray."""

import asyncio
import inspect
import json
import resource
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlx.config.errors import ConfigError
from rlx.environments import host as hosts
from rlx.environments.host import Action, Beginning, EnvironmentHost, HostSettings, MemoryLimit, Reply
from rlx.environments.tools import finite
from rlx.types import Observation, TaskRow

BEGINNING = Beginning(TaskRow("question", "answer", 3), 7)
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


class Plain:
    """A dialogue without `score` and `close`, which remembers where it ran."""

    def __init__(self, start: str | None = None) -> None:
        self.start = start

    def reset(self, row: TaskRow, seed: int) -> str | None:
        return self.start

    def step(self, action: str) -> Any:
        return threading.current_thread().name[:11], 1, action == "end"


class Scored(Plain):
    """Has a score, async, that takes no answer, and is told of its end."""

    ended: ClassVar[list[str]] = []

    async def step(self, action: str) -> Any:
        return [{"role": "system", "content": threading.current_thread().name[:4]}], 0.5, action == "end"

    async def score(self) -> float:
        return 2.0

    def close(self) -> None:
        Scored.ended.append("closed")
        raise RuntimeError("it is over, whatever this says")


class Unready(Scored):
    """Begins with what is no message, or raises."""

    def reset(self, row: TaskRow, seed: int) -> Any:
        return {"role": "user"} if self.start else {}["no server"]


class Slow(Scored):
    """Takes 0.3 s for each call."""

    def step(self, action: str) -> Any:
        time.sleep(0.3)
        Scored.ended.append("step")
        return "a", 0.0, False

    def close(self) -> None:
        time.sleep(0.3)
        Scored.ended.append("closed")


class Endless(Scored):
    """Does not end a turn for a long time."""

    async def step(self, action: str) -> Any:
        Scored.ended.append("step")
        await asyncio.sleep(20.0)

    def close(self) -> None:
        Scored.ended.append("closed")


class Exhausted(Plain):
    def step(self, action: str) -> Any:
        return next(iter([])), 0.0, False


class Crowded(Plain):
    """Starts a thread for which there is no memory, in a turn or in a tool."""

    def step(self, action: str) -> Any:
        started_on_a_stack_of(1 << 60)


class CrowdedTool:
    def crowd(self) -> None:
        """Starts it."""
        started_on_a_stack_of(1 << 60)

    def score(self, answer: str) -> float:
        return 0.0


def started_on_a_stack_of(size: int) -> None:
    before = threading.stack_size(size)
    try:
        threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)


class Shelf(Plain):
    """Has a connection, which belongs to the thread that made it, and plain methods of all kinds."""

    ended: ClassVar[list[threading.Thread]] = []

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def reset(self, row: TaskRow, seed: int) -> str:
        return self.read()

    def step(self, action: str) -> Any:
        time.sleep(0.01)  # so that calls of other episodes are under way
        return self.read(), 1.0, action == "end"

    def score(self, answer: str) -> float:
        return float(self.read())

    def close(self) -> None:
        self.connection.close()
        Shelf.ended.append(threading.current_thread())

    def read(self) -> str:
        return str(self.connection.execute("select 1").fetchone()[0])


class Made(Plain):
    """Takes a while to be made, or to begin on the event loop; says what has been done."""

    done: ClassVar[list[str]] = []

    def __init__(self, slow: str) -> None:
        self.slow = slow
        time.sleep(0.1 if slow == "made" else 0.0)
        self.done.append("made")

    async def reset(self, row: TaskRow, seed: int) -> str:
        await asyncio.sleep(0.1 if self.slow == "reset" else 0.0)
        self.done.append("reset")
        return "go"

    def close(self) -> None:
        self.done.append("closed")


class Deaf(Plain):
    """Its `close` does not end when it is cancelled."""

    async def close(self) -> None:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)


class Reading(Plain):
    """What it calls of Python fails."""

    def step(self, action: str) -> Any:
        return json.loads(action), 0.0, False


class Tools:
    """Tools of several kinds."""

    def __init__(self) -> None:
        self.calls = 0

    def table(self, rows: int = 1) -> Any:
        """A table."""
        return {"rows": [1.5] * rows, "of": {"é"}}

    async def nothing(self) -> None:
        """Nothing."""

    def long(self) -> str:
        """Much."""
        return "a" * 10_001

    def broken(self) -> None:
        """Fails."""
        raise KeyError("b" * 20_000)

    def score(self, answer: str) -> float:
        return float(len(answer))


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Silenced(Plain):
    """Fails without a text."""

    def step(self, action: str) -> Any:
        raise Silent


class SilencedTool(Tools):
    def fail(self) -> None:
        """Fails without a text."""
        raise Silent


def host_of(kind: str, timeout_s: float = 5.0, **params: Any) -> EnvironmentHost:
    return EnvironmentHost(HostSettings(f"test_host:{kind}", params, timeout_s, 2))


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    async def awaited() -> Any:
        return await call()

    return asyncio.run(awaited())


def replies(kind: str, *actions: str, **params: Any) -> list[Reply]:
    host = host_of(kind, **params)
    return list(run(lambda: host.repeat("1", BEGINNING, [Action(action, 0) for action in actions])))


def observed(kind: str, *actions: str, **params: Any) -> list[Observation]:
    found = [reply.observation for reply in replies(kind, *actions, **params)]
    assert None not in found
    return [each for each in found if each]


def test_an_environment_that_says_nothing_begins_with_the_question() -> None:
    assert observed("Plain")[0].text == "question"
    assert observed("Plain", start="")[0].text == ""


def test_plain_methods_run_on_threads_and_async_ones_on_the_loop() -> None:
    assert observed("Plain", "a")[1] == Observation(({"role": "user", "content": "environment"},), 1.0)
    assert observed("Scored", "a")[1].messages == ({"role": "system", "content": "Main"},)


def test_all_plain_calls_of_an_episode_are_on_one_thread_which_ends_with_it() -> None:
    host = EnvironmentHost(HostSettings("test_host:Shelf", {}, 5.0, 8))

    async def played(key: str) -> list[Reply]:
        replies = await host.repeat(key, BEGINNING, [Action("a", 0), Action("b", 0)], answer="a")
        await host.close(key)
        return replies

    async def all_played() -> list[list[Reply]]:
        return await asyncio.gather(*(played(str(number)) for number in range(16)))

    Shelf.ended.clear()
    assert {reply.failure for replies in asyncio.run(all_played()) for reply in replies} == {""}
    assert len(set(Shelf.ended)) == 16
    for thread in Shelf.ended:
        thread.join(5.0)
        assert not thread.is_alive()


def test_stacks_of_threads_are_no_memory_of_environments() -> None:
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        limit = MemoryLimit(1 << 30)
        before = resource.getrlimit(resource.RLIMIT_DATA)[0]
        limit.allow_threads(1000)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] >= before + 1000 * (1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.parametrize(("kind", "turn"), [("Crowded", "a"), ("CrowdedTool", CALL % ("crowd", "{}"))])
def test_a_thread_that_cannot_be_started_is_memory_that_has_run_out(kind: str, turn: str) -> None:
    _, failed = replies(kind, turn)
    assert failed.failure == "raised MemoryError: can't start new thread" and failed.is_stuck
    line = inspect.getsourcelines(started_on_a_stack_of)[1] + 3
    assert failed.raised_at == f"{__file__}:{line}"


class Given(Plain):
    """Returns what it is made with: from `reset`, or from `step` and `score`."""

    def __init__(self, start: Any = "go", step: Any = ("a", 0.5, True), score: Any = 1.0) -> None:
        self.start, self.given, self.scored = start, step, score

    def step(self, action: str) -> Any:
        return self.given

    def score(self) -> Any:
        return self.scored


@pytest.mark.parametrize(
    ("returned", "failure"),
    [
        ({"score": None}, "the reward of score is a number, not NoneType None"),
        ({"step": ("a", None, False)}, "the reward of step is a number, not NoneType None"),
        ({"step": ("a", "good", False)}, "the reward of step is a number, not str 'good'"),
        ({"step": ("a", 0.0, "False")}, "step returns whether the episode has ended as a bool, not str 'False'"),
        ({"step": ("a", 0.0, None)}, "step returns whether the episode has ended as a bool, not NoneType None"),
        (
            {"step": ("a", True, 0.5)},
            "step returns (observation, reward, whether the episode has ended): True and 0.5 are in each other's place",
        ),
        ({"step": (5, 0.0, False)}, "an observation is text or messages, not int, in what step has returned"),
        ({"start": b"7"}, "an observation is text or messages, not bytes, in what reset has returned"),
        ({"start": ["a", "b"]}, "an observation is text or messages, not a list with 'a', in what reset has returned"),
        (
            {"start": ("a", {})},
            "an observation is text or messages, not a tuple with 'a', in what reset has returned; "
            "Gymnasium's info has no place here",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_told_by_its_method(returned: dict[str, Any], failure: str) -> None:
    *_, failed = replies("Given", "go", **returned)
    assert (failed.failure, failed.raised_at) == (f"raised TypeError: {failure}", "")


@pytest.mark.parametrize("done", [True, 1, np.True_, torch.tensor(True)])
def test_an_end_is_anything_that_python_counts_as_a_number(done: Any) -> None:
    assert observed("Given", "go", step=("a", 0.5, done))[1].done is True


def test_an_error_whose_text_cannot_be_made_is_told_by_its_type() -> None:
    assert replies("Silenced", "a")[1].failure == "raised Silent: Silent"
    (message,) = observed("SilencedTool", CALL % ("fail", "{}"))[1].messages
    assert message["content"] == "error: Silent: Silent"


def test_the_end_of_a_dialogue_adds_its_score_if_it_has_one() -> None:
    assert [each.reward for each in observed("Plain", "a", "end")] == [0.0, 1.0, 1.0]
    assert [(each.reward, each.done) for each in observed("Scored", "a", "end")] == [
        (0.0, False),
        (0.5, False),
        (2.5, True),
    ]


def test_a_cut_episode_is_scored_by_its_last_answer_or_not_at_all() -> None:
    for kind, expected in (("Plain", 0.0), ("Scored", 2.0), ("Tools", 4.0)):
        host = host_of(kind)
        run(lambda host=host: host.start("1", BEGINNING))  # type: ignore[misc]
        assert run(lambda host=host: host.finish("1", "four")).observation == Observation(  # type: ignore[misc]
            reward=expected, done=True
        )


def test_tools_answer_in_the_order_of_their_calls_and_errors_are_counted() -> None:
    turn = "".join(CALL % each for each in (("table", '{"rows": 2}'), ("nothing", "{}"), ("tables", "{}")))
    _, answered, end = observed("Tools", turn, "done")
    assert [message["content"] for message in answered.messages] == [
        '{"rows": [1.5, 1.5], "of": "{\'é\'}"}',
        "null",
        "error: there is no tool 'tables'; there are table, nothing, long, broken",
    ]
    assert [message["name"] for message in answered.messages] == ["table", "nothing", "tables"]
    assert {message["role"] for message in answered.messages} == {"tool"}
    assert (answered.calls, answered.call_errors, answered.done, answered.reward) == (3, 1, False, 0.0)
    assert (end.calls, end.done, end.reward) == (0, True, 4.0)


@pytest.mark.parametrize(
    ("name", "arguments", "begins", "length"),
    [
        ("long", "{}", "aaa", 10_000),
        ("broken", "{}", "error: KeyError: 'bbb", 10_000),
        ("table", '{"row": 1}', "error: table: got an unexpected keyword argument 'row'", 54),
        ("score", '{"answer": "a"}', "error: there is no tool 'score'; there are table, nothing, long, broken", 71),
        ("__init__", "{}", "error: there is no tool '__init__'", 74),
    ],
)
def test_what_a_tool_answers_is_bounded_and_only_tools_are_called(
    name: str, arguments: str, begins: str, length: int
) -> None:
    text = observed("Tools", CALL % (name, arguments))[1].text
    assert text.startswith(begins) and len(text) == length


def test_the_answers_of_many_calls_of_a_turn_are_as_long_together_as_an_environment_may_say() -> None:
    _, answered = observed("Tools", (CALL % ("long", "{}")) * 125)
    assert {len(message["content"]) for message in answered.messages} == {8_000}


def test_python_calls_of_what_is_no_literal_or_has_no_name_are_an_answer() -> None:
    for text in ("[table(2)]", "[tools.table(rows=2)]", "[table(rows=2 + x)]", "[table(rows={[]: 1})]"):
        end = observed("Tools", text)[1]
        assert (end.calls, end.done, end.reward) == (0, True, len(text))
    given = observed("Tools", "[table(**{'rows': 3})]")[1]
    assert given.call_errors == 1 and "unexpected keyword argument ''" in given.text


def test_an_environment_that_runs_out_of_answers_fails_at_once() -> None:
    host = host_of("Exhausted", timeout_s=2.0)
    run(lambda: host.start("1", BEGINNING))
    reply = run(lambda: host.step("1", Action("a", 0)))
    assert reply.failure.startswith("raised ") and "StopIteration" in reply.failure and not reply.is_stuck


def test_a_failure_has_the_line_of_ones_own_code_or_else_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = replies("Reading", "no json")[1]
    assert reply.failure == "raised JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    line = inspect.getsourcelines(Reading.step)[1] + 1
    assert reply.raised_at == f"{__file__}:{line}" and str(reply.error) == f"{reply.failure} at {reply.raised_at}"
    monkeypatch.setattr(hosts, "_INSTALLED", frozenset({"tests"}))  # as if it were an installed package
    assert replies("Reading", "no json")[1].raised_at.startswith(f"{json.decoder.__file__}:")


@pytest.mark.parametrize("way", ["close", "forget"])
@pytest.mark.parametrize("slow", ["made", "reset"])
def test_an_instance_that_ends_while_it_begins_is_closed_when_it_has_begun(slow: str, way: str) -> None:
    host = host_of("Made", slow=slow)
    Made.done.clear()

    async def stopped() -> None:
        starting = asyncio.ensure_future(host.start("a/1", BEGINNING))
        await asyncio.sleep(0.05)
        await getattr(host, way)("a/1")
        assert starting.done()

    asyncio.run(stopped())
    is_cut = (slow, way) == ("reset", "forget")  # an `async` call whose answer nobody waits for
    assert Made.done == (["made", "closed"] if is_cut else ["made", "reset", "closed"])


@pytest.mark.parametrize("kind", ["Endless", "Slow"])
def test_what_is_forgotten_is_closed_at_once_but_for_plain_calls_under_way(kind: str) -> None:
    host = host_of(kind, timeout_s=30.0)  # for two calls at a time
    Scored.ended.clear()

    async def stopped() -> list[Reply]:
        for key in "abc":
            await host.start(key, BEGINNING)
        turns = [asyncio.ensure_future(host.step(key, Action("a", 0))) for key in "abc"]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(host.forget(""), 5.0)
        return await asyncio.gather(*turns)

    *_, waited = asyncio.run(stopped())
    assert waited.is_unknown  # it has not begun
    assert sorted(Scored.ended) == ["closed"] * 3 + ["step"] * 2


class Gone(Plain):
    """Asks a server that has died for what it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(name)


def test_an_end_fails_by_nothing_that_an_environment_raises() -> None:
    host = host_of("Gone")
    run(lambda: host.start("1", BEGINNING))
    assert run(lambda: host.close("1")) == Reply()


def test_an_async_close_that_is_not_to_be_cancelled_counts_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_CANCEL_S", 0.05)
    host = host_of("Deaf", timeout_s=0.1)

    async def closed() -> list[Reply]:
        for key in "abc":
            await host.start(key, BEGINNING)
        return [await host.close("a"), await host.start("b", BEGINNING), *await host.forget("c")]

    first, second, third = asyncio.run(closed())
    assert {each.failure for each in (first, second, third)} == {"close took longer than 0.1 s"}
    assert [each.is_stuck for each in (first, second, third)] == [False, True, True]  # two are too many


def test_episodes_end_once_by_their_key_and_by_their_owner() -> None:
    host = host_of("Scored")
    Scored.ended.clear()

    async def played() -> list[int]:
        counts = []
        for key in ("a/1", "a/2", "b/1", "a/1"):  # the second a/1 ends the first
            await host.start(key, BEGINNING)
        counts.append(len(Scored.ended))
        await host.forget("a/")
        counts.append(len(Scored.ended))
        await host.close("a/1")
        await host.close("b/1")
        counts.append(len(Scored.ended))
        return counts

    assert asyncio.run(played()) == [1, 3, 4]


@pytest.mark.parametrize("start", [None, "no message"])
def test_an_instance_that_does_not_begin_is_closed_like_any_other(start: str | None) -> None:
    host = host_of("Unready", start=start)
    Scored.ended.clear()
    assert run(lambda: host.start("1", BEGINNING)).failure
    assert run(lambda: host.start("1", BEGINNING)).failure and len(Scored.ended) == 1
    run(lambda: host.close("1"))
    assert len(Scored.ended) == 2


def test_calls_that_wait_for_one_another_are_not_late() -> None:
    host = EnvironmentHost(HostSettings("test_host:Slow", {}, 0.5, 1))
    Scored.ended.clear()

    async def played() -> tuple[Reply, Reply, None]:
        for key in "abc":
            await host.start(key, BEGINNING)
        return await asyncio.gather(host.step("a", Action("a", 0)), host.step("b", Action("a", 0)), host.close("c"))

    for reply in asyncio.run(played())[:2]:
        assert reply.observation and reply.observation.seconds < 0.5
    assert sorted(Scored.ended) == ["closed", "step", "step"]


def test_a_turn_of_an_episode_that_is_not_there_is_told_from_a_failure_of_an_environment() -> None:
    host, unknown = host_of("Plain"), Reply(failure="its process was started anew", is_unknown=True)
    assert run(lambda: host.step("none", Action("a", 0))) == run(lambda: host.finish("none", "a")) == unknown


def test_arguments_that_a_class_does_not_take_fail_the_start() -> None:
    (reply,) = replies("Plain", "a", where=1)  # no action is tried
    assert "unexpected keyword argument 'where'" in reply.failure and reply.observation is None
    with pytest.raises(ConfigError, match="has no class Plan; nearest: Plain"):
        host_of("Plan")


@pytest.mark.parametrize("reward", [float("inf"), float("nan"), 1e19, -1e19])
def test_a_reward_that_training_cannot_square_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="of step is not a finite number"):
        finite(reward, "step")


def test_a_reward_is_read_as_a_number() -> None:
    assert (finite(True, ""), finite("0.5", ""), finite(-1e18, "")) == (1.0, 0.5, -1e18)
