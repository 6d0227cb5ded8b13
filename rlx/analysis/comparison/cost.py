"""What a sweep costs in steps of training, generated tokens and GPU-seconds; what a budget affords, what was spent.

Steps are known beforehand. Tokens are at most those of answers that are all as long as they may be. GPU-seconds are
those of steps with their evaluations, times the GPUs of a run; they need the seconds of a step, which an earlier run
has told. Left out: starting engines and workers, whether a scheduler will stop runs early, which only saves, and the
steps that pbt discards, which come on top.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rlx.analysis.style import as_text
from rlx.config.errors import ConfigError

if TYPE_CHECKING:  # slow to import, and the options of a sweep are read at once
    from rlx.analysis.loading import Sweep, Trial

_UNITS = {"steps": 1.0, "tokens": 1.0, "gpu-s": 1.0, "gpu-min": 60.0, "gpu-h": 3600.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_TOO_MUCH = 1e18
"""more than any sweep costs, in every unit; infinity is, too"""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kMG]?) ?(.+)")


class Cost(NamedTuple):
    """What a run or a sweep costs; NaN for what is not known."""

    steps: float
    tokens: float
    gpu_seconds: float

    def times(self, count: int) -> Cost:
        return Cost(*(count * each for each in self))

    def __str__(self) -> str:
        known = [f"{as_text(self.steps)} steps", f"{_large(self.tokens)} tokens"]
        return ", ".join([*known, *([f"{as_text(self.gpu_seconds / 3600)} GPU-hours"] if self.gpu_seconds > 0 else [])])


class Amount(NamedTuple):
    """A budget: so much of one of the units."""

    number: float
    unit: str

    @classmethod
    def of(cls, text: str) -> Amount:
        """Reads 500steps, 2Mtokens, 90gpu-min or 8gpu-h.

        Raises:
            ConfigError: it is none of these.
        """
        found = _AMOUNT.fullmatch(text.strip())
        number = float(found[1]) * _PREFIXES[found[2]] if found else 0.0
        if not found or found[3] not in _UNITS or not 0 < number < _TOO_MUCH:
            raise ConfigError(f"--budget {text}: an amount such as 500steps, 2Mtokens, 90gpu-min or 8gpu-h")
        return cls(number, found[3])

    def part_of(self, cost: Cost) -> float:
        """What a cost is in this unit."""
        amounts = {"steps": cost.steps, "tokens": cost.tokens}
        return amounts.get(self.unit, cost.gpu_seconds / _UNITS[self.unit])

    def affords(self, candidate: Cost) -> int:
        """How many candidates it pays for, each with all its seeds.

        Raises:
            ConfigError: none, or their cost in this unit is not known.
        """
        each = self.part_of(candidate)
        if math.isnan(each):
            raise ConfigError(f"--budget in {self.unit}: no run of this model has told yet how long a step takes")
        if not each:
            raise ConfigError(f"--budget in {self.unit}: runs use no GPU; give steps or tokens")
        count = int(self.number / each + 1e-9)  # 0.3 gpu-h are three times 0.1
        if not count:
            raise ConfigError(
                f"--budget {as_text(self.number)} {self.unit}: one setting with its seeds takes {as_text(each)} at most"
            )
        return count


def run_cost(steps: int, answers: int, max_tokens: int, gpus: float, step_seconds: float = math.nan) -> Cost:
    """What a run costs at most.

    Args:
        answers: generated in a step.
        gpus: of the run.
        step_seconds: of a step with its share of evaluations, if it is known.
    """
    return Cost(steps, steps * answers * max_tokens, steps * step_seconds * gpus if gpus else 0.0)


def spent(sweep: Sweep, gpus: float) -> Cost:
    """What the runs of a sweep have cost, each of which used so many GPUs: all attempts of trials, also those of which
    nothing is left. Steps that a run did again after it was lost count once."""
    attempts = [replace(trial, history=rows) for trial in sweep.trials for rows in trial.histories or (trial.history,)]
    each = map(_spent_by, attempts)  # also those that count for nothing
    steps, tokens, seconds = ([*column] for column in zip(*each, strict=True))
    return Cost(_sum(steps), _sum(tokens), gpus * _sum(seconds))


def _spent_by(trial: Trial) -> tuple[float, float, float]:
    """The steps, tokens and seconds of a trial with one attempt. A branch, and an attempt that goes on from another
    trial, begins with the row of the step that it goes on from, which is paid for."""
    start, tokens = int(min(trial.history.index, default=0)), trial.history["tokens/total"]
    own = replace(trial, history=trial.history[trial.history.index > start]) if start else trial
    return max(trial.history.index, default=0) - start, tokens.max() - (tokens.min() if start else 0.0), own.seconds


def cost_line(sweep: Sweep) -> str:
    """What a sweep has cost, of what was planned when it began; empty if its record does not say that."""
    if not sweep.planned:
        return ""
    planned = Cost(**{key: value for key, value in sweep.planned.items() if key != "gpus"})
    return spent_line(spent(sweep, sweep.planned["gpus"]), planned, sweep.options.get("scheduler", ""))


def spent_line(spent: Cost, planned: Cost, scheduler: str = "") -> str:
    """What was spent, of what was planned."""
    share = f"{spent.steps / planned.steps:.0%} of its steps" if planned.steps else "nothing"
    return f"spent {spent}; planned at most {planned}{on_top(scheduler)}: {share}"


def on_top(scheduler: str) -> str:
    """What a plan with a scheduler does not count: pbt discards steps of a trial that takes over an earlier step."""
    return ", without steps that pbt discards" if scheduler == "pbt" else ""


def _sum(values: list[float]) -> float:
    return sum(value for value in values if not math.isnan(value))


def _large(count: float) -> str:
    return f"{count / 1e6:.3g} M" if count >= 1e6 else as_text(count)
