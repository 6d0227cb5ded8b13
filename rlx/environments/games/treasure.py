"""A small text world: rooms on a grid, a key, a door and a treasure behind it.

The shortest way is known (`steps_needed`), so a policy can be compared with the best one. Left out: more of a story.
"""

from __future__ import annotations

import random

from rlx.types import TaskRow

_MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
Place = tuple[int, int]


class Treasure:
    """Find the key, then the treasure. A turn is a word: north, south, east, west, take or open."""

    def __init__(self, size: int = 3, cost: float = 0.02) -> None:
        """
        Args:
            size: rooms along each side of the grid.
            cost: what is taken off the reward of 1 for each turn beyond those that are needed, down to 0.
        """
        if size < 2:
            raise ValueError("a world has at least 2 rooms along each side")
        self._size, self._cost = size, cost
        self._at: Place = (0, 0)
        self._key: Place = (0, 0)
        self._treasure: Place = (0, 0)
        self._has_key, self._turns, self.steps_needed = False, 0, 0

    def reset(self, row: TaskRow, seed: int) -> str:
        """Places the player, the key and the treasure in three rooms."""
        rooms = [(x, y) for x in range(self._size) for y in range(self._size)]
        self._at, self._key, self._treasure = random.Random(seed).sample(rooms, 3)
        self._has_key, self._turns = False, 0
        self.steps_needed = _distance(self._at, self._key) + 1 + _distance(self._key, self._treasure) + 1
        return f"Find the key, then open the chest. Say one of {', '.join(_MOVES)}, take, open. {self._seen()}"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Does what the last word says that is a command."""
        self._turns += 1
        words = [word for word in action.lower().split() if word in (*_MOVES, "take", "open")]
        command = words[-1] if words else ""
        if command == "open" and self._at == self._treasure and self._has_key:
            return "The chest is open.", max(0.0, 1.0 - self._cost * (self._turns - self.steps_needed)), True
        if command == "take" and self._at == self._key and not self._has_key:
            self._has_key = True
            return f"You have the key. {self._seen()}", 0.0, False
        if command in _MOVES:
            x, y = (a + b for a, b in zip(self._at, _MOVES[command], strict=True))
            if 0 <= x < self._size and 0 <= y < self._size:
                self._at = (x, y)
                return self._seen(), 0.0, False
        return f"Nothing happens. {self._seen()}", 0.0, False

    def _seen(self) -> str:
        """What is here, and where what is wanted next lies."""
        here = ["the key"] * (self._at == self._key and not self._has_key) + ["a chest"] * (self._at == self._treasure)
        wanted, name = (self._treasure, "chest") if self._has_key else (self._key, "key")
        text = f"Here is {' and '.join(here)}. " if here else ""
        return f"{text}The {name} is {_direction(self._at, wanted)}."


def _distance(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _direction(at: Place, wanted: Place) -> str:
    """Where a room lies, in the words of the moves."""
    x, y = wanted[0] - at[0], wanted[1] - at[1]
    words = ["north"] * (y > 0) + ["south"] * (y < 0) + ["east"] * (x > 0) + ["west"] * (x < 0)
    return " and ".join(words) or "here"
