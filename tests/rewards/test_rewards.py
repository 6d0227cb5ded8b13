"""Answers out of completions, what they score by each function, and how the scores of several add up."""

import itertools
import json
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import CORRECTNESS, SCORERS, RewardConfig
from rlx.rewards import scoring
from rlx.rewards.custom import RewardError, check_functions, load_function
from rlx.rewards.functions import REWARDS, exact_match, extract_answers, math_verify, numeric
from rlx.rewards.math_verifier import MathVerifier
from rlx.rewards.scoring import Scores
from rlx.types import Checker, GivenAnswer, Prompt, Response, Scorer

FIRST, SECOND = "What is 1 + 1?", "What\nis " + "very " * 100 + "long?"


def response(given: str | None = "", answer: str = "", text: str = "", tokens: int = 1, number: int = 0) -> Response:
    question = SECOND if number else FIRST
    return Response(
        Prompt(number, (1,), question, answer, dataset_index=10 + number), text, given, tokens, finished=True
    )


def never() -> Checker:
    def check(answers: Sequence[GivenAnswer]) -> list[float]:
        raise AssertionError("asked")

    return check


def wrong() -> Checker:
    return lambda answers: [0.0] * len(answers)


def constant(*scores: Any) -> Scorer:
    return lambda responses: scores


def one(name: str, row: Response, **settings: Any) -> Sequence[float]:
    config = RewardConfig(functions={name: 1.0}, **settings)
    return list(scoring.scores_of(scoring.scorers(config, never)[name]([row])))


# ---------------------------------------------------------------------------------------------------------------------
# The answer


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (None, "  4 2\n", "4 2"),
        (None, "", ""),
        (r"\d+", "1 then 22 then 333.", "333"),
        (r"answer: (\w+)", "answer: a, no, answer: b", "b"),
        (r"(\d+) of (\d+)", "3 of 4", "3"),
        (r"<(.*)>", "< 7 >", "7"),
        (r"\d+", "none", None),
        (r"is (\d+)|unknown", "is 4? unknown", None),
        (r"<(.*)>", "<>", ""),
    ],
)
def test_the_answer_is_the_last_match(pattern: str | None, text: str, answer: str | None) -> None:
    assert extract_answers([text, text], pattern) == [answer, answer]


@pytest.mark.parametrize(
    ("given", "expected", "right"),
    [
        ("1,000", "1000", True),
        ("1000.0", "1,000", True),
        ("-12,345.50e2", "-1234550", True),
        ("0,123", "123", False),
        ("1.234,567", "1.234567", False),
        ("1.5,000", "1.5", False),
        ("007,000", "7000", False),
        ("1__0", "10", False),
        ("_5", "5", False),
        ("+1e3", "1000", True),
        (" -7 ", "-7", True),
        ("1,234,567.5", "1234567.5", True),
        ("0.30000000000000004", "0.3", False),
        ("0.30", ".3", True),
        ("1000000000000001", "1000000000000000", False),
        ("123456789012346", "123456789012345", False),
        ("1" * 400, "1" * 399 + "2", False),
        ("1e400", "1" + "0" * 400, True),
        ("inf", "9" * 400, False),
        ("1e999", "9" * 400, False),
        ("Infinity", "inf", False),
        ("sNaN", "7", False),
        ("12345678901", "12345678902", False),
        ("0.3000001", "0.3", False),
        ("1,2", "12", False),
        ("1,23,456", "123456", False),
        ("1000,000", "1000000", True),
        ("", "0", False),
        ("seven", "7", False),
        ("nan", "nan", False),
        ("7", "seven", False),
    ],
)
def test_numeric(given: str, expected: str, right: bool) -> None:
    assert numeric(given, expected) == float(right)


@hypothesis_settings(deadline=None)
@drawn(st.integers(-(10**12), 10**12))
def test_a_number_is_the_same_in_every_notation_and_its_neighbour_is_another(number: int) -> None:
    for text in (f"{number:,}", f"{number:+d}", f"{number}.0", f" {number}\n", f"{number:.12e}"):
        assert numeric(text, str(number)) == 1.0
        assert numeric(text, str(number + 1)) == 0.0


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match(" a b\n", "a b") == 1.0
    assert exact_match("a  b", "a b") == 0.0
    assert exact_match("A", "a") == 0.0


