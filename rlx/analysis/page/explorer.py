"""The curves of every metric that the trials logged: data for the page, whose selector draws one metric at a time.

The page holds the numbers, so that it needs no server. To keep it small, numbers have four digits, trials that logged
at the same steps share one list of them, long curves are thinned, and of very many trials the best are taken.

Left out: the selector itself (page.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rlx.analysis.loading import Trial
from rlx.analysis.page.layout import count_legend_lines, ranked_labels, styled, whole_numbers
from rlx.analysis.page.trial_figures import described
from rlx.analysis.ranges import axis_range
from rlx.analysis.statistics import Group
from rlx.analysis.style import NUM_NAMED, colors
from rlx.tracking.metrics import METRICS, meaning

MAX_TRIALS = 60
"""the number of trials whose curves are shown: reading them takes 0.15 s for each from SQLite"""
_MAX_VALUES = 300_000  # of all curves together: about 2 MB
_MAX_POINTS, _MIN_POINTS = 500, 20  # of a curve that is thinned
_LEADING = ("reward/mean", "kl/ref", "response/length_mean", "policy/entropy")  # what one looks at first


@dataclass(frozen=True)
class MetricCurve:
    """The values of a metric in one trial."""

    steps: int  # which of the lists of steps
    values: tuple[float, ...]


@dataclass(frozen=True)
class MetricChoice:
    """One metric that the selector offers."""

    name: str
    meaning: str
    axis: tuple[float, float]
    curves: tuple[MetricCurve | None, ...]  # one per trial; None if it did not log the metric


@dataclass(frozen=True)
class Explorer:
    """All metrics, those that one looks at first in front, and the lists of steps that their curves share."""

    steps: tuple[tuple[int, ...], ...]
    metrics: tuple[MetricChoice, ...]


def shown_trials(candidates: Sequence[Group]) -> list[Trial]:
    """The trials whose curves the page has: all, or those of the best candidates; best candidate first."""
    return [trial for group in candidates for trial in group.trials][:MAX_TRIALS]


def gather_curves(histories: Sequence[pd.DataFrame]) -> Explorer:
    """Collects the curves of trials.

    Args:
        histories: of each trial, with all of its metrics. A metric without two points in any of them has no curve.
    """
    names = _in_order({str(name) for history in histories for name in history if history[name].count() > 1})
    num_points = min(_MAX_POINTS, max(_MIN_POINTS, _MAX_VALUES // max(1, len(names) * len(histories))))
    numbers = dict[tuple[int, ...], int]()  # of the lists of steps
    metrics = [_choice(name, [_thinned(history, name, num_points) for history in histories], numbers) for name in names]
    return Explorer(tuple(numbers), tuple(metrics))


def draw_first(candidates: Sequence[Group], explorer: Explorer) -> go.Figure:
    """Draws the curves of the first metric: one line per `shown_trials`, in the color of its candidate.

    The page replaces the values of the lines when another metric is selected.
    """
    first, trials = explorer.metrics[0], shown_trials(candidates)
    names, shades = ranked_labels(candidates), colors(len(candidates))
    places = {trial.name: place for place, group in enumerate(candidates) for trial in group.trials}
    figure, texts, named = go.Figure(), described(trials), set[int]()
    for trial, curve in zip(trials, first.curves, strict=True):
        place = places[trial.name]
        is_first = place not in named and place < NUM_NAMED
        look = {"line": {"color": shades[place], "width": 1.6}, "name": names[place], "legendgroup": names[place]}
        points = (explorer.steps[curve.steps], curve.values) if curve else ((), ())
        hover = {"hovertext": texts[trial], "hoverinfo": "text+x+y"}
        figure.add_scatter(x=points[0], y=points[1], mode="lines", **look, **hover, showlegend=is_first)
        named.add(place)
    marks = whole_numbers(step for steps in explorer.steps for step in steps)
    figure.update_xaxes(title="PPO step (0: before training)", **marks)
    figure.update_yaxes(title=first.name, range=first.axis)
    return styled(figure, 360, count_legend_lines(candidates[:NUM_NAMED]))


def _in_order(names: set[str]) -> list[str]:
    """Metrics in the order of their list, others last; the leading ones first."""
    listed = list(dict.fromkeys([*_LEADING, *METRICS]))
    return [*(name for name in listed if name in names), *sorted(names - set(listed))]


def _thinned(history: pd.DataFrame, name: str, num_points: int) -> pd.Series[float]:
    """A metric by step with at most so many values, evenly chosen, among them the first and the last."""
    curve = history[name].dropna() if name in history else pd.Series(dtype=float)
    if len(curve) <= num_points:
        return curve
    return curve.iloc[np.linspace(0, len(curve) - 1, num_points).round().astype(int)]


def _choice(name: str, curves: Sequence[pd.Series[float]], numbers: dict[tuple[int, ...], int]) -> MetricChoice:
    """One metric for the selector; a list of steps that is new gets a number."""
    axis = axis_range(name, [float(value) for curve in curves for value in curve])
    packed = [_packed(curve, numbers) if len(curve) else None for curve in curves]
    return MetricChoice(name, meaning(name) or "", axis, tuple(packed))


def _packed(curve: pd.Series[float], numbers: dict[tuple[int, ...], int]) -> MetricCurve:
    steps = tuple(int(step) for step in curve.index)
    return MetricCurve(numbers.setdefault(steps, len(numbers)), tuple(float(f"{value:.4g}") for value in curve))
