"""Serves a reward function over HTTP: python experiments/reward_server.py --function NAME [--port N] [--key-env VAR]

Set reward.url to its address. A client posts {"prompts": [...], "completions": [...], "answers": [...]}, lists of text
of one length. The answer is {"scores": [...]}, or {"error": "..."} with a status other than 200. The server is an
example to start from. Left out: TLS, and scoring several batches at the same time.
"""

from __future__ import annotations

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

from rlx.cli.options import CommandParser
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.reward import RewardConfig
from rlx.rewards import custom, functions, scoring
from rlx.types import GivenAnswer, Prompt, Response

MAX_BODY_BYTES = 64 << 20
LISTS = ("prompts", "completions", "answers")


def exact_matches(answers: Sequence[GivenAnswer]) -> list[float]:
    """The task's scores: here no data set has a scorer of its own."""
    return [functions.exact_match(answer.given, answer.expected) for answer in answers]


class RefusedError(Exception):
    """A request is refused; the arguments are the HTTP status and the reason."""


class RewardServer(ThreadingHTTPServer):
    """Scores posted completions by the functions of a config; with a key, only for clients that send it."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], config: RewardConfig, key: str | None = None) -> None:
        self.config, self.key = config, key
        custom.check_functions(config)
        self.scorers = scoring.scorers(config, lambda: exact_matches)
        self.lock = Lock()  # a trainer calls a reward function once at a time, so functions need not be thread-safe
        super().__init__(address, Handler)

    def scores(self, prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
        """One score per completion, in their order."""
        found = functions.extract_answers(completions, self.config.answer_pattern)
        columns = zip(prompts, completions, found, answers, strict=True)
        responses = [
            Response(Prompt(i, (), prompt, expected), text, answer, 0, finished=True)
            for i, (prompt, text, answer, expected) in enumerate(columns)
        ]
        with self.lock:
            return scoring.score(responses, self.scorers, self.config).total


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: RewardServer
    timeout = 60  # seconds without data from the client

    def do_POST(self) -> None:
        """Replies with scores, or with the status and the text of an error."""
        status, answer = HTTPStatus.OK, dict[str, Any]()
        try:
            body = self._body()  # before the key is checked: a client that is cut off while it sends sees no status
            self._check_key()
            answer = {"scores": self.server.scores(**_lists(body))}
        except RefusedError as error:
            status, answer = error.args[0], {"error": error.args[1]}
        except Exception as error:  # a reward function may raise anything
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
        self._reply(status, answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a run sends thousands of requests."""

    def _body(self) -> bytes:
        """The body of the request; RefusedError if its length is missing or too large."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,20}", length):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _check_key(self) -> None:
        sent, key = self.headers.get("Authorization", ""), self.server.key
        if key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "wrong key, or none")

    def _reply(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _lists(body: bytes) -> dict[str, list[str]]:
    """The three lists of text in the body of a request."""
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
    """Reads the command line, serves until Ctrl-C, and returns the exit code."""
    parser = CommandParser(description="Serves a reward function to reward.url.", allow_abbrev=False)
    parser.add_argument(
        "--function", required=True, metavar="NAME", help="exact_match, numeric, math_verify or module:function"
    )
    parser.add_argument("--answer-pattern", metavar="RE", help="see reward.answer_pattern (default: none)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (default: %(default)s)")
    parser.add_argument("--key-env", metavar="VAR", help="environment variable that holds the key (default: none)")
    args = parser.parse_args(argv)
    try:
        key = os.environ.get(args.key_env, "").strip() if args.key_env else None
        if key == "":  # an empty key would admit every client
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