@pytest.mark.parametrize(
    ("given", "expected", "right"),
    [
        ("1/2", "0.5", True),
        (r"\frac{2}{4}", "1/2", True),
        (r"\frac12", r"$\dfrac{1}{2}$", True),
        (r"thus $x = \boxed{5}$", "5", True),
        (r"\boxed{5}", "5", True),
        (r"\(5\)", "5", True),
        ("The total is 18", "18", True),
        ("-7", "- 7", True),
        (r"10\,000", "10000", True),
        ("10 000", "10000", True),
        ("1e6", "1000000", True),
        ("50%", "1/2", True),
        (r"x = 2\sqrt{3}", r"\sqrt{12}", True),
        ("(x+1)^2", "x^2 + 2x + 1", True),
        (r"\{3, 1\}", r"\{1, 3\}", True),
        ("5", "6", False),
        ("0.333", "1/3", False),
        (r"2\sqrt{3}", "2", False),
        ("2", r"2\sqrt{3}", False),
        ("x + 1", "x + 2", False),
        ("", "0", False),
        ("{{{", "0", False),
        ("\\", "\\", False),
        ("\x00\ud800", "0", False),
        ("no number at all", "no number at all", False),
        ("(" * 60, "1", False),
    ],
)
def test_math_verify(given: str, expected: str, right: bool) -> None:
    assert math_verify([(given, expected)]) == [float(right)]


def test_math_verify_works_in_a_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(math_verify([("3/4", "0.75"), ("3/4", "0.76")])))
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]


HOSTILE = (r"\binom{100000000}{50000000}", "9^9^9^9", r"2^{2^{2^{2^{2^{2}}}}}")


@pytest.mark.slow
def test_answers_that_take_for_ever_are_wrong_and_others_are_judged() -> None:
    verifier = MathVerifier(seconds=1.0, batch_seconds=2.0)  # on a busy machine a sound answer may take half a second
    pairs = [(answer, str(i)) for i in range(4) for answer in (*HOSTILE, str(i))]
    assert verifier.are_equal(pairs) == [answer == expected for answer, expected in pairs]
    assert verifier.are_equal([("1/2", "0.5")] * 3) == [True] * 3
    verifier.close()


@pytest.mark.slow
def test_hundreds_of_hostile_answers_and_patterns_leave_the_others_their_scores() -> None:
    hostile = [response(f"{HOSTILE[i % 3]} + {i}", "1", text="a" * 40 + "!" * (i % 7 + 1)) for i in range(256)]
    config = RewardConfig(functions={"math_verify": 1.0, "format": 1.0}, format_pattern=r"((a|aa)+)+(b|c)")
    sound = response(r"\frac{1}{2}", "0.5", text="aab")
    scores = scoring.score([*hostile, sound], scoring.scorers(config, never), config)
    assert scores.total == [0.0] * 256 + [2.0]


def test_a_pattern_that_takes_for_ever_matches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    texts = ["a" * 40 + "!", "1", "a" * 50 + "!", "2"]
    assert extract_answers(texts, r"\d|(?:(?:a|aa)+)+\d") == [None, "1", None, "2"]
    assert "took too long on 2 of 4 completions" in caplog.text


def test_without_math_verify_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(RuntimeError, match="is math-verify installed"):
        MathVerifier().are_equal([("1", "2")])


# ---------------------------------------------------------------------------------------------------------------------
# Scorers


def test_every_name_in_the_settings_has_a_scorer_here_or_elsewhere() -> None:
    assert {*REWARDS, "task", "model", "url", "judge"} == set(SCORERS)
    settings: Any = {"format_pattern": "x", "length_target": 1, "model": "m", "url": "http://h"}
    settings |= {"judge_url": "http://h", "judge_model": "m"}
    config = RewardConfig(functions=dict.fromkeys(SCORERS, 1.0), **settings)
    assert set(scoring.scorers(config, never)) == {*REWARDS, "task"}


