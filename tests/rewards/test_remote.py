"""Scores over HTTP: against the example server, and against servers that fail in every way that was thought of."""

import contextlib
import http.client
import importlib.util
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from hypothesis import given as drawn
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig
from rlx.rewards import json_server
from rlx.rewards.custom import RewardError
from rlx.rewards.remote import RemoteReward
from rlx.types import Prompt, Response

SCRIPT = Path(__file__).parents[2] / "experiments" / "reward_server.py"
KEY = "s3cret-k3y"
OWN = """
def lengths(prompts, completions, answers):
    return [len(p) + 1000 * len(c) - len(a) / 1000 for p, c, a in zip(prompts, completions, answers)]

def broken(prompts, completions, answers):
    raise ValueError("no\\nscore")
"""


def response(text: str = "", number: int = 0, question: str = "?", answer: str = "") -> Response:
    return Response(Prompt(number, (1,), question, answer), text, text, num_tokens=1, finished=True)


def config(url: str, **settings: Any) -> RewardConfig:
    return RewardConfig(functions={"url": 1.0}, url=url, **settings)


def remote(url: str, key: str | None = None, **settings: Any) -> RemoteReward:
    # The address is put in afterwards: settings refuse one with a password, and this module hides it all the same.
    scorer = RemoteReward.from_config(config("http://h", **settings))
    return replace(scorer, server=replace(scorer.server, url=url, key=key, first_wait_s=0.001))


def refusal(scorer: RemoteReward, count: int = 1) -> str:
    """The one line that comes out of a scorer that gets no scores."""
    with pytest.raises(RewardError) as caught:
        scorer([response()] * count)
    message = str(caught.value)
    assert "\n" not in message
    assert KEY not in message
    assert message.startswith(f"reward url: {scorer.server.address} ")
    return message.removeprefix(f"reward url: {scorer.server.address} ")


# ---------------------------------------------------------------------------------------------------------------------
# Servers


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


Reply = Callable[[BaseHTTPRequestHandler], None]


def raw(data: bytes) -> Reply:
    return lambda handler: handler.wfile.write(data) and None


def reply(status: int, body: str = "", *headers: str) -> Reply:
    head = [f"HTTP/1.1 {status} -", f"Content-Length: {len(body)}", *headers, "", ""]
    return raw("\r\n".join(head).encode() + body.encode())


def scores(*values: Any) -> Reply:
    return reply(200, json.dumps({"scores": values}))


