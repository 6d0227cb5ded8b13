"""Interactive figures of a sweep's settings: intervals, curves, parallel coordinates, slices, cost, importance.

Each takes groups (comparison.py), best first, those without values left out, and gives a plotly figure. Plotly's own
parallel coordinates and panels are used rather than optuna.visualization's: in these a range of any axis can be picked
with the mouse, and every point has its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rlx.analysis.importance import numbers, on_log_scale
from rlx.analysis.loading import Setting
from rlx.analysis.statistics import BANDS, NAMED, Group, as_text, mean_curve, shades, short_names
from rlx.analysis.tables import cost

_FEW = 6  # so many different values of a setting are all written at its axis, unless two of them are
_CLOSE = 0.06  # of the axis or less apart: they would overprint
_ROW = 24  # pixels of a line of a legend
_COLOURS = ["#440154", "#3b528b", "#21918c", "#5ec962", "#b5de2b"]  # viridis without its last yellow, lost on white
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#222"}


def intervals(found: Sequence[Group], metric: str) -> go.Figure:
    """Each group's mean with its interval, and every value that it comes from, best on top."""
    labels = [f"{place}  {group.label}" for place, group in enumerate(found, 1)]
    points = [(value, label) for group, label in zip(found, labels, strict=True) for value in group.values]
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
                x=[group.mean for group in found],
                y=labels,
                error_x=_bars(found),
                mode="markers",
                marker={"color": "#1f4e79", "size": 9, "symbol": "diamond"},
                name="mean, 95 % interval",
            ),
        ]
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title=f"last {metric}")
    return _styled(figure, 46 + 28 * len(found), legend=1)