@pytest.mark.parametrize(
    ("name", "given", "answer", "score"),
    [
        ("exact_match", "7", "7", 1.0),
        ("exact_match", "7.0", "7", 0.0),
        ("numeric", "7.0", "7", 1.0),
        ("numeric", "14/2", "7", 0.0),
        ("math_verify", "14/2", "7", 1.0),
        ("math_verify", "14/3", "7", 0.0),
    ],
)
def test_answers_are_judged_by_the_named_function(name: str, given: str, answer: str, score: float) -> None:
    assert one(name, response(given, answer, text=f"it is {given}, I think")) == [score]


@pytest.mark.parametrize("name", [name for name in CORRECTNESS if name != "environment"])  # it judges episodes
def test_no_answer_is_wrong_even_where_none_is_expected(name: str) -> None:
    assert one(name, response(None, "")) == [0.0]


def test_the_tasks_checker_gets_answer_expected_and_entry() -> None:
    asked = []

    def checker(answers: Sequence[GivenAnswer]) -> list[float]:
        asked.append(list(answers))
        return [0.25] * len(answers)

    task = scoring.scorers(RewardConfig(), lambda: checker)["task"]
    assert task([response("5", "a"), response(None, "b"), response("6", "c", number=1)]) == [0.25, 0.0, 0.25]
    assert task([response(None, "b")]) == [0.0]
    assert asked == [[GivenAnswer("5", "a", 10), GivenAnswer("6", "c", 11)]]


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        (r"<think>.*</think>\d+", "<think>a\nb</think>42", 1.0),
        (r"<think>.*</think>\d+", " <think>a</think>42", 0.0),
        (r"<think>.*</think>\d+", "<think>a</think>42\n", 0.0),
        (r"a|ab", "ab", 1.0),
        (r"", "", 1.0),
    ],
)
def test_format_is_of_the_whole_text_with_or_without_an_answer(pattern: str, text: str, score: float) -> None:
    assert one("format", response(None, text=text), format_pattern=pattern) == [score]


@pytest.mark.parametrize(("tokens", "score"), [(0, -1.0), (5, -0.5), (10, 0.0), (13, -0.3), (20, -1.0), (500, -1.0)])
def test_length_is_the_relative_distance_to_the_target(tokens: int, score: float) -> None:
    assert one("length", response(tokens=tokens), length_target=10) == [pytest.approx(score)]


@hypothesis_settings(deadline=None)
@drawn(st.integers(0, 10**6), st.integers(1, 10**6))
def test_length_is_best_at_the_target_alone_and_bounded(tokens: int, target: int) -> None:
    (score,) = one("length", response(tokens=tokens), length_target=target)
    assert -1 <= score <= 0
    assert (score == 0) == (tokens == target)
    assert (score == -1) == (tokens == 0 or tokens >= 2 * target)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of one's own

Write = Callable[..., str]
_fresh = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts a module into the working directory, which no path names yet, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])

    def write(source: str, name: str = "") -> str:
        name = name or f"own_rewards_{next(_fresh)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_a_function_of_ones_own_gets_lists_by_keyword(write: Write) -> None:
    source = "def f(answers, completions, *, prompts, **more):\n    assert not more\n"
    module = write(
        f"{source}    open('shown', 'w').write(repr([prompts, completions, answers]))\n    return range(2)\n"
    )
    name = f"{module}:f"
    scorer = scoring.scorers(RewardConfig(functions={name: 1.0}), never)[name]
    assert scorer([response(None, "a", text="x y"), response("3", "b", text="z", number=1)]) == [0.0, 1.0]
    assert Path("shown").read_text() == repr([[FIRST, SECOND], ["x y", "z"], ["a", "b"]])


SOUND = "def helpful(prompts, completions, answers): return [0.0] * len(prompts)\n"


