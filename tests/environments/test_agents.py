"""Agents that ask an OpenAI-compatible address: one conversation is one episode, token by token."""

import asyncio
import functools
import resource
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import aiohttp
import openai
import pytest
from episode_cases import CHATML, byte_tokenizer, pool_of, saying

from rlx.environments.agents import AgentLoop
from rlx.environments.agents.endpoint import Endpoint
from rlx.environments.agents.wire import Answer, RefusedRequest, messages_in
from rlx.environments.host import Action, Beginning, EnvironmentHost, HostSettings, Reply
from rlx.environments.pool import EnvironmentPool
from rlx.rollout.base import Request
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits
from rlx.rollout.episodes.player import Draw, Player
from rlx.rollout.fake_engine import FakeEngines
from rlx.types import EnvironmentFailed, Prompt, Sampling, TaskRow, TurnLength

ROW = TaskRow("question", "answer")
HERE = "test_agents:"
Messages = list[dict[str, Any]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


class Patient(AgentLoop):
    """Asks until it hears the answer; the reward is less for each question."""

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: Messages = [{"role": "system", "content": f"seed {seed}"}, user(row.question)]
            for asked in range(9):
                said = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                text = said.choices[0].message.content
                if text == row.answer:
                    return 1.0 - 0.1 * asked
                messages += [{"role": "assistant", "content": text}, user(f"not {text} ({said.system_fingerprint})")]
        return 0.0


class Blocking(AgentLoop):
    """The same on a thread, as a stream."""

    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            stream = client.chat.completions.create(model="policy", messages=[user(row.question)], stream=True)
            parts = [part.choices[0].delta.content or "" for part in stream]
        return float("".join(parts) == row.answer)


class Blocks(Blocking):
    """Asks with a blocking client where it should not."""

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:  # type: ignore[override]
        return Blocking.play(self, row, seed, base_url, api_key)


class Silent(AgentLoop):
    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        return 1.0


class Forgetful(AgentLoop):
    """Asks something new each time, as if it had said nothing."""

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for text in "ab":
                await client.chat.completions.create(model="policy", messages=[user(text)])
        return 1.0


class Bad(AgentLoop):
    """Does what its argument says after its first answer."""

    def __init__(self, what: str) -> None:
        self.what = what

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="policy", messages=[user("a")])
        return misbehaved(self.what)


class BadOnThread(Bad):
    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:  # type: ignore[override]
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=[user("a")])
        return misbehaved(self.what)


def misbehaved(what: str) -> float:
    if what == "exit":
        sys.exit(3)
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "stop":
        next(iter([]))
    raise KeyError(what)


class Returning(AgentLoop):
    """Asks once, and returns what is no reward."""

    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> Any:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=[user("a")])
        return self.reward()

    def reward(self) -> Any:
        return None


class Praising(Returning):
    def reward(self) -> Any:
        return "good"


class Misread(AgentLoop):
    def play(self, row: TaskRow) -> float:  # type: ignore[override]
        return 1.0


