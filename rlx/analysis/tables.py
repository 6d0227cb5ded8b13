"""TODO rlx.analysis.tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from rich import box
from rich.measure import Measurement
from rich.table import Table

from rlx.analysis.loading import Sweep, Trial
from rlx.analysis.statistics import Group, Mode, _best, as_text, final, groups, ranked, short_names
from rlx.config.sections import DEFAULT_METRIC
from rlx.tracking.console import plain_console, printed

_SPARE = ("tokens", "lowest", "highest", "seconds")  # columns that a narrow terminal goes without, the first first


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def rank(sweep: Sweep, metric: str = DEFAULT_METRIC, mode: Mode = "max", by: str | None = None) -> pd.DataFrame:
    """One row per setting, or per value of `by`, as `groups`: what it is, what it reached, and what it took."""
    return table(groups(sweep, metric, mode, by))


def table(found: Sequence[Group]) -> pd.DataFrame:
    """One row per group: rank, settings, number of values, their mean, its interval and their extremes, what a run took
    on average, and what is to be said of its trials, if anything is."""
    keys = list(dict.fromkeys(key for group in found for key in group.settings))
    names = dict(zip(keys, short_names(keys), strict=True))
    rows = [
        {"rank": place}
        | {names[key]: group.settings.get(key) for key in keys}
        | {"runs": len(group.values), "mean": group.mean, "±": group.half}
        | {"lowest": min(group.values, default=math.nan), "highest": max(group.values, default=math.nan)}
        | {"tokens": cost(group, "tokens"), "seconds": cost(group, "seconds"), "notes": _notes(group.trials)}
        for place, group in enumerate(found, 1)
    ]
    return pd.DataFrame(rows).drop(columns=[] if any(row["notes"] for row in rows) else "notes")


def cost(group: Group, kind: Literal["tokens", "seconds"]) -> float:
    """Response tokens generated, or seconds of training, by a run on average; NaN if none has ended."""
    if kind == "tokens":
        each = [trial.history["tokens/total"].max() for trial in group.ended]
    else:
        each = [trial.seconds for trial in group.ended]
    return float(np.mean(each)) if each else math.nan


def trial_table(sweep: Sweep, metric: str = DEFAULT_METRIC, mode: Mode = "max") -> pd.DataFrame:
    """One row per trial, as `ranked`: name, varied settings, last, best and first value, what it took, how it ended."""
    rows = [
        {"rank": place, "trial": trial.name}
        | dict(zip(short_names(trial.settings), trial.settings.values(), strict=True))
        | {"final": final(trial, metric), "best": _best(trial, metric, mode)}
        | {"first": float(trial.curve(metric).get(0, math.nan))}
        | {"steps": max(trial.history.index, default=0), "tokens": trial.history["tokens/total"].max()}
        | {"seconds": trial.seconds, "status": trial.status, "stopped": trial.stopped}
        | {"from": ", ".join(trial.origins)}
        for place, trial in enumerate(ranked(sweep, metric, mode), 1)
    ]
    return pd.DataFrame(rows)


def format_table(shown: pd.DataFrame, width: int | None = None) -> str:
    """A table as text that is Markdown, too.

    Args:
        width: a terminal's, for which `_SPARE` columns are left out as need be. Without them the table may still be
            wider: then texts are folded, numbers never.
    """
    spare = [column for column in _SPARE if column in shown]
    while width and spare and _measured(shown).maximum > width:
        shown = shown.drop(columns=spare.pop(0))
    fitting = min(width or 10_000, _measured(shown).maximum)
    return printed(_drawn(shown), max(fitting, _measured(shown).minimum))


def _drawn(shown: pd.DataFrame) -> Table:
    drawn = Table(box=box.MARKDOWN)
    for column in shown:
        number = pd.api.types.is_numeric_dtype(shown[column])
        drawn.add_column(str(column), justify="right" if number else "left", no_wrap=number)
    for row in shown.itertuples(index=False):
        drawn.add_row(*(as_text(value) for value in row))
    return drawn


def _measured(shown: pd.DataFrame) -> Measurement:
    """How narrow and how wide a table can be."""
    console = plain_console(width=10_000)
    return Measurement.get(console, console.options, _drawn(shown))


def _notes(trials: Sequence[Trial]) -> str:
    """What a mean does not say: trials that did not end as planned, and those that went on from others."""
    ends = Counter(trial.status.lower() for trial in trials if trial.status != "FINISHED" and trial.stopped is None)
    stops = sorted(str(trial.stopped) for trial in trials if trial.stopped is not None)
    notes = [f"{count} {status}" if len(trials) > 1 else status for status, count in ends.items()]
    notes += [f"stopped at {', '.join(stops)}"] if stops else []
    return "; ".join([*notes, *(f"went on from {origin}" for trial in trials for origin in trial.origins)])
