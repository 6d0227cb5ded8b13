"""Interactive figures of the trials of a sweep: the best value so far, and where a scheduler stopped which trial.

Left out: means of settings (figures.py), and the curves of every metric (explorer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from rlx.analysis.comparison.rungs import curve_by_amount
from rlx.analysis.loading import Sweep, Trial
from rlx.analysis.page.layout import styled, whole_numbers
from rlx.analysis.progress import Finish, Rung
from rlx.analysis.ranges import axis_range
from rlx.analysis.style import settings_labels
from rlx.config.sweep import RungUnit

_BLUE, _GREY, _RED = "#1f4e79", "#9db4cf", "#b5483a"
_AXES: Mapping[RungUnit, str] = {
    "steps": "PPO step (0: before training)",
    "tokens": "response tokens drawn (0: before training)",
    "gpu-seconds": "GPU-seconds of training",
}


def best_values(finishes: Sequence[Finish], metric: str) -> go.Figure:
    """Shows the last value of each trial in the order in which they ended, and the best one so far as a line."""
    numbers, values = list(range(1, len(finishes) + 1)), [finish.value for finish in finishes]
    is_stopped = [finish.trial.was_stopped for finish in finishes]
    marker = {"size": 8, "color": _GREY, "symbol": ["x" if stopped else "circle" for stopped in is_stopped]}
    texts = described([finish.trial for finish in finishes])
    hover: dict[str, Any] = {"hovertext": [*texts.values()], "hoverinfo": "text+y"}
    name = "one trial (a cross: stopped early)" if any(is_stopped) else "one trial"
    best = {"line": {"shape": "hv", "color": _BLUE, "width": 2.5}, "hoverinfo": "y", "name": "best so far"}
    figure = go.Figure()
    figure.add_scatter(x=numbers, y=[finish.best for finish in finishes], mode="lines", **best)
    figure.add_scatter(x=numbers, y=values, mode="markers", marker=marker, name=name, **hover)
    figure.update_xaxes(title="trials, in the order in which they ended", **whole_numbers(numbers))
    figure.update_yaxes(title=f"last {metric}", range=axis_range(metric, values))
    return styled(figure, 280, legend_lines=1)


def stops(sweep: Sweep, rungs: Sequence[Rung], metric: str) -> go.Figure:
    """Shows the curve of each trial, with a cross where a scheduler stopped it; a dotted line marks each rung."""
    figure, points = go.Figure(), list[float]()
    for rung in rungs:
        figure.add_vline(rung.at, line={"color": "#8a97a6", "width": 1, "dash": "dot"})
    texts, named = described(sweep.trials), set[str]()
    for trial in sorted(sweep.trials, key=lambda trial: not trial.was_stopped):  # the others are drawn on top
        curve = curve_by_amount(sweep, trial, metric)
        name = "stopped" if trial.was_stopped else "not stopped"
        look = _look(trial.was_stopped, len(curve))
        common = {"name": name, "legendgroup": name, "showlegend": name not in named, "hoverinfo": "text+y"}
        figure.add_scatter(x=list(curve.index), y=curve.tolist(), hovertext=texts[trial], **look, **common)
        points, named = [*points, *curve], {*named, name}
    marks = whole_numbers([0, *(trial.last_step for trial in sweep.trials)]) if sweep.rung_by == "steps" else {}
    figure.update_xaxes(title=_AXES[sweep.rung_by], **marks)
    figure.update_yaxes(title=metric, range=axis_range(metric, points))
    return styled(figure, 320, legend_lines=1)


def described(trials: Sequence[Trial]) -> dict[Trial, str]:
    """The names of trials with their settings."""
    labels = settings_labels([trial.settings for trial in trials])
    return {trial: f"{trial.name} ({label})" for trial, label in zip(trials, labels, strict=True)}


def _look(is_stopped: bool, num_points: int) -> dict[str, Any]:
    """The line of a trial; if it was stopped, with a cross at its end."""
    color = _RED if is_stopped else _BLUE
    sizes = [0] * (num_points - 1) + [9 if is_stopped else 0]
    marker = {"symbol": "x", "size": sizes, "color": color, "opacity": 1}
    return {"mode": "lines+markers", "marker": marker, "line": {"color": color, "width": 1.4 if is_stopped else 2}}
