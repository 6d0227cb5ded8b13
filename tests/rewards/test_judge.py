"""A language model as a judge, against a real HTTP server on the loopback interface that speaks the chat protocol."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.reward import RewardConfig
from rlx.rewards import scoring
from rlx.rewards.custom import RewardError
from rlx.rewards.json_server import MAX_ANSWER_BYTES
from rlx.rewards.judge import cache as cache_module
from rlx.rewards.judge.cache import ReplyCache, key_of
from rlx.rewards.judge.rubric import RANK, SCORE, JudgeReply, Rubric, ranks, rubric_text, shuffled
from rlx.rewards.judge.scorer import Judge
from rlx.runs.preflight import absolute_paths, check_rewards
from rlx.storage.filesystem import Storage
from rlx.types import MarkedScores, Prompt, Response

KEY = "s3cret-k3y"
Answer = Callable[[str], Any]
"""(what the judge reads): its reply, or (status, body) for another answer"""


@dataclass
class Chat:
    """A chat server and what it was asked."""

    answer: Answer
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    under_way: int = 0
    most: int = 0

    @property
    def asked(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]


@pytest.fixture
def chat() -> Iterator[Callable[[Answer], Chat]]:
    with ExitStack() as stack:

        def start(answer: Answer) -> Chat:
            state, lock = Chat(answer), threading.Lock()

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    with lock:
                        state.requests.append(request)
                        state.headers.append(self.headers)
                        state.paths.append(self.path)
                        state.under_way += 1
                        state.most = max(state.most, state.under_way)
                    reply = state.answer(request["messages"][0]["content"])
                    with lock:
                        state.under_way -= 1
                    status, body = reply if isinstance(reply, tuple) else (200, chat_body(reply))
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body.encode())

                def log_message(self, *args: Any) -> None: ...

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            state.url = f"http://127.0.0.1:{server.server_port}/v1"
            return state

        yield start


def chat_body(content: Any, finish_reason: str = "stop") -> str:
    message = {"role": "assistant", "content": content}
    return json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}]})


def by_length(text: str) -> str:
    """A judge for whom a completion is worth its number of letters."""
    return f"I see.\nScore: {len(re.findall(r'<(.*?)>', text)[-1])}"


def longest_first(text: str) -> str:
    rows = re.findall(r"Answer (\d+):\n<(.*)>", text)
    return "Ranking: " + " > ".join(number for number, _ in sorted(rows, key=lambda row: -len(row[1])))


def response(text: str, number: int = 0, question: str = "Why?", answer: str = "Because.") -> Response:
    return Response(Prompt(number, (1,), question, answer), text, text, num_tokens=1, finished=True)


def config(url: str = "http://127.0.0.1:1/v1", **settings: Any) -> RewardConfig:
    return RewardConfig(functions={"judge": 1.0}, judge_url=url, judge_model="the-judge", **settings)


def judge(url: str, cache: ReplyCache | None = None, **settings: Any) -> Judge:
    made = Judge.from_config(config(url, **settings), cache or ReplyCache())
    return replace(made, server=replace(made.server, first_wait_s=0.001))


# ---------------------------------------------------------------------------------------------------------------------
# Scores of single completions


def test_each_completion_gets_the_score_on_the_scale(chat: Callable[[Answer], Chat]) -> None:
    server = chat(by_length)
    scores = judge(server.url)([response("<aaaaa>"), response("<>"), response("<aaaaaaaaaa>"), response("<abc>", 1)])
    assert scores == MarkedScores([0.5, 0.0, 1.0, 0.3], {"judge_failed": [0.0, 0.0, 0.0, 0.0]})


def test_a_request_is_as_the_protocol_says(chat: Callable[[Answer], Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = chat(by_length)
    rubric = "{prompt}|{answer}|{completion}|{low}..{high}"
    judge(server.url, judge_url_key_env="JUDGE_KEY", judge_rubric=rubric, judge_seed=5, judge_max_tokens=9)(
        [response("<a>")]
    )
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.requests == [
        {
            "model": "the-judge",
            "messages": [{"role": "user", "content": "Why?|Because.|<a>|0..10"}],
            "temperature": 0,
            "seed": 5,
            "max_tokens": 9,
        }
    ]


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/x/v1?version=2", "/x/v1/chat/completions?version=2"),
    ],
)
def test_the_address_may_be_the_base_or_the_whole(chat: Callable[[Answer], Chat], address: str, path: str) -> None:
    server = chat(by_length)
    judge(server.url.removesuffix("/v1") + address)([response("<a>")])
    assert server.paths == [path]


def test_names_of_fields_in_a_completion_stay_what_they_are() -> None:
    rubric = Rubric.from_config(config(judge_rubric="P {prompt} A {answer} C {completion}"))
    assert (
        rubric.question("{answer}", "{completion}", "{prompt} {x} {}") == "P {answer} A {completion} C {prompt} {x} {}"
    )


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 0.7),
        ("**Score:** 7.5", 0.75),
        ("The rubric says Score: 0 to 10.\nScore: 4", 0.4),
        ("score:10", 1.0),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: ten", None),
        ("Score: **8**", 0.8),
        ("**Score**: 8", 0.8),
        ("__Score__: 8/10", 0.8),
        ("SCORE: [8]", 0.8),
        (r"Score: $\boxed{8.5}$", 0.85),
        ('{"score": 8}', 0.8),
        ("## Score:\n\n**8**", 0.8),
        ("Score: 1e999", 0.1),
        ("", None),
        ("7", None),
    ],
)
def test_the_last_score_of_a_reply_counts(reply: str, score: float | None) -> None:
    assert Rubric.from_config(config()).score(reply) == (score if score is None else pytest.approx(score, abs=1e-9))


def test_long_replies_without_a_verdict_are_searched_in_no_time(caplog: pytest.LogCaptureFixture) -> None:
    for text in (
        "Score:" + "* " * 50_000,
        "Ranking: " + "answer (" * 20_000,
        "ranking" * 20_000,
        "ranking: 1>" * 9_000,
    ):
        assert Rubric.from_config(config()).score(text) is None and ranks(text, 2) is None
    assert not caplog.messages


def test_scale_and_pattern_are_settings() -> None:
    rubric = Rubric.from_config(config(judge_scale=(-1, 3), judge_pattern=r"<(.*?)>"))
    assert [rubric.score(f"<{text}>") for text in ("-1", "0", "3", "3.5", "nan", "inf", "x")] == [
        0.0,
        0.25,
        1.0,
        None,
        None,
        None,
        None,
    ]
    assert "from -1 (useless) to 3\n" in rubric.question("", "", "")


def test_replies_without_a_score_get_the_default_and_are_counted(chat: Callable[[Answer], Chat]) -> None:
    replies = {"<none>": "I would not say.", "<null>": None, "<list>": [1], "<good>": "Score: 8"}
    server = chat(lambda text: replies[re.findall("<.*>", text)[0]])
    rows = [response(text) for text in replies]
    assert judge(server.url, judge_default=0.25)(rows) == MarkedScores(
        [0.25, 0.25, 0.25, 0.8], {"judge_failed": [1.0, 1.0, 1.0, 0.0]}
    )


THOUGHT = "<think>It might deserve Score: 2 at first, but"


def test_a_reply_that_was_cut_has_no_score_also_from_the_kept_ones(
    chat: Callable[[Answer], Chat], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was cut may be thinking, whatever tags it has, and `Score: 1` the half of `Score: 10`."""
    server = chat(lambda text: (200, chat_body("Hm. Score: 1", "length" if "<cut>" in text else "stop")))
    for _ in range(2):
        rows = [response("<cut>"), response("<whole>")]
        scores = judge(server.url, ReplyCache(Storage.local(tmp_path)), judge_default=0.5)(rows)
        assert scores == MarkedScores([0.5, 0.1], {"judge_failed": [1.0, 0.0]})
    assert len(server.requests) == 2
    assert "(first: 'Hm. Score: 1', which reward.judge_max_tokens cut)" in caplog.text


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (THOUGHT, None),
        (f"\n{THOUGHT} no.</think>\nI will not say.", None),
        (f"{THOUGHT} no.</think>\nScore: 8", 0.8),
        ("Score: 2? No.</think>Score: 8", 0.8),  # the chat template has opened it
        ("The answer has <think> in it. Score: 3", 0.3),
    ],
)
def test_a_score_stands_behind_the_thinking(reply: str, score: float | None) -> None:
    assert Rubric.from_config(config()).score(JudgeReply(reply).conclusion) == score


