"""The table of mistakes: how its commands are split, and what counts as a flaw of an answer."""

import shlex

import mistakes
import pytest
from mistakes import MISTAKES, Mistake, Outcome

QUICK, SLOW = Mistake("m", "train"), Mistake("m", "train", waits="Ray")


def outcome(output: str, code: int = 1, seconds: float = 1.0, crowd: float = 1.0) -> Outcome:
    return Outcome(seconds, seconds, code, output, crowd)


@pytest.mark.parametrize(
    ("seen", "mistake", "flaw"),
    [
        (outcome("error: x\n"), QUICK, ""),
        (outcome("warning\nerror: x\n"), QUICK, ""),
        (outcome("error: x\n", code=0), QUICK, "no error"),
        (outcome("Traceback (most recent call last):\nerror: x\n"), QUICK, "traceback"),
        (outcome("nothing to see\n"), QUICK, "not one line"),
        (outcome("error: x\nerror: y\n"), QUICK, "not one line"),
        (outcome("error: x\n", seconds=2.5), QUICK, "slow"),
        (outcome("error: x\n", seconds=2.5, crowd=2.0), QUICK, ""),
        (outcome("error: x\n", seconds=60.0), SLOW, ""),
    ],
)
def test_an_answer_is_one_line_soon(seen: Outcome, mistake: Mistake, flaw: str) -> None:
    assert seen.flaw(mistake) == flaw


def test_what_stands_in_braces_is_one_word() -> None:
    words = mistakes.words_of("train --reward.functions {tusk: 1} --reward.answer-pattern (a")
    assert words == ["train", "--reward.functions", "{tusk: 1}", "--reward.answer-pattern", "(a"]


def test_there_are_many_different_mistakes() -> None:
    assert len(MISTAKES) == len({mistake.words for mistake in MISTAKES}) == len({each.what for each in MISTAKES}) > 41
    assert all(shlex.join(mistakes.words_of(mistake.words)) for mistake in MISTAKES)


@pytest.mark.slow
def test_a_real_mistake_is_measured_in_a_folder_of_its_own() -> None:
    seen = mistakes.attempt(next(mistake for mistake in MISTAKES if "typo.yaml" in mistake.words))
    assert seen.last_line == "error: typo.yaml: unknown setting train.stepz; nearest: train.steps"
    assert seen.code == 1 and seen.computed > 0 and seen.seconds > 0