def drip(head: bytes) -> Reply:
    """A start, then a byte now and then, for longer than any test should take."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head)
        for _ in range(200):
            time.sleep(0.05)
            handler.wfile.write(b" ")

    return reply


@dataclass
class Faulty:
    """A server that answers its n-th request by the n-th reply, and all further ones by the last."""

    replies: Sequence[Reply]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)


@pytest.fixture
def faulty() -> Iterator[Callable[..., Faulty]]:
    with contextlib.ExitStack() as stack:

        def start(*replies: Reply) -> Faulty:
            state, turn = Faulty(replies), threading.Lock()

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    with turn:  # batches come at the same time
                        number = len(state.requests)
                        state.requests.append(request)
                        state.headers.append(self.headers)
                    with contextlib.suppress(OSError):  # the client has gone
                        state.replies[min(number, len(state.replies) - 1)](self)

                def log_message(self, *args: Any) -> None: ...

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            server.daemon_threads, server.block_on_close = True, False
            state.url = stack.enter_context(running(server))
            return state

        yield start


@pytest.fixture(scope="module")
def script() -> Any:
    """experiments/reward_server.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("reward_server", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module with functions of one's own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "served_rewards.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "served_rewards"


@pytest.fixture(scope="module")
def lengths_url(script: Any, own: str) -> Iterator[str]:
    server = script.RewardServer(("127.0.0.1", 0), RewardConfig(functions={f"{own}:lengths": 1.0}), KEY)
    with running(server) as url:
        yield url


# ---------------------------------------------------------------------------------------------------------------------
# Scores that arrive


@pytest.mark.slow
@hypothesis_settings(max_examples=25, deadline=None)
@drawn(st.lists(st.tuples(*[st.text(st.characters(), max_size=5)] * 3), max_size=7), st.integers(1, 4))
def test_remote_scores_are_the_functions_own_in_the_order_of_the_responses(
    lengths_url: str, rows: list[tuple[str, str, str]], batch: int
) -> None:
    responses = [response(text, i, question, answer) for i, (question, text, answer) in enumerate(rows)]
    expected = [len(question) + 1000 * len(text) - len(answer) / 1000 for question, text, answer in rows]
    assert remote(lengths_url, KEY, url_batch=batch)(responses) == expected


def test_a_batch_goes_out_as_three_lists(faulty: Callable[..., Faulty]) -> None:
    server = faulty(scores(1, 2), scores(3))
    rows = [response("t0", 0, "q0", "a0"), response("t1", 1, "q1", "a1"), response("t2", 2, "q2", "a2")]
    sent = remote(server.url, url_batch=2)
    assert [*sent(rows[:2]), *sent(rows[2:])] == [1, 2, 3]
    assert server.requests == [
        {"prompts": ["q0", "q1"], "completions": ["t0", "t1"], "answers": ["a0", "a1"]},
        {"prompts": ["q2"], "completions": ["t2"], "answers": ["a2"]},
    ]
    assert [(h["Content-Type"], h["Authorization"]) for h in server.headers] == [("application/json", None)] * 2


def test_eight_batches_are_under_way_at_once_and_never_more(faulty: Callable[..., Faulty]) -> None:
    together, lock, under_way = threading.Barrier(8, timeout=20), threading.Lock(), [0]
    most = 0

    def count(by: int) -> None:
        nonlocal most
        with lock:
            under_way[0] += by
            most = max(most, under_way[0])

    def meet(handler: BaseHTTPRequestHandler) -> None:
        count(1)
        together.wait()
        time.sleep(0.3)  # in which a ninth would show
        count(-1)
        scores(1)(handler)

    server = faulty(meet)
    assert remote(server.url, url_batch=1)([response()] * 16) == [1] * 16
    assert (len(server.requests), most) == (16, 8)


def test_an_answer_in_chunks_is_read(faulty: Callable[..., Faulty]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server = faulty(raw(head + b'c\r\n{"scores": [\r\n4\r\n2.5]\r\n1\r\n}\r\n0\r\n\r\n'))
    assert remote(server.url)([response()]) == [2.5]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "None"), (float("nan"), "nan"), (float("inf"), "inf"), ("1", "'1'"), (True, "True"), ([1], "[1]")],
)
def test_what_is_no_number_is_asked_for_again_and_then_named_with_its_prompt(
    faulty: Callable[..., Faulty], value: Any, shown: str
) -> None:
    responses = [response("a", 3), response("b", 4, "Why?")]
    passing = faulty(scores(0.5, value), scores(0.5, 10**400), scores(0.5, 2))
    assert remote(passing.url, url_retries=2)(responses) == [0.5, 2.0]
    lasting = faulty(scores(0.5, value))
    problem = f" answered {shown}, which is not a finite score, for prompt 4 ('Why?') (2 attempts)"
    with pytest.raises(RewardError, match=re.escape(problem)):
        remote(lasting.url, url_retries=1)(responses)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


