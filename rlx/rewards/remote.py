"""Scores from a web address: posts batches of completions as JSON, several at once, and retries after a failure.

Left out: whether the scores are valid numbers, which `scoring.score` checks. The repository has an example of a
server, experiments/reward_server.py.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3

from rlx.config.errors import ConfigError
from rlx.config.sections import RewardConfig
from rlx.rewards.custom import RewardError
from rlx.types import Response

_CONNECTIONS = 8
MAX_ANSWER_BYTES = 64 << 20


class _Transient(Exception):
    """An attempt failed, and another one may succeed."""


@dataclass(frozen=True)
class RemoteReward:
    """A scorer that asks a server at a web address.

    Raises ConfigError where it is made: the address or the key is not valid. Raises RewardError where it is called: the
    server refuses a request, or every attempt fails.
    """

    url: str
    key: str | None = field(repr=False)  # sent as a bearer token
    batch: int  # completions per request
    retries: int
    timeout_s: float  # of one attempt, from connecting to the last byte
    first_wait_s: float = 0.5  # before the first retry; it doubles before each further one

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            requests.Request("POST", self.url).prepare()
        except ValueError:  # the errors of the package requests about an address are ValueErrors too
            valid = False
        if not valid:  # the address is not shown: it may hold a password anywhere
            raise ConfigError("reward.url: expected an address like http://HOST:PORT/PATH or https://HOST/PATH")
        if self.key is not None and not re.fullmatch(r"[!-~]+", self.key):
            raise ConfigError("reward.url_key_env: the key is empty, or has characters that a header cannot contain")

    @classmethod
    def from_config(cls, config: RewardConfig) -> RemoteReward:
        """The scorer of reward.url, with the key that the environment holds.

        Raises:
            ConfigError: the environment variable of the key is missing, or the address or the key is not valid.
        """
        assert config.url is not None  # RewardConfig checks it where reward.functions has url
        key = None
        if config.url_key_env is not None:
            key = os.environ.get(config.url_key_env)
            if key is None:
                raise ConfigError(f"reward.url_key_env: there is no environment variable {config.url_key_env}")
        return cls(config.url, key and key.strip(), config.url_batch, config.url_retries, config.timeout_s)

    @property
    def address(self) -> str:
        """The URL as messages show it: without password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        """One score per response, in their order."""
        batches = [responses[start : start + self.batch] for start in range(0, len(responses), self.batch)]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return [score for scores in pool.map(self._batch_scores, batches) for score in scores]

    def _batch_scores(self, responses: Sequence[Response]) -> list[Any]:
        """The scores of one request, which is repeated after temporary failures."""
        request = {
            "prompts": [response.prompt.question for response in responses],
            "completions": [response.text for response in responses],
            "answers": [response.prompt.answer for response in responses],
        }
        body = json.dumps(request).encode()
        for attempt in range(1, self.retries + 2):
            try:
                return self._scores(*self._post(body), len(responses))
            except _Transient as error:
                failure = self._error(str(error), attempt)
            except RewardError as error:
                raise self._error(str(error), attempt) from None
            if attempt <= self.retries:
                time.sleep(self.first_wait_s * 2 ** (attempt - 1))
        raise failure

    def _error(self, reason: str, attempts: int) -> RewardError:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return RewardError(f"reward url: {self.address} {reason} ({times})")

    def _scores(self, status: int, body: bytes, count: int) -> list[Any]:
        """The scores in the answer to a request of `count` completions."""
        if status != http.client.OK:
            text = body[:10_000].decode(errors="replace").replace(self.key or "\0", "***")  # a server may quote the key
            phrase = http.client.responses.get(status, "")
            kind = _Transient if status == http.client.TOO_MANY_REQUESTS or status >= 500 else RewardError
            raise kind(f"answered {status} {phrase}: {' '.join(text.split())[:200]}".rstrip(": "))
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise _Transient("answered no valid JSON") from None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise _Transient('answered without a list "scores"')
        if len(scores) != count:
            raise _Transient(f"answered {len(scores)} scores for {count} completions")
        return scores

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to one attempt.

        The attempt runs in a thread that is abandoned at the deadline: the timeouts of the package requests do not end
        an answer that arrives very slowly.
        """
        answer: Future[tuple[int, bytes]] = Future()

        def attempt() -> None:
            try:
                answer.set_result(self._exchange(body, time.monotonic() + self.timeout_s))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=attempt, daemon=True).start()
        try:
            return answer.result(self.timeout_s)
        except (TimeoutError, requests.Timeout, urllib3.exceptions.TimeoutError):
            raise _Transient(f"did not answer within {self.timeout_s:g} s") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise _Transient(f"failed: {_root(error)}") from None

    def _exchange(self, body: bytes, deadline: float) -> tuple[int, bytes]:
        # Without compression: a small compressed answer could expand until the memory is full.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        with requests.post(
            self.url,
            data=body,
            headers=headers,
            auth=self._authorize if self.key else None,
            timeout=self.timeout_s,
            allow_redirects=False,  # the key is for this address only
            stream=True,
        ) as response:
            read = bytearray()
            while chunk := response.raw.read1(1 << 16):
                read += chunk
                if len(read) > MAX_ANSWER_BYTES:
                    raise _Transient(f"answered more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError
            return response.status_code, bytes(read)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Sets the key; without this, requests would send a password from the address or ~/.netrc."""
        request.headers["Authorization"] = f"Bearer {self.key}"
        return request


def _root(error: BaseException) -> str:
    """The first cause of an error, on one line. The errors above it quote the whole address."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(f"{type(error).__name__}: {error}".split())
