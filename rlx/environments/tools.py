"""Tools: what the model is told of them, the calls in what it says, and the dialogue that a set of tools makes.

Five ways to write a call are read, whichever the model's chat template asks for: JSON between <tool_call> marks
(Qwen 2.5 and 3), JSON alone (Llama 3), Python (LFM), and two with an element for each argument, those of Qwen 3.5 and
of GLM. Left out: showing tools to the model, which its chat template does.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlx.config.errors import ConfigError, message_of, shortened
from rlx.environments.base import LONGEST_ANSWER, has_steps, messages_of, tool_methods
from rlx.types import Observation

_MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=.*?(?:</function>|\Z)", re.DOTALL)  # its marks may be special tokens, left out
_PARAMETER = re.compile(r"([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_NAME = re.compile(r"[\w.-]+")
_LONGEST = 10_000
"""characters of what a tool returns; the rest is cut"""
_LARGEST_REWARD = 1e18
"""rewards beyond it would overflow where training squares them"""
Called = Callable[..., Awaitable[Any]]
"""(method, its arguments) -> what it returns, on a thread or on the event loop"""


@dataclass(frozen=True)
class Call:
    """A call of a tool as the model has written it."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""  # why it cannot be made
    is_untyped: bool = field(default=False, compare=False)  # each argument is a text, whose type the tool says


def schemas(found: type[Any]) -> list[dict[str, Any]]:
    """The tools of a class as chat templates take them: JSON schemas, from docstrings and annotations.

    A class with steps has none.

    Raises:
        ValueError: a tool's docstring or annotations do not say what its parameters are.
    """
    if has_steps(found):
        return []
    from transformers.utils import get_json_schema  # takes seconds to import

    builtin: Any = next(each for each in found.__mro__ if each.__module__ == "builtins")  # object, of most
    blank = builtin.__new__(found)
    described = []
    for name in tool_methods(found):
        try:
            described.append(get_json_schema(getattr(blank, name)))
        except Exception as error:
            raise ValueError(f"the tool {name}: {error}") from None
    return described


def calls_in(text: str) -> list[Call]:
    """The calls in a turn of the policy, in their order; a malformed one has a problem. None: it calls no tool."""
    last = text.rpartition("</think>")[2].strip()
    if "<tool_call>" in last:
        bodies = [body.strip() for body in _MARKED.findall(last)]
        is_mention = not (last.startswith("<tool_call>") or last.endswith("</tool_call>") or any(map(_begins, bodies)))
        return [] if is_mention else [call for body in bodies for call in _from_marked(body)]
    if last.startswith(("{", "[{")):
        calls = _from_json(last)
        return [] if any(call.problem for call in calls) else calls  # an answer may be JSON
    if last.startswith("[") and last.endswith(")]"):
        return _from_python(last)
    if last.startswith("<function=") or last.endswith("</function>"):  # the marks are special tokens
        return [call for body in _FUNCTION.findall(last) for call in _from_marked(body)]
    return []


def beside_calls(text: str) -> str:
    """What a turn of the policy that has calls says beside them, its thoughts included."""
    thoughts, mark, last = text.rpartition("</think>")
    last = last.strip()
    if "<tool_call>" in last:
        rest = _MARKED.sub("", last)
    elif last.startswith("<function=") or last.endswith("</function>"):
        rest = _FUNCTION.sub("", last)
    else:  # such calls are all that it says
        rest = ""
    return (thoughts + mark + rest).strip()


def check_calls(tool: str, write: Callable[[str, Mapping[str, Any] | str], str]) -> None:
    """Refuses a model whose calls would not be read.

    Args:
        tool: the name of one.
        write: (name, arguments) -> a turn with this call as the model's template writes it; some templates expect the
            arguments as JSON in a text. One that leaves calls out of turns does not say how they are written: it is
            taken.

    Raises:
        ConfigError: the call is not read, or as another one.
    """
    call, problems = Call(tool, {"text": "a b"}), list[ConfigError]()
    for arguments in (call.arguments, json.dumps(call.arguments)):
        try:
            written = write(call.name, arguments).strip()
        except ConfigError as error:
            problems.append(error)
            continue
        if call.name not in written or calls_in(written) == [call]:
            return
        shown = f"environment: the model's chat template writes calls as {shortened(written)}, which rlx does not read"
        instead = "use a model whose calls it reads (docs/environments.md), or describe tools in the messages"
        problems.append(ConfigError(f"{shown}: {instead}"))
    raise problems[0]


def _begins(body: str) -> bool:
    """Whether what follows a mark begins as calls do, so that it is one, though perhaps malformed."""
    return body.startswith(("{", "[", "<function=")) or "<arg_key>" in body


def _from_marked(body: str) -> list[Call]:
    if body.startswith("<function="):
        return [_from_elements(body.removeprefix("<function=").removesuffix("</function>"), "<parameter=", _PARAMETER)]
    if not body.startswith(("{", "[")) and ("<arg_key>" in body or _NAME.fullmatch(body)):
        return [_from_elements(body, "<arg_key>", _ARGUMENT)]
    return _from_json(body)