@pytest.mark.parametrize(
    "failure",
    [
        reply(500),
        reply(503, "down"),
        reply(429),
        reply(200, "<html>"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff"),
        reply(200, "[" * 100_000),
        reply(200, "[1]"),
        reply(200, '{"score": [1]}'),
        reply(200, '{"scores": 1}'),
        scores(),
        scores(1, 2),
        raw(b""),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        raw(b"no HTTP at all\r\n\r\n"),
    ],
)
def test_a_failure_that_may_pass_is_followed_by_another_attempt(faulty: Callable[..., Faulty], failure: Reply) -> None:
    server = faulty(failure, scores(7))
    assert remote(server.url, url_retries=1)([response()]) == [7]
    assert len(server.requests) == 2
    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        (reply(500, '{"error": "no\\nGPU"}'), 'answered 500 Internal Server Error: {"error": "no\\nGPU"}'),
        (reply(599), "answered 599 (3"),
        (reply(200, "nothing"), "answered no valid JSON"),
        (reply(200, "...", "Content-Encoding: gzip"), "answered with Content-Encoding gzip, which was not asked for"),
        (reply(500, "", "Content-Encoding: gzip"), "answered 500 Internal Server Error"),
        (reply(200, "{}", "Content-Encoding: identity"), 'answered without a list "scores"'),
        (reply(200, "{}", "Content-Encoding: utf-8"), 'answered without a list "scores"'),
        (scores(1, 2, 3), "answered 3 scores for 1 completions"),
        (raw(b""), "failed: RemoteDisconnected"),
    ],
)
def test_the_last_failure_comes_out_after_all_attempts(
    faulty: Callable[..., Faulty], failure: Reply, shown: str
) -> None:
    server = faulty(reply(500, "first"), failure)
    message = refusal(remote(server.url, KEY, url_retries=2))
    assert message.startswith(shown)
    assert message.endswith(" (3 attempts)")
    assert len(server.requests) == 3


