"""Interactive figures of comparisons: settings paired with the best one, races rung by rung, and the lineage of trials.

Left out: what is compared (rlx.analysis.comparison), and the figures of single settings (figures.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from rlx.analysis.comparison.pairs import PairedGap
from rlx.analysis.comparison.rungs import RungStanding, rung_text
from rlx.analysis.comparison.wording import interval_text
from rlx.analysis.loading import Trial
from rlx.analysis.page.layout import count_legend_lines, styled, whole_numbers
from rlx.analysis.page.trial_figures import described
from rlx.analysis.statistics import Group
from rlx.analysis.style import NUM_NAMED, colors
from rlx.config.sweep import RungUnit

_BLUE, _GREY, _RED = "#1f4e79", "#8a97a6", "#b5483a"
_MOST_WIDE = 4  # times the largest difference, an interval is drawn


def paired_gaps(gaps: Sequence[PairedGap], ranks: Mapping[Group, int]) -> go.Figure:
    """Shows how far each setting is behind the best one; the zero line is the best itself.

    The color tells whether that is more than chance (of all comparisons together, Holm), which is nearly whether the
    interval (of this one alone, and lower by the luck) leaves out 0.
    """
    labels = [f"{ranks[gap.second]}  {gap.second.label}" for gap in gaps]
    values = [gap.gap.value for gap in gaps]
    reach = _MOST_WIDE * max(max(map(abs, values)), 1e-9)
    above, below = ([_drawn(abs(gap.ends[side] - gap.gap.value), reach) for gap in gaps] for side in (1, 0))
    figure = go.Figure()
    for name, color, is_shown in (("more than chance", _BLUE, True), ("may be chance", _GREY, False)):
        rows = [i for i, gap in enumerate(gaps) if gap.is_shown is is_shown]
        if not rows:
            continue
        figure.add_scatter(
            x=[values[i] for i in rows],
            y=[labels[i] for i in rows],
            error_x={"array": [above[i] for i in rows], "arrayminus": [below[i] for i in rows], "color": color}
            | {"symmetric": False, "thickness": 2.2, "width": 4},
            mode="markers",
            marker={"color": color, "size": 9, "symbol": "diamond"},
            name=name,
            showlegend=True,  # also the only one
            hovertext=[f"{labels[i]}\nbehind by {interval_text(gaps[i])}" for i in rows],
            hoverinfo="text",
        )
    figure.add_vline(0, line={"color": "#222", "width": 1})
    figure.update_yaxes(type="category", categoryarray=labels, range=[len(gaps) - 0.5, -0.5], automargin=True)
    figure.update_xaxes(title="behind the best setting by", zeroline=False)
    return styled(figure, 46 + 28 * len(gaps), legend_lines=1)


def _drawn(width: float, reach: float) -> float | None:
    return None if math.isnan(width) else min(width, reach)


def race(standings: Sequence[RungStanding], ranks: Mapping[Group, int], unit: RungUnit = "steps") -> go.Figure:
    """Shows how far each setting was behind the best of the others at each rung; a cross is its last one, if it was
    stopped there."""
    groups = sorted({standing.group for standing in standings}, key=lambda group: ranks[group])
    figure, tints = go.Figure(), dict(zip(groups, colors(len(groups)), strict=True))
    rungs = sorted({standing.at for standing in standings})
    apart = {group: 0.5 * (place / max(1, len(groups) - 1) - 0.5) for place, group in enumerate(groups)}
    for group in reversed(groups):
        own = [standing for standing in standings if standing.group is group]
        name, is_named = f"{ranks[group]}  {group.label}", groups.index(group) < NUM_NAMED
        figure.add_scatter(
            x=[rungs.index(standing.at) + apart[group] for standing in own],
            y=[standing.behind for standing in own],
            error_y={"array": [standing.ends[1] - standing.behind for standing in own], "thickness": 1, "width": 3}
            | {"arrayminus": [standing.behind - standing.ends[0] for standing in own], "symmetric": False},
            mode="lines+markers",
            line={"color": tints[group], "width": 2 if is_named else 1},
            marker={"size": 9, "symbol": ["x" if standing.is_out else "circle" for standing in own]},
            name=name,
            legendrank=ranks[group],
            showlegend=is_named,
        )
    figure.add_hline(0, line={"color": "#222", "width": 1})
    names = [rung_text(rung, unit) for rung in rungs]
    figure.update_xaxes(tickvals=list(range(len(rungs))), ticktext=names, range=[-0.5, len(rungs) - 0.5])
    figure.update_xaxes(showgrid=False, zeroline=False)
    values = [standing.behind for standing in standings]
    room = 0.25 * max(max(values) - min(values), 1e-9)
    figure.update_yaxes(title="behind the best of the others by", range=[max(values) + room, min(values) - room])
    return styled(figure, 340, count_legend_lines(groups[:NUM_NAMED]))


def lineage(trials: Sequence[Trial], metric: str) -> go.Figure:
    """Shows each trial as a line by step, with its value as the color, and from which trial and step it continued."""
    rows = {trial.name: row for row, trial in enumerate(trials)}
    figure = go.Figure()
    for name, trial in zip(rows, trials, strict=True):
        line = {"color": "#d5dce3", "width": 6}
        figure.add_scatter(x=[0, trial.last_step], y=[rows[name]] * 2, mode="lines", line=line, hoverinfo="skip")
        for origin in trial.origins:
            if arrow := _arrow(origin, rows, rows[name]):
                figure.add_annotation(arrow)
    points = [
        (step, rows[trial.name], value, f"{text}\nstep {step}: {value:.4g}")
        for trial, text in described(trials).items()
        for step, value in trial.curve(metric).items()
    ]
    steps, places, values, texts = zip(*points, strict=True) if points else ((), (), (), ())
    bar = {"title": metric, "thickness": 12}
    marker = {"size": 12, "color": list(values), "colorscale": "Viridis", "colorbar": bar}
    hover = {"hovertext": list(texts), "hoverinfo": "text"}
    figure.add_scatter(x=list(steps), y=list(places), mode="markers", marker=marker, **hover)
    figure.update_yaxes(tickvals=list(rows.values()), ticktext=list(rows), range=[len(rows) - 0.5, -0.5])
    figure.update_yaxes(automargin=True, zeroline=False)
    marks = whole_numbers([0, *(trial.last_step for trial in trials)])
    figure.update_xaxes(title="PPO step", zeroline=False, **marks)
    figure.update_traces(showlegend=False)
    return styled(figure, 60 + 34 * len(rows))


def _arrow(origin: str, rows: Mapping[str, int], to: int) -> dict[str, Any] | None:
    """An arrow from the trial and step of an origin, trial_00001@6, to the row that continued from it; None if that
    trial is not there."""
    name, _, step = origin.rpartition("@")
    if name not in rows:
        return None
    ends = {"x": int(step), "ax": int(step), "y": to, "ay": rows[name]}
    axes = {"axref": "x", "ayref": "y", "xref": "x", "yref": "y"}
    return ends | axes | {"arrowhead": 2, "arrowwidth": 1.6, "arrowcolor": _RED, "text": ""}
