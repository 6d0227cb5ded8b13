"""A reward that a policy with random weights can raise: its workers import this file and nothing else of bench/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def share(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of sevens among the characters of each completion."""
    return [text.count("7") / max(1, len(text)) for text in completions]