def with_client(play: Callable[[Any, TaskRow, openai.OpenAI], float]) -> Callable[..., float]:
    """A `play` that is given a client."""

    @functools.wraps(play)
    def wrapped(self: Any, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            return play(self, row, client)

    return wrapped


class Decorated(AgentLoop):
    @with_client
    def play(self, row: TaskRow, client: openai.OpenAI) -> float:
        client.chat.completions.create(model="policy", messages=[user("a")])
        return 1.0


class Unsigned(AgentLoop):
    """Has a `play` that does not say what it takes; it returns the seed."""

    play = staticmethod(functools.partial(max, key=lambda given: isinstance(given, int)))  # type: ignore[assignment]


class Restarted(Returning):
    """Begins by itself."""

    async def reset(self, row: TaskRow, seed: int) -> str:
        return row.question


class Waiting(AgentLoop):
    """Is cancelled when its episode ends."""

    ended = 0

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        try:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                await client.chat.completions.create(model="policy", messages=[user("a")])
        finally:
            Waiting.ended += 1
        return 0.0


class Refused(AgentLoop):
    """Keeps the error of its request, whose client would repeat it where a connection is lost."""

    errors: ClassVar[list[Any]] = []

    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            try:
                client.chat.completions.create(model="policy", messages=[user("a")])
            except openai.OpenAIError as error:
                Refused.errors.append(error)
        return 0.0


class Hung(AgentLoop):
    """Hangs after its first answer, or when there is none, on its thread or where it can be cancelled."""

    goes_on = threading.Event()

    def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> Any:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client, suppress(openai.OpenAIError):
            client.chat.completions.create(model="policy", messages=[user("a")])
        return Hung.goes_on.wait(60) if row.answer == "thread" else asyncio.Event().wait()


def conversation(pool: EnvironmentPool, *actions: str, check: bool = False) -> tuple[list[Any], bool]:
    """What an episode says, its rewards, and whether it comes out the same once more."""

    async def played() -> tuple[list[Any], bool]:
        said: list[Any] = [(await pool.start("1", ROW, 7)).messages]
        try:
            for number, action in enumerate(actions):
                answered = await pool.step("1", action, number, 40 + number)
                said.append(answered.reward if answered.done else answered.messages)
        except EnvironmentFailed as error:
            said.append(str(error))
        return said, await pool.close("1", check)

    return asyncio.run(played())


def test_requests_are_observations_and_answers_are_turns() -> None:
    said, is_repeatable = conversation(pool_of(f"{HERE}Patient"), "no", "answer", check=True)
    opening = ({"role": "system", "content": "seed 7"}, user("question"))
    assert said == [opening, (user("not no (weights-40)"),), 0.9]
    assert is_repeatable


def test_an_agent_may_block_a_thread_and_read_a_stream() -> None:
    assert conversation(pool_of(f"{HERE}Blocking"), "answer")[0] == [(user("question"),), 1.0]
    assert conversation(pool_of(f"{HERE}Blocking"), "no")[0] == [(user("question"),), 0.0]


def test_an_agent_that_does_not_go_on_from_its_conversation_fails_and_is_told() -> None:
    pool = pool_of(f"{HERE}Forgetful", retries=0)
    said, _ = conversation(pool, "x")
    assert "an episode is one conversation: each request repeats all messages so far" in said[1]
    assert pool.failures["raised"] == 1


@pytest.mark.parametrize("where", ["thread", "loop"])
def test_an_agent_that_hangs_where_nothing_ends_it_has_its_process_replaced(where: str) -> None:
    host = EnvironmentHost(HostSettings(f"{HERE}Hung", {}, 3.0, 4))

    async def stepped() -> Reply:
        assert not (await host.start("1", Beginning(TaskRow("", where), 0))).failure
        reply = await host.step("1", Action("b", 0))
        Hung.goes_on.set()
        await host.close("1")
        return reply

    Hung.goes_on.clear()
    reply = asyncio.run(stepped())
    assert reply.is_late and reply.is_stuck == (where == "thread")


def test_an_agent_that_goes_on_when_its_episode_is_over_is_told_and_has_its_process_replaced() -> None:
    """One such agent is too many where one call may run at a time."""
    host = EnvironmentHost(HostSettings(f"{HERE}Hung", {}, 3.0, 1))

    async def closed() -> Reply:
        assert not (await host.start("1", Beginning(TaskRow("", "thread"), 0))).failure
        host.settings = replace(host.settings, timeout_s=0.3)
        reply = await host.close("1")
        Hung.goes_on.set()
        return reply

    Hung.goes_on.clear()
    reply = asyncio.run(closed())
    assert reply.failure == "close took longer than 0.3 s" and reply.is_stuck


@pytest.mark.parametrize("name", ["Silent", "Unsigned"])
def test_an_agent_that_asks_nothing_is_named(name: str) -> None:
    async def started() -> None:
        await pool_of(f"{HERE}{name}", retries=0).start("1", ROW, 7)

    with pytest.raises(EnvironmentFailed, match=rf"{name}\.play returned before its first request"):
        asyncio.run(started())


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("Returning", "the reward of Returning.play is a number, not NoneType None"),
        ("Praising", "the reward of Praising.play is a number, not str 'good'"),
        ("Misread", "Misread.play takes (row, seed, base_url, api_key): too many positional arguments"),
        ("Restarted", "Restarted.reset has to return what AgentLoop's does: await super().reset(row, seed)"),
    ],
)
def test_an_agent_that_is_written_wrongly_is_told_what_is_meant_and_no_place_in_rlx(name: str, failure: str) -> None:
    async def played() -> str:
        host = EnvironmentHost(HostSettings(f"{HERE}{name}", {}, 5.0, 1))
        *_, failed = await host.repeat("1", Beginning(ROW, 0), [Action("b", 0)])
        await host.close("1")
        return str(failed.error)

    assert asyncio.run(played()) == f"raised TypeError: {failure}"