@pytest.mark.parametrize(
    ("source", "function", "complaint"),
    [
        (SOUND, "helpfull", "{m}.py) has no helpfull; nearest: helpful"),
        (SOUND + "helpfuls = 3", "helpfuls", "helpfuls is not a function but int; nearest: helpful"),
        (
            "def f(prompts, completion, answers): ...",
            "f",
            "missing a required argument: 'completion'; nearest: completions",
        ),
        ("def f(prompts, completions): ...", "f", "got an unexpected keyword argument 'answers'"),
        ("def f(prompts, completions, answers, tokenizer): ...", "f", "missing a required argument: 'tokenizer'"),
        ("def f(prompts, completions, answers, /): ...", "f", "positional"),
        ("f = dict.fromkeys", "f", "must take prompts, completions, answers by keyword"),
        (
            "async def f(prompts, completions, answers): return [1.0]",
            "f",
            "f is async, expected a function",
        ),
        ("async def f(prompts, completions, answers): yield 1.0", "f", "f is async, expected a function"),
        (
            "class F:\n    async def __call__(self, prompts, completions, answers): return [1.0]\nf = F()",
            "f",
            "f is async, expected a function that returns its scores: asyncio.run in it awaits",
        ),
        ("f = max", "f", "a built-in function without a signature"),
        ("1 / 0", "f", "importing {m} failed: ZeroDivisionError('division by zero')"),
        ("import absent_package", "f", "importing {m} failed: ModuleNotFoundError"),
        ("def f(:", "f", "importing {m} failed: SyntaxError"),
        ("raise ModuleNotFoundError", "f", "importing {m} failed: ModuleNotFoundError()"),
        ("raise SystemExit(2)", "f", "importing {m} failed: SystemExit(2)"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_it_is_asked(
    write: Write, source: str, function: str, complaint: str
) -> None:
    module = write(source)
    with pytest.raises(ConfigError) as caught:
        check_functions(RewardConfig(functions={f"{module}:{function}": 1.0}))
    message = str(caught.value)
    assert message.startswith(f"reward.functions {module}:{function}: ")
    assert complaint.format(m=module) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("own_judgment:f", "no module own_judgment; nearest: own_judgement"),
        ("email.mesage:f", "no module email.mesage; nearest: email.message"),
        ("email.message.deep:f", "no module email.message.deep"),
        ("qqqqqqqqqqqq:f", "no module qqqqqqqqqqqq"),
    ],
)
def test_a_module_that_is_not_there_is_named_with_the_nearest(write: Write, name: str, complaint: str) -> None:
    write(SOUND, "own_judgement")
    with pytest.raises(ConfigError) as caught:
        load_function(name)
    assert str(caught.value) == f"reward.functions {name}: {complaint}"


def test_the_working_directory_hides_no_module_of_the_same_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    write("def f(prompts, completions, answers): ...", "tabnanny")
    with pytest.raises(ConfigError) as refused:
        load_function("tabnanny:f")
    file = sys.modules["tabnanny"].__file__
    assert str(refused.value) == f"reward.functions tabnanny:f: tabnanny ({file}) has no f" and str(file).startswith(
        "/"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return [1 / len(c) for c in completions]", r"raised ZeroDivisionError\('division by zero'\) at \S+\.py:3"),
        ("return (1 / len(c) for c in completions)", r"raised ZeroDivisionError\('division by zero'\) at \S+\.py:3"),
        ("import sys; sys.exit(3)", r"raised SystemExit\(3\) at \S+\.py:3"),
        ("raise KeyboardInterrupt", r"raised KeyboardInterrupt\(\) at \S+\.py:3"),
        ("import os; os._exit(3)", r"ended its process \(exit code 3\)"),
        ("import os; os.abort()", r"ended its process \(SIGABRT\)"),
        ("import time; time.sleep(60)", r"took longer than 3 s"),
        ("import re; re.match('((a|aa)+)+b', 'a' * 99)", r"took longer than 3 s"),
    ],
    ids=str,
)
def test_what_a_function_of_ones_own_does_names_it_and_the_next_call_is_answered(
    write: Write, body: str, complaint: str
) -> None:
    name = write(f"def f(prompts, completions, answers):\n    if all(completions): return [0.5]\n    {body}\n") + ":f"
    config = RewardConfig(functions={name: 1.0}, timeout_s=3)
    scorers = scoring.scorers(config, wrong)
    with pytest.raises(RewardError) as caught:
        scoring.score([response(text="")], scorers, config)
    assert re.fullmatch(
        rf"reward {name}: {complaint}, for 1 responses, from prompt 0 \('{re.escape(FIRST)}'\) on", str(caught.value)
    )
    details = json.loads(caught.value.details.partition("called with")[2])
    assert details["completions"] == [""]
    assert ("Traceback" in caught.value.details) == ("raised" in complaint)
    assert scoring.score([response(text="x")], scorers, config).total == [0.5]


