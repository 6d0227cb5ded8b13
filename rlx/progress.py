"""What a person watches: the warm start, the steps of a run, the trials of a sweep. A line that changes in place on a
terminal, plain lines elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "task/accuracy", "{:.3f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
    ("KL", "kl/ref", "{:.4f}"),
    ("tokens/s", "tokens/rollout_per_s", "{:,.0f}"),
    ("s/step", "time/step", "{:.1f}"),
)


def described(metrics: Mapping[str, Any]) -> str:
    """The metrics that people watch, in one line; those that are not there are left out."""
    return "  ".join(f"{label} {form.format(metrics[key])}" for label, key, form in _SHOWN if key in metrics)


def time_left(seconds: float) -> str:
    """12 s as 0:12, an hour as 1:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RunProgress:
    """The live line of one run. Steps with an evaluation stay on the screen; off a terminal every step is a line."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.steps = steps
        self._first: tuple[int, float] | None = None
        self._live = Live(console=self.console, transient=True, refresh_per_second=4)

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A passing message, e.g. what is being waited for."""
        if self.console.is_terminal:
            self._live.update(Text(text))
        else:
            self.console.print(text)

    def warm_start(self, done: int, steps: int, loss: float) -> None:
        """One step of making the tiny model."""
        if self.console.is_terminal or done % 100 == 0 or done == steps:
            self.say(f"making the tiny model, once: step {done}/{steps}  loss {loss:.3f}")

    def step(self, metrics: Mapping[str, Any], checkpoint: str | None) -> None:
        """One reported step."""
        now, done = time.monotonic(), int(metrics["step"])
        self._first = self._first or (done, now)
        spent = done - self._first[0]
        left = f"  left {time_left((now - self._first[1]) / spent * (self.steps - done))}" if spent else ""
        line = f"step {done}/{self.steps}  {described(metrics)}{left}"
        if "time/eval" in metrics or not self.console.is_terminal:
            self.console.print(line + ("  checkpoint" if checkpoint else ""))
        self.say(line) if self.console.is_terminal else None