def test_a_decorator_may_give_play_other_arguments() -> None:
    assert conversation(pool_of(f"{HERE}Decorated"), "b")[0] == [(user("a"),), 1.0]


def test_an_episode_that_is_cut_ends_its_agent() -> None:
    before = Waiting.ended
    assert conversation(pool_of(f"{HERE}Waiting"))[0] == [(user("a"),)]
    assert Waiting.ended == before + 1


def test_an_agent_whose_episode_is_cut_is_refused_so_that_its_client_does_not_ask_again() -> None:
    Refused.errors.clear()
    conversation(pool_of(f"{HERE}Refused"))
    (error,) = Refused.errors
    assert isinstance(error, openai.APIStatusError) and error.status_code == 410
    assert "the episode is over" in str(error)


def test_stacks_of_an_agents_threads_are_no_memory_of_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instance's, that of `play`, and two that `play` starts, unless the class says how many."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)

    def allowed(name: str) -> int:
        host = EnvironmentHost(HostSettings(name, {}, 5.0, 1, memory_mb=1 << 20))
        before = resource.getrlimit(resource.RLIMIT_DATA)[0]

        async def played() -> None:
            assert not (await host.start("1", Beginning(ROW, 0))).failure
            await host.close("1")

        asyncio.run(played())
        return resource.getrlimit(resource.RLIMIT_DATA)[0] - before

    try:
        stack = allowed("guess_number")
        assert stack > 0
        assert allowed(f"{HERE}Patient") == 4 * stack
        monkeypatch.setattr(Patient, "threads_per_episode", 1)
        assert allowed(f"{HERE}Patient") == 2 * stack
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.parametrize("name", ["Bad", "BadOnThread"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [("exit", "SystemExit"), ("cancel", "Cancelled"), ("stop", "StopIteration"), ("raise", "KeyError: 'raise'")],
)
def test_whatever_an_agent_does_ends_its_own_episode_alone(name: str, what: str, reason: str) -> None:
    pool = pool_of(f"{HERE}{name}", retries=0, params={"what": what})
    said, _ = conversation(pool, "x")
    assert "raised " in said[1] and reason in said[1]


def test_an_agent_that_blocks_its_own_loop_holds_nobody_up() -> None:
    said, _ = conversation(pool_of(f"{HERE}Blocks"), "answer")
    assert said == [(user("question"),), 1.0]


def test_cut_episodes_leave_no_task_behind() -> None:
    async def played() -> int:
        pool = pool_of(f"{HERE}Waiting")
        for number in range(5):
            await pool.start(str(number), ROW, 7)
            await pool.close(str(number))
        return len(asyncio.all_tasks())

    assert asyncio.run(played()) == 1


def test_an_agent_without_play_is_told_so() -> None:
    async def started() -> None:
        await pool_of("rlx.environments.agents:AgentLoop", retries=0).start("1", ROW, 7)

    with pytest.raises(EnvironmentFailed, match="AgentLoop has no play"):
        asyncio.run(started())


# ---------------------------------------------------------------------------------------------------------------------
# The endpoint by itself


def served(use: Callable[[Endpoint, aiohttp.ClientSession], Coroutine[Any, Any, Any]]) -> Any:
    async def used() -> Any:
        endpoint = await Endpoint.open()
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        try:
            async with aiohttp.ClientSession(endpoint.base_url + "/", headers=key) as session:
                return await use(endpoint, session)
        finally:
            await endpoint.close()

    return asyncio.run(used())


def test_nobody_is_served_without_the_key() -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        asked = [
            session.post("chat/completions", json={"messages": [user("a")]}, headers={"Authorization": "Bearer x"}),
            session.get("models", headers={"Authorization": ""}),
        ]
        return [(await each).status for each in asked] + [endpoint._asked.empty()]

    assert served(use) == [401, 401, True]


def test_requests_after_the_end_wait_longer_each_time() -> None:
    """Turns of an agent that ignores errors are over soon, and one that asks in a loop keeps no core busy."""

    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        async def ask() -> int:
            return (await session.post("chat/completions", json={"messages": [user("a")]})).status

        async def seconds(count: int) -> float:
            started = asyncio.get_running_loop().time()
            assert [await ask() for _ in range(count)] == [410] * count
            return asyncio.get_running_loop().time() - started

        first = asyncio.ensure_future(ask())
        await endpoint.asked()
        endpoint.end()
        assert await first == 410
        few = await seconds(10)
        endpoint._late = 10_000
        return few, await seconds(1)

    few, late = served(use)
    assert 0.1 <= few < 1 <= late < 3


def test_a_request_that_is_repeated_gets_the_same_answer() -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        async def ask() -> str:
            answered = await session.post("chat/completions", json={"messages": [user("a")]})
            return str((await answered.json())["choices"][0]["message"]["content"])

        first = asyncio.ensure_future(ask())
        messages = await endpoint.asked()
        second = asyncio.ensure_future(ask())
        await asyncio.sleep(0.2)
        first.cancel()  # the client has lost its connection, and asks again
        await asyncio.sleep(0.2)
        endpoint.answer(Answer("b", 1))
        return messages, await second, endpoint._asked.empty()

    assert served(use) == ((user("a"),), "b", True)


def test_a_request_whose_answer_was_lost_gets_it_again_also_with_a_half_of_a_character() -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        said = []
        for _ in range(2):
            asked = asyncio.ensure_future(session.post("chat/completions", json={"messages": [user("\ud800")]}))
            if not said:
                messages = await endpoint.asked()
                endpoint.answer(Answer("b", 1))
            said.append((await (await asked).json())["choices"][0]["message"]["content"])
        return messages, said, endpoint._asked.empty()

    assert served(use) == ((user("\ud800"),), ["b", "b"], True)


@pytest.mark.parametrize(("is_cut", "reason"), [(False, "stop"), (True, "length")])
def test_an_answer_says_how_long_it_is_and_whether_it_was_cut(is_cut: bool, reason: str) -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        given: dict[str, Any] = {"model": "policy", "messages": [user("a")]}
        asked = asyncio.ensure_future(client.chat.completions.create(**given))
        await endpoint.asked()
        endpoint.answer(Answer("b", 1, TurnLength(5, 2, is_cut)))
        whole = await asked
        usage = {"include_usage": True}
        parts = [
            each async for each in await client.chat.completions.create(**given, stream=True, stream_options=usage)
        ]
        ends = [each.choices[0].finish_reason for each in parts if each.choices]
        return [whole.usage.total_tokens, parts[-1].usage.total_tokens], [whole.choices[0].finish_reason, *ends]

    assert served(use) == ([7, 7], [reason, None, reason])


def test_an_agent_may_take_off_white_space_around_an_answer() -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        said = []
        messages = [user("a ")]
        for _ in range(2):
            asked = asyncio.ensure_future(session.post("chat/completions", json={"messages": messages}))
            said.append(await asyncio.wait_for(endpoint.asked(), 5))
            endpoint.answer(Answer(" b\n", 1))
            text = (await (await asked).json())["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text.strip()}, user(" c ")]
        changed = [*messages[:1], {"role": "assistant", "content": "B"}, *messages[2:]]
        return said, text, (await session.post("chat/completions", json={"messages": changed})).status

    assert served(use) == ([(user("a "),), (user(" c "),)], " b\n", 400)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "messages: expected a list"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": ["a"]}, "each has a role and a content of text"),
        ({"messages": [{"role": "user"}]}, "each has a role and a content of text"),
        ({"messages": [user([{"type": "image_url"}])]}, "each has a role and a content of text"),
        ({"messages": [user("a")], "n": 2}, "n: an episode has one answer"),
        ({"messages": [user("a")], "logprobs": True, "top_logprobs": 2}, "logprobs: not served; those of all tokens"),
        (
            {"messages": [user("a")], "response_format": {"type": "json_object"}},
            "response_format: not served; describe",
        ),
        ({"messages": [user("a")], "modalities": ["text", "audio"]}, "modalities: not served; an answer is text"),
        ([], "the body is a JSON object"),
    ],
)
def test_what_cannot_be_served_is_explained(body: Any, problem: str) -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        answered = await session.post("chat/completions", json=body)
        return answered.status, (await answered.json())["error"]["message"]

    status, message = served(use)
    assert status == 400 and problem in message


