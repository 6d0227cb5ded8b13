"""What PPO adapts from step to step: the KL coefficient, the running mean and spread of scores, the learning rate.

Plain numbers, no tensors. Left out: saving. The state of the first two is part of a checkpoint, as dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, asdict, dataclass, field

from rlx.algorithms.masking import lookup


@dataclass
class AdaptiveKL:
    """KL coefficient that steers the measured KL towards `target`; with target None it stays at `init`.

    Source: Ziegler et al. 2019 (arXiv 1909.08593) sec. 2.2.
    """

    init: InitVar[float]
    target: float | None  # in the unit of the KL that `update` takes
    horizon: float  # in the unit of the `n` that `update` takes; a larger one reacts more slowly
    coef: float = field(init=False)

    def __post_init__(self, init: float) -> None:
        self.coef = init

    def update(self, kl: float, n: float) -> None:
        """coef *= 1 + clip(kl / target - 1, +-0.2) * n / horizon, after `n` more samples with mean KL `kl`.

        Raises:
            ValueError: n >= 5 * horizon. One update could then set the coefficient to 0 or below, where it would
                stay.
        """
        if self.target is None:
            return
        if n >= 5 * self.horizon:
            raise ValueError(f"n = {n} is not below 5 * horizon = {5 * self.horizon}: choose a longer horizon")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint; a fixed coefficient has none, it is a setting, as target and horizon are."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from a `state_dict`, unless one of both coefficients is fixed: then this one begins at its setting.

        A coefficient of 0 is no state either: it was fixed, and would stay 0.
        """
        if self.target is not None:
            self.coef = state.get("coef") or self.coef


@dataclass
class RunningScores:
    """Mean and standard deviation of all scores so far, which normalise the scores of a step.

    Source: the reward normalisation of Engstrom et al. 2020 (arXiv 2005.12729) sec. 3, on scores of whole responses.
    """

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def update(self, count: float, total: float, squares: float) -> None:
        """Adds the number, the sum and the sum of squares of the scores of one step, over all ranks."""
        self.count += count
        self.total += total
        self.squares += squares

    def shift_and_scale(self) -> tuple[float, float]:
        """(mean, 1 / standard deviation): a normalised score is (score - mean) * scale.

        The standard deviation is unbiased; the scale is at most 1e4.
        """
        mean = self.total / max(1.0, self.count)
        variance = max(0.0, self.squares - self.total * mean) / max(1.0, self.count - 1)
        return mean, (variance + 1e-8) ** -0.5

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from a `state_dict`."""
        self.count, self.total, self.squares = state["count"], state["total"], state["squares"]


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


LR_SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def lr_scale(step: int, warmup_steps: int, total_steps: int, kind: str) -> float:
    """The factor in [0, 1] of the learning rate at optimizer step `step`, counted from 0.

    During the warm-up it is (step + 1) / warmup_steps. After it, the factor is 1 (`constant`), or falls from 1
    to 0 at total_steps and stays 0 (`linear`, `cosine`). Source of cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983)
    eq. 5.

    Raises:
        ValueError: unknown kind.
    """
    schedule = lookup(LR_SCHEDULES, kind, "learning-rate schedule")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return schedule(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