def test_equal_completions_are_judged_once(chat: Callable[[Answer], Chat]) -> None:
    server = chat(by_length)
    rows = [response("<a>"), response("<bb>"), response("<a>"), response("<a>", 1)]  # the last one of another prompt
    assert judge(server.url)(rows).scores == [0.1, 0.2, 0.1, 0.1]
    assert len(server.requests) == 2


def test_so_many_requests_are_under_way_at_once(chat: Callable[[Answer], Chat]) -> None:
    together = threading.Barrier(3, timeout=20)

    def meet(text: str) -> str:
        together.wait()
        return by_length(text)

    server = chat(meet)
    judge(server.url, judge_parallel=3)([response("<" + "a" * i + ">") for i in range(9)])
    assert (len(server.requests), server.most) == (9, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Rankings


def test_a_group_is_ranked_in_one_request(chat: Callable[[Answer], Chat]) -> None:
    server = chat(longest_first)
    rows = [response("<aaa>"), response("<a>"), response("<aaaaa>"), response("<b>", 1), response("<bb>", 1)]
    scores = judge(server.url, judge_mode="rank")([rows[0], rows[3], rows[1], rows[4], rows[2]])
    assert scores.scores == [0.5, 0.0, 0.0, 1.0, 1.0]
    assert len(server.requests) == 2
    assert all("<a" not in text or "<b" not in text for text in server.asked)


def test_episodes_of_a_prompt_are_a_group_also_where_one_begins_differently(chat: Callable[[Answer], Chat]) -> None:
    server = chat(longest_first)
    rows = [response("<a>"), response("<aaa>"), response("<aa>")]
    rows[1] = replace(rows[1], prompt=replace(rows[1].prompt, token_ids=(7, 8, 9)))
    assert judge(server.url, judge_mode="rank")(rows).scores == [0.0, 1.0, 0.5]
    assert len(server.requests) == 1


def test_equal_completions_of_a_group_share_a_place(chat: Callable[[Answer], Chat]) -> None:
    server = chat(longest_first)
    rows = [response(text) for text in ("<a>", "<aaa>", "<a>", "<aa>")]
    assert judge(server.url, judge_mode="rank")(rows).scores == [0.0, 1.0, 0.0, 0.5]
    assert server.asked[0].count("Answer ") == 3


def test_what_has_nothing_to_be_compared_with_scores_a_half(chat: Callable[[Answer], Chat]) -> None:
    server = chat(longest_first)
    rows = [response("<a>"), response("<b>", 1), response("<b>", 1)]
    assert judge(server.url, judge_mode="rank")(rows) == MarkedScores([0.5] * 3, {"judge_failed": [0.0] * 3})
    assert not server.requests


@pytest.mark.parametrize(
    ("reply", "count", "scores"),
    [
        ("Ranking: 2 > 1", 2, [0.0, 1.0]),
        ("Ranking: 3>1>2", 3, [0.5, 0.0, 1.0]),
        ("Ranking: 1 > 2 > 3\nNo.\n**Ranking:** 2 > 3 > 1 > 4", 4, [1 / 3, 1.0, 2 / 3, 0.0]),
        ("Ranking: **2 > 1**", 2, [0.0, 1.0]),
        ("**Ranking**: **2** > **1**", 2, [0.0, 1.0]),
        ("RANKING: [2] > [1] > #3", 3, [0.5, 1.0, 0.0]),
        ("Ranking:\nAnswer 2 > Answer 1", 2, [0.0, 1.0]),
        (r"Ranking: $\boxed{2 > 1}$", 2, [0.0, 1.0]),
        ("Ranking: Answer 2, then Answer 1", 2, None),
        ("Ranking: 1 > 2", 3, None),
        ("Ranking: 1 > 1 > 2", 3, None),
        ("Ranking: 0 > 1", 2, None),
        ("Ranking: 1 > 2 > 99999999999999999999", 3, None),
        ("Ranking: none", 2, None),
        ("", 2, None),
    ],
)
def test_ranks_become_scores(reply: str, count: int, scores: list[float] | None) -> None:
    assert ranks(reply, count) == (scores if scores is None else pytest.approx(scores, abs=1e-9))


def test_a_ranking_that_cannot_be_read_fails_its_group_only(chat: Callable[[Answer], Chat]) -> None:
    server = chat(lambda text: "Ranking: 1" if "<a>" in text else longest_first(text))
    rows = [response("<a>"), response("<b>", 1), response("<aa>"), response("<bb>", 1)]
    assert judge(server.url, judge_mode="rank", judge_default=-1.0)(rows) == MarkedScores(
        [-1.0, 0.0, -1.0, 1.0], {"judge_failed": [1.0, 0.0, 1.0, 0.0]}
    )


def test_the_order_follows_from_the_seed_and_favours_no_place() -> None:
    texts = [f"text {i}" for i in range(4)]
    assert shuffled(texts, 1, "p") == shuffled(texts[::-1], 1, "p")
    firsts = [shuffled(texts, 1, f"prompt {i}").index("text 0") for i in range(400)]
    assert all(70 < firsts.count(place) < 130 for place in range(4))
    assert len({tuple(shuffled(texts, seed, "p")) for seed in range(20)}) > 5


def test_a_judge_that_prefers_the_first_place_gives_nothing_away(chat: Callable[[Answer], Chat]) -> None:
    server = chat(lambda text: "Ranking: 1 > 2")
    rows = [response(text, number) for number in range(60) for text in ("<x>", "<y>")]
    rows = [replace(row, prompt=replace(row.prompt, question=f"Q{row.prompt.id}")) for row in rows]
    scores = judge(server.url, judge_mode="rank")(rows).scores
    assert 15 < sum(scores[::2]) < 45  # of 60: neither all for the completion that came first, nor none


# ---------------------------------------------------------------------------------------------------------------------
# Replies that are kept


@pytest.mark.parametrize("mode", ["score", "rank"])
def test_a_resume_asks_nothing_twice(chat: Callable[[Answer], Chat], tmp_path: Path, mode: str) -> None:
    server = chat(by_length if mode == "score" else longest_first)
    folder = Storage.local(tmp_path) / "judge"
    rows = [response("<" + "a" * i + ">", i // 4) for i in range(8)]
    first = judge(server.url, ReplyCache(folder), judge_mode=mode)(rows)
    asked = len(server.requests)
    server.answer = lambda text: (500, "gone")
    assert judge(server.url, ReplyCache(folder), judge_mode=mode)(rows) == first
    assert len(server.requests) == asked
    assert not judge(server.url, ReplyCache(folder), judge_mode=mode, on_timeout="fail")(rows[:4]).marks[
        "judge_failed"
    ][0]


def test_replies_of_all_ranks_are_found_by_any_number_of_them(chat: Callable[[Answer], Chat], tmp_path: Path) -> None:
    server, folder = chat(by_length), Storage.local(tmp_path) / "judge"
    for rank in range(3):
        judge(server.url, ReplyCache(folder))([response(f"<{'a' * rank}>")])
    assert len(folder.names()) == 3
    judge(server.url, ReplyCache(folder))([response(f"<{'a' * rank}>") for rank in range(3)])
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"judge_rubric": "Another {completion}"},
        {"judge_seed": 1},
        {"judge_max_tokens": 7},
    ],
)
def test_another_question_is_asked_anew(chat: Callable[[Answer], Chat], tmp_path: Path, change: dict[str, Any]) -> None:
    server, folder = chat(by_length), Storage.local(tmp_path)
    judge(server.url, ReplyCache(folder))([response("<a>")])
    judge(server.url, ReplyCache(folder), **change)([response("<a>")])
    judge(server.url, ReplyCache(folder))([response("<a>", question="How?"), response("<b>")])
    assert len(server.requests) == 4


