"""The tables of an analysis, and tables as Markdown for a terminal or a file. Left out: HTML (rlx.analysis.page)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from rich import box
from rich.measure import Measurement
from rich.table import Table

from rlx.analysis.loading import Sweep
from rlx.analysis.statistics import Group, best_value, final_value, rank_trials
from rlx.analysis.style import as_text, progress_text, setting_text, short_names, short_texts
from rlx.config.sweep import Mode
from rlx.tracking.base import RunStatus
from rlx.tracking.console import plain_console, table_text

OPTIONAL_COLUMNS = ("tokens", "lowest", "highest", "seconds")
"""columns that a narrow terminal does not show, in the order in which they are dropped"""
_UNLIMITED = 10_000  # characters
_SETTINGS = "settings"  # among the attributes of a table: the names of the columns that are


def group_table(groups: Sequence[Group]) -> pd.DataFrame:
    """One row per group: rank, settings, number of values, mean, half width of the interval, extremes, mean cost of a
    run, and remarks on its trials."""
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    names = dict(zip(keys, short_names(keys), strict=True))
    rows = [
        {"rank": rank}
        | {names[key]: group.settings.get(key) for key in keys}
        | {"runs": len(group.values), "mean": group.mean, "±": group.half_width}
        | {"lowest": min(group.values, default=math.nan), "highest": max(group.values, default=math.nan)}
        | {"tokens": mean_tokens(group), "seconds": mean_seconds(group), "notes": _remarks(group)}
        for rank, group in enumerate(groups, 1)
    ]
    table = with_settings(pd.DataFrame(rows), names.values())
    return table.drop(columns=[] if any(row["notes"] for row in rows) else "notes")


def mean_tokens(group: Group) -> float:
    """The mean number of response tokens that a run of the group generated; NaN if none has ended."""
    return _mean([trial.history["tokens/total"].max() for trial in group.ended])


def mean_seconds(group: Group) -> float:
    """The mean duration of the steps and evaluations of a run of the group; NaN if none has ended."""
    return _mean([trial.seconds for trial in group.ended])


def trial_table(sweep: Sweep, metric: str, mode: Mode) -> pd.DataFrame:
    """One row per trial, in the order of `rank_trials`: name, varied settings, final, best and first value, cost,
    status, why it failed."""
    rows = [
        {"rank": rank, "trial": trial.name}
        | dict(zip(short_names(trial.settings), trial.settings.values(), strict=True))
        | {"final": final_value(trial, metric), "best": best_value(trial, metric, mode)}
        | {"first": float(trial.curve(metric).get(0, math.nan))}
        | {"steps": trial.last_step, "tokens": trial.history["tokens/total"].max()}
        | {"seconds": trial.seconds, "status": str(trial.status), "error": trial.error}
        | {"stopped": trial.stopped_at, "from": ", ".join(trial.origins)}
        for rank, trial in enumerate(rank_trials(sweep, metric, mode), 1)
    ]
    return with_settings(pd.DataFrame(rows), short_names(sweep.varied))


def with_settings(table: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """The table, which knows that these columns are settings: `cell_texts` gives them in full."""
    table.attrs[_SETTINGS] = [*columns]
    return table


def cell_texts(table: pd.DataFrame, are_settings_short: bool = False) -> list[list[str]]:
    """The texts of a table by rows: settings in full or shortened, other numbers rounded."""
    settings = table.attrs.get(_SETTINGS, [])
    of_setting = short_texts if are_settings_short else lambda values: map(setting_text, values)
    columns = [of_setting(table[column]) if column in settings else map(as_text, table[column]) for column in table]
    return [[*row] for row in zip(*columns, strict=True)]


def format_table(table: pd.DataFrame, width: int | None = None) -> str:
    """Formats a table as Markdown, with long texts of settings shortened.

    Args:
        width: columns of the terminal. If the table is wider, it loses `OPTIONAL_COLUMNS`; if it is still wider, texts
            are folded, but numbers are not.
    """
    optional = [column for column in OPTIONAL_COLUMNS if column in table]
    while width and optional and _measure(table).maximum > width:
        table = table.drop(columns=optional.pop(0))
    limits = _measure(table)
    return table_text(_rich_table(table), max(min(width or _UNLIMITED, limits.maximum), limits.minimum))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _rich_table(table: pd.DataFrame) -> Table:
    drawn = Table(box=box.MARKDOWN)
    for column in table:
        is_number = pd.api.types.is_numeric_dtype(table[column])
        drawn.add_column(str(column), justify="right" if is_number else "left", no_wrap=is_number)
    for row in cell_texts(table, are_settings_short=True):
        drawn.add_row(*row)
    return drawn


def _measure(table: pd.DataFrame) -> Measurement:
    """The smallest and the largest width of a table, in characters."""
    console = plain_console(width=_UNLIMITED)
    return Measurement.get(console, console.options, _rich_table(table))


def _remarks(group: Group) -> str:
    """Remarks that a mean needs: which trials did not end as planned, and which continued from others."""
    trials = group.trials
    cut = [trial.last_step for trial in trials if trial.was_cut]
    at = f" at {progress_text(cut, trials[0].planned_steps)}" if cut else ""
    statuses = Counter(
        trial.status.lower() + at * trial.was_cut
        for trial in trials
        if trial.status != RunStatus.FINISHED and not trial.was_stopped
    )
    stops = sorted(str(trial.stopped_at) for trial in trials if trial.was_stopped)
    remarks = [f"{count} {status}" if len(trials) > 1 else status for status, count in statuses.items()]
    remarks += [f"{len(group.diverged)} of {len(trials)} ended with no finite value"] if group.diverged else []
    remarks += [f"stopped at {', '.join(stops)}"] if stops else []
    return "; ".join([*remarks, *(f"continued from {origin}" for trial in trials for origin in trial.origins)])