def test_each_wait_is_twice_the_last(faulty: Callable[..., Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(json_server, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    server = faulty(reply(500))
    with pytest.raises(RewardError, match="5 attempts"):
        RemoteReward.from_config(config(server.url))([response()])
    assert waits == [0.5, 1.0, 2.0, 4.0]
    with pytest.raises(RewardError, match="1 attempt\\)"):
        RemoteReward.from_config(config(server.url, url_retries=0))([response()])
    assert len(waits) == 4


@pytest.mark.parametrize("status", [201, 204, 301, 400, 401, 403, 404, 413])
def test_what_another_attempt_cannot_mend_is_an_error_at_once(faulty: Callable[..., Faulty], status: int) -> None:
    server = faulty(reply(status), scores(1))
    assert refusal(remote(server.url, KEY)).startswith(f"answered {status} {http.client.responses[status]}")
    assert len(server.requests) == 1


@pytest.mark.parametrize("failure", [scores(1, 2), reply(400)], ids=["transient", "final"])
def test_one_batch_that_fails_is_an_error_of_all(faulty: Callable[..., Faulty], failure: Reply) -> None:
    server = faulty(scores(1), failure)
    assert "answered" in refusal(remote(server.url, url_batch=1, url_retries=1), count=2)


def test_a_refused_connection_is_an_error_without_the_secrets_of_its_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and not listening
        host = f"127.0.0.1:{unused.getsockname()[1]}"
        scorer = remote(f"http://us3r:passw0rd@{host}/score?token=hidd3n#fragm3nt", KEY, url_retries=1)
        message = refusal(scorer)
    assert scorer.server.address == f"http://{host}/score"
    assert message == "failed: ConnectionRefusedError: [Errno 111] Connection refused (2 attempts)"


START = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "slow",
    [
        lambda handler: time.sleep(10),
        drip(START + b"Content-Length: 1000\r\n\r\n"),
        drip(START + b"X-Slow: "),
        drip(b""),
    ],
    ids=["silent", "body", "header", "white space"],
)
def test_an_attempt_ends_at_its_deadline_however_the_server_dawdles(faulty: Callable[..., Faulty], slow: Reply) -> None:
    server = faulty(slow)
    started = time.monotonic()
    message = refusal(remote(server.url, url_retries=1, timeout_s=0.3))
    assert 0.6 <= time.monotonic() - started < 5
    assert message == "did not answer within 0.3 s (2 attempts)"


def test_a_slow_first_answer_is_asked_for_again(faulty: Callable[..., Faulty]) -> None:
    server = faulty(lambda handler: time.sleep(10), scores(5))
    assert remote(server.url, timeout_s=0.5)([response()]) == [5]


def test_a_huge_answer_is_not_read_to_its_end(faulty: Callable[..., Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_server, "MAX_ANSWER_BYTES", 100_000)
    server = faulty(drip(START + b"Content-Length: 1000000000\r\n\r\n" + b" " * 200_000))
    assert refusal(remote(server.url, url_retries=0)) == "answered more than 100000 bytes (1 attempt)"


@pytest.mark.slow
@pytest.mark.parametrize("unit", [b"[],", b'{"":0},'])
def test_the_largest_answer_takes_little_memory_and_time(unit: bytes) -> None:
    """Eight may be parsed at once."""
    server = json_server.JsonServer("url", "http://h", None, 0, 1.0)
    body = b"[" + unit * ((json_server.MAX_ANSWER_BYTES - 4) // len(unit)) + b"0]"
    tracemalloc.start()
    started = time.process_time()
    server.content(200, body)
    seconds, most = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 128 << 20 and seconds < 5


def test_an_answer_that_swells_when_unpacked_is_not_asked_for(faulty: Callable[..., Faulty]) -> None:
    server = faulty(scores(1))
    remote(server.url)([response()])
    assert server.headers[0]["Accept-Encoding"] == "identity"


# ---------------------------------------------------------------------------------------------------------------------
# The key, the address


def test_the_key_comes_from_the_environment(lengths_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", f"{KEY}\n")
    scorer = RemoteReward.from_config(config(lengths_url, url_key_env="SCORER_KEY"))
    assert scorer([response("abc", question="")]) == [3000]
    assert KEY not in repr(scorer)
    assert pickle.loads(pickle.dumps(scorer)) == scorer


@pytest.mark.parametrize("key", [None, "other", KEY[:-1], f"{KEY}x"])
def test_without_the_key_there_are_no_scores(lengths_url: str, key: str | None) -> None:
    shown = 'answered 401 Unauthorized: {"error": "wrong key, or none"} (1 attempt)'
    assert refusal(remote(lengths_url, key)) == shown


def test_a_key_that_is_not_there_or_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^reward\.url_key_env: there is no environment variable SCORER_KEY$"):
        RemoteReward.from_config(config("http://h", url_key_env="SCORER_KEY"))
    for key in ("", " \n", "two words", "two\nlines", "schlüssel"):
        monkeypatch.setenv("SCORER_KEY", key)
        with pytest.raises(ConfigError, match=r"^reward\.url_key_env: the key is empty, or has") as caught:
            RemoteReward.from_config(config("http://h", url_key_env="SCORER_KEY"))
        assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize("padding", [0, 40, 95, 9_995])
def test_a_server_that_quotes_the_key_gives_nothing_away(faulty: Callable[..., Faulty], padding: int) -> None:
    def quotes(handler: BaseHTTPRequestHandler) -> None:
        reply(403, "x" * padding + f" you sent {handler.headers['Authorization']}")(handler)

    message = refusal(remote(faulty(quotes).url, KEY))
    assert message.startswith("answered 403 Forbidden: ")
    assert KEY[:4] not in message


def test_the_key_is_sent_though_netrc_and_address_have_other_ideas(
    faulty: Callable[..., Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = faulty(scores(1))
    remote(server.url, KEY)([response()])
    remote(server.url.replace("//", "//user:password@"), KEY)([response()])
    sent = [headers["Authorization"] for headers in server.headers]
    assert sent == [f"Bearer {KEY}", f"Bearer {KEY}"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(faulty: Callable[..., Faulty], status: int) -> None:
    other = faulty(scores(1))
    server = faulty(reply(status, "", f"Location: {other.url.replace('127.0.0.1', 'localhost')}"))
    assert refusal(remote(server.url, KEY)).startswith(f"answered {status} ")
    assert (len(server.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize(
    "url",
    [
        *("host:8000", "ftp://host/", "file:///etc/passwd", "http://", "http:///path", "HTTPS//host"),
        *("http://h:port", "http://h:0", "http://h:99999", "http://[::1", "http://.h..x/"),
        *("http://host:p4ssw0rd/", "ftp://host/passw0rd"),
    ],
)
def test_what_is_no_web_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.url: expected an address like ") as caught:
        RemoteReward.from_config(config(url))
    assert "ssw0rd" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# The example server


def ask(url: str, body: bytes | str, **headers: str) -> tuple[int, Any]:
    answer = requests.post(url, data=body, headers={"Authorization": f"Bearer {KEY}"} | headers, timeout=20)
    return answer.status_code, answer.json()


LISTS = "expected an object of prompts, completions, answers"
TEXTS = "prompts, completions, answers must be lists of text"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "the body is no JSON"),
        (b"\xff\xfe\xfd", "the body is no JSON"),
        ("[" * 100_000, "the body is no JSON"),
        ("[]", LISTS),
        ("null", LISTS),
        ('{"prompts": [], "completions": []}', LISTS),
        ('{"prompts": [], "completions": [], "answers": [], "more": []}', LISTS),
        ('{"prompts": "a", "completions": ["a"], "answers": ["a"]}', TEXTS),
        ('{"prompts": [1], "completions": ["a"], "answers": ["a"]}', TEXTS),
        ('{"prompts": ["a"], "completions": [null], "answers": ["a"]}', TEXTS),
        (
            '{"prompts": ["a"], "completions": [], "answers": ["a"]}',
            "prompts, completions, answers must be of one length",
        ),
    ],
)
def test_the_server_refuses_garbage(lengths_url: str, body: str | bytes, error: str) -> None:
    assert ask(lengths_url, body) == (400, {"error": error})


def test_the_server_wants_the_key_before_it_judges_a_body(lengths_url: str) -> None:
    assert ask(lengths_url, "garbage", Authorization="Bearer \xe9") == (401, {"error": "wrong key, or none"})


@pytest.mark.parametrize(
    ("headers", "status"), [({"Content-Length": str((64 << 20) + 1)}, 413), ({}, 411), ({"Content-Length": "-1"}, 411)]
)
def test_the_server_reads_no_body_of_unknown_or_too_great_length(
    lengths_url: str, headers: dict[str, str], status: int
) -> None:
    connection = http.client.HTTPConnection(lengths_url.split("/")[2], timeout=20)
    connection.putrequest("POST", "/")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


@pytest.mark.slow
def test_the_server_says_what_its_function_raised(script: Any, own: str) -> None:
    reward = RewardConfig(functions={f"{own}:broken": 1.0})
    with running(script.RewardServer(("127.0.0.1", 0), reward)) as url:
        message = refusal(remote(url, url_retries=1))
    assert message.startswith("answered 500 Internal Server Error: ")
    assert "raised ValueError('no\\\\nscore')" in message
    assert message.endswith("(2 attempts)")


def test_the_server_finds_the_answer_by_its_pattern(script: Any) -> None:
    reward = RewardConfig(functions={"numeric": 2.0}, answer_pattern=r"<(.*)>")
    with running(script.RewardServer(("127.0.0.1", 0), reward)) as url:
        rows = [response("so <1,000>", answer="1000"), response("so 1000", answer="1000")]
        assert remote(url)(rows) == [2.0, 0.0]


@pytest.mark.slow
def test_the_script_serves_a_file_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "beside_me.py").write_text(OWN)
    command = [sys.executable, str(SCRIPT), "--function", "beside_me:lengths", "--port", "0", "--key-env", "SCORER_KEY"]
    environment = os.environ | {"SCORER_KEY": f"{KEY}\n"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            started = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
            assert started
            assert remote(started[1], KEY)([response("ab", question="")]) == [2000]
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--function", "numerik"], "no reward function 'numerik'"),
        (["--function", "absent_module:f"], "reward.functions absent_module:f: no module absent_module"),
        (["--function", "length"], "reward.functions has length, which needs reward.length_target"),
        (["--function", "numeric", "--key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--function", "numeric", "--answer-pattern", "("], "not a regular expression"),
        (["--function", "numeric", "--port", "70000"], "port must be 0-65535"),
        (["--function", "numeric", "--host", "192.0.2.1"], "Cannot assign requested address"),
    ],
)
def test_the_script_says_in_one_line_why_it_does_not_start(
    script: Any, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert script.main(words) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert error in shown.err
    assert shown.err.count("\n") == 1
