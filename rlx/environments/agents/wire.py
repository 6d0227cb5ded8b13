"""OpenAI's chat completions as they travel: what a request says, and what is answered.

Left out: the server, and who may ask it (endpoint).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlx.types import TurnLength, Utterance, sendable

MODEL = "policy"
_FORM = "describe the form of answers in the messages"
_NOT_SERVED = {
    **dict.fromkeys(("functions", "function_call"), "use tools"),
    **dict.fromkeys(("response_format", "structured_outputs"), _FORM),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _FORM),  # vLLM's
    **dict.fromkeys(("logprobs", "top_logprobs"), "those of all tokens are kept with the episode"),
    **dict.fromkeys(("audio", "web_search_options"), ""),
    "modalities": "an answer is text",
}
"""fields of a request that would give its answer another form or meaning, and a hint"""
_PLAIN: tuple[Any, ...] = ("none", "auto", ["text"], {"type": "text"})
"""values of these fields that ask for nothing but text"""


GivenMessage = Mapping[str, Any]
"""one of a request: an utterance, and `tool_calls` or `tool_call_id` where it has them"""


@dataclass(frozen=True)
class Answer:
    """A turn of the policy as the answer to a request."""

    text: str
    version: int  # of the policy's weights
    length: TurnLength = field(default_factory=TurnLength)
    calls: tuple[dict[str, Any], ...] = ()  # of tools; the text is what it says beside them

    @property
    def message(self) -> dict[str, Any]:
        """The message that it is."""
        called = {"content": self.text or None, "tool_calls": list(self.calls)} if self.calls else {}
        return {"role": "assistant", "content": self.text} | called

    @property
    def finish_reason(self) -> str:
        """Why the turn ended there."""
        if self.calls:
            return "tool_calls"
        return "length" if self.length.is_cut else "stop"

    @property
    def usage(self) -> dict[str, int]:
        """The tokens that were read and drawn for it."""
        read, drawn = self.length.read, self.length.drawn
        return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


class RefusedRequest(Exception):
    """A request that cannot be served; the text says why."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status  # of HTTP


async def read_body(request: web.Request) -> Mapping[str, Any]:
    """The body of a request.

    Raises:
        RefusedRequest: it is no object, or asks for what an episode does not have.
    """
    try:
        body = await request.json()
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedRequest(f"the body is too large: {error.text}", error.status) from None
    except web.RequestPayloadError:  # it is not compressed as it says
        request.content.feed_eof()  # else aiohttp reads on, and logs the error
        body = None
    except (ValueError, RecursionError, LookupError):  # the last for an unknown character set
        body = None
    if not isinstance(body, dict):
        raise RefusedRequest("the body is a JSON object")
    if body.get("n") not in (None, 1):
        raise RefusedRequest("n: an episode has one answer to each request")
    for name, hint in _NOT_SERVED.items():
        if body.get(name) and body[name] not in _PLAIN:
            raise RefusedRequest(f"{name}: not served{hint and f'; {hint}'}")
    if (body.get("tool_choice") or "auto") not in ("auto", "none"):
        raise RefusedRequest("tool_choice: served are auto and none; whether it calls is what the policy decides")
    if body.get("tools") and body.get("parallel_tool_calls") is False:
        raise RefusedRequest("parallel_tool_calls: not served as false; a turn of the policy may have several calls")
    return body


