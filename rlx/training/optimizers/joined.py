"""Several optimizers of one model as one, because a model has one optimizer everywhere else.

Left out: which weights each has (choice).
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Joined(Optimizer):
    """Optimizers of different weights: their groups one after the other, and one state."""

    def __init__(self, *parts: Optimizer) -> None:
        """Takes optimizers that have not stepped; they share the groups and the state with this one."""
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each optimizer."""
        for part in self._parts:
            part.step()