def test_another_scale_reads_the_kept_replies_again(chat: Callable[[Answer], Chat], tmp_path: Path) -> None:
    server, folder = chat(by_length), Storage.local(tmp_path)
    rubric = "{completion}"
    assert judge(server.url, ReplyCache(folder), judge_rubric=rubric)([response("<abcde>")]).scores == [0.5]
    other = judge(server.url, ReplyCache(folder), judge_rubric=rubric, judge_scale=(0, 20))
    assert other([response("<abcde>")]).scores == [0.25]
    assert len(server.requests) == 1


def test_replies_before_a_failure_are_kept(chat: Callable[[Answer], Chat], tmp_path: Path) -> None:
    server = chat(lambda text: (500, "no") if "<bad>" in text else by_length(text))
    asked = judge(server.url, ReplyCache(Storage.local(tmp_path)), judge_parallel=1, url_retries=0)
    with pytest.raises(RewardError):
        asked([response("<a>"), response("<bad>")])
    judge(server.url, ReplyCache(Storage.local(tmp_path)))([response("<a>")])
    assert len(server.requests) == 2


def test_files_that_hold_no_replies_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps({"request": "k", "reply": "Score: 1"})
    for name, text in {"a": good, "b": good + "\n{", "c": "[1]", "d": '{"request": 1}', "e": "\0"}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "f.jsonl").write_bytes(b"\xff")
    (tmp_path / "other.txt").write_text("{")
    assert ReplyCache(Storage.local(tmp_path)).get("k") == JudgeReply("Score: 1")
    assert len([line for line in caplog.messages if "holds no replies" in line]) == 5


