"""The static picture of a sweep, for a terminal's image viewer or a text: curves, and the final values beside them.

Left out: interactive figures (rlx.analysis.page).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlx.analysis.ranges import axis_of_curves, axis_of_values, natural_range, reach
from rlx.analysis.statistics import Group, mean_curve
from rlx.analysis.style import NUM_BANDS, colors

_MAX_INTERVALS = 20  # groups whose final values fit into the figure
_LABEL_WIDTH = 48  # characters of a line


def draw(groups: Sequence[Group], title: str, metric: str) -> Figure:
    """Draws the mean curves of the groups, and beside them the final value of each run with means and intervals.

    The best few curves have their intervals as bands. Groups without values are left out.

    Args:
        groups: best first.
    """
    drawn = [group for group in groups if group.values]
    figure = Figure(figsize=(12, max(5.2, 1.6 + 0.3 * min(len(drawn), _MAX_INTERVALS))))
    curves, finals = figure.add_axes((0.06, 0.11, 0.41, 0.74)), figure.add_axes((0.74, 0.11, 0.24, 0.74))
    means = [mean_curve(group, metric) for group in drawn]
    ranked = list(enumerate(zip(drawn, means, colors(len(drawn)), strict=True)))
    for row, (group, mean, color) in reversed(ranked):
        _draw_curve(curves, mean, metric, color, row < NUM_BANDS)
        if row < _MAX_INTERVALS:
            _draw_final_values(finals, row, group, metric, color)
    if drawn:
        curves.set_ylim(axis_of_curves(means, metric))
        finals.set_xlim(axis_of_values(drawn, metric))
    for axes in (curves, finals):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8e8e8", linewidth=0.8)
    curves.set(xlabel="PPO step (0: before training)", ylabel=metric)
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels = [_folded(group.label) for group in drawn[:_MAX_INTERVALS]]
    finals.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    finals.invert_yaxis()
    has_intervals = any(len(group.values) > 1 for group in drawn)
    finals.set_title(f"last value of each run{'; mean, 95 % interval' if has_intervals else ''}", fontsize=9)
    figure.text(0.02, 0.94, title, fontsize=13, fontweight="bold")
    figure.text(0.02, 0.9, _subtitle(drawn, len(groups) - len(drawn)), fontsize=9, color="#707070")
    return figure


def _subtitle(drawn: Sequence[Group], num_left_out: int) -> str:
    counts = sorted({len(group.values) for group in drawn})
    if counts == [1]:
        text = "one run each, so no interval"
    else:
        text = f"mean and 95 % interval of {' or '.join(map(str, counts)) or 'no'} runs each"
    return text + (f"; {num_left_out} without a value left out" if num_left_out else "")


def _folded(label: str) -> str:
    """A label in lines of about `_LABEL_WIDTH` characters, folded between settings, and within longer ones."""
    lines = [""]
    for setting in label.split(", "):
        separator = ", "
        for part in textwrap.wrap(setting, _LABEL_WIDTH):
            if len(lines[-1]) + len(part) > _LABEL_WIDTH and lines[-1]:
                lines.append("")
            lines[-1] += (separator if lines[-1] else "") + part
            separator = " "
    return "\n".join(lines)


def _draw_curve(axes: Axes, curve: pd.DataFrame, metric: str, color: str, has_band: bool) -> None:
    marker, width = ("o-", 2) if has_band else ("-", 1)
    axes.plot(curve.index, curve["mean"], marker, color=color, linewidth=width, markersize=4)
    if has_band:
        band = curve.clip(*natural_range(metric))
        axes.fill_between(curve.index, band["low"], band["high"], color=color, alpha=0.15, linewidth=0)


def _draw_final_values(axes: Axes, row: int, group: Group, metric: str, color: str) -> None:
    count = len(group.values)
    heights = row + (np.linspace(-0.12, 0.12, count) if count > 1 else np.zeros(1))
    axes.plot(group.values, heights, "o", color=color, alpha=0.5, markersize=5)
    below, above = reach(metric, group.mean, 0 if math.isnan(group.half_width) else group.half_width)
    axes.errorbar(group.mean, row, xerr=[[below], [above]], fmt="|", color=color, markersize=14, capsize=4)
