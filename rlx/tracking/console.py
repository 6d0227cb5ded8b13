"""What a person sees in the terminal: the progress of the warm start, of a run's steps, and of a sweep's trials.

On a terminal, a line or table changes in place; elsewhere (a file, a pipe) each event is one line. Left out: reports
about finished runs and sweeps.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rlx.config.sections.data import error_of
from rlx.config.sweep import DEFAULT_METRIC
from rlx.tracking.startup import StartUp
from rlx.types import Phase, has_evaluation


class _Column(NamedTuple):
    """A metric that people watch."""

    label: str
    metric: str
    format: str


_COLUMNS = (
    _Column("reward", "reward/mean", "{:.3f}"),
    _Column("accuracy", "task/accuracy", "{:.3f}"),
    _Column("held-out", DEFAULT_METRIC, "{:.3f}"),
    _Column("KL", "kl/ref", "{:.4f}"),
    _Column("tokens/s", "tokens/rollout_per_s", "{:,.0f}"),
    _Column("s/step", "time/step", "{:.1f}"),
)
_FAILED = (
    _Column("failed", "episode/failed_fraction", "{:.3f}"),
    _Column("held-out failed", "eval/failed_fraction", "{:.3f}"),
)
"""shares of episodes whose environment failed, shown where they are not 0"""
_TIME_LEFT = "left"
_OPTIONAL = (
    "s/step",
    "accuracy",
    "tokens/s",
    "KL",
    "reward",
)  # columns in the order in which a narrow table drops them


@dataclass(frozen=True)
class _TrialRow:
    """What is known of a trial."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    since: float = 0.0  # when it was first seen


# ---------------------------------------------------------------------------------------------------------------------
# Text


def metrics_line(metrics: Mapping[str, Any], columns: Sequence[_Column] = ()) -> str:
    """The metrics that people watch, in one line, with what eval.sets measured; or those of some columns.

    Missing ones are omitted.
    """
    failed = [column for column in _FAILED if metrics.get(column.metric)]
    shown = [*(columns or [*_COLUMNS, *_columns_of_sets(metrics)]), *failed]
    values = [(column.label, _metric_text(column, metrics)) for column in shown]
    return "  ".join(f"{label} {text}" for label, text in values if text)