def test_a_folder_that_cannot_be_written_costs_no_run(
    chat: Callable[[Answer], Chat], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    server, cache = chat(by_length), ReplyCache()
    cache._folder = Storage.local(tmp_path / "file") / "judge"
    assert judge(server.url, cache)([response("<a>")]).scores == [0.1]
    assert any("are not kept" in line for line in caplog.messages)


def test_memory_holds_replies_of_a_limited_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_module, "_MOST", 10)
    cache = ReplyCache(Storage.local(tmp_path))
    for key, reply in (("a", "1234"), ("b", "12345678"), ("b", "1234"), ("c", "123456")):
        cache.add(key, JudgeReply(reply))
    assert [cache.get(key) for key in "abc"] == [None, JudgeReply("1234"), JudgeReply("123456")]
    cache.add("d", JudgeReply("x" * 11))
    assert [cache.get(key) for key in "bcd"] == [None] * 3
    cache.flush()
    read = ReplyCache(Storage.local(tmp_path))  # the last reply is too long
    assert [read.get(key) for key in "abcd"] == [None] * 4


def test_keys_differ_with_all_of_a_request() -> None:
    requests = [{"a": 1, "b": [1]}, {"a": 1, "b": [2]}, {"a": 1}, {"a": 1.0}]
    assert len({key_of(each) for each in requests}) == 4
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


