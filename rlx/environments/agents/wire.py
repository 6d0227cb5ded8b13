"""OpenAI's chat completions as they travel: what a request says, and what is answered.

Left out: the server, and who may ask it (endpoint).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlx.types import TurnLength, Utterance

MODEL = "policy"
_TOOLS, _FORM = "describe tools in the messages", "describe the form of answers in the messages"
_NOT_SERVED = {
    **dict.fromkeys(("tools", "functions", "tool_choice", "function_call"), _TOOLS),
    **dict.fromkeys(("response_format", "structured_outputs"), _FORM),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _FORM),  # vLLM's
    **dict.fromkeys(("logprobs", "top_logprobs"), "those of all tokens are kept with the episode"),
    **dict.fromkeys(("audio", "web_search_options"), ""),
    "modalities": "an answer is text",
}
"""fields of a request that would give its answer another form or meaning, and a hint"""
_PLAIN: tuple[Any, ...] = ("none", "auto", ["text"], {"type": "text"})
"""values of these fields that ask for nothing but text"""


@dataclass(frozen=True)
class Answer:
    """A turn of the policy as the answer to a request."""

    text: str
    version: int  # of the policy's weights
    length: TurnLength = field(default_factory=TurnLength)

    @property
    def finish_reason(self) -> str:
        """Why the turn ended there."""
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
    return body


def messages_in(body: Mapping[str, Any]) -> list[Utterance]:
    """The messages of a request: roles, texts, and names where there are any.

    Raises:
        RefusedRequest: there are none, or one is no text, or has a call of a tool beside it.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RefusedRequest("messages: expected a list of messages")
    return [_message(each) for each in given]


def _message(given: Any) -> Utterance:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if isinstance(content, list):  # parts
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    if not (isinstance(role, str) and isinstance(content, str)):
        raise RefusedRequest("messages: each has a role and a content of text")
    for part in ("tool_calls", "function_call"):
        if given.get(part):
            raise RefusedRequest(f"messages: {part}: not served; write calls in the content")
    name = given.get("name")
    named = {"name": name} if isinstance(name, str) else {}
    return {"role": role, **named, "content": content}


def stripped(messages: Sequence[Utterance]) -> list[Utterance]:
    """Messages as they are compared: roles and contents, those of the assistant without the white space around them.

    Many agents take it off, and not all repeat a name.
    """
    return [
        {"role": role, "content": content.strip() if role == "assistant" else content}
        for role, content in ((each["role"], each["content"]) for each in messages)
    ]


def error_reply(error: RefusedRequest) -> web.Response:
    """An error as OpenAI's clients read it."""
    content = {"error": {"message": str(error), "type": "invalid_request_error"}}
    response = web.json_response(content, status=error.status)
    response.force_close()  # what is left of a body that cannot be read is no next request
    return response


def reply(answer: Answer) -> dict[str, Any]:
    """The answer in one part."""
    message = {"role": "assistant", "content": answer.text}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
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
    text = {"delta": {"role": "assistant", "content": answer.text}, "finish_reason": None}
    end = {"delta": {}, "finish_reason": answer.finish_reason}
    parts = [described | {"choices": [{"index": 0} | choice]} for choice in (text, end)]
    options = body.get("stream_options")
    wants_usage = isinstance(options, dict) and options.get("include_usage")
    return [*parts, described | {"choices": [], "usage": answer.usage}] if wants_usage else parts
