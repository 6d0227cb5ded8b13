"""OpenAI's chat completions as they travel: what a request says, and what is answered.

Left out: the server, and who may ask it (endpoint).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from rlx.environments.base import sendable
from rlx.types import Utterance

MODEL = "policy"


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
    except (ValueError, RecursionError, LookupError):  # the last for an unknown character set
        body = None
    if not isinstance(body, dict):
        raise RefusedRequest("the body is a JSON object")
    if body.get("n") not in (None, 1):
        raise RefusedRequest("n: an episode has one answer to each request")
    for name in ("tools", "functions"):
        if body.get(name):
            raise RefusedRequest(f"{name}: not served; describe tools in the messages")
    return body


def messages_in(body: Mapping[str, Any]) -> list[Utterance]:
    """The messages of a request: roles and texts.

    Raises:
        RefusedRequest: there are none, or one is no text.
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
    return {"role": role, "content": sendable(content)}


def error_reply(error: RefusedRequest) -> web.Response:
    """An error as OpenAI's clients read it."""
    content = {"error": {"message": str(error), "type": "invalid_request_error"}}
    return web.json_response(content, status=error.status)


def reply(text: str, version: int) -> dict[str, Any]:
    """The answer in one part."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return _described("chat.completion", version) | {"choices": [choice]}


def _described(kind: str, version: int) -> dict[str, Any]:
    # An agent that read the time here could not be repeated.
    return {
        "id": "episode",
        "object": kind,
        "created": 0,
        "model": MODEL,
        "system_fingerprint": f"weights-{version}",
    }


async def stream(request: web.Request, text: str, version: int) -> web.StreamResponse:
    """The answer as a stream of one part: it is known when it is whole."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    described = _described("chat.completion.chunk", version)
    delta = {"role": "assistant", "content": text}
    for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"}):
        part = described | {"choices": [{"index": 0} | choice]}
        await response.write(f"data: {json.dumps(part)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