# ---------------------------------------------------------------------------------------------------------------------
# Failures, and what is refused before the start


@pytest.mark.parametrize("answer", [(500, "x"), (429, ""), (200, "<html>"), (200, "{}"), (200, '{"choices": []}')])
def test_a_failure_is_followed_by_another_attempt(chat: Callable[[Answer], Chat], answer: tuple[int, str]) -> None:
    turns = iter([answer])
    server = chat(lambda text: next(turns, "Score: 9"))
    assert judge(server.url)([response("<a>")]).scores == [0.9]
    assert len(server.requests) == 2


UNUSABLE = [
    (400, "the text is too long"),
    (200, "<html>"),
    (200, "{}"),
    (200, '{"choices": []}'),
    (200, " " * (MAX_ANSWER_BYTES + 1)),
]
"""answers to a request that no further attempt mends"""


@pytest.mark.parametrize("on_timeout", ["fail", "zero"])
@pytest.mark.parametrize("answer", UNUSABLE)
def test_one_answer_of_no_use_ends_no_run(
    chat: Callable[[Answer], Chat], answer: tuple[int, str], on_timeout: str
) -> None:
    server = chat(lambda text: answer if "<bad>" in text else by_length(text))
    scores = judge(server.url, url_retries=1, on_timeout=on_timeout, judge_default=0.25)(
        [response("<bad>"), response("<aaa>")]
    )
    assert scores == MarkedScores([0.25, 0.3], {"judge_failed": [1.0, 0.0]})
    assert len(server.requests) == (2 if answer[0] == 400 else 3)


