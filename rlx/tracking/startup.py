"""How long each phase of a start takes: the cluster, prompts, workers, engines, the first evaluation; and the messages.

Left out: which phases there are. Whoever begins one says so by a `Phase` among its messages.
"""

from __future__ import annotations

import time
from typing import Any

from rlx.tracking.tracker import OutboxTracker
from rlx.types import Notify, OnReport, Phase


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


class EventLog:
    """Passes messages and steps on; keeps the messages, and how long the start took, as a text with the MLflow run."""

    def __init__(self, record: OutboxTracker, notify: Notify, on_report: OnReport) -> None:
        self.record, self.notify, self.on_report = record, notify, on_report
        self.file = f"events_{time.strftime('%Y-%m-%d_%H:%M:%S')}.txt"
        self.text, self.startup, self.is_started = "", StartUp(), False

    def __call__(self, message: str) -> None:
        if isinstance(message, Phase):
            self.startup.begin(message)
        else:
            self._keep(message)
        self.notify(message)

    def report(self, metrics: dict[str, Any], checkpoint: str | None) -> None:
        if not self.is_started:
            self._keep(self.startup.summary())
            self.is_started = True
        self.on_report(metrics, checkpoint)

    def _keep(self, line: str) -> None:
        self.text += f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n"
        self.record.log_text(self.file, self.text)
