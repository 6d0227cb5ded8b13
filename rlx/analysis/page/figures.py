"""Interactive figures of the settings of a sweep: intervals, curves, parallel coordinates, slices, cost, importance.

Each function takes groups that all have values, best first, and returns a plotly figure. The figures of
optuna.visualization are not used: here the mouse can select a range of any axis, and every point has its interval.

Intervals are drawn up to the ends of the metric's range, and axes show the points (rlx.analysis.ranges).

Left out: figures of trials (trial_figures.py), the page around the figures (sections.py), and pictures without a
browser (static_figure.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rlx.analysis.comparison.pareto import front, mean_length
from rlx.analysis.importance import numbers, varied_settings
from rlx.analysis.page.layout import (
    count_legend_lines,
    dimension,
    mark_texts,
    ranked_labels,
    setting_axis,
    styled,
    whole_numbers,
)
from rlx.analysis.ranges import axis_of_curves, axis_of_values, natural_range, reach
from rlx.analysis.sentences import mean_text
from rlx.analysis.statistics import Group, mean_curve
from rlx.analysis.style import NUM_BANDS, NUM_NAMED, colors, short_names
from rlx.analysis.tables import mean_seconds, mean_tokens
from rlx.config.sweep import Mode

_BAND = {"mode": "none", "fill": "toself", "opacity": 0.15, "hoverinfo": "skip", "showlegend": False}
_COLOR_SCALE = ["#440154", "#3b528b", "#21918c", "#5ec962", "#b5de2b"]  # viridis without its last yellow, lost on white


def intervals(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows the mean of each group with its interval, and the value of each of its runs; the best is on top."""
    labels = ranked_labels(groups)
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
                error_x=_error_bars(groups, metric),
                mode="markers",
                marker={"color": "#1f4e79", "size": 9, "symbol": "diamond"},
                name="mean, 95 % interval",
                **_hover(groups),
            ),
        ]
    )
    figure.update_yaxes(type="category", range=[len(groups) - 0.5, -0.5], automargin=True)
    figure.update_xaxes(title=f"last {metric}", range=axis_of_values(groups, metric))
    return styled(figure, 46 + 28 * len(groups), legend_lines=1)