def test_a_group_without_a_ranking_ends_no_run(chat: Callable[[Answer], Chat]) -> None:
    server = chat(lambda text: (400, "too long") if "<a>" in text else longest_first(text))
    rows = [response("<a>"), response("<b>", 1), response("<aa>"), response("<bb>", 1)]
    assert judge(server.url, judge_mode="rank")(rows) == MarkedScores(
        [0.0, 0.0, 0.0, 1.0], {"judge_failed": [1.0, 0.0, 1.0, 0.0]}
    )


def test_an_answer_of_no_use_among_attempts_without_one_is_an_answer(chat: Callable[[Answer], Chat]) -> None:
    turns = iter([(200, "{}")])
    server = chat(lambda text: by_length(text) if "<a>" in text else next(turns, (500, "busy")))
    assert judge(server.url, url_retries=1)([response("<a>"), response("<bad>")]).marks == {"judge_failed": [0.0, 1.0]}


@pytest.mark.parametrize("on_timeout", ["fail", "zero"])
@pytest.mark.parametrize("answer", UNUSABLE)
def test_a_judge_that_gives_no_reply_at_all_ends_the_run(
    chat: Callable[[Answer], Chat], answer: tuple[int, str], on_timeout: str
) -> None:
    server = chat(lambda text: answer)
    with pytest.raises(RewardError, match=r"^reward judge_url: http://127.0.0.1:\d+/v1/chat/completions answered "):
        judge(server.url, url_retries=0, on_timeout=on_timeout)([response("<a>"), response("<b>")])


def test_a_refusal_ends_a_run_in_which_the_judge_is_away_otherwise(chat: Callable[[Answer], Chat]) -> None:
    server = chat(lambda text: (403, "revoked") if "<b>" in text else (500, "busy"))
    rows = [response("<a>"), response("<b>"), response("<c>")]
    with pytest.raises(RewardError, match="403 Forbidden: revoked"):
        judge(server.url, url_retries=0, on_timeout="zero")(rows)
    with pytest.raises(RewardError, match="500 Internal Server Error: busy"):
        judge(server.url, url_retries=0, judge_parallel=1)(rows)
    server.answer = lambda text: (403, "revoked") if "<b>" in text else by_length(text)
    assert judge(server.url)(rows).marks == {"judge_failed": [0.0, 1.0, 0.0]}


