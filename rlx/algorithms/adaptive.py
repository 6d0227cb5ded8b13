"""What PPO adapts from step to step: the KL coefficient, the scores' mean and spread, the learning rate.

Plain numbers only. The state of the first two is part of a checkpoint; formulas over tensors are algorithms.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, asdict, dataclass, field


@dataclass
class AdaptiveKL:
    """KL coefficient that steers the measured KL towards `target`; with target None it stays at `init`.

    `target` is in the unit of the KL given to `update`, `horizon` in that of its `n`; a larger horizon reacts more
    slowly. Source: Ziegler et al. 2019 (arXiv 1909.08593) sec. 2.2.
    """

    init: InitVar[float]
    target: float | None
    horizon: float
    coef: float = field(init=False)

    def __post_init__(self, init: float) -> None:
        self.coef = init

    def update(self, kl: float, n: float) -> None:
        """coef *= 1 + clip(kl / target - 1, +-0.2) * n / horizon, after `n` more samples with mean KL `kl`.

        Raises ValueError if n >= 5 * horizon: one update could then bring the coefficient to 0 or below, for good.
        """
        if self.target is None:
            return
        if n >= 5 * self.horizon:
            raise ValueError(f"n = {n} is not below 5 * horizon = {5 * self.horizon}: choose a longer horizon")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps; target and horizon are settings and come from the caller."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from the coefficient of `state_dict`; a fixed one is what this controller was made with."""
        if self.target is not None:
            self.coef = state["coef"]


@dataclass
class RunningScores:
    """Mean and standard deviation of all scores so far, by which scores are normalised.

    Source: the reward normalisation of Engstrom et al. 2020 (arXiv 2005.12729) sec. 3, on scores of whole responses.
    """

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def update(self, count: float, total: float, squares: float) -> None:
        """Takes in the number, the sum and the sum of squares of a step's scores, over all ranks."""
        self.count += count
        self.total += total
        self.squares += squares

    def shift_and_scale(self) -> tuple[float, float]:
        """(mean, 1 / standard deviation), the latter unbiased and at most 1e4: normalised is (score - mean) * scale."""
        mean = self.total / max(1.0, self.count)
        variance = max(0.0, self.squares - self.total * mean) / max(1.0, self.count - 1)
        return mean, (variance + 1e-8) ** -0.5

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from `state_dict`."""
        self.count, self.total, self.squares = state["count"], state["total"], state["squares"]


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


LR_SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def lr_scale(step: int, warmup_steps: int, total_steps: int, kind: str) -> float:
    """Multiplier in [0, 1] of the learning rate at optimizer step `step`, counted from 0.

    (step + 1) / warmup_steps in the warm-up; then, from 1, `constant`, or `linear` or `cosine` down to 0 at
    total_steps, and 0 beyond. Raises ValueError for another kind.
    Source of cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983) eq. 5.
    """
    if kind not in LR_SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {kind!r}: choose one of {', '.join(LR_SCHEDULES)}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return LR_SCHEDULES[kind](min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
