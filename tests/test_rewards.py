"""Answers out of completions, and what they score."""

import re

import pytest

from rlx.rewards import REWARDS, exact_match, extract_answer, numeric, score


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
    assert extract_answer(text, re.compile(pattern) if pattern else None) == answer


@pytest.mark.parametrize(
    ("given", "expected", "right"),
    [
        ("1,000", "1000", True),
        ("1000.0", "1,000", True),
        ("+1e3", "1000", True),
        (" -7 ", "-7", True),
        ("1,234,567.5", "1234567.5", True),
        ("0.30000000000000004", "0.3", True),
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


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match(" a b\n", "a b") == 1.0
    assert exact_match("a  b", "a b") == 0.0
    assert exact_match("A", "a") == 0.0


def never(given: str, expected: str, entry: int | None) -> float:
    raise AssertionError("asked")


def test_scores_come_from_the_chosen_function() -> None:
    texts, answers, entries = ["=7", "=7.0", "7", "="], ["7", "7", "7", ""], [0, 1, 2, 3]
    pattern = re.compile("=(.*)")
    assert score(texts, answers, list(entries), "exact_match", never, pattern) == [1.0, 0.0, 0.0, 1.0]
    assert score(texts, answers, list(entries), "numeric", never, pattern) == [1.0, 1.0, 0.0, 0.0]
    assert set(REWARDS) == {"exact_match", "numeric"}


def test_the_tasks_checker_gets_answer_expected_and_entry_and_nothing_without_an_answer() -> None:
    asked = []

    def checker(given: str, expected: str, entry: int | None) -> float:
        asked.append((given, expected, entry))
        return 0.25

    scores = score([" x 5", "no number", "6"], ["a", "b", "c"], [3, 4, None], "task", checker, re.compile(r"\d"))
    assert scores == [0.25, 0.0, 0.25]
    assert asked == [("5", "a", 3), ("6", "c", None)]


def test_rows_of_unequal_number_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        score(["1"], ["1", "2"], [None], "numeric", never, None)