def test_a_run_is_told_once_that_the_judge_gave_no_score(
    chat: Callable[[Answer], Chat], caplog: pytest.LogCaptureFixture
) -> None:
    replies = {"<good>": "Score: 8", "<none>": "I would\nnot say. " + "x" * 200, "<bad>": (400, "too long")}
    server = chat(lambda text: replies[re.findall("<.*>", text)[0]])
    asked = judge(server.url, judge_default=0.25)
    asked([response("<good>")])
    assert not caplog.messages
    for _ in range(2):
        asked([response("<none>"), response("<bad>"), response("<bad>"), response("<good>")])
    (line,) = caplog.messages
    assert line.startswith("reward judge: 2 of 3 replies gave no score (first: 'I would\\nnot say. xxx")
    assert line.endswith("x...); they score reward.judge_default 0.25")
    judge(server.url)([response("<bad>"), response("<good>")])
    assert caplog.messages[1:] == [
        f"reward judge: 1 of 2 replies gave no score (first: reward judge_url: {server.url}/chat/completions "
        "answered 400 Bad Request: too long (1 attempt)); they score reward.judge_default 0"
    ]


def test_a_run_is_told_of_rankings_that_cannot_be_read(
    chat: Callable[[Answer], Chat], caplog: pytest.LogCaptureFixture
) -> None:
    server = chat(lambda text: "Ranking: 1" if "<a>" in text else longest_first(text))
    rows = [response("<a>"), response("<b>", 1), response("<aa>"), response("<bb>", 1), response("<c>", 2)]
    judge(server.url, judge_mode="rank")(rows)
    assert caplog.messages == [
        "reward judge: 1 of 2 replies gave no score (first: 'Ranking: 1'); they score reward.judge_default 0"
    ]