def duration_text(seconds: float) -> str:
    """A duration as minutes and seconds, 0:12, or with hours, 1:00:00."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def plain_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that prints texts unchanged: an error, path or setting may look like rich markup, e.g. "[/tmp]"."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def table_text(table: Table, width: int) -> str:
    """A table as text, as a screen of the given width shows it."""
    stream = io.StringIO()
    plain_console(stream, width).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def _columns_with(metric: str) -> tuple[_Column, ...]:
    """The columns of a sweep that compares its trials by a metric, which takes the place of the held-out accuracy."""
    own = _Column(metric, metric, "{:.3f}")
    return tuple(own if column.metric == DEFAULT_METRIC != metric else column for column in _COLUMNS)


def _columns_of_sets(metrics: Mapping[str, Any]) -> list[_Column]:
    """The share of right answers to each of eval.sets."""
    found = (re.fullmatch(r"eval/([^/]+)/avg_at_\d+", name) for name in sorted(metrics))
    return [_Column(each[1], each[0], "{:.3f}") for each in found if each]


def _metric_text(column: _Column, metrics: Mapping[str, Any]) -> str:
    """The value of a metric as a cell, with its standard error if it has one; empty if it is missing."""
    if column.metric not in metrics:
        return ""
    error, text = error_of(column.metric), column.format.format(metrics[column.metric])
    return f"{text}±{column.format.format(metrics[error])}" if error in metrics else text


def _settings_line(settings: Mapping[str, Any]) -> str:
    return "  ".join(f"{key} {_setting_text(value)}" for key, value in settings.items())


def _setting_text(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)  # in full, as in an analysis: 0.9999 is not 1


# ---------------------------------------------------------------------------------------------------------------------
# Progress


class RunProgress:
    """The progress line of one run. Steps with an evaluation stay on the screen; in a file every step is a line.

    Use it as a context manager.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or plain_console()
        self.steps = steps
        self._first: tuple[int, float] | None = None  # the first step shown, and its time
        self._startup = StartUp()
        self._live = Live(console=self.console, transient=True, refresh_per_second=4)

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def status(self, text: str) -> None:
        """Shows what is happening now; on a terminal the next status replaces it."""
        if self.console.is_terminal:
            self._live.update(Text(text))
        else:
            self.message(text)

    def message(self, text: str) -> None:
        """Prints a message that stays on the screen; a phase of the start is shown while it lasts."""
        if not isinstance(text, Phase):
            self.console.print(text, soft_wrap=True)
            return
        self._startup.begin(text)
        if self.console.is_terminal:
            self._live.update(_Clock(self._startup))
        else:
            self.console.print(f"starting: {text}", soft_wrap=True)

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        """Shows one step of training the tiny model."""
        if self.console.is_terminal or step % 100 == 0 or step == steps:
            self.status(f"making the tiny model, once: step {step}/{steps}  loss {loss:.3f}")

    def step(self, metrics: Mapping[str, Any], checkpoint: str | None) -> None:
        """Shows one reported step, and the checkpoint that became complete since the step before."""
        step = int(metrics["step"])
        if not self._first and (summary := self._startup.summary()):
            self.message(summary)
        line = f"step {step}/{self.steps}  {metrics_line(metrics)}{self._time_left(step)}"
        if has_evaluation(metrics) or not self.console.is_terminal:
            self.message(line + (f"  saved {checkpoint.rpartition('/')[2]}" if checkpoint else ""))
            self._live.update(Text(""))  # on a terminal, the line is there once
        else:
            self.status(line)

    def _time_left(self, step: int) -> str:
        """The remaining time at the mean speed since the first step shown; empty at the first step."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        first_step, started = self._first
        if step == first_step:
            return ""
        return f"  left {duration_text((now - started) / (step - first_step) * (self.steps - step))}"


@dataclass(frozen=True)
class _Clock:
    """What goes on in a start, with its seconds so far each time it is drawn."""

    startup: StartUp

    def __rich__(self) -> Text:
        return Text(self.startup.now)


class SweepProgress:
    """The progress table of a sweep, one row per trial. In a file, a trial is a line when it starts, evaluates or ends.

    Use it as a context manager.
    """

    def __init__(self, steps: int, metric: str = DEFAULT_METRIC, console: Console | None = None) -> None:
        """
        Args:
            metric: by which trials are compared.
        """
        self.console = console or plain_console()
        self.steps, self._columns = steps, _columns_with(metric)
        self._rows: dict[str, _TrialRow] = {}
        self._startup, self._is_over = StartUp(), False
        self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=1)

    def __enter__(self) -> SweepProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # the last table, which stays on the screen, has all trials
        self._live.stop()

    def message(self, text: str) -> None:
        """Prints a message that stays on the screen; a phase before the first trial is shown while it lasts."""
        if isinstance(text, Phase):
            self._startup.begin(text)
        if not (isinstance(text, Phase) and self.console.is_terminal):
            self.console.print(f"starting: {text}" if isinstance(text, Phase) else text, soft_wrap=True)

    def update(self, trial: str, settings: Mapping[str, Any], metrics: Mapping[str, Any], state: str) -> None:
        """Shows a change of a trial; its settings change when a scheduler replaces them."""
        before = self._rows.get(trial, _TrialRow(since=time.monotonic()))
        row = _TrialRow(settings, {**before.metrics, **metrics}, state, before.since)
        self._rows = self._rows | {trial: row}  # a new dict, because another thread draws the table
        has_new_state = before.state != state
        if not self.console.is_terminal and (has_new_state or has_evaluation(metrics)):
            step = f"step {row.metrics['step']}/{self.steps}  " if "step" in row.metrics else ""
            is_start = has_new_state and state == "running"
            shown = _settings_line(settings) if is_start else step + metrics_line(row.metrics, self._columns)
            if not before.metrics and row.metrics:
                shown += f"  started in {time.monotonic() - row.since:.0f} s"
            self.console.print(f"{trial} {state}  {shown}", soft_wrap=True)

    def render(self) -> RenderableType:
        """The table with as many trials as fit on the screen; with all trials once the sweep is over."""
        if not self._rows:
            return Text("" if self._is_over else self._startup.now)
        height = self.console.height - 4  # without the header, the line about omitted trials, and the cursor
        omitted = [] if self._is_over else self._least_interesting(len(self._rows) - max(height, 1))
        rows = {trial: row for trial, row in self._rows.items() if trial not in omitted}
        states = Counter(self._rows[trial].state for trial in omitted)
        summary = ", ".join(f"{count} {state}" for state, count in states.items())
        return Group(self._fitting_table(rows), *([f"and {summary}"] if summary else []))

    def _least_interesting(self, count: int) -> list[str]:
        """The `count` trials to omit: those that are over, oldest first, then the newest running ones."""
        over = [trial for trial, row in self._rows.items() if row.state != "running"]
        running = [trial for trial in self._rows if trial not in over]
        return [*over, *reversed(running)][: max(count, 0)]

    def _fitting_table(self, rows: Mapping[str, _TrialRow]) -> Table:
        """The table without the `_OPTIONAL` columns for which the screen is too narrow, so that no cell is cut."""
        optional = list(_OPTIONAL)
        every = [column.label for column in self._columns]
        table = self._table(rows, [*every, _TIME_LEFT])
        while self._width(table) > self.console.width - 2 and optional:  # 2: typed characters must not wrap a line
            labels = [label for label in every if label not in _OPTIONAL or label in optional]
            table = self._table(rows, labels, is_narrow=True)
            optional = optional[1:]
        return table

    def _width(self, table: Table) -> int:
        return Measurement.get(self.console, self.console.options.update(width=1000), table).maximum

    def _table(self, rows: Mapping[str, _TrialRow], labels: Collection[str], *, is_narrow: bool = False) -> Table:
        """One row per trial. A narrow table has headers in two lines, and trials without the prefix of their name.

        Args:
            labels: of the metrics to show, and `_TIME_LEFT`.
        """
        table = Table(box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0), header_style="bold")
        varied = list(next(iter(rows.values())).settings)
        columns = [column for column in self._columns if column.label in labels]
        _add_headers(table, [*(key.rpartition(".")[2] for key in varied), "step"], columns, labels, is_narrow)
        for trial, row in rows.items():
            step = f"{row.metrics['step']}/{self.steps}" if "step" in row.metrics else ""
            is_starting = row.state == "running" and not step
            state = f"starting {time.monotonic() - row.since:.0f} s" if is_starting else row.state
            table.add_row(
                trial.removeprefix("trial_") if is_narrow else trial,
                *(_setting_text(row.settings.get(key)) for key in varied),
                step,
                *(_metric_text(column, row.metrics) for column in columns),
                *([self._time_left(row)] if _TIME_LEFT in labels else []),
                state,
            )
        return table

    def _time_left(self, row: _TrialRow) -> str:
        if row.state != "running" or "time/step" not in row.metrics:
            return ""
        return duration_text(row.metrics["time/step"] * (self.steps - row.metrics["step"]))


def _add_headers(
    table: Table, names: Sequence[str], columns: Sequence[_Column], labels: Collection[str], is_narrow: bool
) -> None:
    """Adds the columns of a sweep's table: trial, names, metrics, time left if it is one of the labels, state."""
    time_left = [_TIME_LEFT] if _TIME_LEFT in labels else []
    for name in ("trial", *names, *(column.label for column in columns), *time_left, "state"):
        side: JustifyMethod = "left" if name in ("trial", "state") else "right"
        header = re.sub("[-_]", "\n", name, count=1) if is_narrow else name
        table.add_column(header, justify=side, no_wrap=True, vertical="bottom")
