"""`Schedule`: what a scheduler needs to know of a sweep. Left out: the schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.config.sweep import DEFAULT_ALPHA, PROGRESS, Mode, RungUnit
from rlx.sweeps.records import TrialRecord, TrialRecords, number_of, place_of, trial_number
from rlx.sweeps.space import MODE, Space

TIME = "step"
"""the metric of a trial that says which step it has done"""


@dataclass(frozen=True)
class Schedule:
    """What a scheduler needs to know of a sweep."""

    steps: int  # of each trial
    eval_every: int  # steps between evaluations; 0: only after the last step
    space: Space
    known: Mapping[str, TrialRecord] = field(default_factory=dict)  # by trial name, of before a resume
    records: TrialRecords | None = None  # where what schedulers are told is noted; None: nowhere
    candidates: int = 1
    seeds: int = 1  # of each candidate
    max_seeds: int = 1  # which a race may add up to
    alpha: float = DEFAULT_ALPHA  # a race's chance of dropping the best candidate
    mode: Mode = MODE
    rung_by: RungUnit = "steps"  # in which rungs are
    gpus: float = 0.0  # of a trial
    seed: int = 0  # of what a scheduler draws
    tree: Mapping[str, Any] | None = None  # the settings that trials share; None: what is drawn is not checked

    @property
    def first_rung(self) -> int:
        """The step of the first evaluation that training can have changed."""
        return min(self.steps, self.eval_every or self.steps)

    @property
    def rungs(self) -> list[int]:
        """The steps at which trials are judged on their way: each twice the one before, the last step left out."""
        return [self.first_rung << i for i in range(self.steps.bit_length()) if self.first_rung << i < self.steps]

    def is_evaluation(self, result: Mapping[str, Any]) -> bool:
        """Whether a trial has evaluated at a step that it reports."""
        return bool(result[TIME] % self.first_rung == 0 or result[TIME] >= self.steps)

    def amount(self, result: Mapping[str, Any]) -> float:
        """The steps, tokens or GPU-seconds, as rungs are in them, that a trial has taken by then."""
        taken = float(result.get(PROGRESS[self.rung_by], 0.0))
        return taken * self.gpus if self.rung_by == "gpu-seconds" else taken

    def place_of(self, number: int) -> tuple[int, int]:
        """The candidate of a trial and the index of its seed, see `number_of`."""
        return place_of(number, self.candidates, self.seeds)

    def number_of(self, candidate: int, seed_index: int) -> int:
        """The number of the trial that runs a candidate on one of its seeds."""
        return number_of(candidate, seed_index, self.candidates, self.seeds)

    def candidate_of(self, trial: str) -> int:
        """The number of the candidate that a trial, by name, runs."""
        return self.place_of(trial_number(trial))[0]
