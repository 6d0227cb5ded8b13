"""Serves a reward function over HTTP: python experiments/reward_server.py --function NAME [--port N] [--key-env VAR]

The address is what reward.url takes. POST {"prompts": [...], "completions": [...], "answers": [...]}, lists of text of
one length, and the answer is {"scores": [...]}, or {"error": "..."} with another status than 200. An example to start
from: it knows no TLS, and scores one batch after another.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import re
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections import RewardConfig
from rlx.rewards import functions, scoring
from rlx.types import Prompt, Response

MOST_BYTES = 64 << 20
LISTS = ("prompts", "completions", "answers")


class RefusedError(Exception):
    """A request that gets no scores: status and reason."""


class RewardServer(ThreadingHTTPServer):
    """Scores what is posted to it by a config's functions; if there is a key, only for those who have it."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], config: RewardConfig, key: str | None = None) -> None:
        self.config, self.key = config, key
        self.pattern = re.compile(config.answer_pattern) if config.answer_pattern else None
        self.scorers = scoring.scorers(config, lambda given, expected, _: functions.exact_match(given, expected))
        self.turn = Lock()  # a trainer calls reward functions one at a time, and so they are written
        super().__init__(address, Handler)

    def scores(self, prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
        responses = [
            Response(
                Prompt(i, (), prompt, answer), text, functions.extract_answer(text, self.pattern), 0, finished=True
            )
            for i, (prompt, text, answer) in enumerate(zip(prompts, completions, answers, strict=True))
        ]
        with self.turn:
            return scoring.score(responses, self.scorers, self.config).total


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: RewardServer
    timeout = 60  # for a client that stops sending

    def do_POST(self) -> None:
        status, answer = HTTPStatus.OK, dict[str, Any]()
        try:
            body = self._body()  # even without the key: a client that is cut off while it sends sees no status
            self._check_key()
            answer = {"scores": self.server.scores(**_lists(body))}
        except RefusedError as error:
            status, answer = error.args[0], {"error": error.args[1]}
        except Exception as error:  # whatever a reward function raises is the server's fault
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
        self._reply(status, answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a run sends requests by the thousand."""

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,20}", length):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        if int(length) > MOST_BYTES:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MOST_BYTES} bytes")
        return self.rfile.read(int(length))

    def _check_key(self) -> None:
        given, key = self.headers.get("Authorization", ""), self.server.key
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "wrong key, or none")

    def _reply(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _lists(body: bytes) -> dict[str, list[str]]:
    """The three lists of text in a request."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the body is no JSON") from None
    if not isinstance(request, dict) or set(request) != set(LISTS):
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"expected an object of {', '.join(LISTS)}")
    if not all(isinstance(texts, list) and all(isinstance(t, str) for t in texts) for texts in request.values()):
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"{', '.join(LISTS)} must be lists of text")
    if len({len(texts) for texts in request.values()}) > 1:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"{', '.join(LISTS)} must be of one length")
    return request


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serves a reward function to reward.url.", allow_abbrev=False)
    parser.add_argument(
        "--function", required=True, metavar="NAME", help="exact_match, numeric, math_verify or module:function"
    )
    parser.add_argument("--answer-pattern", metavar="RE", help="what reward.answer_pattern is in a run (default: none)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--key-env", metavar="VAR", help="environment variable with the key to ask for (default: none)")
    args = parser.parse_args(argv)
    try:
        key = os.environ.get(args.key_env, "").strip() if args.key_env else None
        if key == "":  # which would let everybody in
            raise ConfigError(f"--key-env: the environment variable {args.key_env} is not set, or empty")
        tree = {"reward": {"functions": {args.function: 1.0}, "answer_pattern": args.answer_pattern}}
        config = from_tree(tree, "command line").reward
        with RewardServer((args.host, args.port), config, key) as server:
            print(f"listening on http://{args.host}:{server.server_port}/", flush=True)
            server.serve_forever()
        return 0
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
