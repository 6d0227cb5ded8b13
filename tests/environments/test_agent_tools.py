"""Agents with tools: calls are `tool_calls`, results are what the policy reads of a class of tools, token by token."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from episode_cases import CHATML, ByTool, byte_tokenizer, pool_of, saying
from test_dialogue import needs_templates, tokenizer_of

from rlx.config.errors import ConfigError
from rlx.environments.agents import AgentLoop
from rlx.environments.agents.calls import read_calls
from rlx.environments.agents.endpoint import Endpoint
from rlx.environments.agents.wire import Answer
from rlx.environments.tools import check_calls, schemas
from rlx.rollout.base import Request
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits
from rlx.rollout.episodes.player import Draw, Player
from rlx.rollout.fake_engine import FakeEngines
from rlx.types import Completion, Episode, Prompt, Sampling, TaskRow

TOOLS: list[Any] = schemas(ByTool)
ASKED = {"role": "user", "content": "sum?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1203, "b": 4}}\n</tool_call>'
SUM = "1207"


class Adding(AgentLoop):
    """Adds as long as it is asked to, and takes what comes then for the answer."""

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": row.question}]
            while True:
                said = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                message = said.choices[0].message
                assert (said.choices[0].finish_reason == "tool_calls") == bool(message.tool_calls)
                if not message.tool_calls:
                    return float("5" in str(message.content))
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    assert call.type == "function" and call.function.name == "add"
                    added = await ByTool().add(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(added)})


def played(name: str, dialogue: Dialogue, turns: list[str]) -> tuple[Completion, list[Request]]:
    """An episode in which the policy says these texts, and what was asked of the engine."""
    requests: list[Request] = []

    def turn(request: Request) -> str:
        requests.append(request)
        return turns[len(requests) - 1]

    def play(draw: Draw) -> Player:
        return Player(draw, pool_of(name), dialogue, EpisodeLimits(max_turns=4), run_seed=5, checked_share=1.0)

    engines = FakeEngines(saying(dialogue.tokenizer, turn), seed=5, play=play)
    engines.push(3)
    sampling = Sampling(1.0, 1.0, -1, 4000, (dialogue.tokenizer.eos_token_id,))
    (done,) = engines.finish(engines.begin([Prompt(7, (1, 2), "sum?", "answer")], [sampling], 3), 3)
    assert done.episode and not done.episode.told_failure
    return done, requests


@needs_templates
@pytest.mark.parametrize(
    "family", ["qwen2_5", "qwen3", "qwen3_5_nothink", "llama3_1", "lfm2_v2", "glm4moe", "nemotron_3_nano"]
)
def test_an_agent_with_tools_is_token_by_token_what_a_class_of_them_is(family: str) -> None:
    tokenizer = tokenizer_of(family)
    of_class = Dialogue(tokenizer, TOOLS, check=check_calls)
    call = of_class.call_text("add", {"a": 1203, "b": 4}).strip()
    turns = ["I add.\n" * call.startswith("<") + call, call, "It is 5"]  # JSON and Python stand alone
    expected, expected_requests = played("episode_cases:ByTool", of_class, turns)
    done, requests = played("test_agent_tools:Adding", Dialogue(tokenizer, check=check_calls), turns)
    assert done.prompt.token_ids == expected.prompt.token_ids and "add" in tokenizer.decode(done.prompt.token_ids)
    assert (done.token_ids, done.drawn, done.logprobs) == (expected.token_ids, expected.drawn, expected.logprobs)
    assert requests == expected_requests
    drawn = [token for token, own in zip(done.token_ids, done.drawn, strict=True) if own]
    said = [token for token, own in zip(done.token_ids, done.drawn, strict=True) if not own]
    assert tokenizer.decode(drawn, skip_special_tokens=True) == "".join(turns)
    assert SUM in tokenizer.decode(said) and SUM not in tokenizer.decode(drawn)
    assert tokenizer.decode(requests[-1].prompt).count(SUM) == 2
    assert done.episode and expected.episode and done.episode.score == expected.episode.score == 1.0
    assert [turn.observation.messages for turn in done.episode.turns] == [
        turn.observation.messages for turn in expected.episode.turns
    ]
    assert [turn.observation.calls for turn in done.episode.turns] == [1, 1, 0]
    assert Episode.of_json(done.episode.as_json()) == done.episode and list(done.episode.start.tools) == TOOLS


class Submitting(AgentLoop):
    """Ends with the policy's first call, whose result nobody reads."""

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            said = await client.chat.completions.create(model="policy", messages=[ASKED], tools=TOOLS)  # type: ignore[list-item]
        return float(bool(said.choices[0].message.tool_calls))


def test_a_call_that_ends_the_episode_is_counted() -> None:
    dialogue = Dialogue(byte_tokenizer(CHATML), check=check_calls)
    done, _ = played("test_agent_tools:Submitting", dialogue, [CALL])
    assert done.episode and done.episode.score == 1.0
    assert [turn.observation.calls for turn in done.episode.turns] == [1]


