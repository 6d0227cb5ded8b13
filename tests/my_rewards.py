"""Reward functions of a user's own, for tests."""

from pathlib import Path


def short(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """1 for a completion of at most three characters."""
    return [float(len(completion) <= 3) for completion in completions]


def fragile(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """1 for every completion, as long as the file that the answer names is not there."""
    if Path(answers[0]).exists():
        raise ValueError("no luck")
    return [1.0 for _ in completions]