def curves(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows the mean by step: the best few groups with their intervals as bands, the others thin, most of them grey."""
    figure = go.Figure()
    means = [mean_curve(group, metric) for group in groups]
    ranked = list(zip(ranked_labels(groups), means, colors(len(groups)), strict=True))
    for index, (name, curve, color) in reversed(list(enumerate(ranked))):  # the best is drawn last, on top
        steps, is_named = list(curve.index), index < NUM_NAMED
        common = {"legendgroup": name, "legendrank": index, "name": name}
        if index < NUM_BANDS and not curve["low"].isna().all():
            figure.add_scatter(x=steps + steps[::-1], y=_outline(curve, metric), fillcolor=color, **_BAND, **common)
        line = {"color": color, "width": 2.5 if index < NUM_BANDS else 1.2 if is_named else 0.8}
        figure.add_scatter(x=steps, y=curve["mean"].tolist(), mode="lines", line=line, **common, showlegend=is_named)
    marks = whole_numbers(step for curve in means for step in curve.index)
    figure.update_xaxes(title="PPO step (0: before training)", **marks)
    figure.update_yaxes(title=metric, range=axis_of_curves(means, metric))
    return styled(figure, 380, count_legend_lines(groups[:NUM_NAMED]))


def parallel_coordinates(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows each group as a line through its settings to its mean. Dragging along an axis selects a range of it."""
    keys = varied_settings(groups)
    dimensions = [
        dimension(name, [group.settings[key] for group in groups])
        for key, name in zip(keys, short_names(keys), strict=True)
    ]
    dimensions.append({"label": metric, "values": [group.mean for group in groups], "tickformat": ".3~g"})
    lines = go.Parcoords(line=_mean_colors(groups), dimensions=dimensions)
    longest = max(len(text) for text in dimensions[0].get("ticktext", [""]))  # they stand left of the axis
    return styled(go.Figure(lines), 300, top=70, right=60, left=max(60, 8 * longest))


def slices(groups: Sequence[Group], metric: str) -> go.Figure:
    """Shows a panel for each varied setting: its values on the x axis, the means with intervals on the y axis."""
    keys = varied_settings(groups)
    rows = math.ceil(len(keys) / 3)
    columns = math.ceil(len(keys) / rows)
    figure = make_subplots(rows, columns, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=0.3 / rows)
    for i, (key, name) in enumerate(zip(keys, short_names(keys), strict=True)):
        values = [group.settings[key] for group in groups]
        panel = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_trace(_means(groups, numbers(values) or mark_texts(values), metric), **panel)
        figure.update_xaxes(title=name, **setting_axis(values), **panel)
    figure.update_yaxes(range=axis_of_values(groups, metric))
    figure.update_yaxes(title=metric, col=1)
    return styled(figure, 330 * rows - 14)


def costs(groups: Sequence[Group], metric: str, mode: Mode) -> go.Figure:
    """Shows the mean of each group over the mean cost of its runs, in tokens, seconds and length of answers; diamonds
    are on the Pareto front of all four."""
    measures = {"tokens of a run": mean_tokens, "seconds of a run": mean_seconds, "answer's tokens": mean_length}
    costs = {name: [measure(group) for group in groups] for name, measure in measures.items()}
    costs = {name: values for name, values in costs.items() if not all(map(math.isnan, values))}
    sign = -1 if mode == "max" else 1
    points = [[sign * group.mean, *(values[i] for values in costs.values())] for i, group in enumerate(groups)]
    symbols = ["diamond" if is_on_it else "circle" for is_on_it in front(points)]
    figure = make_subplots(1, max(1, len(costs)), shared_yaxes=True, horizontal_spacing=0.03)
    for column, (name, values) in enumerate(costs.items(), 1):
        figure.add_trace(_means(groups, values, metric).update(marker_symbol=symbols), row=1, col=column)
        figure.update_xaxes(title=name, nticks=4, row=1, col=column)
    figure.update_yaxes(range=axis_of_values(groups, metric))
    figure.update_yaxes(title=metric, col=1)
    return styled(figure, 316)


def importances(shares: Mapping[str, float]) -> go.Figure:
    """Shows the importance of each setting as a bar, the largest on top."""
    names, values = short_names(shares), list(shares.values())
    figure = go.Figure(go.Bar(x=values, y=names, orientation="h", marker={"color": "#1f4e79"}))
    figure.update_traces(text=[f"{value:.0%}" for value in values], textposition="outside", cliponaxis=False)
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix=" ")
    figure.update_xaxes(title="share of the explained variance", tickformat=".0%", range=[0, 1])
    return styled(figure, 36 + 36 * len(names))


def _means(groups: Sequence[Group], x: Sequence[Any], metric: str) -> go.Scatter:
    """The means of the groups with intervals, at the given x values; the hover text has rank and name."""
    return go.Scatter(
        x=list(x),
        y=[group.mean for group in groups],
        error_y=_error_bars(groups, metric),
        mode="markers",
        marker={"size": 9} | _mean_colors(groups),
        showlegend=False,
        **_hover(groups),
    )


def _hover(groups: Sequence[Group]) -> dict[str, Any]:
    """What the mouse shows at a mean: the whole interval, of which the drawing may have a part."""
    texts = [f"{name}\n{mean_text(group)}" for name, group in zip(ranked_labels(groups), groups, strict=True)]
    return {"hovertext": texts, "hoverinfo": "text"}


def _mean_colors(groups: Sequence[Group]) -> dict[str, Any]:
    """The color of each group by its mean, dark for the best."""
    means = [group.mean for group in groups]
    return {"color": means, "colorscale": _COLOR_SCALE, "reversescale": means[0] > means[-1]}


def _error_bars(groups: Sequence[Group], metric: str) -> dict[str, Any]:
    """The intervals of the groups within the metric's range; a group without an interval has no bar."""
    below, above = zip(*(reach(metric, group.mean, group.half_width) for group in groups), strict=True)
    lengths = {"array": _or_none(above), "arrayminus": _or_none(below), "symmetric": False}
    return {"type": "data", **lengths, "color": "#8a97a6", "thickness": 1.4, "width": 3}


def _or_none(values: Sequence[float]) -> list[float | None]:
    """Numbers as plotly takes them: None for no number."""
    return [None if math.isnan(value) else value for value in values]


def _outline(curve: pd.DataFrame, metric: str) -> list[float]:
    """The band of a curve within the metric's range: along its upper side, and back along the lower one."""
    return [*pd.concat([curve["high"], curve["low"][::-1]]).clip(*natural_range(metric))]