def tools_in(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools of a request, as chat templates take them.

    Raises:
        RefusedRequest: one is no function.
    """
    given = body.get("tools") or []
    if not (isinstance(given, list) and all(map(_is_tool, given))):
        raise RefusedRequest("tools: each has type function and a function of name, description and parameters")
    return tuple(json.loads(sendable(json.dumps(given, ensure_ascii=False))))


def _is_tool(given: Any) -> bool:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
        return False
    parameters = function.get("parameters") or {}
    return isinstance(parameters, dict) and isinstance(parameters.get("properties", {}), dict)


def messages_in(body: Mapping[str, Any]) -> list[GivenMessage]:
    """The messages of a request: roles, texts, and names where there are any; results are in the order of their calls.

    Raises:
        RefusedRequest: there are none, one is no text, or calls and results do not belong together.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RefusedRequest("messages: expected a list of messages")
    messages, done = [message_in(each) for each in given], list[GivenMessage]()
    while len(done) < len(messages):
        message, after = messages[len(done)], len(done) + 1
        names = {call["id"]: call["name"] for call in message.get("tool_calls", ())}
        results = {each.get("tool_call_id"): each for each in messages[after : after + len(names)]}
        if set(results) != set(names) or (body.get("tools") and "tool_call_id" in message):
            raise RefusedRequest("messages: each call is followed by one message of role tool with its tool_call_id")
        done += [message, *({**results[id_], "name": name} for id_, name in names.items())]
    return done


def message_in(given: Any) -> GivenMessage:
    """A message of a request.

    Raises:
        RefusedRequest: it is no text, or has calls of another kind.
    """
    given = given if isinstance(given, dict) else {}
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls") or []
    if isinstance(content, list):  # parts
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else 0
    content = "" if calls and content is None else content
    if not (isinstance(role, str) and isinstance(content, str)):
        raise RefusedRequest("messages: each has a role and a content of text")
    if given.get("function_call"):
        raise RefusedRequest("messages: function_call: not served; use tool_calls")
    named = ("name", "tool_call_id") if role == "tool" else ("name",)
    own = {key: given[key] for key in named if isinstance(given.get(key), str)}
    called = {"tool_calls": _calls(calls)} if calls else {}
    return {"role": role, **own, "content": content, **called}


def _calls(given: Any) -> list[GivenMessage]:
    """Calls as they are compared: clients may write the JSON of arguments in their own way."""
    try:
        each = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in given]
        if all(isinstance(text, str) for call in each for text in call):
            return [{"id": id_, "name": name, "arguments": json.loads(text)} for id_, name, text in each]
    except (TypeError, KeyError, ValueError, RecursionError):
        pass
    raise RefusedRequest("messages: each of tool_calls has an id, and a function of name and arguments, JSON in a text")


def stripped(messages: Sequence[GivenMessage]) -> list[GivenMessage]:
    """Messages as they are compared: without names, those of the assistant without the white space around them.

    Many agents take it off, and not all repeat a name.
    """
    compared = ("role", "content", "tool_calls", "tool_call_id")
    kept = [{key: each[key] for key in compared if key in each} for each in messages]
    return [each | ({"content": each["content"].strip()} if each["role"] == "assistant" else {}) for each in kept]


def observed(message: GivenMessage) -> Utterance:
    """A message as the policy is told it: results of tools as those of a class of tools.

    Raises:
        RefusedRequest: it has calls that the policy has not drawn.
    """
    if "tool_calls" in message:
        raise RefusedRequest("messages: tool_calls: an episode has those of the policy's own turns alone")
    return {key: value for key, value in message.items() if key != "tool_call_id"}


def error_reply(error: RefusedRequest) -> web.Response:
    """An error as OpenAI's clients read it."""
    content = {"error": {"message": str(error), "type": "invalid_request_error"}}
    response = web.json_response(content, status=error.status)
    response.force_close()  # what is left of a body that cannot be read is no next request
    return response


def reply(answer: Answer) -> dict[str, Any]:
    """The answer in one part."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    return _described("chat.completion", answer) | {"choices": [choice], "usage": answer.usage}


def _described(kind: str, answer: Answer) -> dict[str, Any]:
    # An agent that read the time here could not be repeated.
    return {
        "id": "episode",
        "object": kind,
        "created": 0,
        "model": MODEL,
        "system_fingerprint": f"weights-{answer.version}",
    }


async def stream(request: web.Request, body: Mapping[str, Any], answer: Answer) -> web.StreamResponse:
    """The answer as a stream of one part: it is known when it is whole."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in _parts(body, answer):
        await response.write(f"data: {json.dumps(part)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _parts(body: Mapping[str, Any], answer: Answer) -> list[dict[str, Any]]:
    """The parts of a stream; a last one has the usage if the request wants it."""
    described = _described("chat.completion.chunk", answer)
    numbered = [{"index": number} | call for number, call in enumerate(answer.calls)]
    text = {"delta": answer.message | ({"tool_calls": numbered} if numbered else {}), "finish_reason": None}
    end = {"delta": {}, "finish_reason": answer.finish_reason}
    parts = [described | {"choices": [{"index": 0} | choice]} for choice in (text, end)]
    options = body.get("stream_options")
    wants_usage = isinstance(options, dict) and options.get("include_usage")
    return [*parts, described | {"choices": [], "usage": answer.usage}] if wants_usage else parts