@pytest.mark.slow
def test_a_late_function_may_score_nothing(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    name = write("import time\ndef f(prompts, completions, answers): time.sleep(60)\n") + ":f"
    config = RewardConfig(functions={name: 1.0}, timeout_s=2, on_timeout="zero")
    scores = scoring.score([response(text="")], scoring.scorers(config, wrong), config)
    assert scores.total == scores.by_function[name] == [0.0] and scores.by_function[f"{name}_late"] == [1.0]
    assert config.reported == [name, f"{name}_late"]
    assert f"reward {name}: took longer than 2 s: 0 for 1 responses" in caplog.text


@pytest.mark.slow
def test_a_function_that_cannot_be_imported_any_more_is_named(write: Write) -> None:
    config = RewardConfig(functions={"gone_since:f": 1.0})
    with pytest.raises(RewardError, match=r"reward gone_since:f: raised ConfigError.*no module gone_since"):
        scoring.score([response(text="")], scoring.scorers(config, wrong), config)


@pytest.mark.parametrize(
    ("scores", "complaint"),
    [
        ({"task": 1e300}, "reward task: 1e+300 is too large a score"),
        ({"task": 1e18, "m:f": 1e18}, "reward: the weighted sum 2e+18 is too large"),
    ],
)
def test_scores_too_large_to_train_on_are_refused(scores: dict[str, float], complaint: str) -> None:
    config = RewardConfig(functions=dict.fromkeys(scores, 1.0))
    with pytest.raises(RewardError) as caught:
        scoring.score([response()], {name: constant(score) for name, score in scores.items()}, config)
    assert str(caught.value) == f"{complaint}, for prompt 0 ({FIRST!r})"


# ---------------------------------------------------------------------------------------------------------------------
# Several at once


def test_scores_are_added_by_weight_and_kept_apart() -> None:
    config = RewardConfig(functions={"length": 0.5, "numeric": 2.0, "m:f": -1.0, "exact_match": 0.0}, length_target=9)
    scorers = {
        "length": constant(-1.0, 0.0),
        "numeric": constant(0.5, 1.0),
        "m:f": constant(3, 0.25),
        "exact_match": constant(100.0, -100.0),
    }
    assert scoring.score([response(), response(number=1)], scorers, config) == Scores(
        total=[-2.5, 1.75],
        by_function={"length": [-1, 0], "numeric": [0.5, 1], "m:f": [3, 0.25], "exact_match": [100, -100]},
        is_correct=[False, True],
    )


@pytest.mark.parametrize(
    ("names", "judge"),
    [
        (["task"], "task"),
        (["m:f", "numeric", "task"], "numeric"),
        (["math_verify", "exact_match"], "math_verify"),
        (["m:f"], "task"),
    ],
)
def test_the_first_function_that_can_says_what_is_right(names: list[str], judge: str) -> None:
    config = RewardConfig(functions={name: float(name != judge) or 0.5 for name in names})
    scorers = {name: constant(0.0, 9.0) for name in {*names, "task"}} | {judge: constant(1.0, 0.99)}
    assert config.judging == judge
    assert scoring.score([response(), response()], scorers, config).is_correct == [True, False]


def test_where_no_function_judges_the_answer_the_task_does_and_adds_nothing() -> None:
    config = RewardConfig(functions={"length": 1.0}, length_target=4)
    scorers = scoring.scorers(config, lambda: lambda answers: [float(one.given == one.expected) for one in answers])
    scores = scoring.score([response("a", "a", tokens=3), response("b", "a", tokens=4)], scorers, config)
    assert scores == Scores([-0.25, 0.0], {"length": [-0.25, 0.0], "task": [1.0, 0.0]}, [True, False])


@hypothesis_settings(deadline=None)
@drawn(st.data())
def test_the_total_is_linear_in_the_weights(data: st.DataObject) -> None:
    numbers = st.floats(-1e6, 1e6)
    count = data.draw(st.integers(1, 4))
    weights = data.draw(st.lists(numbers, min_size=1, max_size=4).filter(any))
    rows = [data.draw(st.lists(numbers, min_size=count, max_size=count)) for _ in weights]
    config = RewardConfig(functions={f"m:f{i}": weight for i, weight in enumerate(weights)})
    scorers = {f"m:f{i}": constant(*row) for i, row in enumerate(rows)} | {"task": constant(*[0.0] * count)}
    scores = scoring.score([response()] * count, scorers, config)
    for i, total in enumerate(scores.total):
        exact = math.fsum(weight * row[i] for weight, row in zip(weights, rows, strict=True))
        assert total == pytest.approx(exact, rel=1e-9, abs=1e-3)
    assert [scores.by_function[f"m:f{i}"] for i in range(len(rows))] == rows


def test_all_scorers_are_asked_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)

    def waits(responses: Sequence[Response]) -> list[float]:
        together.wait()
        return [1.0]

    config = RewardConfig(functions={"task": 1.0, "m:f": 1.0, "m:g": 1.0})
    assert scoring.score([response()], dict.fromkeys(config.functions, waits), config).total == [3.0]


