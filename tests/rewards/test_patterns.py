"""Patterns of users: they find what Python's own find, and those that take for ever find nothing."""

import math
import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rewards import patterns

SOUND = [r"\d+", r"answer: (\w+)", r"(a)|b", r"<(.*)>", r"(?:^|\n)#### (-?[\d,.]+)", r"\\boxed\{([^{}]*)\}", r""]
SLOW = r"((a|aa)+)+b"


@pytest.mark.parametrize("pattern", SOUND)
@settings(deadline=None)  # the machine may be busy
@given(texts=st.lists(st.text("ab1<>#-\n \\{}answer:boxd", max_size=30), max_size=5))
def test_matches_are_those_of_python(pattern: str, texts: list[str]) -> None:
    group = 1 if re.compile(pattern).groups else 0
    found = [[match.group(group) for match in re.finditer(pattern, text)] for text in texts]
    assert patterns.last_matches(pattern, texts) == [(matches or [None])[-1] for matches in found]
    whole = [re.fullmatch(pattern, text, re.DOTALL) is not None for text in texts]
    assert patterns.full_matches(pattern, texts) == whole


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_search_has_its_time_whatever_other_threads_compute() -> None:
    """The package regex counts processor time of the whole process: here others have used two thirds of it."""
    allowed = []

    def search(text: str, seconds: float) -> str:
        allowed.append(seconds)
        compute(0.02)
        if len(allowed) < 2:
            raise TimeoutError
        return text

    found, used = patterns._searched(search, "42", 0.06)
    assert found == "42" and 0.02 <= used <= 0.06
    assert allowed[0] == 0.06 and 0.12 < allowed[1] < 0.2


@pytest.mark.parametrize("finds", [False, True])
def test_a_search_that_has_used_its_own_time_is_over(finds: bool) -> None:
    def search(text: str, seconds: float) -> str:
        compute(seconds + 0.01)
        if not finds:
            raise TimeoutError
        return text

    with pytest.raises(TimeoutError):
        patterns._searched(search, "42", 0.02)


def test_a_search_does_not_go_on_for_ever_beside_others_that_take_all_the_time() -> None:
    allowed = []

    def search(text: str, seconds: float) -> str:
        allowed.append(seconds)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        patterns._searched(search, "42", 0.5)
    assert allowed == [0.5, 4.0]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_texts_have_the_same_time_whatever_share_of_the_processor_their_thread_has(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow text takes from those behind it what it was allowed once, however often it was searched."""
    clock, first = 0.0, dict[str, float]()

    def search(text: str, seconds: float) -> str:
        nonlocal clock
        first.setdefault(text, seconds)
        needed = 0.4 if text.startswith("sound") else math.inf
        clock += min(needed, share * seconds)
        if needed > share * seconds:
            raise TimeoutError
        return text

    monkeypatch.setattr(patterns, "time", SimpleNamespace(thread_time=lambda: clock))
    texts = [*(f"slow {i}" for i in range(8)), "sound 1", "sound 2", "slow 8", "slow 9"]
    assert list(patterns._limited("", search, texts, None)) == [None] * 8 + ["sound 1", "sound 2"] + [None] * 2
    assert [*first.values()] == pytest.approx([0.5] * 10 + [0.2, 0.05])


@pytest.mark.slow
def test_a_slow_text_takes_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patterns, "_BATCH_SECONDS", 0.6)
    texts = ["a" * 60] * 4 + ["aab", "b"]
    assert patterns.full_matches(SLOW, texts) == [False] * 4 + [True, False]
    assert patterns.last_matches(SLOW, texts) == [None] * 4 + ["aa", None]
    assert caplog.text.count("took too long on 4 of 6 completions") == 2
