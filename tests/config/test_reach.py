"""One quick connection tells whether a server can be reached, whatever the network does."""

import socket
import time

import pytest

from rlx.config import reach


def test_a_server_that_accepts_connections_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reach.why_silent(f"http://127.0.0.1:{server.getsockname()[1]}/x") == ""


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:9/x", "Connection refused"),
        ("https://no-such-host.invalid", r"(Name or service not known|failure in name resolution|no answer)"),
    ],
)
def test_why_nobody_answers_is_said_within_the_limit(address: str, reason: str) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match=reason):
        assert not (found := reach.why_silent(address)), found
    assert time.monotonic() - started < reach.ANSWER_S + 1


@pytest.mark.slow
def test_a_server_that_does_not_accept_is_not_waited_for() -> None:
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for waiting in (first, second):  # nobody takes them, and there is no room for more
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        started = time.monotonic()
        assert reach.why_closed(*server.getsockname()) in ("timed out", "no answer within 2 s")
        assert reach.ANSWER_S - 0.1 < time.monotonic() - started < reach.ANSWER_S + 1


def test_a_server_behind_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert reach.why_silent("http://192.0.2.1:9") == ""
    assert "refused" in reach.why_silent("http://127.0.0.1:9")
