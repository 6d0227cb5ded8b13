"""A reward function of a user's own, for tests."""


def short(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    """1 for a completion of at most three characters."""
    return [float(len(completion) <= 3) for completion in completions]