@needs_templates
def test_each_episode_is_told_of_its_own_tools() -> None:
    dialogue = Dialogue(tokenizer_of("qwen3"), check=check_calls)
    (tool,) = TOOLS
    properties = tool["function"]["parameters"]["properties"]
    turned = {**tool["function"]["parameters"], "properties": dict(reversed(properties.items()))}
    other = {**tool, "function": {**tool["function"], "parameters": turned}}
    assert other == tool and len(properties) > 1
    texts = {dialogue.with_tools([each]).opening([ASKED]).text for each in (tool, other)}
    assert len(texts) == 2


@needs_templates
def test_the_calls_of_each_tool_have_to_be_read() -> None:
    (tool,) = TOOLS
    dashed = {**tool, "function": {**tool["function"], "name": "search-web"}}
    with pytest.raises(ConfigError, match=r"writes calls as .*search-web"):
        Dialogue(tokenizer_of("lfm2_v2"), [tool, dashed], check=check_calls)


NO_TOOLS = CHATML.partition("{% endif %}")[2]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_TOOLS, r"does not show tools, .* know of add: use a model whose template does, or describe tools in"),
        (
            CHATML.replace("{{ message.content }}", "{{ message.content }}{% if message.tool_calls %}add!{% endif %}"),
            r"template writes calls as 'add!', which rlx does not read",
        ),
    ],
)
def test_a_model_that_an_agents_tools_cannot_be_used_with_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        played("test_agent_tools:Adding", Dialogue(byte_tokenizer(template), check=check_calls), ["a"])
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------------------------------------------------
# The endpoint by itself


def exchanged(
    turn: str, then: Callable[[Any], list[Any]] | None = None, *, then_tools: Any = TOOLS, **options: Any
) -> tuple[Any, Any]:
    """The choice that answers a turn of the policy, and what the policy reads next, or why it was refused.

    Args:
        then: what is said after the question in the next request, of the first answer.
        options: of the first request.
    """

    async def used() -> tuple[Any, Any]:
        endpoint = await Endpoint.open()
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

                async def ask(messages: list[Any], **given: Any) -> Any:
                    create: Any = client.chat.completions.create
                    return (await create(model="policy", messages=messages, **given)).choices[0]

                asking = asyncio.ensure_future(ask([ASKED], tools=TOOLS, **options))
                assert await endpoint.asked() == (ASKED,) and list(endpoint.tools) == TOOLS
                endpoint.answer(Answer(turn, 1))
                choice = await asking
                if then is None:
                    return choice, None
                message = choice.message.model_dump(exclude_none=True)
                following = asyncio.ensure_future(ask([ASKED, *then(message)], tools=then_tools))
                reading = asyncio.ensure_future(endpoint.asked())
                await asyncio.wait([following, reading], return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                if not following.done():
                    endpoint.answer(Answer("5", 1))
                    await following
                    return choice, reading.result()
                return choice, str(following.exception())
        finally:
            await endpoint.close()

    return asyncio.run(used())


def result(number: int, content: Any = SUM) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": content}


@pytest.mark.parametrize(
    ("turn", "content", "arguments"),
    [
        (CALL, None, ['{"a": 1203, "b": 4}']),
        (f"I add.\n{CALL}\n{CALL}", "I add.", ['{"a": 1203, "b": 4}'] * 2),
        (f"<think>hm\n</think>\n\n{CALL}", "<think>hm\n</think>", ['{"a": 1203, "b": 4}']),
        ('{"name": "add", "parameters": {"a": "<function=", "b": {}}}', None, ['{"a": "<function=", "b": {}}']),
        ("[add(a=1, b='é')]", None, ['{"a": 1, "b": "é"}']),
        ('{"name": "add", "parameters": {"a": "\\ud83d"}}', None, ['{"a": "?"}']),  # half of a character
        ("So\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>", "So", ['{"a": 7}']),
    ],
)
def test_calls_are_tool_calls_and_the_rest_is_content(turn: str, content: str | None, arguments: list[str]) -> None:
    choice, _ = exchanged(turn)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
    assert [(call.id, call.type, call.function.name) for call in choice.message.tool_calls] == [
        (f"call{number:05}", "function", "add") for number in range(len(arguments))
    ]
    assert [call.function.arguments for call in choice.message.tool_calls] == arguments


@pytest.mark.parametrize(
    "turn",
    [
        "It is 5",
        '<tool_call>\n{"name": "add", "argum',
        f"{CALL}<tool_call>{{}}</tool_call>",
        "[add(a={1, 2})]",
        '{"name": "add", "parameters": {"a": NaN}}',
        "<function=>\n</function>",
    ],
)
def test_what_cannot_be_read_as_calls_is_text(turn: str) -> None:
    choice, _ = exchanged(turn)
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", turn, None)


def test_an_agent_that_wants_no_calls_gets_text() -> None:
    choice, _ = exchanged(CALL, tool_choice="none")
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)


