"""An environment of every bad kind, for the run of test_killed_episodes.py; the seed of an episode says which it is."""

import itertools
import time

from rlx.types import TaskRow

KINDS = ("good", "raises", "hangs", "slow", "lies", "unhurried")
HEALTHY = ("good", "unhurried")
_COUNT = itertools.count()


class BadWorld:
    """Repeats what it is told in a turn, and ends after two; unless it is one of the others."""

    def reset(self, row: TaskRow, seed: int) -> str:
        """Begins with its kind, which the test reads in kept completions."""
        self.kind, self.turns = KINDS[seed % len(KINDS)], 0
        return self.kind

    def step(self, action: str) -> tuple[str, float, bool]:
        """Answers in its own way."""
        self.turns += 1
        if self.kind == "raises":
            raise LookupError("no such thing")
        if self.kind == "hangs":
            time.sleep(3600)
        if self.kind == "slow":
            time.sleep(10)
        if self.kind == "unhurried":  # slow, but below the limit
            time.sleep(0.3)
        said = str(next(_COUNT)) if self.kind == "lies" else action
        return said, float(self.kind in HEALTHY), self.turns == 2
