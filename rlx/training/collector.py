"""TODO rlx.training.collector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.types import ScoredCompletion


class Selection:
    """The completions that a step trains on: group by group, those of each prompt together.

    Left out, if asked for, are groups whose scores are all equal: their advantages would all be 0. Source: dynamic
    sampling of Yu et al. 2025, DAPO (arXiv 2503.14476) eq. 11.
    """

    def __init__(self, wanted: int, samples: int, filtered: bool, greedy: bool, at_once: bool = False) -> None:
        """`wanted` groups of `samples` completions, on this rank; `greedy`: each comes with a further one at its end,
        the prompt's greedy completion, whose score is kept with the others; `at_once`: groups are not waited for."""
        self.wanted, self.samples, self.filtered, self.greedy, self.at_once = wanted, samples, filtered, greedy, at_once
        self.drawn: list[ScoredCompletion] = []  # all there were to choose from
        self.tokens = 0  # that were generated for them
        self.varied = 0  # groups whose scores differ
        self.rounds = 0
        self._kept: list[list[ScoredCompletion]] = []
        self._left_out: list[list[ScoredCompletion]] = []
        self._taken = 0  # groups

    def add(self, judged: Sequence[ScoredCompletion]) -> None:
        """Takes in whole groups, of a round or of a part of one."""
        size = self.samples + self.greedy
        for start in range(0, len(judged), size):
            group = list(judged[start : start + self.samples])
            if self.greedy:
                group = [replace(one, greedy_score=judged[start + self.samples].score) for one in group]
            varied = len({one.score for one in group}) > 1
            (self._left_out if self.filtered and not varied else self._kept).append(group)
            self.drawn += group
            self.varied += varied
        self.tokens += sum(len(one.completion.token_ids) for one in judged)

    @property
    def missing(self) -> int:
        """How many more groups are wanted."""
        return max(0, self.wanted - len(self._kept))

    def take(self, last: bool = False) -> list[ScoredCompletion]:
        """Completions to train on that were not taken before.

        Unless they are wanted at once there are none before the `last` call: only then it is known which groups are
        left out. If there are too few, it fills up with some that were left out.
        """
        if not (self.at_once or last):
            return []
        groups = (self._kept + self._left_out)[self._taken : self.wanted]
        self._taken += len(groups)
        return [one for group in groups for one in group]
