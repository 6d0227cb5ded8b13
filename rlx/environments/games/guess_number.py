"""A game: the policy guesses a number, and is told whether it is larger or smaller.

Halving the range finds it in at most ceil(log2(n + 1)) guesses: the optimum, with which a policy can be compared.
Left out: who plays (rlx.rollout.episodes).
"""

from __future__ import annotations

import math
import random
import re

from rlx.types import TaskRow

_NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """A number between 1 and `largest`, which follows from the seed; the question of the row is not used."""

    def __init__(self, largest: int = 15, cost: float = 0.1) -> None:
        """
        Args:
            largest: number that may be drawn.
            cost: what is taken off the reward of 1 for each guess after the first, down to 0.
        """
        if largest < 1:
            raise ValueError("the largest number is at least 1")
        self.largest, self._cost, self._secret, self._guesses = largest, cost, 0, 0

    def reset(self, row: TaskRow, seed: int) -> str:
        """Draws the number."""
        self._secret, self._guesses = random.Random(seed).randint(1, self.largest), 0
        return f"Guess a number from 1 to {self.largest}."

    def step(self, action: str) -> tuple[str, float, bool]:
        """Says how a guess compares; the last number of the turn counts."""
        found = _NUMBER.findall(action)
        self._guesses += 1
        if not found:
            return "no number", 0.0, False
        guess = int(found[-1][:20])  # Python reads no number of thousands of digits
        if guess == self._secret:
            return "right", max(0.0, 1.0 - self._cost * (self._guesses - 1)), True
        return "smaller" if guess > self._secret else "larger", 0.0, False

    @property
    def most_guesses(self) -> int:
        """How many guesses the best strategy needs at most."""
        return math.ceil(math.log2(self.largest + 1))
