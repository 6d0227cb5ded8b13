"""The calls that are read in a turn of the policy, and what a tool gets of them."""

import asyncio
import json
import time
from typing import Any, Literal

import pytest

from rlx.config.errors import ConfigError
from rlx.environments.tools import Call, ToolDialogue, calls_in, check_calls

FUNCTION = """<tool_call>
<function=f>
<parameter=a>%s</parameter>
<parameter=b>
2
</parameter>
</function>
</tool_call>"""
"""as Qwen 3.5 and Nemotron 3 write calls"""
ELEMENTS = """<tool_call>f
<arg_key>a</arg_key>
<arg_value>%s</arg_value>
<arg_key>b</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
"""as GLM writes them"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 4", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        (
            'so\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}',
            None,
        ),
        ('{"name": "f", "parameters": {"a": "b"}}', [("f", {"a": "b"})]),
        ('<think>{"x": 1}</think>[{"name": "f", "arguments": {}}]', [("f", {})]),
        ('{"answer": 4}', []),
        ("[f(a=1, b='x'), g()]", [("f", {"a": 1, "b": "x"}), ("g", {})]),
        ("[f(a=__import__('os'))]", []),
        ("[1, 2]", []),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),  # OpenAI's form
        (FUNCTION % "\n <b>\n\n", [("f", {"a": " <b>\n", "b": "2"})]),
        (f"I look.\n{FUNCTION % 1}\n{FUNCTION % 2}", [("f", {"a": "1", "b": "2"}), ("f", {"a": "2", "b": "2"})]),
        ((FUNCTION % 1)[len("<tool_call>\n") : -len("\n</tool_call>")], [("f", {"a": "1", "b": "2"})]),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", [("f", {})]),
        ("I look.\n<function=f>\n</function>\n<function=g>\n</function>", None),  # its marks are special tokens
        ('so <tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>g</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call> Let me see.', [("f", {})]),
        (ELEMENTS % "x\ny", [("f", {"a": "x\ny", "b": "2"})]),
        (ELEMENTS.replace("\n", "") % "", [("f", {"a": "", "b": "2"})]),
        ("<tool_call>f\n</tool_call>", [("f", {})]),
    ],
)
def test_calls_are_found_in_each_way_of_writing_them(text: str, expected: list[Any] | None) -> None:
    found = [(call.name, call.arguments) for call in calls_in(text)]
    assert found == ([("f", {}), ("g", {})] if expected is None else expected)
    assert not any(call.problem for call in calls_in(text))


@pytest.mark.parametrize(
    "body",
    [
        "{",
        '"f"',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": "a"}',
        '{"name": "f", "arguments": "[1]"}',
        "[" * 9999,
        "<function=f>\n<parameter=a>\n1",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n2\n</function>",
        "f\n<arg_key>a</arg_key>\n<arg_value>1",
    ],
)
def test_a_marked_call_that_is_malformed_has_a_problem(body: str) -> None:
    assert [bool(call.problem) for call in calls_in(f"<tool_call>{body}</tool_call>")] == [True]


@pytest.mark.parametrize("turn", ["I look: <tool_call>a(1)</tool_call>\n", "<tool_call>a(1)", "I: <tool_call>{"])
def test_what_follows_a_mark_is_a_malformed_call_if_it_is_all_there_is_or_begins_as_calls_do(turn: str) -> None:
    assert [bool(call.problem) for call in calls_in(turn)] == [True]


@pytest.mark.parametrize(
    "mention",
    ["<function=NAME>", "<function=NAME>...</function>", "<tool_call>", "<tool_call></tool_call>", "<tool_call>f"],
)
def test_an_answer_that_mentions_a_call_is_an_answer(mention: str) -> None:
    assert calls_in(f"The template is `{mention}`. Answer: 7") == []


def test_marks_of_another_way_may_stand_in_an_argument() -> None:
    body = '{"name": "f", "arguments": {"x": "use <arg_key> here"}}'
    assert calls_in(f"<tool_call>{body}</tool_call>") == [Call("f", {"x": "use <arg_key> here"})]


@pytest.mark.parametrize("takes_text", [False, True])
def test_a_template_may_want_the_arguments_as_json_in_a_text(takes_text: bool) -> None:
    def write(name: str, arguments: Any) -> str:
        if takes_text is not isinstance(arguments, str):
            raise ConfigError("the template does not take a call")
        shown = arguments if takes_text else json.dumps(arguments)
        return f'<tool_call>{{"name": "{name}", "arguments": {shown}}}</tool_call>'

    check_calls("f", write)
    with pytest.raises(ConfigError, match="writes calls as 'call:f', which rlx does not read"):
        check_calls("f", lambda name, arguments: f"call:{name}")


def test_a_call_in_a_thought_is_not_made() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert calls_in(f"<think>perhaps {call}</think>12") == []
    assert [each.name for each in calls_in(f"<think>a <tool_call></think>{call}")] == ["f"]


class Typed:
    """Says what it gets."""

    def f(self, a: str | None, b: Any = 0, c: float = 0.0, d: list[str] | None = None, e: Literal["1"] = "1") -> str:
        """Shows its arguments."""
        return repr((a, b, c, d, e))


def answered(turn: str) -> str:
    async def called(method: Any, **arguments: Any) -> Any:
        return method(**arguments)

    return asyncio.run(ToolDialogue(Typed(), called).step(turn)).text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"a": "2"}, "('2', 0, 0.0, None, '1')"),
        ({"a": "null", "b": "[]"}, "(None, '[]', 0.0, None, '1')"),
        ({"a": "", "c": "2", "d": '["x"]', "e": "1"}, "('', 0, 2, ['x'], '1')"),
        ({"a": "x", "c": "True", "d": "['x', None]"}, "('x', 0, True, ['x', None], '1')"),  # as templates write them
        ({"a": "x", "c": "two"}, "error: ValueError: c is 'two': expected JSON"),
        ({"a": "x", "f": "1"}, "error: f: got an unexpected keyword argument 'f'"),
    ],
)
def test_a_string_stays_one_and_other_values_are_read_where_a_call_does_not_show_types(
    arguments: dict[str, str], expected: str
) -> None:
    written = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    assert answered(f"<tool_call>f{written}</tool_call>") == expected


def test_a_call_with_an_element_that_is_not_closed_is_told_so() -> None:
    assert answered("<tool_call><function=f><parameter=a>1") == (
        "error: not every <parameter is closed, or something follows it"
    )


@pytest.mark.parametrize("start", ["a", "<function=f><parameter=a>1", "f<arg_key>a</arg_key>"])
def test_a_call_of_many_blanks_is_read_at_once(start: str) -> None:
    begun = time.monotonic()
    assert len(calls_in(f"<tool_call>{start}{' ' * 30_000}x")) == 1  # 9e8 steps, if each blank begins a new search
    assert time.monotonic() - begun < 1
