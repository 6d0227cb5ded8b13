"""TODO rlx.rollout.base."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.types import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to draw."""

    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Output:
    """One completion drawn: its tokens, their logprobs, and whether it ended with a stop token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
