"""Completions for the tests of rlx.samples: two prompts with two samples each, the numbers easy to check."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.samples.columns import Kind, StepCompletions, TrainedTokens
from rlx.types import Completion, Prompt, ScoredCompletion

LENGTHS = (1, 2, 3, 2)


class Letters:
    """A tokenizer: each token is a character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class Bytes:
    """A tokenizer as of byte-level BPE: each token is a byte, and a part of a character is no text."""

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        self.calls += 1
        return bytes(ids).decode(errors="replace")


class Words:
    """A tokenizer as of SentencePiece: the space before a word belongs to it, and the first one of a text is lost."""

    TEXTS = ("a", " b", " c", "d")

    def encode(self, text: str, **_: Any) -> list[int]:
        return [0]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.TEXTS[i] for i in ids).removeprefix(" ")


def scored(number: int, text: str = "", **changes: Any) -> ScoredCompletion:
    """Completion `number` of prompts 10 and 11 of a table of 8; 11 is row 3 of the second epoch."""
    ids = tuple(map(ord, text)) or tuple(range(97 + number, 97 + number + LENGTHS[number]))
    prompt = Prompt(10 + number // 2, (63, 33), f"question {number // 2}", "yes")
    finished, logprobs = number != 2, (-0.5 - number,) * len(ids)
    completion = Completion(prompt, number % 2, ids, logprobs, finished, version=4 - number // 2)
    known = {"text": text or "text", "answer": "no" if number else None} | changes
    return ScoredCompletion(completion, number / 4, number == 3, {"task": number / 2, "length": -1.0}, **known)


def step(number: int = 5, kind: Kind = Kind.TRAINING, trained: int = 3) -> StepCompletions:
    """Four completions of a step, of which the first ones were trained on."""
    rows = [scored(i) for i in range(4)]
    grid = np.arange(trained * 3, dtype=np.float32).reshape(trained, 3)
    newest = -grid + np.log(np.float32(2))
    if trained:
        newest[1] = np.nan
    tokens = TrainedTokens(-grid, newest, grid / 2, np.array([1.0, 0.0, 1.0])[:trained]) if trained else None
    return StepCompletions(kind, number, 8, rows, tokens)
