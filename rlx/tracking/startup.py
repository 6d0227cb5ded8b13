"""How long each phase of a start takes: the cluster, prompts, workers, engines, the first evaluation.

Left out: which phases there are. Whoever begins one says so by a `Phase` among its messages.
"""

from __future__ import annotations

import time


class StartUp:
    """The phases since it was made, each until the next one begins."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, float]] = []  # name, and when it began

    def begin(self, phase: str) -> None:
        """Ends the phase before."""
        self._phases.append((phase, time.monotonic()))

    @property
    def now(self) -> str:
        """What goes on, and for how long; empty before the first phase."""
        if not self._phases:
            return ""
        name, began = self._phases[-1]
        return f"starting: {name} {time.monotonic() - began:.0f} s"

    def summary(self) -> str:
        """The whole start in one line; empty if there was no phase."""
        if not self._phases:
            return ""
        ends = [*(began for _, began in self._phases[1:]), time.monotonic()]
        parts = [f"{name} {end - began:.0f} s" for (name, began), end in zip(self._phases, ends, strict=True)]
        return f"started in {ends[-1] - self._phases[0][1]:.0f} s: {', '.join(parts)}"
