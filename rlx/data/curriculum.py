"""A curriculum by measured difficulty: prompts that are always right or always wrong come less often.

Each prompt has an estimate of how often it is answered correctly, from its completions in training. The draws of a step
are those of an order without a curriculum, source by source; of each source, its shuffled rows are looked at in turn,
and one whose estimate lies outside a range is taken in one of several epochs only. So a prompt that was passed over
comes back, and weights of sources hold. Which prompts a step takes follows from the seed, the estimates and how
far each source has been looked through, all of which every rank has and checkpoints keep.

Sources: online difficulty filtering, Bae et al. 2025 (arXiv 2504.03380); the easy, normal and hard pools of prime-rl.
Left out: rows that are fetched ahead (stream.py), because the next step's prompts depend on this one's scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.data.mixture import MixedOrder
from rlx.data.stream import PromptStream, permutation, prompts
from rlx.types import Prompt

_UNKNOWN = 255
_SCALE = 254  # an estimate of 1; each is one byte, so a million prompts take a megabyte
_WEIGHT = 0.5  # of the newest completions in an estimate: the policy changes meanwhile
_AT_LEAST = 256  # rows that are looked at together


@dataclass
class CurriculumStream(PromptStream):
    """The prompts of training under a curriculum. Every rank makes the same calls in the same order."""

    mixed: MixedOrder = field(kw_only=True)  # the draws of sources, and each source's order
    target: tuple[float, float] = field(kw_only=True)  # least and largest estimate of prompts that always are taken
    success: np.ndarray = field(init=False)  # estimates, by row
    period: int = field(kw_only=True)  # epochs of which another one is taken in one

    def __post_init__(self) -> None:
        super().__post_init__()
        self.success = np.full(len(self.rows), _UNKNOWN, np.uint8)
        self._looked_at = np.zeros(len(self.mixed.sizes), np.int64)  # rows of each source, over all epochs
        self._starts = np.cumsum([0, *self.mixed.sizes])
        self._step: list[int] = []  # ids of the prompts that all ranks took last
        self._passed_over = 0.0  # share of the rows that were looked at for them

    def next(self, count: int) -> list[Prompt]:
        """Returns this rank's share of the next `count` prompts: of every `ranks` prompts, the one at `rank`."""
        numbers = np.array([self.mixed.source(self.position + place) for place in range(count)])
        ids, before = np.empty(count, np.int64), self._looked_at.sum()
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            ids[places] = self._next_of(number, len(places))
        self.position += count
        self._step, self._passed_over = ids.tolist(), 1 - count / int(self._looked_at.sum() - before)
        return prompts(self.rows, self._step[self.rank :: self.ranks])

    def observe(self, correct: Sequence[float]) -> dict[str, float]:
        """Takes account of the completions of the prompts that `next` gave last; returns metrics.

        Args:
            correct: the share of right ones for each prompt of all ranks, in the order of the step; NaN: not measured.
        """
        for prompt, newest in zip(self._step, correct, strict=True):
            if math.isnan(newest):
                continue
            row = prompt % len(self.rows)
            known = newest if self.success[row] == _UNKNOWN else self.success[row] / _SCALE
            self.success[row] = round(_SCALE * (known + _WEIGHT * (newest - known)))
        known = self.success[self.success != _UNKNOWN] / _SCALE
        metrics = {
            "curriculum/passed_over_fraction": self._passed_over,
            "curriculum/measured_fraction": len(known) / len(self.rows),
        }
        if not len(known):
            return metrics
        return metrics | {
            "curriculum/success": float(known.mean()),
            "curriculum/in_range_fraction": float(self._is_in_range(known).mean()),
        }

    def cursor(self, position: int | None = None) -> dict[str, int]:
        """Returns what a checkpoint keeps of the stream beside the estimates; only its present position is known."""
        looked_at = {_key(number): int(count) for number, count in enumerate(self._looked_at)}
        return super().cursor(position) | looked_at

    def seek(self, cursor: Mapping[str, int]) -> None:
        """Goes to the position of a cursor; one of a run without a curriculum has looked at what it drew.

        Raises:
            ConfigError: the cursor belongs to other prompts or another seed.
        """
        super().seek(cursor)
        drawn = self.mixed.drawn(self.position)
        self._looked_at = np.array([cursor.get(_key(number), drawn[number]) for number in range(len(drawn))])

    def _next_of(self, number: int, count: int) -> list[int]:
        """The ids of the next prompts of a source that are taken."""
        size, taken = self.mixed.sizes[number], list[int]()
        while missing := count - len(taken):
            epoch, first = divmod(int(self._looked_at[number]), size)
            order = permutation(self.seed, epoch, size, number)[first : first + max(_AT_LEAST, 2 * missing)]
            rows = self._starts[number] + order
            success = self.success[rows]
            is_due = (order + epoch) % self.period == 0
            wanted = (success == _UNKNOWN) | self._is_in_range(success / _SCALE) | is_due
            places = np.flatnonzero(wanted)[:missing]
            self._looked_at[number] += places[-1] + 1 if len(places) == missing else len(order)
            taken += (epoch * len(self.rows) + rows[places]).tolist()
        return taken

    def _is_in_range(self, success: np.ndarray) -> np.ndarray:
        """Whether each estimate is of a prompt that something can be learnt from."""
        least, most = self.target
        return (success >= least) & (success <= most)


def _key(number: int) -> str:
    """The key of a cursor for the rows of a source that were looked at."""
    return f"looked_at.{number}"
