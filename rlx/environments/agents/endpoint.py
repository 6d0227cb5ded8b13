"""The OpenAI-compatible address of one episode: a server on loopback that asks whoever knows its key.

It has one conversation: each request repeats what was said before and goes on. White space around the policy's answers
may be missing then: the episode keeps the tokens that were drawn. Left out: who answers (loop), and
sampling, which is the run's: temperature and the like in a request are not followed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from rlx.environments.agents.calls import read_calls
from rlx.environments.agents.wire import (
    MODEL,
    Answer,
    GivenMessage,
    RefusedRequest,
    error_reply,
    message_in,
    messages_in,
    observed,
    read_body,
    reply,
    stream,
    stripped,
    tools_in,
)
from rlx.types import Utterance

_LARGEST = 16 << 20  # bytes of a request
_PAUSE_S, _LONGEST_S = 0.002, 1.0
"""seconds that each request after the end waits longer for its refusal, and the most that one waits: 30 turns of an
agent that takes errors for answers are over in a second, and one that asks in a loop keeps no core busy"""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """One episode's server. Its methods belong to the event loop on which it was opened."""

    def __init__(self) -> None:
        self.api_key, self.base_url = secrets.token_urlsafe(24), ""
        self.tools: tuple[Mapping[str, Any], ...] = ()  # of the first request, and of all others
        self._said: list[GivenMessage] = []  # `stripped`, in the conversation, the policy's last answer included
        self._asked = asyncio.Queue[tuple[Utterance, ...]]()
        self._answer: asyncio.Future[Answer] | None = None  # what the newest request waits for
        self.drawn_calls = 0  # in the policy's newest turn
        self._may_call, self._calls = True, 0  # whether the newest request takes calls; those of the policy so far
        self._is_over, self._late = False, 0  # requests after the end
        self._runner: web.AppRunner | None = None

    @classmethod
    async def open(cls) -> Endpoint:
        """Starts a server on a free port; clients of this process reach it without a proxy."""
        for name in ("no_proxy", "NO_PROXY"):
            if "127.0.0.1" not in os.environ.get(name, ""):
                os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        made = cls()
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_post("/v1/chat/completions", partial(made._served, made._complete))
        app.router.add_get("/v1/models", partial(made._served, made._models))
        app.router.add_route("*", "/{path:.*}", partial(made._served, _unknown))
        made._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await made._runner.setup()
        site = web.TCPSite(made._runner, "127.0.0.1", 0)
        await site.start()
        made.base_url = f"http://127.0.0.1:{made._runner.addresses[0][1]}/v1"
        return made

    async def asked(self) -> tuple[Utterance, ...]:
        """The messages that the next request adds to the conversation."""
        return await self._asked.get()

    def answer(self, answer: Answer) -> None:
        """Answers the request that waits."""
        assert self._answer is not None
        if self.tools and self._may_call:
            text, calls = read_calls(answer.text, self.tools, self._calls)
            answer = replace(answer, text=text, calls=calls)
        self.drawn_calls = len(answer.calls)
        self._calls += self.drawn_calls
        self._said += stripped([message_in(answer.message)])
        self._answer.set_result(answer)

    def end(self) -> None:
        """Refuses the request that waits, at once, and all others: clients do not repeat what is refused."""
        self._is_over = True
        if self._answer and not self._answer.done():
            self._answer.set_exception(_over())
            self._answer.exception()  # its handler may have gone with its client

    async def close(self) -> None:
        """Ends the server."""
        self.end()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlx"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        answer = await asyncio.shield(self._awaited(body))
        return await stream(request, body, answer) if body.get("stream") else web.json_response(reply(answer))

    def _awaited(self, body: Mapping[str, Any]) -> asyncio.Future[Answer]:
        """The answer to a request; a client that repeats its request waits for the same one.

        Raises:
            RefusedRequest: it does not go on from what was said before.
        """
        messages, tools = messages_in(body), tools_in(body)
        given, is_same = stripped(messages), tools == self.tools or self._answer is None
        if self._answer and self._answer.done() and given == self._said[:-1] and is_same:
            return self._answer  # the answer was lost on its way
        known, is_open = len(self._said), self._answer is not None and not self._answer.done()
        if given[:known] != self._said or (is_open and len(messages) != known):
            raise RefusedRequest(
                "an episode is one conversation: each request repeats all messages so far, the answers of the policy "
                "included, and adds to them; one is answered before the next"
            )
        if not is_same:
            raise RefusedRequest("tools: not those of the first request; tool_choice none asks for text instead")
        if not is_open:
            if len(messages) == known:
                raise RefusedRequest("a request adds a message to the conversation")
            self._asked.put_nowait(tuple(map(observed, messages[known:])))
            self._answer = asyncio.get_running_loop().create_future()
            self._said, self.tools, self._may_call = given, tools, body.get("tool_choice") != "none"
        assert self._answer is not None
        return self._answer

    async def _served(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        """Serves whoever knows the key; errors are as OpenAI's clients read them."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            if not secrets.compare_digest(given.encode(errors="surrogateescape"), self.api_key.encode()):
                raise RefusedRequest("this is not the key of the episode", status=401)
            if self._is_over:
                self._late += 1
                await asyncio.sleep(min(self._late * _PAUSE_S, _LONGEST_S))
                raise _over()
            return await handler(request)
        except RefusedRequest as error:
            return error_reply(error)


def _over() -> RefusedRequest:
    return RefusedRequest("the episode is over", status=410)


async def _unknown(request: web.Request) -> web.StreamResponse:
    """Refuses a path or method that is not served."""
    served = "POST /v1/chat/completions, GET /v1/models"
    raise RefusedRequest(f"{request.method} {request.path}: not served; served: {served}", status=404)
