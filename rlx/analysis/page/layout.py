"""What the figures of the page share: their layout, and axes that separate the values of a setting.

Left out: the axis of a metric (rlx.analysis.ranges).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from rlx.analysis.importance import numbers, on_log_scale
from rlx.analysis.loading import SettingValue
from rlx.analysis.statistics import Group
from rlx.analysis.style import as_text, setting_text, short_texts

_MAX_MARKS = 6  # an axis shows every value of a setting that has at most this number of values
_OVERLAP = 0.06  # marks that are closer than this share of the axis would overlap
_LONGEST_MARK = 24  # characters
_MAX_WHOLE = 10  # numbers apart, an axis has a mark at each
_CHOSEN_MARKS = {"tickformat": ".6~g"}  # of a setting's axis, whose marks plotly chooses
_LEGEND_LINE = 24  # height in pixels
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#222"}


def styled(
    figure: go.Figure, plot_height: int, legend_lines: int = 0, top: int = 24, right: int = 20, left: int = 60
) -> go.Figure:
    """Gives a figure the common layout: a plot of the given height in pixels, and the legend below the axis title."""
    axis_title = 54
    bottom = axis_title + _LEGEND_LINE * legend_lines
    figure.update_layout(
        height=top + plot_height + bottom,
        font=_FONT,
        template="plotly_white",
        margin={"l": left, "r": right, "t": top, "b": bottom},
        legend={"orientation": "h", "yanchor": "top", "y": -axis_title / plot_height, "x": 0, "title": None},
        hovermode="closest",
    )
    return figure


def whole_numbers(values: Iterable[float]) -> dict[str, Any]:
    """The marks of an axis of steps or of trials, which plotly sets at halves if it has few values."""
    found = [*values]
    return {"dtick": 1} if found and max(found) - min(found) <= _MAX_WHOLE else {}


def ranked_labels(groups: Sequence[Group]) -> list[str]:
    """The names of the groups with their rank in front."""
    return [f"{rank}  {group.label}" for rank, group in enumerate(groups, 1)]


def count_legend_lines(groups: Sequence[Group]) -> int:
    """How many lines a horizontal legend of the groups needs, about."""
    longest = max(len(group.label) for group in groups)
    per_line = max(1, 900 // (60 + 7 * longest))
    return math.ceil(len(groups) / per_line)


def dimension(name: str, values: Sequence[SettingValue]) -> dict[str, Any]:
    """An axis of parallel coordinates. These know only linear axes, so texts and logarithms become numbers here."""
    as_numbers, marks = numbers(values), axis_marks(values)
    if as_numbers is None:
        positions = [float(marks.index(setting_text(value))) for value in values]
        return {"label": name, "values": positions, "tickvals": list(range(len(marks))), "ticktext": mark_texts(marks)}
    if _scale(values) == "linear":
        written = {"tickvals": marks, "ticktext": mark_texts(marks)} if marks else _CHOSEN_MARKS
        return {"label": name, "values": as_numbers, **written}
    logarithms = [math.log10(value) for value in as_numbers]
    low, high = min(logarithms), max(logarithms)
    inner = [mark for mark in marks if _OVERLAP < (math.log10(mark) - low) / (high - low) < 1 - _OVERLAP]
    shown = [min(as_numbers), *inner, max(as_numbers)]  # the axis reaches from the first mark to the last
    texts = [as_text(float(f"{mark:.2g}")) for mark in shown]
    return {"label": name, "values": logarithms, "tickvals": [math.log10(mark) for mark in shown], "ticktext": texts}


def setting_axis(values: Sequence[SettingValue]) -> dict[str, Any]:
    """The scale and the marks of an axis with the values of a setting."""
    scale, marks = _scale(values), axis_marks(values)
    if scale == "category":
        return {"type": scale, "categoryorder": "array", "categoryarray": mark_texts(marks)}  # plotly thins them
    if not marks:
        return {"type": scale, **_CHOSEN_MARKS}
    return {"type": scale, "tickvals": marks, "ticktext": mark_texts(marks)}


def mark_texts(values: Sequence[SettingValue]) -> list[str]:
    """The values of a setting as the marks of its axis; those that are no numbers stand at these."""
    return short_texts(values, _LONGEST_MARK)


def _scale(values: Sequence[SettingValue]) -> str:
    """The scale that separates the values of a setting, by the name that plotly gives it."""
    as_numbers = numbers(values)
    return "category" if as_numbers is None else "log" if on_log_scale(as_numbers) else "linear"


def axis_marks(values: Sequence[SettingValue]) -> list[Any]:
    """The values that are written at the axis of a setting.

    Texts are written, and so are a few numbers that do not overlap, such as those of a grid. In other cases a
    logarithmic axis gets round numbers. A linear axis gets an empty list: plotly chooses its marks.
    """
    as_numbers = numbers(values)
    if as_numbers is None:
        return sorted({setting_text(value) for value in values})
    distinct = sorted(set(as_numbers))
    is_logarithmic = on_log_scale(as_numbers)
    positions = [math.log10(value) for value in distinct] if is_logarithmic else distinct
    if len(distinct) <= _MAX_MARKS and not _would_overlap(positions):
        return distinct
    return _round_marks(distinct[0], distinct[-1]) if is_logarithmic else []


def _round_marks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds on a logarithmic scale: few enough for an axis, if possible."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        marks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= _MAX_MARKS - 2:
            break
    return marks


def _would_overlap(positions: Sequence[float]) -> bool:
    """Whether marks at two neighboring positions of an axis would overlap."""
    length = positions[-1] - positions[0]
    return any(high - low <= _OVERLAP * length for low, high in pairwise(positions))
