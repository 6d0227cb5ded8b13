"""Interactive figures of the settings of a sweep: intervals, curves, parallel coordinates, slices, cost, importance.

Each function takes groups that all have values, best first, and returns a plotly figure. The figures of
optuna.visualization are not used: here the mouse can select a range of any axis, and every point has its interval.

Left out: the page around the figures (page.py), and pictures without a browser (static_figure.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rlx.analysis.importance import numbers, on_log_scale, varied_settings
from rlx.analysis.loading import Setting
from rlx.analysis.statistics import Group, mean_curve
from rlx.analysis.style import NUM_BANDS, NUM_NAMED, as_text, colors, short_names
from rlx.analysis.tables import mean_seconds, mean_tokens

_MAX_MARKS = 6  # an axis shows every value of a setting that has at most this number of values
_OVERLAP = 0.06  # marks that are closer than this share of the axis would overlap
_LEGEND_LINE = 24  # height in pixels
_COLOR_SCALE = ["#440154", "#3b528b", "#21918c", "#5ec962", "#b5de2b"]  # viridis without its last yellow, lost on white
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#222"}


def intervals(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows the mean of each group with its interval, and the value of each of its runs; the best is on top."""
    labels = _ranked_labels(groups)
    points = [(value, label) for group, label in zip(groups, labels, strict=True) for value in group.values]
    figure = go.Figure(
        [
            go.Scatter(
                x=[value for value, _ in points],
                y=[label for _, label in points],
                mode="markers",
                marker={"color": "#9db4cf", "size": 8},
                name="one run",
            ),
            go.Scatter(
                x=[group.mean for group in groups],
                y=labels,
                error_x=_error_bars(groups),
                mode="markers",
                marker={"color": "#1f4e79", "size": 9, "symbol": "diamond"},
                name="mean, 95 % interval",
            ),
        ]
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title=f"last {metric}")
    return _styled(figure, 46 + 28 * len(groups), legend_lines=1)


def curves(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows the mean by step: the best few groups with their intervals as bands, the others thin, most of them grey."""
    figure = go.Figure()
    ranked = list(zip(_ranked_labels(groups), groups, colors(len(groups)), strict=True))
    for index, (name, group, color) in reversed(list(enumerate(ranked))):  # the best is drawn last, on top
        curve, is_named = mean_curve(group, metric), index < NUM_NAMED
        steps = list(curve.index)
        common = {"legendgroup": name, "legendrank": index, "name": name}
        if index < NUM_BANDS and not curve["low"].isna().all():
            band = {"x": steps + steps[::-1], "y": [*curve["high"], *curve["low"][::-1]], "fill": "toself"}
            fill = {"mode": "none", "fillcolor": color, "opacity": 0.15, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(**band, **fill, **common)
        line = {"color": color, "width": 2.5 if index < NUM_BANDS else 1.2 if is_named else 0.8}
        figure.add_scatter(x=steps, y=curve["mean"].tolist(), mode="lines", line=line, **common, showlegend=is_named)
    figure.update_xaxes(title="PPO step (0: before training)")
    figure.update_yaxes(title=metric)
    return _styled(figure, 380, legend_lines=_legend_lines(groups[:NUM_NAMED]))


def parallel_coordinates(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows each group as a line through its settings to its mean. Dragging along an axis selects a range of it."""
    keys = varied_settings(groups)
    dimensions = [
        _dimension(name, [group.settings[key] for group in groups])
        for key, name in zip(keys, short_names(keys), strict=True)
    ]
    dimensions.append({"label": metric, "values": [group.mean for group in groups], "tickformat": ".3~g"})
    lines = go.Parcoords(line=_mean_colors(groups), dimensions=dimensions)
    return _styled(go.Figure(lines), 300, top=70, right=60)


def slices(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows a panel for each varied setting: its values on the x axis, the means with intervals on the y axis."""
    keys = varied_settings(groups)
    rows = math.ceil(len(keys) / 3)
    columns = math.ceil(len(keys) / rows)
    figure = make_subplots(rows, columns, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=0.3 / rows)
    for i, (key, name) in enumerate(zip(keys, short_names(keys), strict=True)):
        values = [group.settings[key] for group in groups]
        panel = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_trace(_means(groups, numbers(values) or [as_text(value) for value in values]), **panel)
        figure.update_xaxes(title=name, **_axis(values), **panel)
    figure.update_yaxes(title=metric, col=1)
    return _styled(figure, 330 * rows - 14)


def costs(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows the mean of each group over the mean cost of its runs, in response tokens and in seconds of training."""
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.03)
    figure.add_trace(_means(groups, [mean_tokens(group) for group in groups]), row=1, col=1)
    figure.add_trace(_means(groups, [mean_seconds(group) for group in groups]), row=1, col=2)
    figure.update_xaxes(title="response tokens of a run", row=1, col=1)
    figure.update_xaxes(title="seconds of a run's steps and evaluations", row=1, col=2)
    figure.update_yaxes(title=metric, col=1)
    return _styled(figure, 316)


def importances(shares: Mapping[str, float]) -> go.Figure:
    """Shows the importance of each setting as a bar, the largest on top."""
    names, values = short_names(shares), list(shares.values())
    figure = go.Figure(go.Bar(x=values, y=names, orientation="h", marker={"color": "#1f4e79"}))
    figure.update_traces(text=[f"{value:.0%}" for value in values], textposition="outside", cliponaxis=False)
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix=" ")
    figure.update_xaxes(title="share of the explained variance", tickformat=".0%", range=[0, 1])
    return _styled(figure, 36 + 36 * len(names))


