"""TODO rlx.analysis.static_figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlx.analysis.statistics import BANDS, Group, mean_curve, shades
from rlx.config.sections import DEFAULT_METRIC

_SHOWN = 20  # groups whose intervals a static figure has room for


def figure(found: Sequence[Group], title: str, metric: str = DEFAULT_METRIC) -> Figure:
    """Mean curves of the groups, and beside them each run's last value with the means and their intervals.

    The best few curves have their intervals as bands; those of all but the best groups are grey.
    """
    known = [group for group in found if group.values]
    drawn = Figure(figsize=(12, max(5.2, 1.6 + 0.3 * min(len(known), _SHOWN))))
    curves, ends = drawn.add_axes((0.06, 0.11, 0.41, 0.74)), drawn.add_axes((0.74, 0.11, 0.24, 0.74))
    for place, (group, shade) in reversed(list(enumerate(zip(known, shades(len(known)), strict=True)))):
        _draw_mean(curves, mean_curve(group, metric), shade, place < BANDS)
        if place < _SHOWN:
            _draw_ends(ends, place, group, shade)
    for axes in (curves, ends):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8e8e8", linewidth=0.8)
    curves.set(xlabel="PPO step (0: before training)", ylabel=metric)
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    ends.set_yticks(range(len(known[:_SHOWN])), [_folded(group.label) for group in known[:_SHOWN]], fontsize=8)
    ends.invert_yaxis()
    ends.set_title("last value of each run; mean, 95 % interval", fontsize=9)
    drawn.text(0.02, 0.94, title, fontsize=13, fontweight="bold")
    drawn.text(0.02, 0.9, _of_runs(known, len(found) - len(known)), fontsize=9, color="#707070")
    return drawn


def _of_runs(known: Sequence[Group], without: int) -> str:
    counts = sorted({len(group.values) for group in known})
    note = f"mean and 95 % interval of {' or '.join(map(str, counts)) or 'no'} runs each"
    return note + (f"; {without} without a value left out" if without else "")


def _folded(label: str) -> str:
    """A label in lines of at most 50 characters, cut between its settings."""
    lines = [""]
    for part in label.split(", "):
        if len(lines[-1]) + len(part) > 48 and lines[-1]:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return "\n".join(lines)


def _draw_mean(axes: Axes, curve: pd.DataFrame, shade: str, banded: bool) -> None:
    axes.plot(
        curve.index, curve["mean"], "o-" if banded else "-", color=shade, linewidth=2 if banded else 1, markersize=4
    )
    if banded:
        axes.fill_between(curve.index, curve["low"], curve["high"], color=shade, alpha=0.15, linewidth=0)


def _draw_ends(axes: Axes, place: int, group: Group, shade: str) -> None:
    around = place + (np.linspace(-0.12, 0.12, len(group.values)) if len(group.values) > 1 else np.zeros(1))
    axes.plot(group.values, around, "o", color=shade, alpha=0.5, markersize=5)
    half = 0 if math.isnan(group.half) else group.half
    axes.errorbar(group.mean, place, xerr=half, fmt="|", color=shade, markersize=14, capsize=4)