def test_nothing_is_asked_about_no_responses() -> None:
    config = RewardConfig(functions={"task": 1.0, "m:f": 1.0})
    scorers = {"task": constant("asked"), "m:f": constant("asked")}
    assert scoring.score([], scorers, config) == Scores([], {"task": [], "m:f": []}, [])


def test_a_scorer_that_is_missing_is_no_score_of_zero() -> None:
    with pytest.raises(KeyError, match="model"):
        scoring.score([response()], {"task": constant(1.0)}, RewardConfig(functions={"task": 1, "model": 1}, model="m"))


def test_the_first_error_by_name_comes_out_once_all_have_ended() -> None:
    ended, last = [], threading.Event()

    def slow(responses: Sequence[Response]) -> list[float]:
        assert last.wait(20)
        ended.append("slow")
        raise RewardError("slow")

    def quick(responses: Sequence[Response]) -> list[float]:
        ended.append("quick")
        last.set()
        raise RewardError("quick")

    config = RewardConfig(functions={"task": 1.0, "m:slow": 1.0, "m:quick": 1.0})
    with pytest.raises(RewardError, match="slow"):
        scoring.score([response()], {"task": constant(1.0), "m:slow": slow, "m:quick": quick}, config)
    with pytest.raises(RewardError, match="quick"):
        scoring.score([response()], {"task": constant(1.0), "m:quick": quick, "m:slow": slow}, config)
    assert ended == ["quick", "slow"] * 2


@pytest.mark.parametrize(
    "returned",
    [
        [True, False],
        (1, 0),
        np.array([1, 0]),
        np.array([True, False]),
        [np.float32(1), np.int8(0)],
        torch.tensor([1.0, 0.0]),
    ],
    ids=str,
)
def test_numbers_of_every_kind_are_scores(returned: Any) -> None:
    scores = scoring.score([response(), response()], {"task": lambda _: returned}, RewardConfig())
    assert scores == Scores([1.0, 0.0], {"task": [1.0, 0.0]}, [True, False])
    assert {type(value) for value in scores.by_function["task"]} == {float}