def _from_elements(text: str, start: str, rest: re.Pattern[str]) -> Call:
    """A call of a name and elements, one for each argument; `rest`: key, value and end, after the `start` of one."""
    name, *elements = text.split(start)
    found = [rest.fullmatch(each) for each in elements]
    if not all(found):
        return Call("", {}, f"not every {start.rstrip('=')} is closed, or something follows it")
    return Call(name.strip().removesuffix(">"), {each[1].strip(): each[2] for each in found if each}, is_untyped=True)


def _from_json(text: str) -> list[Call]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return [Call("", {}, "a call is a JSON object with name and arguments")]
    return [_as_call(each) for each in (content if isinstance(content, list) else [content])]


def _as_call(content: Any) -> Call:
    given = content if isinstance(content, dict) else {}
    name, arguments = given.get("name"), given.get("arguments", given.get("parameters"))
    if isinstance(arguments, str):  # as OpenAI's API has them
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call(str(name or ""), {}, "a call is a JSON object with name and arguments")
    return Call(name, arguments)


def _from_python(text: str) -> list[Call]:
    """Calls such as [add(a=1, b=2)], of literals alone."""
    try:
        body = ast.parse(text, mode="eval").body
        elements = body.elts if isinstance(body, ast.List) else []
        return [_python_call(each) for each in elements]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # TypeError: of {[]: 1}
        return []


def _python_call(node: ast.expr) -> Call:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise ValueError("no call by keywords")
    return Call(node.func.id, {each.arg or "": ast.literal_eval(each.value) for each in node.keywords})


class ToolDialogue:
    """The dialogue of an environment that is a set of tools: each turn is answered by what its calls return.

    A turn without a call is the answer: it ends the episode with its score.
    """

    def __init__(self, environment: Any, called: Called) -> None:
        """`called` makes each call of the environment's methods."""
        self.environment, self._called = environment, called
        self.tools = {name: getattr(environment, name) for name in tool_methods(type(environment))}

    async def step(self, action: str) -> Observation:
        """What the tools return that a turn calls, or the score of the answer."""
        calls = calls_in(action)
        if not calls:
            return Observation(reward=await score_of(self.environment, action, self._called), done=True)
        most = min(_LONGEST, LONGEST_ANSWER // len(calls))
        made = [(call, *await self._made(call, most)) for call in calls]
        messages = messages_of([{"role": "tool", "name": call.name, "content": content} for call, content, _ in made])
        return Observation(messages, calls=len(calls), call_errors=sum(not is_good for *_, is_good in made))

    async def _made(self, call: Call, most: int) -> tuple[str, bool]:
        """The first `most` characters of what a call returns, as the model reads it, and whether it went well."""
        if problem := call.problem or _misfit(call, self.tools):
            return f"error: {problem}"[:most], False
        try:
            tool = self.tools[call.name]
            arguments = _typed(call.arguments, get_type_hints(tool)) if call.is_untyped else call.arguments
            returned = await self._called(tool, **arguments)
            text = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)
        except MemoryError:  # of the process, which is of no use any more
            raise
        except Exception as error:  # whatever else the tool raises, the policy is told
            return f"error: {type(error).__name__}: {message_of(error)}"[:most], False
        return text[:most], True


def _misfit(call: Call, tools: Mapping[str, Any]) -> str:
    """Why a call does not fit any tool; empty if it does."""
    if call.name not in tools:
        return f"there is no tool {call.name!r}; there are {', '.join(tools)}"
    try:
        inspect.signature(tools[call.name]).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"
    return ""


def _typed(arguments: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are written as text: a parameter that takes text gets it as it is, another one its value.

    Raises:
        ValueError: an argument is no value, neither as JSON nor, as many templates write them, as a literal of Python.
    """
    return {
        key: text if _is_text(text, hints.get(key, str)) else value_in(text, key) for key, text in arguments.items()
    }


def _is_text(argument: str, hint: Any) -> bool:
    """Whether an argument is meant as text, of a parameter with this annotation."""
    if get_origin(hint) in (Union, UnionType, Literal):
        chosen = get_args(hint)
        is_none = type(None) in chosen and argument in ("null", "None")
        return not is_none and any(isinstance(each, str) or _is_text(argument, each) for each in chosen)
    return hint in (str, Any)


def value_in(text: str, key: str) -> Any:
    """The value of an argument that is written as text; raises ValueError, which names `key`, if it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ast.literal_eval(text.strip())
    raise ValueError(f"{key} is {text!r:.80}: expected JSON")


async def score_of(environment: Any, answer: str, called: Called) -> float:
    """What an environment scores an episode that ends with this text of the policy; 0 if it scores none."""
    score = getattr(environment, "score", None)
    if score is None:
        return 0.0
    takes_answer = bool(inspect.signature(score).parameters)
    return finite(await (called(score, answer) if takes_answer else called(score)), "score")


def finite(reward: Any, method: str) -> float:
    """A reward as a number; `method`: which gives it.

    Raises:
        TypeError: it is no number.
        ValueError: it is not a finite number, or is too large.
    """
    try:
        number = float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"the reward of {method} is a number, not {type(reward).__name__} {reward!r:.80}") from None
    if not abs(number) <= _LARGEST_REWARD:
        raise ValueError(f"the reward {reward!r:.80} of {method} is not a finite number")
    return number