def _ranked_labels(groups: Sequence[Group]) -> list[str]:
    """The names of the groups with their rank in front."""
    return [f"{rank}  {group.label}" for rank, group in enumerate(groups, 1)]


def _legend_lines(groups: Sequence[Group]) -> int:
    """How many lines a horizontal legend of the groups needs, about."""
    longest = max(len(group.label) for group in groups)
    per_line = max(1, 900 // (60 + 7 * longest))
    return math.ceil(len(groups) / per_line)


def _means(groups: Sequence[Group], x: Sequence[Any]) -> go.Scatter:
    """The means of the groups with intervals, at the given x values; the hover text has rank and name."""
    return go.Scatter(
        x=list(x),
        y=[group.mean for group in groups],
        error_y=_error_bars(groups),
        mode="markers",
        marker={"size": 9} | _mean_colors(groups),
        hovertext=_ranked_labels(groups),
        showlegend=False,
    )


def _mean_colors(groups: Sequence[Group]) -> dict[str, Any]:
    """The color of each group by its mean, dark for the best."""
    means = [group.mean for group in groups]
    return {"color": means, "colorscale": _COLOR_SCALE, "reversescale": means[0] > means[-1]}


def _error_bars(groups: Sequence[Group]) -> dict[str, Any]:
    """The intervals of the groups; a group without an interval has no bar."""
    half_widths = [None if math.isnan(group.half_width) else group.half_width for group in groups]
    return {"type": "data", "array": half_widths, "color": "#8a97a6", "thickness": 1.4, "width": 3}


def _dimension(name: str, values: Sequence[Setting]) -> dict[str, Any]:
    """An axis of parallel coordinates. These know only linear axes, so texts and logarithms become numbers here."""
    as_numbers, marks = numbers(values), axis_marks(values)
    if as_numbers is None:
        positions = [float(marks.index(as_text(value))) for value in values]
        return {"label": name, "values": positions, "tickvals": list(range(len(marks))), "ticktext": marks}
    if _scale(values) == "linear":
        return {"label": name, "values": as_numbers, "tickformat": ".3~g"} | ({"tickvals": marks} if marks else {})
    logarithms = [math.log10(value) for value in as_numbers]
    low, high = min(logarithms), max(logarithms)
    inner = [mark for mark in marks if _OVERLAP < (math.log10(mark) - low) / (high - low) < 1 - _OVERLAP]
    shown = [min(as_numbers), *inner, max(as_numbers)]  # the axis reaches from the first mark to the last
    texts = [as_text(float(f"{mark:.2g}")) for mark in shown]
    return {"label": name, "values": logarithms, "tickvals": [math.log10(mark) for mark in shown], "ticktext": texts}


def _axis(values: Sequence[Setting]) -> dict[str, Any]:
    """The scale and the marks of the x axis of a panel."""
    scale, marks = _scale(values), axis_marks(values)
    if scale == "category":
        return {"type": scale, "categoryorder": "array", "categoryarray": marks}
    if not marks:
        return {"type": scale, "tickformat": ".3~g"}
    return {"type": scale, "tickvals": marks, "ticktext": [as_text(mark) for mark in marks]}


def _scale(values: Sequence[Setting]) -> str:
    """The scale that separates the values of a setting, by the name that plotly gives it."""
    as_numbers = numbers(values)
    return "category" if as_numbers is None else "log" if on_log_scale(as_numbers) else "linear"


def axis_marks(values: Sequence[Setting]) -> list[Any]:
    """The values that are written at the axis of a setting.

    Texts are written, and so are a few numbers that do not overlap, such as those of a grid. In other cases a
    logarithmic axis gets round numbers. A linear axis gets an empty list: plotly chooses its marks.
    """
    as_numbers = numbers(values)
    if as_numbers is None:
        return sorted({as_text(value) for value in values})
    distinct = sorted(set(as_numbers))
    is_logarithmic = on_log_scale(as_numbers)
    positions = [math.log10(value) for value in distinct] if is_logarithmic else distinct
    if len(distinct) <= _MAX_MARKS and not _overlap(positions):
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


def _overlap(positions: Sequence[float]) -> bool:
    """Whether marks at two neighboring positions of an axis would overlap."""
    length = positions[-1] - positions[0]
    return any(high - low <= _OVERLAP * length for low, high in pairwise(positions))


def _styled(figure: go.Figure, plot_height: int, legend_lines: int = 0, top: int = 24, right: int = 20) -> go.Figure:
    """Gives a figure the common layout: a plot of the given height in pixels, and the legend below the axis title."""
    axis_title = 54
    bottom = axis_title + _LEGEND_LINE * legend_lines
    figure.update_layout(
        height=top + plot_height + bottom,
        font=_FONT,
        template="plotly_white",
        margin={"l": 60, "r": right, "t": top, "b": bottom},
        legend={"orientation": "h", "yanchor": "top", "y": -axis_title / plot_height, "x": 0, "title": None},
        hovermode="closest",
    )
    return figure
