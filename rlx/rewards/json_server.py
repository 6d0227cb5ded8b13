"""Asks a server at a web address: posts JSON, retries after a failure, and keeps secrets out of messages.

Left out: what is asked and what an answer means; `remote` and `judge` know that.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig
from rlx.rewards.child import LONGEST_WAIT_S
from rlx.rewards.custom import RewardError

T = TypeVar("T")
_COMPRESSIONS = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress"})
MAX_ANSWER_BYTES = 2 << 20
"""the largest answer that is parsed: JSON may take fifty times as much memory as bytes"""


class UselessAnswerError(RewardError):
    """The server answers the request, but never with something of use."""


class RefusedError(UselessAnswerError):
    """The server refuses the request, and would refuse it again."""


class TransientError(Exception):
    """An attempt failed, and another one may succeed."""


class UnreadableError(TransientError):
    """An attempt failed: the server did its work, but its answer is of no use."""


@dataclass(frozen=True)
class JsonServer:
    """A server that answers JSON with JSON.

    Raises ConfigError where it is made: the address or the key is not valid.
    """

    name: str  # of its setting below reward, e.g. "url"; the one of the key is named url_key_env then
    url: str
    key: str | None = field(repr=False)  # sent as a bearer token
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
            raise ConfigError(
                f"reward.{self.name}: expected an address like http://HOST:PORT/PATH or https://HOST/PATH"
            )
        if self.key is not None and not re.fullmatch(r"[!-~]+", self.key):
            raise ConfigError(
                f"reward.{self.name}_key_env: the key is empty, or has characters that a header cannot contain"
            )

    @classmethod
    def from_config(cls, name: str, url: str, key_env: str | None, config: RewardConfig) -> Self:
        """The server at an address, with the key that an environment variable holds.

        Raises:
            ConfigError: the variable is missing, or the address or the key is not valid.
        """
        key = None
        if key_env is not None:
            key = os.environ.get(key_env)
            if key is None:
                raise ConfigError(f"reward.{name}_key_env: there is no environment variable {key_env}")
        return cls(name, url, key and key.strip(), config.url_retries, min(config.timeout_s, LONGEST_WAIT_S))

    @property
    def address(self) -> str:
        """The URL as messages show it: without password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def ask(self, request: object, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer to a request, which is repeated after temporary failures.

        Args:
            read: raises UnreadableError for an answer of no use.

        Raises:
            RefusedError: the server refuses the request.
            UselessAnswerError: every attempt fails, and at least one of them with an answer of no use.
            RewardError: every attempt fails.
        """
        body = json.dumps(request).encode()
        kind: type[RewardError] = RewardError
        for attempt in range(1, self.retries + 2):
            try:
                return read(self.content(*self._post(body)))
            except TransientError as error:
                kind = UselessAnswerError if isinstance(error, UnreadableError) else kind
                failure = kind(self._failed(str(error), attempt))
            except RefusedError as error:
                raise RefusedError(self._failed(str(error), attempt)) from None
            if attempt <= self.retries:
                time.sleep(self.first_wait_s * 2 ** (attempt - 1))
        raise failure

    def _failed(self, reason: str, attempts: int) -> str:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return f"reward {self.name}: {self.address} {reason} ({times})"

    def content(self, status: int, body: bytes) -> Any:
        """The JSON in an answer.

        Raises:
            UnreadableError: there is none.
            TransientError: the server is busy or broken.
            RefusedError: the server refuses the request.
        """
        if status != http.client.OK:
            text = body[:10_000].decode(errors="replace").replace(self.key or "\0", "***")  # a server may quote the key
            phrase = http.client.responses.get(status, "")
            kind = TransientError if status == http.client.TOO_MANY_REQUESTS or status >= 500 else RefusedError
            raise kind(f"answered {status} {phrase}: {' '.join(text.split())[:200]}".rstrip(": "))
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise UnreadableError("answered no valid JSON") from None

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
            raise TransientError(f"did not answer within {self.timeout_s:g} s") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise TransientError(f"failed: {_root(error)}") from None

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
            encoding = response.headers.get("Content-Encoding", "").strip().lower()
            if response.ok and encoding in _COMPRESSIONS:
                raise UnreadableError(f"answered with Content-Encoding {encoding[:40]}, which was not asked for")
            read = bytearray()
            while chunk := response.raw.read1(1 << 16):
                read += chunk
                if len(read) > MAX_ANSWER_BYTES:
                    raise UnreadableError(f"answered more than {MAX_ANSWER_BYTES} bytes")
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