def test_the_error_names_the_address_without_secrets(
    chat: Callable[[Answer], Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = chat(lambda text: (401, f"bad key {KEY}"))
    asked = judge(server.url, judge_url_key_env="JUDGE_KEY")
    with pytest.raises(RewardError) as caught:
        asked([response("<a>")])
    assert str(caught.value) == (
        f"reward judge_url: {server.url}/chat/completions answered 401 Unauthorized: bad key *** (1 attempt)"
    )
    assert KEY not in repr(asked)


def test_a_server_that_is_away_may_cost_scores_instead_of_the_run() -> None:
    rows = [response("<a>"), response("<b>")]
    with pytest.raises(RewardError, match=r"^reward judge_url: http://127.0.0.1:1/v1/chat/completions failed: .*2 att"):
        judge("http://127.0.0.1:1/v1", url_retries=1)(rows)
    scores = judge("http://127.0.0.1:1/v1", url_retries=1, on_timeout="zero", judge_default=0.1)(rows)
    assert scores == MarkedScores([0.1, 0.1], {"judge_failed": [1.0, 1.0]})


def test_a_slow_judge_is_not_waited_for(chat: Callable[[Answer], Chat]) -> None:
    leave = threading.Event()
    server = chat(lambda text: leave.wait(20) and "Score: 1")
    try:
        with pytest.raises(RewardError, match=r"did not answer within 0.2 s \(1 attempt\)"):
            judge(server.url, timeout_s=0.2, url_retries=0)([response("<a>")])
    finally:
        leave.set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge_model": "m"}, "reward.functions has judge, which needs reward.judge_url"),
        ({"judge_url": "http://h/v1"}, "reward.functions has judge, which needs reward.judge_model"),
        ({"judge_url": "http://u:p@h/v1", "judge_model": "m"}, "use reward.judge_url_key_env"),
        ({"judge_url": "http://h/v1?api_key=x", "judge_model": "m"}, "use reward.judge_url_key_env"),
        ({"judge_url": "http://h", "judge_model": "m", "judge_scale": [3, 3]}, "must be less than the highest"),
        ({"judge_url": "http://h", "judge_model": "m", "judge_pattern": "("}, "not a regular expression"),
        ({"judge_url": "http://h", "judge_model": "m", "judge_mode": "best"}, "reward.judge_mode"),
        ({"judge_url": "http://h", "judge_model": "m", "functions": {"task": 1}}, "gives judge no weight"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_tree({"reward": {"functions": {"judge": 1}} | settings}, "test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"judge_rubric": "Be strict."},
            "reward.judge_rubric Be strict.: no such file of text, and as a rubric",
        ),
        ({"judge_rubric": "{prompt}"}, "reward.judge_rubric: reward.judge_mode score needs {completion} in it"),
        ({"judge_rubric": "{completion}", "judge_mode": "rank"}, "reward.judge_mode rank needs {completions} in it"),
        ({"judge_rubric": "{reference} {completion}"}, "reward.judge_rubric: no field {reference}; nearest: {answer}"),
        ({"judge_rubric": "{promt} {completion}"}, "reward.judge_rubric: no field {promt}; nearest: {prompt}"),
        ({"judge_url": "ftp://h"}, "reward.judge_url: expected an address like http://HOST:PORT/PATH"),
        (
            {"judge_url_key_env": "NO_SUCH_KEY"},
            "reward.judge_url_key_env: there is no environment variable NO_SUCH",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(settings: dict[str, Any], message: str) -> None:
    reward = config().model_copy(update=settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_rewards(reward)


def test_the_first_prompt_is_tried_before_the_start(
    chat: Callable[[Answer], Chat], caplog: pytest.LogCaptureFixture
) -> None:
    server = chat(lambda text: (404, "no model the-judge"))
    prompts = [Prompt(0, (), "Why?", "<a>")]
    with pytest.raises(RewardError, match="answered 404 Not Found: no model the-judge"):
        scoring.try_rewards(config(server.url), prompts, on_gpu=False)
    server.answer = lambda text: by_length(text) if text else (400, "an empty answer")
    with pytest.raises(RewardError, match="answered 400 Bad Request: an empty answer"):
        scoring.try_rewards(config(server.url, judge_rubric="{completion}"), prompts, on_gpu=False)
    server.answer = lambda text: "I cannot say."
    with pytest.raises(RewardError, match=r"no score is in what it replied, where .* from 0 to 10: 'I cannot say\.'"):
        scoring.try_rewards(config(server.url), prompts, on_gpu=False)
    with pytest.raises(RewardError, match=r"which should end with all numbers, as in 'Ranking: 2 > 1': 'I cannot say"):
        scoring.try_rewards(config(server.url, judge_mode="rank"), prompts, on_gpu=False)
    server.answer = lambda text: "Score: 5" if "<a>" in text else "Nothing to judge."
    with caplog.at_level(logging.WARNING, logger="rlx"):
        scoring.try_rewards(config(server.url, judge_rubric="{completion}"), prompts, on_gpu=False)
    assert caplog.messages == [
        "reward judge: 1 of 2 replies gave no score (first: 'Nothing to judge.'); they score reward.judge_default 0"
    ]


def test_the_text_of_a_rubric_travels_with_the_settings(tmp_path: Path) -> None:
    """Other nodes need not have the file, and a resume does not depend on it."""
    file = tmp_path / "rubric.txt"
    file.write_text("Is it short? {completion}\n")
    run = from_tree({"reward": config(judge_rubric=str(file)).model_dump()}, "test")
    assert rubric_text(run.reward) == "Is it short? {completion}\n"
    assert absolute_paths(run)["reward.judge_rubric"] == "Is it short? {completion}\n"
    assert rubric_text(config()) is None


def test_the_general_rubrics_hold_every_field() -> None:
    for text, fields in ((SCORE, ("completion", "low", "high")), (RANK, ("completions",))):
        assert {f"{{{name}}}" in text for name in ("prompt", "answer", *fields)} == {True}
    compared = Rubric.from_config(config(judge_mode="rank")).comparison("P", "A", ["one", "two {answer}"])
    assert "Answer 1:\none\n\nAnswer 2:\ntwo {answer}\n" in compared


def test_all_of_it_through_the_sum(chat: Callable[[Answer], Chat]) -> None:
    server = chat(by_length)
    reward = config(server.url)
    local = {"task": lambda rows: [0.0] * len(rows)}
    scores = scoring.score([response("<abcde>")], {**local, "judge": judge(server.url)}, reward)
    assert (scores.total, scores.by_function["judge_failed"]) == ([0.5], [0.0])
    assert reward.reported == ["judge", "judge_failed"]