@pytest.mark.parametrize(
    "value",
    [None, math.nan, math.inf, -math.inf, "1", b"1", 1j, [1.0, 2.0], 10**400, np.float64("nan"), ...],
    ids=str,
)
def test_what_is_no_finite_number_names_function_prompt_and_value(value: Any) -> None:
    with pytest.raises(RewardError) as caught:
        scoring.score([response(), response(number=1)], {"task": constant(1.0, value)}, RewardConfig())
    message = str(caught.value)
    assert message.startswith(f"reward task: {repr(value)[:40]}")
    assert "for prompt 1 ('What\\nis very very" in message
    assert "\n" not in message
    assert len(message) < 350


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ([1.0], "1 scores for 2 responses, from prompt 0 ('What is 1 + 1?') on: [1.0]"),
        ([1.0] * 3, "3 scores for 2 responses, from prompt 0 ('What is 1 + 1?') on: [1.0, 1.0, 1.0]"),
        ([], "0 scores for 2 responses"),
        (None, "returned None, not a list of scores, for 2 responses, from prompt 0 ('What is 1 + 1?') on"),
        (0.5, "returned 0.5, not a list of scores, for 2 responses"),
        (np.zeros((1, 2)), "1 scores for 2 responses, from prompt 0 ('What is 1 + 1?') on: array([[0., 0.]])"),
        ("10", "'1' is not a finite score, for prompt 0"),
    ],
    ids=str,
)
def test_a_wrong_number_of_scores_is_an_error(returned: Any, shown: str) -> None:
    with pytest.raises(RewardError) as caught:
        scoring.score([response(), response(number=1)], {"task": lambda _: returned}, RewardConfig())
    assert str(caught.value).startswith(f"reward task: {shown}")


def test_half_precision_is_a_score() -> None:
    scores = np.array([0.5, -6e4], dtype=np.float16)
    with warnings.catch_warnings(action="error"):  # NumPy warns where it compares one with a number beyond its range
        found = scoring.score([response(), response(number=1)], {"task": lambda _: scores}, RewardConfig())
    assert found.by_function["task"] == [0.5, -60_000.0] and type(found.by_function["task"][0]) is float


TWO = [Prompt(0, (), "1 + 1?", "2"), Prompt(1, (), "2 + 2?", "4")]


def test_numeric_without_a_number_to_expect_is_refused() -> None:
    told = [Prompt(0, (), "1 + 1?", "two, so #### 2")]
    with pytest.raises(ConfigError, match="numeric: the expected answer 'two, so #### 2' is no number; --data"):
        scoring.try_functions(RewardConfig(functions={"numeric": 1.0}), told)
    scoring.try_functions(RewardConfig(functions={"numeric": 1.0}), [*told, *TWO])  # one of them is
    scoring.try_functions(RewardConfig(functions={"numeric": 0.0, "task": 1.0}), told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return [float(a) for a in answers]", None),
        ("return []", "0 scores for 2 responses, from prompt 0 ('1 + 1?') on: []"),
        ("return {1.0: 'a', 0.0: 'b'}", "returned a dict, {1.0: 'a', 0.0: 'b'}, not a list of scores, for 2"),
        ("return {0.5, 1.0}", "returned a set, {0.5, 1.0}, not a list of scores, for 2 responses, from"),
        ("return 'xy'", "returned a str, 'xy', not a list of scores, for 2 responses, from"),
        ("return b'xy'", "returned a bytes, b'xy', not a list of scores, for 2 responses, from"),
        ("return ['x', 1.0]", "'x' is not a finite score, for prompt 0 ('1 + 1?')"),
        ("raise OSError(completions[1])", "raised OSError('4') at "),
    ],
)
def test_functions_are_tried_on_the_expected_answers(write: Write, body: str, complaint: str | None) -> None:
    name = write(f"def f(prompts, completions, answers): {body}\n") + ":f"
    config = RewardConfig(functions={name: 1.0, "exact_match": 1.0})
    if complaint is None:
        scoring.try_functions(config, TWO)
        return
    with pytest.raises(RewardError) as refused:
        scoring.try_functions(config, TWO)
    assert str(refused.value).startswith(f"reward {name}: {complaint}")
    assert str(refused.value).endswith("; tried with the expected answers as completions: ['2', '4']")


@pytest.mark.parametrize("pattern", [r"\\boxed{e}", r"x{ i<2}", r"(a|b){s}"])
def test_a_brace_that_means_something_else_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="for a brace that is text"):
        RewardConfig(answer_pattern=pattern)
    assert RewardConfig(answer_pattern=r"\\boxed\{e\}|a{2}|[^{}]{1,3}").answer_pattern
