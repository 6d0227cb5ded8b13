"""Reward functions of a user's own, for tests."""

import time
from pathlib import Path


def short(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """1 for a completion of at most three characters."""
    return [float(len(completion) <= 3) for completion in completions]


def fragile(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """1 for every completion, as long as the file that the answer names is not there."""
    if Path(answers[0]).exists():
        raise ValueError("no luck")
    return [1.0 for _ in completions]


def slow(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """Too late for more than four completions."""
    if len(completions) > 4:
        time.sleep(60)
    return [1.0 for _ in completions]


GLITCH = Path(__file__).with_name("glitch.txt")
"""names a question, while a fault is planted"""


def glitching(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """The length of each completion, but one more for the second completion of the question in `GLITCH`."""
    scores = [float(len(completion)) for completion in completions]
    wrong = GLITCH.read_text() if GLITCH.exists() else None
    places = [place for place, prompt in enumerate(prompts) if prompt == wrong]
    for place in places[1:2]:
        scores[place] += 1
    return scores
