"""What a person watches: the warm start, the steps of a run, the trials of a sweep. A line that changes in place on a
terminal, plain lines elsewhere.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.measure import Measurement
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
_SPARE = ("s/step", "accuracy", "tokens/s", "KL", "reward")  # of a sweep's table, in the order in which they go

Row = Mapping[str, Any]
"""what is known of a trial: its settings, metrics, state"""


def described(metrics: Mapping[str, Any]) -> str:
    """The metrics that people watch, in one line; those that are not there are left out."""
    return "  ".join(f"{label} {form.format(metrics[key])}" for label, key, form in _SHOWN if key in metrics)


def time_left(seconds: float) -> str:
    """12 s as 0:12, an hour as 1:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """One that shows texts as they are: an error's, a path or a setting may look like rich's markup, "[/tmp]" say."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def printed(table: Table, width: int) -> str:
    """A table as text, as a screen so wide shows it."""
    stream = io.StringIO()
    plain_console(stream, width).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


class RunProgress:
    """The live line of one run. Steps with an evaluation stay on the screen; off a terminal every step is a line."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or plain_console()
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
        self.console = console or plain_console()
        self.steps = steps
        self._rows: dict[str, dict[str, Any]] = {}
        self._began, self._over = time.monotonic(), False
        self._live = Live(console=self.console, get_renderable=self._shown, refresh_per_second=1)

    def __enter__(self) -> SweepProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True  # what stays on the screen has every trial
        self._live.stop()

    def watch(self, trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], state: str) -> None:
        """News of a trial; its settings change where a scheduler gives it another's."""
        before: dict[str, Any] = self._rows.get(trial, {"metrics": {}, "state": ""})
        changed = before["state"] != state
        known: dict[str, Any] = {"settings": settings, "metrics": {**before["metrics"], **metrics}, "state": state}
        self._rows = self._rows | {trial: known}  # in one go: the table is drawn in a thread of its own
        if not self.console.is_terminal and (changed or "time/eval" in metrics):
            step = f"step {known['metrics']['step']}/{self.steps}  " if "step" in known["metrics"] else ""
            shown = step + described(known["metrics"]) if not changed or state != "running" else _settings(settings)
            self.console.print(f"{trial} {state}  {shown}", soft_wrap=True)

    def _shown(self) -> RenderableType:
        """As much as fits on the screen; all trials once the sweep is over."""
        if not self._rows:
            waited = time_left(time.monotonic() - self._began)
            return Text("" if self._over else f"waiting for the first trial  {waited}")
        room = self.console.height - 4  # header, what is left out, the cursor's line
        left_out = [] if self._over else self._least_watched(len(self._rows) - max(room, 1))
        rows = {trial: row for trial, row in self._rows.items() if trial not in left_out}
        states = Counter(self._rows[trial]["state"] for trial in left_out)
        more = ", ".join(f"{count} {state}" for state, count in states.items())
        return Group(self._fitting(rows), *([f"and {more}"] if more else []))

    def _least_watched(self, count: int) -> list[str]:
        """So many trials: those that are over, the oldest first, and then the newest."""
        over = [trial for trial, row in self._rows.items() if row["state"] != "running"]
        running = [trial for trial in self._rows if trial not in over]
        return [*over, *reversed(running)][: max(count, 0)]

    def _fitting(self, rows: Mapping[str, Row]) -> Table:
        """The table with all columns that fit, less those of least weight; nothing in it is cut, if that can be."""
        labels, spare = [label for label, _, _ in _SHOWN], list(_SPARE)
        table = self._table(rows, [*labels, "left"])
        while self._width(table) > self.console.width - 2 and spare:  # what is typed meanwhile breaks no line
            table = self._table(rows, [label for label in labels if label not in _SPARE or label in spare], narrow=True)
            spare = spare[1:]
        return table

    def _width(self, table: Table) -> int:
        return Measurement.get(self.console, self.console.options.update(width=1000), table).maximum

    def _table(self, rows: Mapping[str, Row], chosen: Sequence[str], *, narrow: bool = False) -> Table:
        """A row per trial. A narrow table has names in two lines, and trials by their number."""
        table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0), header_style="bold")
        varied = list(next(iter(rows.values()))["settings"])
        watched = [column for column in _SHOWN if column[0] in chosen]
        left = ["left"] if "left" in chosen else []
        names = [key.rpartition(".")[2] for key in varied]
        for column in ("trial", *names, "step", *(label for label, _, _ in watched), *left, "state"):
            side: JustifyMethod = "left" if column in ("trial", "state") else "right"
            header = re.sub("[-_]", "\n", column, count=1) if narrow else column
            table.add_column(header, justify=side, no_wrap=True, vertical="bottom")
        for trial, row in rows.items():
            metrics, state = row["metrics"], row["state"]
            values = [_short(row["settings"].get(key)) for key in varied]
            done = f"{metrics['step']}/{self.steps}" if "step" in metrics else ""
            shown = [form.format(metrics[key]) if key in metrics else "" for _, key, form in watched]
            rest = [self._left(row)] if left else []
            state = "starting" if state == "running" and not done else state
            table.add_row(trial.removeprefix("trial_") if narrow else trial, *values, done, *shown, *rest, state)
        return table

    def _left(self, row: Row) -> str:
        metrics = row["metrics"]
        if row["state"] != "running" or "time/step" not in metrics:
            return ""
        return time_left(metrics["time/step"] * (self.steps - metrics["step"]))


def _settings(settings: Mapping[str, Any]) -> str:
    return "  ".join(f"{key} {_short(value)}" for key, value in settings.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