def curves(found: Sequence[Group], metric: str) -> go.Figure:
    """Mean by step; the best three groups with their intervals as bands, the others thin, most of them grey."""
    figure = go.Figure()
    for place, (group, shade) in reversed(list(enumerate(zip(found, shades(len(found)), strict=True)))):
        curve, named = mean_curve(group, metric), place < NAMED
        name, steps = f"{place + 1}  {group.label}", list(curve.index)
        common = {"legendgroup": name, "legendrank": place, "name": name}
        if place < BANDS and not curve["low"].isna().all():
            band = {"x": steps + steps[::-1], "y": [*curve["high"], *curve["low"][::-1]], "fill": "toself"}
            empty = {"mode": "none", "fillcolor": shade, "opacity": 0.15, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(**band, **empty, **common)
        line = {"color": shade, "width": 2.5 if place < BANDS else 1.2 if named else 0.8}
        figure.add_scatter(x=steps, y=curve["mean"].tolist(), mode="lines", line=line, **common, showlegend=named)
    figure.update_xaxes(title="PPO step (0: before training)")
    figure.update_yaxes(title=metric)
    beside = max(1, 900 // (60 + 7 * max(len(group.label) for group in found[:NAMED])))  # names in a row of the legend
    return _styled(figure, 380, legend=math.ceil(min(len(found), NAMED) / beside))


def parallel_coordinates(found: Sequence[Group], metric: str) -> go.Figure:
    """A line per setting through its values to its mean. Dragging along an axis picks a range of it."""
    keys = varied(found)
    dimensions = [
        _dimension(name, [group.settings[key] for group in found])
        for key, name in zip(keys, short_names(keys), strict=True)
    ]
    dimensions.append({"label": metric, "values": [group.mean for group in found], "tickformat": ".3~g"})
    lines = go.Parcoords(line=_colouring(found), dimensions=dimensions)
    return _styled(go.Figure(lines), 300, above=70, beside=60)


def slices(found: Sequence[Group], metric: str) -> go.Figure:
    """A panel per varied setting: its values against the means, with intervals."""
    keys = varied(found)
    down = math.ceil(len(keys) / 3)
    across = math.ceil(len(keys) / down)
    figure = make_subplots(down, across, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=0.3 / down)
    for i, (key, name) in enumerate(zip(keys, short_names(keys), strict=True)):
        values = [group.settings[key] for group in found]
        place = {"row": i // across + 1, "col": i % across + 1}
        figure.add_trace(_means(found, numbers(values) or [as_text(value) for value in values]), **place)
        figure.update_xaxes(title=name, **_axis(values), **place)
    figure.update_yaxes(title=metric, col=1)
    return _styled(figure, 330 * down - 14)


def costs(found: Sequence[Group], metric: str) -> go.Figure:
    """What a run of each group took on average, in response tokens and in seconds of training, against its mean."""
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.03)
    figure.add_trace(_means(found, [cost(group, "tokens") for group in found]), row=1, col=1)
    figure.add_trace(_means(found, [cost(group, "seconds") for group in found]), row=1, col=2)
    figure.update_xaxes(title="response tokens of a run", row=1, col=1)
    figure.update_xaxes(title="seconds of a run's steps and evaluations", row=1, col=2)
    figure.update_yaxes(title=metric, col=1)
    return _styled(figure, 316)


def importances(shares: Mapping[str, float]) -> go.Figure:
    """The importance of each setting, largest on top."""
    names, values = short_names(shares), list(shares.values())
    figure = go.Figure(go.Bar(x=values, y=names, orientation="h", marker={"color": "#1f4e79"}))
    figure.update_traces(text=[f"{value:.0%}" for value in values], textposition="outside", cliponaxis=False)
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix=" ")
    figure.update_xaxes(title="share of the explained variance", tickformat=".0%", range=[0, 1])
    return _styled(figure, 36 + 36 * len(names))


def varied(found: Sequence[Group]) -> list[str]:
    """The settings of which there is more than one value."""
    return [key for key in found[0].settings if len({group.settings[key] for group in found}) > 1]


def _means(found: Sequence[Group], x: Sequence[Any]) -> go.Scatter:
    """The groups' means with intervals over some x, each under its rank and name."""
    return go.Scatter(
        x=list(x),
        y=[group.mean for group in found],
        error_y=_bars(found),
        mode="markers",
        marker={"size": 9} | _colouring(found),
        hovertext=[f"{place}  {group.label}" for place, group in enumerate(found, 1)],
        showlegend=False,
    )


def _colouring(found: Sequence[Group]) -> dict[str, Any]:
    """Each group's colour by its mean, dark for the best."""
    means = [group.mean for group in found]
    return {"color": means, "colorscale": _COLOURS, "reversescale": means[0] > means[-1]}


def _bars(found: Sequence[Group]) -> dict[str, Any]:
    halves = [None if math.isnan(group.half) else group.half for group in found]
    return {"type": "data", "array": halves, "color": "#8a97a6", "thickness": 1.4, "width": 3}


def _dimension(name: str, values: Sequence[Setting]) -> dict[str, Any]:
    """An axis of parallel coordinates, which has no scales of its own: its values and marks as places along it."""
    known, marks = numbers(values), _marks(values)
    if known is None:
        places = [float(marks.index(as_text(value))) for value in values]
        return {"label": name, "values": places, "tickvals": list(range(len(marks))), "ticktext": marks}
    if _scale(values) == "linear":
        return {"label": name, "values": known, "tickformat": ".3~g"} | ({"tickvals": marks} if marks else {})
    place = [math.log10(value) for value in known]
    low, high = min(place), max(place)
    inner = [mark for mark in marks if _CLOSE < (math.log10(mark) - low) / (high - low) < 1 - _CLOSE]
    shown = [min(known), *inner, max(known)]  # the axis reaches from the first mark to the last
    texts = [as_text(float(f"{mark:.2g}")) for mark in shown]
    return {"label": name, "values": place, "tickvals": [math.log10(mark) for mark in shown], "ticktext": texts}


def _axis(values: Sequence[Setting]) -> dict[str, Any]:
    """The scale and the marks of an axis of a panel."""
    scale, marks = _scale(values), _marks(values)
    if scale == "category":
        return {"type": scale, "categoryorder": "array", "categoryarray": marks}
    if not marks:
        return {"type": scale, "tickformat": ".3~g"}
    return {"type": scale, "tickvals": marks, "ticktext": [as_text(mark) for mark in marks]}


def _scale(values: Sequence[Setting]) -> str:
    """Plotly's name of the scale that tells a setting's values apart."""
    known = numbers(values)
    return "category" if known is None else "log" if on_log_scale(known) else "linear"


def _marks(values: Sequence[Setting]) -> list[Any]:
    """What is written at an axis: the values themselves if they are texts, or few and apart as in a grid; else round
    numbers, on a linear scale those that plotly finds."""
    known = numbers(values)
    if known is None:
        return sorted({as_text(value) for value in values})
    distinct = sorted(set(known))
    logarithmic = on_log_scale(known)
    if len(distinct) <= _FEW and _apart([math.log10(value) for value in distinct] if logarithmic else distinct):
        return distinct
    if not logarithmic:
        return []
    decades = range(math.floor(math.log10(distinct[0])), math.ceil(math.log10(distinct[-1])) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        rounded = [float(f"{step}e{decade}") for decade in decades for step in steps]
        marks = [mark for mark in rounded if distinct[0] <= mark <= distinct[-1]]
        if len(marks) <= _FEW - 2:
            break
    return marks


def _apart(places: Sequence[float]) -> bool:
    """Whether no two neighbours in order are so close on their axis that what is written at them would overprint."""
    return all(high - low > _CLOSE * (places[-1] - places[0]) for low, high in pairwise(places))


def _styled(figure: go.Figure, plot: int, legend: int = 0, above: int = 24, beside: int = 20) -> go.Figure:
    """The figure as all are: the plot so many pixels high, and below the axis title so many lines of legend."""
    below = 54
    figure.update_layout(
        height=above + plot + below + _ROW * legend,
        font=_FONT,
        template="plotly_white",
        margin={"l": 60, "r": beside, "t": above, "b": below + _ROW * legend},
        legend={"orientation": "h", "yanchor": "top", "y": -below / plot, "x": 0, "title": None},
        hovermode="closest",
    )
    return figure
