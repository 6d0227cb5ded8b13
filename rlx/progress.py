"""What a person watches: the warm start, the steps of a run, the trials of a sweep. A line that changes in place on a
terminal, plain lines elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
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

    def note(self, text: str) -> None:
        """Something that a person should know, and that stays on the screen."""
        self.console.print(text, soft_wrap=True)

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
            self.console.print(
                line + (f"  saved {checkpoint.rpartition('/')[2]}" if checkpoint else ""), soft_wrap=True
            )
        if self.console.is_terminal:
            self.say(line)


class SweepProgress:
    """The live table of a sweep: one row per trial. Off a terminal, a line when a trial starts, evaluates or ends."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.steps = steps
        self._rows: dict[str, dict[str, Any]] = {}
        self._live = Live(console=self.console, get_renderable=self._table, refresh_per_second=1)

    def __enter__(self) -> SweepProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def watch(self, trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], state: str) -> None:
        """News of a trial."""
        known = self._rows.setdefault(trial, {"settings": settings, "metrics": {}, "state": ""})
        changed = known["state"] != state
        known["metrics"], known["state"] = {**known["metrics"], **metrics}, state
        if not self.console.is_terminal and (changed or "time/eval" in metrics):
            step = f"step {known['metrics']['step']}/{self.steps}  " if "step" in known["metrics"] else ""
            shown = step + described(known["metrics"]) if not changed or state != "running" else _settings(settings)
            self.console.print(f"{trial} {state}  {shown}", soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        varied = list(next(iter(self._rows.values()))["settings"]) if self._rows else []
        short = [key.rpartition(".")[2] for key in varied]
        for column in ("trial", *short, "step", *(label for label, _, _ in _SHOWN), "left", "state"):
            table.add_column(column, justify="left" if column in ("trial", "state") else "right", no_wrap=True)
        for trial, row in self._rows.items():
            metrics = row["metrics"]
            values = [_short(row["settings"].get(key)) for key in varied]
            watched = [form.format(metrics[key]) if key in metrics else "" for _, key, form in _SHOWN]
            done = f"{metrics['step']}/{self.steps}" if "step" in metrics else ""
            table.add_row(trial, *values, done, *watched, self._left(row), row["state"])
        return table

    def _left(self, row: Mapping[str, Any]) -> str:
        metrics = row["metrics"]
        if row["state"] != "running" or "time/step" not in metrics:
            return ""
        return time_left(metrics["time/step"] * (self.steps - metrics["step"]))


def _settings(settings: Mapping[str, Any]) -> str:
    return "  ".join(f"{key} {_short(value)}" for key, value in settings.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