@pytest.mark.parametrize(
    ("data", "encoding", "status", "problem"),
    [
        (b"\xff{", "identity", 400, "the body is a JSON object"),
        (b"no gzip", "gzip", 400, "the body is a JSON object"),
        (b" " * (1 + (16 << 20)), "identity", 413, "the body is too large"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(
    data: bytes, encoding: str, status: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        answered = await session.post("chat/completions", data=data, headers={"Content-Encoding": encoding})
        again = await session.get("models")
        return answered.status, (await answered.json())["error"]["message"], again.status

    given, message, again = served(use)
    assert given == status and problem in message and again == 200
    assert not [each for each in caplog.records if each.name.startswith("aiohttp")]  # it logs what is not caught


@pytest.mark.parametrize(("method", "path"), [("POST", "responses"), ("GET", "chat/completions"), ("GET", "models/a")])
def test_a_path_or_method_that_is_not_served_is_told_which_are(method: str, path: str) -> None:
    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        answered = await session.request(method, path)
        return answered.status, (await answered.json())["error"]["message"]

    served_ones = "not served; served: POST /v1/chat/completions, GET /v1/models"
    assert served(use) == (404, f"{method} /v1/{path}: {served_ones}")


@pytest.mark.parametrize("repeated", [{}, {"name": "bob"}])
def test_what_asks_for_plain_text_is_served_and_names_are_what_the_policy_reads(repeated: dict[str, Any]) -> None:
    plain = {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "modalities": ["text"]}
    tuning = {"temperature": 0.1, "max_tokens": 1, "stop": ["x"], "seed": 3, "tool_choice": "none", "tools": []}
    body = {"messages": [user("a") | {"name": "bob"}], **plain, **tuning}

    async def use(endpoint: Endpoint, session: aiohttp.ClientSession) -> Any:
        asked = asyncio.ensure_future(session.post("chat/completions", json=body))
        messages = [*await asyncio.wait_for(endpoint.asked(), 5)]
        endpoint.answer(Answer("b", 1))
        await asked
        body["messages"] = [user("a") | repeated, {"role": "assistant", "name": "me", "content": "b"}, user("c")]
        asked = asyncio.ensure_future(session.post("chat/completions", json=body))
        messages += await asyncio.wait_for(endpoint.asked(), 5)
        endpoint.answer(Answer("b", 1))
        return messages, (await asked).status

    assert served(use) == ([user("a") | {"name": "bob"}, user("c")], 200)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_in({"messages": [user(parts)]}) == [user("ab")]
    with pytest.raises(RefusedRequest):
        messages_in({"messages": [user([*parts, 3])]})


# ---------------------------------------------------------------------------------------------------------------------
# With a policy


def test_a_conversation_is_one_episode_whose_tokens_are_never_rendered_again() -> None:
    tokenizer = byte_tokenizer(CHATML)
    turns = {1: "no", 2: "answer"}

    def turn(request: Request) -> str:
        return turns[tokenizer.decode(request.prompt).count("<|assistant|>")]

    def play(draw: Draw) -> Player:
        return Player(draw, pool_of(f"{HERE}Patient"), Dialogue(tokenizer), EpisodeLimits(max_turns=4), run_seed=5)

    engines = FakeEngines(saying(tokenizer, turn), seed=5, play=play)
    engines.push(3)
    sampling = Sampling(1.0, 1.0, -1, 200, (0,))
    done = engines.finish(engines.begin([Prompt(7, (1, 2), "x", "answer")], [sampling] * 2, 3), 3)
    text = "no<|end|>\n<|user|>not no (weights-3)<|end|>\n<|assistant|>answer<|end|>"
    assert [tokenizer.decode(each.token_ids) for each in done] == [text] * 2
    assert [each.episode.score for each in done if each.episode] == [0.9] * 2
    assert done[0].num_drawn == 2 + 1 + 6 + 1 and done[0].finished
