"""Trials of a sweep compared group by group: mean and 95 % interval over the seeds of each value of one setting.

Intervals are Student's t: they suppose runs that differ by chance alone, so everything else that a sweep varies within
a group counts as chance too. Ranking single trials is analysis.py's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats  # type: ignore[import-untyped]

from rlx import analysis, report
from rlx.analysis import Setting, Sweep, Trial
from rlx.config import ConfigError, nearest

LEVEL = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval: t * s / sqrt(n) with n - 1 degrees of freedom; NaN for n = 1."""
    count = len(values)
    if count < 2:
        return float(np.mean(values)), math.nan
    spread = float(np.std(values, ddof=1))
    return float(np.mean(values)), float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * spread / math.sqrt(count)


def compare(sweep: Sweep, by: str, metric: str = analysis.METRIC) -> pd.DataFrame:
    """One row per value of the setting `by`, best mean first: runs, mean of the metric's last value, its interval, the
    extremes, and what a run took. Trials that still run or lack the metric are left out.

    ConfigError if `by` was not varied, or no trial is left.
    """
    rows = []
    for value, trials in _groups(sweep, by, metric).items():
        finals = [float(trial.curve(metric).iloc[-1]) for trial in trials]
        mean, half = mean_interval(finals)
        rows.append(
            {by: value, "runs": len(trials), "mean": mean, "±": half, "lowest": min(finals), "highest": max(finals)}
            | {"tokens/total": float(np.mean([trial.history["tokens/total"].max() for trial in trials]))}
            | {"seconds": float(np.mean([trial.seconds for trial in trials]))}
        )
    return pd.DataFrame(rows).sort_values("mean", ascending=False, ignore_index=True)


def write(sweep: Sweep, by: str, folder: Path, uri: str, metric: str = analysis.METRIC) -> list[Path]:
    """Writes the table and its figure into a folder and stores them with the sweep's MLflow run; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, name = compare(sweep, by, metric), f"by_{by}"
    (folder / f"{name}.md").write_text(f"# Sweep {sweep.name}, {metric}\n\n{analysis.format_table(table)}\n")
    figure(sweep, by, metric).savefig(folder / f"{name}.png", dpi=150)
    paths = [folder / f"{name}.md", folder / f"{name}.png"]
    report.log_files(uri, sweep.run_id, paths, "analysis")
    return paths


def figure(sweep: Sweep, by: str, metric: str = analysis.METRIC) -> Figure:
    """Mean curves with their intervals as bands, and beside them each run's last value with the means of the groups."""
    groups = _groups(sweep, by, metric)
    order = [value for value in compare(sweep, by, metric)[by] if value in groups]
    shades = {value: colormaps["tab10"](i % 10) for i, value in enumerate(order)}
    drawn = Figure(figsize=(10, 5.2))
    curves, ends = drawn.add_axes((0.075, 0.11, 0.52, 0.74)), drawn.add_axes((0.67, 0.11, 0.29, 0.74))
    for place, value in enumerate(order):
        _draw_mean(curves, groups[value], metric, str(value), shades[value])
        _draw_ends(ends, place, groups[value], metric, shades[value])
    for axes in (curves, ends):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8e8e8", linewidth=0.8)
    curves.set(xlabel="PPO step (0: before training)", ylabel=metric)
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.legend(frameon=False, loc="lower right")
    ends.set_xticks(range(len(order)), [str(value) for value in order], rotation=15)
    ends.set_title("last value of each run; mean, 95 % interval", fontsize=9)
    drawn.text(0.02, 0.94, f"{sweep.name}: {metric} by {by}", fontsize=13, fontweight="bold")
    counts = sorted({len(trials) for trials in groups.values()})
    note = f"mean and 95 % interval of {' or '.join(map(str, counts))} runs each"
    drawn.text(0.02, 0.9, note, fontsize=9, color="#707070")
    return drawn


def _groups(sweep: Sweep, by: str, metric: str) -> dict[Setting, list[Trial]]:
    if by not in sweep.varied:
        raise ConfigError(f"--by {by}: sweep {sweep.name} varies {', '.join(sweep.varied)}{nearest(by, sweep.varied)}")
    groups: dict[Setting, list[Trial]] = {}
    for trial in sweep.trials:
        if trial.status != "RUNNING" and len(trial.curve(metric)):
            groups.setdefault(trial.settings[by], []).append(trial)
    if not groups:
        raise ConfigError(f"no trial of sweep {sweep.name} has ended with {metric} yet")
    return groups


def _draw_mean(axes: Axes, trials: Sequence[Trial], metric: str, label: str, shade: tuple[float, ...]) -> None:
    table = pd.concat([trial.curve(metric) for trial in trials], axis=1).dropna()  # steps that all of them have
    rows = [mean_interval(list(row)) for row in table.to_numpy()]
    means, halves = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    axes.plot(table.index, means, "o-", color=shade, linewidth=2, markersize=4, label=label)
    axes.fill_between(table.index, means - halves, means + halves, color=shade, alpha=0.15, linewidth=0)


def _draw_ends(axes: Axes, place: int, trials: Sequence[Trial], metric: str, shade: tuple[float, ...]) -> None:
    finals = [float(trial.curve(metric).iloc[-1]) for trial in trials]
    mean, half = mean_interval(finals)
    around = np.linspace(-0.12, 0.12, len(finals)) if len(finals) > 1 else np.zeros(1)
    axes.plot(place + around, finals, "o", color=shade, alpha=0.5, markersize=5)
    axes.errorbar(place, mean, yerr=0 if math.isnan(half) else half, fmt="_", color=shade, markersize=22, capsize=5)