def test_results_are_read_in_the_order_of_their_calls_also_if_json_is_written_anew() -> None:
    def then(message: Any) -> list[Any]:
        for call in message["tool_calls"]:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        more = {"role": "user", "content": "Go on."}
        return [message | {"content": ""}, result(1, [{"type": "text", "text": "second"}]), result(0, "first"), more]

    _, read = exchanged(CALL + CALL, then)
    assert read == (
        {"role": "tool", "name": "add", "content": "first"},
        {"role": "tool", "name": "add", "content": "second"},
        {"role": "user", "content": "Go on."},
    )


def changed(**function: str) -> Callable[[Any], list[Any]]:
    def then(message: Any) -> list[Any]:
        message["tool_calls"][0]["function"] |= function
        return [message, result(0)]

    return then


CHANGED = "an episode is one conversation: each request repeats all messages so far"
UNANSWERED = "each call is followed by one message of role tool with its tool_call_id"


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (changed(name="sub"), CHANGED),
        (changed(arguments='{"a": 1203, "b": 5}'), CHANGED),
        (lambda message: [message | {"content": "more"}, result(0)], CHANGED),
        (lambda message: [{"role": "assistant", "content": CALL}, {"role": "user", "content": SUM}], CHANGED),
        (
            lambda message: [message | {"tool_calls": [message["tool_calls"][0] | {"id": "call00001"}]}, result(1)],
            CHANGED,
        ),
        (lambda message: [message, {"role": "user", "content": SUM}], UNANSWERED),
        (lambda message: [message, result(1)], UNANSWERED),
        (lambda message: [message, result(0), result(0)], UNANSWERED),
        (changed(arguments="{"), "each of tool_calls has an id, and a function of name and arguments"),
        (
            lambda message: [message, result(0), message, result(0)],
            "tool_calls: an episode has those of the policy's own turns alone",
        ),
        (lambda message: [message, result(0, None)], "each has a role and a content of text"),
    ],
)
def test_a_changed_call_or_result_is_refused(then: Callable[[Any], list[Any]], reason: str) -> None:
    _, refusal = exchanged(CALL, then)
    assert "400" in refusal and reason in refusal


@pytest.mark.parametrize("tools", [openai.omit, [*TOOLS, *TOOLS]])
def test_all_requests_of_an_episode_have_the_same_tools(tools: Any) -> None:
    _, refusal = exchanged(CALL, lambda message: [message, result(0)], then_tools=tools)
    assert "tools: not those of the first request" in refusal


def test_calls_travel_in_a_stream() -> None:
    async def used() -> Any:
        endpoint = await Endpoint.open()
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                create: Any = client.chat.completions.create
                given = {"model": "policy", "messages": [ASKED], "tools": TOOLS, "stream": True}
                asking = asyncio.ensure_future(create(**given))
                await endpoint.asked()
                endpoint.answer(Answer(CALL + CALL, 1))
                return [part.choices[0] async for part in await asking]
        finally:
            await endpoint.close()

    first, last = asyncio.run(used())
    assert [(call.index, call.id) for call in first.delta.tool_calls] == [(0, "call00000"), (1, "call00001")]
    assert (first.delta.content, first.finish_reason, last.finish_reason) == (None, None, "tool_calls")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice: served are auto and none"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: served are auto and none"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls: not served as false"),
        ({"functions": [{"name": "add"}]}, "functions: not served; use tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "add"}}]}, "tools: each has type function"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools: each has type function"),
        ({"tools": {"type": "function"}}, "tools: each has type function"),
    ],
)
def test_other_ways_of_tools_are_refused(options: dict[str, Any], reason: str) -> None:
    async def used() -> str:
        endpoint = await Endpoint.open()
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                create: Any = client.chat.completions.create
                with pytest.raises(openai.BadRequestError) as raised:
                    await create(**{"model": "policy", "messages": [ASKED], "tools": TOOLS, **options})
                return str(raised.value)
        finally:
            await endpoint.close()

    assert reason in asyncio.run(used())


DEFINED = {"Point": {"type": "object"}, "Word": {"enum": ["1"]}, "Again": {"$ref": "#/$defs/Again"}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": ["array", "null"]}, "[1]", [1]),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Word"}, "1", "1"),
        ({"$ref": "#/$defs/Again"}, "1", 1),
        ({"oneOf": [{"$ref": "#/$defs/Point"}, {"type": "integer"}]}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, '{"x": 1}', {"x": 1}),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": None, "type": "integer"}, "1", 1),
        ({"const": 7}, "7", 7),
        ({}, "7", "7"),
        (None, "7", "7"),
    ],
)
def test_arguments_that_are_written_as_text_have_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINED}
    function = {"name": "f", "parameters": parameters}
    turn = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    _, (call,) = read_calls(turn, [{"type": "function", "function": function}], 3)
    assert json.loads(call["function"]["arguments"]) == {"x": value} and call["id"] == "call00003"
