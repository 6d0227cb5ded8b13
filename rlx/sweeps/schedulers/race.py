"""`Race`: which candidates of a sweep are shown to be behind the best one, decided from reports alone.

The race has a list of looks, known beforehand: one at each rung with the first seeds, and at the last step a further
one for each seed that may be added. At a look the candidates that are left are compared on the same seeds; one that is
behind the best of the others (`rlx.analysis.paired`) is out, all its trials stop. Each look may drop the best candidate
with a chance of at most alpha divided by the number of looks, so that all of them together do with at most alpha
(Bonferroni's inequality; looks resemble each other, so it is less). This holds for the best *of the rung*: who is
behind there might have come to the front later, as with every scheduler that stops trials early. Of two candidates
alone either may seem to win by chance, so each has half of a look's share. A seed is added to the candidates that are
left while there is more than one.

A look is taken when every candidate that is left has reported it with every seed, and then once. What is decided
follows from what was reported, whenever and in which order that arrived, so a resume decides the same again. A
candidate one of whose trials ended before a look, because it failed or was stopped, is out at that look.

Left out: telling Tune (`racing`), and the statistics (`rlx.analysis.paired`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlx.analysis.paired import Deficit, deficits
from rlx.sweeps.records import trial_number
from rlx.sweeps.schedulers.schedule import Schedule


class Look(NamedTuple):
    """When candidates are compared."""

    step: int
    seeds: int  # of each candidate


@dataclass(frozen=True)
class Standing:
    """How a candidate stood when it was compared last."""

    look: Look
    mean: float  # of the sweep's metric
    deficit: Deficit
    leader: int  # the candidate that it was furthest behind, by the mean
    is_out: bool


class Race:
    """Takes reports of trials, by number, and says which trials go on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        more = range(schedule.seeds + 1, schedule.max_seeds + 1)
        rungs = [*schedule.rungs, schedule.steps]
        self.looks = [*(Look(step, schedule.seeds) for step in rungs), *(Look(schedule.steps, n) for n in more)]
        self.live = list(range(schedule.candidates))  # the candidates that are left
        self.standings: dict[int, Standing] = {}  # by candidate; none for one that was never compared
        self._sign = 1.0 if schedule.mode == "max" else -1.0
        self._taken = 0  # looks
        self._values: dict[int, dict[int, float]] = {}  # by number and step
        self._ended: set[int] = set()  # numbers of the trials that report no more
        for name, record in schedule.known.items():
            self._values[trial_number(name)] = dict(record.reports)
            if record.is_over:
                self._ended.add(trial_number(name))
        self._take_looks()

    # What happens

    def report(self, number: int, step: int, value: float) -> None:
        """A trial has evaluated; a value that it has reported before, and does again after a restart, is left out."""
        self._values.setdefault(number, {}).setdefault(step, value)
        self._take_looks()

    def end(self, number: int) -> None:
        """A trial reports no more."""
        self._ended.add(number)
        self._take_looks()

    # What follows

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compare."""
        return len(self.live) < 2 or self._taken == len(self.looks)

    def is_out(self, number: int) -> bool:
        """Whether a trial is to stop."""
        return self.schedule.place_of(number)[0] not in self.live

    def waits(self, number: int, step: int) -> bool:
        """Whether a trial that has done so many steps is to wait for others; the seeds added later never do."""
        return not self.is_over and self.schedule.place_of(number)[1] < self.schedule.seeds and step >= self._look.step

    def added(self) -> list[int]:
        """The trials with added seeds that the next look needs."""
        if self.is_over:
            return []
        new = range(self.schedule.seeds, self._look.seeds)
        numbers = [self.schedule.number_of(candidate, seed_index) for seed_index in new for candidate in self.live]
        return [number for number in numbers if number not in self._ended]

    @property
    def _look(self) -> Look:
        return self.looks[self._taken]

    def _take_looks(self) -> None:
        while not self.is_over:
            look, indices = self._look, range(self._look.seeds)
            trials = {
                candidate: [self.schedule.number_of(candidate, each) for each in indices] for candidate in self.live
            }
            missing = {
                candidate: [each for each in trials[candidate] if not self._has(each, look.step)]
                for candidate in trials
            }
            if not all(self._is_lost(number, look.step) for numbers in missing.values() for number in numbers):
                return
            if whole := [candidate for candidate in self.live if not missing[candidate]]:  # else nobody is worse off
                self.live = whole
                self._compare(look, trials)
            self._taken += 1

    def _has(self, number: int, step: int) -> bool:
        return math.isfinite(self._values.get(number, {}).get(step, math.nan))

    def _is_lost(self, number: int, step: int) -> bool:
        """Whether a trial that has no value of a step will not have one: it is over, or the value is no number."""
        return number in self._ended or step in self._values.get(number, {})

    def _compare(self, look: Look, trials: dict[int, list[int]]) -> None:
        """Takes a look: compares the candidates that are left until none of them is out."""
        before = 0
        while len(self.live) not in (0, 1, before):
            before, compared = len(self.live), list(self.live)
            ways = 2 if len(compared) == 2 else 1  # of two that are equal, either may seem to win
            level = self.schedule.alpha / len(self.looks) / ways
            values = np.array([[self._values[each][look.step] for each in trials[candidate]] for candidate in compared])
            found = deficits(self._sign * values, self._taken + 1)
            for candidate, row, deficit in zip(compared, values, found, strict=True):
                is_out = deficit.value > 0 and deficit.chance <= level  # whoever has the best mean stays
                self.standings[candidate] = Standing(look, float(row.mean()), deficit, compared[deficit.leader], is_out)
            self.live = [candidate for candidate in compared if not self.standings[candidate].is_out]
