"""A sweep, read back from MLflow: its trials ranked in a table, their learning curves, and parallel coordinates.

Everything comes from the tracking store alone, so a sweep can be analysed while it runs and from any machine. Left out:
importance scores and significance tests, which a handful of trials cannot carry, and settings that change within a
trial (population based training): a trial has the settings it started with.
"""

from __future__ import annotations

import ast
import io
import json
import math
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import nonsingular
from rich import box
from rich.console import Console
from rich.table import Table

from rlx import report
from rlx.config import ConfigError, flatten, from_tree, nearest, one_line, with_overrides

Setting = int | float | str | None
Mode = Literal["max", "min"]

METRIC = "eval/accuracy"
WATCHED = (METRIC, "eval/reward", "reward/mean", "task/accuracy", "kl/ref", "response/length_mean", "tokens/total")
_PLACE = ("name", "storage")  # settings that say where a run is kept, not what it does
_NAMED = 5  # curves that are emphasised and named
_NAME_GAP = 0.12  # between those names, as a fraction of the axis
_TICK_GAP = 0.035  # between numbers at an axis of parallel coordinates, likewise
_FEW = 6  # so many different values of a setting are all written at its axis
_GREY = "#707070"


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a sweep."""

    name: str  # of its MLflow run, without the sweep's own name in front
    run_id: str
    settings: dict[str, Setting]  # the varied ones
    options: dict[str, str]  # these and all others that are not at their default, as the command line takes them
    status: str  # MLflow's: RUNNING, FINISHED, FAILED or KILLED
    seconds: float  # from its first start to its last end; NaN while it runs
    history: pd.DataFrame  # a row per step, a column per watched metric, NaN where it was not logged

    def curve(self, metric: str) -> pd.Series[float]:
        """A metric by step, where it was logged."""
        return self.history[metric].dropna()


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep and its trials, in the order in which they were started."""

    name: str
    run_id: str
    varied: tuple[str, ...]  # dotted names of the settings that differ between trials
    metrics: tuple[str, ...]  # the watched ones
    trials: tuple[Trial, ...]


# ---------------------------------------------------------------------------------------------------------------------
# From MLflow


def sweep_names(uri: str, experiment: str) -> list[str]:
    """Names of an experiment's sweeps, newest first; ConfigError if there is no such store, experiment or sweep."""
    return list(dict.fromkeys(str(run.info.run_name) for run in _sweep_runs(uri, experiment)))


def load_sweep(uri: str, experiment: str, name: str | None = None, metrics: Sequence[str] = ()) -> Sweep:
    """Reads a sweep, the newest of that name or the newest of all, with `metrics` besides the `WATCHED` ones.

    ConfigError if a metric is unknown, there is no such store, experiment or sweep, or it has no trials.
    """
    watched = tuple(dict.fromkeys([*WATCHED, *metrics]))
    for metric in metrics:
        _check_metric(metric, [metric] if report.meaning(metric) else list(report.METRICS))
    sweeps = _sweep_runs(uri, experiment)
    parent = next((run for run in sweeps if name in (None, run.info.run_name)), None)
    if parent is None:
        hint = nearest(name or "", [run.info.run_name for run in sweeps])
        raise ConfigError(f"no sweep {name!r} in experiment {experiment!r}{hint}")
    sweep, varied = str(parent.info.run_name), tuple(json.loads(parent.data.tags.get("rlx.space", "[]")))
    door = report.client(uri)
    children = _search(door, parent.info.experiment_id, "mlflow.parentRunId", parent.info.run_id)
    if not children:
        raise ConfigError(f"sweep {sweep!r} has no trials yet")
    trials = tuple(_trial(door, run, sweep, varied, watched) for run in reversed(children))
    return Sweep(sweep, str(parent.info.run_id), varied, watched, trials)


def _sweep_runs(uri: str, experiment: str) -> list[Any]:
    """The parent runs of an experiment's sweeps, newest first."""
    path = uri.removeprefix("sqlite:///")
    if path != uri and not Path(path).is_file():  # MLflow would make an empty database
        raise ConfigError(f"no MLflow database {path}")
    from mlflow.exceptions import MlflowException

    try:
        found = {each.name: each.experiment_id for each in report.client(uri).search_experiments()}
    except MlflowException as error:
        raise ConfigError(f"tracking store {uri}: {one_line(error, 300)}") from None
    if experiment not in found:
        raise ConfigError(f"no experiment {experiment!r} in {uri}{nearest(experiment, list(found))}")
    sweeps = _search(report.client(uri), found[experiment], "rlx.kind", "sweep")
    if not sweeps:
        raise ConfigError(f"no sweep in experiment {experiment!r}: experiments/ppo_sweep.py makes one")
    return sweeps


def _search(door: Any, experiment_id: str, tag: str, value: str) -> list[Any]:
    """All runs with a tag, newest first, which is MLflow's own order."""
    return list(door.search_runs([experiment_id], f"tags.`{tag}` = '{value}'", max_results=50_000))


def _trial(door: Any, run: Any, sweep: str, varied: Sequence[str], metrics: Sequence[str]) -> Trial:
    info, params = run.info, dict(run.data.params)
    ended = info.end_time and info.status != "RUNNING"  # a resumed run still has its earlier end
    return Trial(
        name=str(info.run_name).removeprefix(f"{sweep}."),
        run_id=str(info.run_id),
        settings={key: _setting(params.get(key)) for key in varied},
        options=_options(params, varied),
        status=str(info.status),
        seconds=(info.end_time - info.start_time) / 1000 if ended else math.nan,
        history=_history(door, run, metrics),
    )


def _history(door: Any, run: Any, metrics: Sequence[str]) -> pd.DataFrame:
    columns = {}
    for metric in metrics:
        logged = door.get_metric_history(run.info.run_id, metric) if metric in run.data.metrics else []
        # What is not finite cannot be ranked or drawn; MLflow's databases give the largest float for infinity.
        finite = {entry.step: entry.value for entry in logged if abs(entry.value) < sys.float_info.max}
        columns[metric] = pd.Series(finite, dtype=float)
    return pd.DataFrame(columns).sort_index().rename_axis("step")


def _setting(text: str | None) -> Setting:
    value = None if text is None else _literal(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _literal(text: str) -> Any:
    """The Python value that a text spells, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _options(params: Mapping[str, str], varied: Sequence[str]) -> dict[str, str]:
    """What to give on the command line for a run's settings: the varied ones, then those not at their default."""
    options = {key: _option(params.get(key, "None")) for key in varied}
    for key, default in flatten(from_tree({})).items():
        logged = params.get(key, "None")  # None itself is not logged
        newer = key not in params and not _takes_none(key)  # a setting that the run's version of rlx did not have
        if logged != str(default) and not newer and key not in _PLACE:
            options.setdefault(key, _option(logged))
    return options


def _option(text: str) -> str:
    value = _literal(text)
    return json.dumps(value) if isinstance(value, dict | tuple | list | None) else text


def _takes_none(key: str) -> bool:
    try:
        from_tree(with_overrides({}, {key: None}))
    except ConfigError:
        return False
    return True


def _check_metric(metric: str, choices: Sequence[str]) -> None:
    if metric not in choices:
        raise ConfigError(f"unknown metric {metric!r}{nearest(metric, choices)}")


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def ranked(sweep: Sweep, metric: str = METRIC, mode: Mode = "max") -> list[Trial]:
    """The trials, best last value first, since that is the model a run leaves behind; then by best value.

    Trials without the metric come last. ConfigError if the metric was not loaded.
    """
    _check_metric(metric, sweep.metrics)
    sign = -1.0 if mode == "max" else 1.0

    def place(trial: Trial) -> tuple[bool, float, float]:
        final, best, _ = _summary(trial, metric, mode).values()
        return math.isnan(final), sign * final, sign * best

    return sorted(sweep.trials, key=place)


def rank(sweep: Sweep, metric: str = METRIC, mode: Mode = "max") -> pd.DataFrame:
    """One row per trial, as `ranked`: rank, name, varied settings, last, best and first value, and what it took."""
    rows = [
        {"rank": place, "trial": trial.name}
        | trial.settings
        | _summary(trial, metric, mode)
        | {"steps": max(trial.history.index, default=0), "tokens/total": trial.history["tokens/total"].max()}
        | {"seconds": trial.seconds, "status": trial.status}
        for place, trial in enumerate(ranked(sweep, metric, mode), 1)
    ]
    return pd.DataFrame(rows)


def rerun_command(trial: Trial) -> str:
    """The command line of a new run with a trial's settings."""
    options = [f"--{key.replace('_', '-')} {shlex.quote(text)}" for key, text in trial.options.items()]
    return " ".join(["python experiments/ppo.py", *options])


def format_table(table: pd.DataFrame, width: int | None = None) -> str:
    """A table as text that is Markdown, too, unless folding it to a terminal's width breaks its cells."""
    shown = Table(box=box.MARKDOWN)
    for column in table:
        shown.add_column(str(column), justify="right" if pd.api.types.is_numeric_dtype(table[column]) else "left")
    for row in table.itertuples(index=False):
        shown.add_row(*(_text(value) for value in row))
    stream = io.StringIO()
    Console(file=stream, width=width or 10_000).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def write(sweep: Sweep, folder: Path, uri: str, metric: str = METRIC, mode: Mode = "max") -> list[Path]:
    """Writes tables and figures into a folder and stores them with the sweep's MLflow run; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rank(sweep, metric, mode)
    table.to_csv(folder / "trials.csv", index=False)
    (folder / "trials.md").write_text(f"# Sweep {sweep.name}, by {metric} ({mode})\n\n{format_table(table)}\n")
    figures = {"learning_curves.png": curves_figure, "parallel_coordinates.png": parallel_coordinates_figure}
    for file, draw in figures.items():
        draw(sweep, metric, mode).savefig(folder / file, dpi=150)
    paths = [folder / file for file in ("trials.csv", "trials.md", *figures)]
    report.log_files(uri, sweep.run_id, paths, "analysis")
    return paths


def _summary(trial: Trial, metric: str, mode: Mode) -> dict[str, float]:
    """A trial's last, best and first value of a metric; the first is that before training."""
    curve = trial.curve(metric)
    best = curve.max() if mode == "max" else curve.min()
    final, first = (curve.get(step, math.nan) for step in (max(curve.index, default=0), 0))
    return {"final": float(final), "best": float(best), "first": float(first)}


def _text(value: Any) -> str:
    """A cell or an axis label: four digits of a number, whole numbers whole."""
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 1000:  # .4g would make 1.235e+04 of 12345.67
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-")


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def curves_figure(sweep: Sweep, metric: str = METRIC, mode: Mode = "max") -> Figure:
    """Learning curves, one line per trial, coloured by rank; the best ones are thick and named."""
    trials = [trial for trial in ranked(sweep, metric, mode) if len(trial.curve(metric))]
    figure = Figure(figsize=(10, 5.6))
    axes = figure.add_axes((0.075, 0.105, 0.66, 0.73))
    failed = "; x: the trial failed" if any(trial.status == "FAILED" for trial in trials) else ""
    _head(figure, f"{metric} by step", sweep, metric, "left out", failed)
    axes.set(xlabel="PPO step (0: before training)", ylabel=metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    norm, colours = Normalize(1, max(2, len(trials))), _colours("min")  # rank 1 is the best
    shades = [colours(norm(place)) for place in range(1, len(trials) + 1)]
    for place, (trial, shade) in reversed(list(enumerate(zip(trials, shades, strict=True), 1))):  # the best on top
        _draw_curve(axes, trial.curve(metric), shade, place, trial.status == "FAILED")
    _name_curves(axes, trials[:_NAMED], metric, shades)
    if len(trials) > _NAMED:
        place_of_bar = figure.add_axes((0.79, 0.935, 0.18, 0.02))
        bar = figure.colorbar(ScalarMappable(norm, colours), cax=place_of_bar, orientation="horizontal")
        bar.set_ticks([1, len(trials)], labels=["rank 1", f"{len(trials)}"], fontsize=8)
    return figure


def _draw_curve(axes: Axes, curve: pd.Series[float], shade: Any, place: int, failed: bool) -> None:
    width = 2.8 if place == 1 else 1.8 if place <= _NAMED else 0.9
    axes.plot(curve.index, curve, color=shade, linewidth=width, alpha=1 if place <= _NAMED else 0.65)
    end, size = ("x", 8.0) if failed else ("o", 2.5 + width)
    axes.plot(curve.index[-1:], curve.iloc[-1:], end, color=shade, markersize=size, markeredgewidth=1.5)


def _name_curves(axes: Axes, trials: Sequence[Trial], metric: str, shades: Sequence[Any]) -> None:
    """Rank, name, last value and settings of the best trials on the right, each tied to the end of its curve."""
    low, high = axes.get_ylim()
    ends = [float(trial.curve(metric).iloc[-1]) for trial in trials]
    heights = _apart([(end - low) / (high - low) for end in ends], _NAME_GAP)
    style: dict[str, Any] = {"textcoords": "axes fraction", "va": "bottom", "fontsize": 9, "fontweight": "bold"}
    for i, (trial, shade) in enumerate(zip(trials, shades, strict=False)):  # the best have names, all have shades
        label, tip = f"{i + 1}  {_shortened(trial.name)}   {_text(ends[i])}", (trial.curve(metric).index[-1], ends[i])
        leader = {"arrowstyle": "-", "color": shade, "linewidth": 0.7, "linestyle": ":", "relpos": (0, 0)}
        axes.annotate(label, tip, (1.045, heights[i] + 0.008), color=shade, arrowprops=leader, **style)
        settings = ", ".join(f"{key.rpartition('.')[2]}={_text(value)}" for key, value in trial.settings.items())
        lines = textwrap.wrap(settings, 42, max_lines=2, placeholder=" ...")
        axes.text(1.045, heights[i], "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7, color=_GREY)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights within 0 to 1 moved until they are a gap apart, in the same order; the first of equal ones goes above."""
    wanted, place = np.asarray(heights, dtype=float), np.arange(len(heights))
    order, steps = np.lexsort((-place, wanted)), gap * place
    lowest = np.maximum.accumulate(wanted[order] - steps)
    placed = np.empty_like(wanted)
    placed[order] = np.minimum(lowest, 1 - gap * (len(heights) - 1)) + steps
    return [float(height) for height in placed]


class _Scale(NamedTuple):
    """A vertical axis: where a value lies between 0 and 1, and what is written beside it."""

    heights: list[float]  # of each trial, NaN where it has no value
    ticks: list[tuple[float, str]]
    note: str = ""


def parallel_coordinates_figure(sweep: Sweep, metric: str = METRIC, mode: Mode = "max") -> Figure:
    """A vertical axis per varied setting, and the colour bar of the metric's last value as the axis that ends them."""
    trials = ranked(sweep, metric, mode)
    finals = [_summary(trial, metric, mode)["final"] for trial in trials]
    known = [value for value in finals if not math.isnan(value)] or [0.0]
    norm, colours = Normalize(*nonsingular(min(known), max(known))), _colours(mode)
    scales = {key: _setting_scale([trial.settings[key] for trial in trials]) for key in sweep.varied}
    scales[metric] = _Scale([float(norm(value)) for value in finals], [], "final")
    width = max(7.0, 1.9 * len(scales) + 0.9)
    left, bottom, right, height = 0.95 / width, 0.06, 1 - 1.05 / width, 0.69
    figure = Figure(figsize=(width, 5.6))
    axes = figure.add_axes((left, bottom, right - left, height))
    axes.set(xlim=(min(0, len(scales) - 2), len(scales) - 1), ylim=(0, 1))
    axes.set_axis_off()
    _head(figure, f"settings and final {metric}", sweep, metric, "dashed")
    for i in reversed(range(len(trials))):  # the best on top
        _draw_line(axes, [scale.heights[i] for scale in scales.values()], colours(norm(finals[i])), i == 0)
    for x, (key, scale) in enumerate(scales.items()):
        _draw_scale(axes, x, key, scale)
    figure.colorbar(ScalarMappable(norm, colours), cax=figure.add_axes((right, bottom, 0.16 / width, height)))
    return figure


def _setting_scale(values: Sequence[Setting]) -> _Scale:
    """Numbers by size, on a log scale if they are positive and span more than a decade; texts evenly spaced."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return _number_scale(numbers, min(numbers) > 0 and max(numbers) > 10 * min(numbers))
    names = sorted({_text(value) for value in values})
    places = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
    return _Scale([places[_text(value)] for value in values], [(places[name], _shortened(name, 16)) for name in names])


def _number_scale(values: Sequence[float], log: bool) -> _Scale:
    size = math.log if log else float
    low, high = size(min(values)), size(max(values))

    def height(value: float) -> float:
        return (size(value) - low) / (high - low) if low < high else 0.5

    ticks = [(height(value), _text(value)) for value in _tick_values(values, log)]
    return _Scale([height(value) for value in values], ticks, "log scale" if log else "")


def _tick_values(values: Sequence[float], log: bool) -> list[float]:
    """The values themselves if they are few, as in a grid; round numbers within their range otherwise."""
    distinct = sorted(set(values))
    low, high = distinct[0], distinct[-1]
    if len(distinct) <= _FEW:
        return distinct
    locator = LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)) if log else MaxNLocator(6)
    return [float(value) for value in locator.tick_values(low, high) if low <= value <= high]


def _draw_line(axes: Axes, heights: Sequence[float], colour: Any, best: bool) -> None:
    """A trial's way through the axes, level where it meets them; one without the metric ends at the last setting."""
    known = not math.isnan(heights[-1])
    heights = heights if known else heights[:-1]
    if not heights:  # nothing was varied
        return
    x = np.linspace(0, len(heights) - 1, 50 * len(heights))
    way = x % 1
    y = np.interp(x - way + way * way * (3 - 2 * way), range(len(heights)), heights)
    style = {"color": colour, "linestyle": "-"} if known else {"color": "#bbbbbb", "linestyle": "--"}
    axes.plot(x, y, linewidth=3.0 if best else 1.4, alpha=1 if best else 0.8, clip_on=False, **style)


def _draw_scale(axes: Axes, x: float, key: str, scale: _Scale) -> None:
    section, _, name = ("", "", key) if report.meaning(key) else key.rpartition(".")
    note = ", ".join(part for part in (section, scale.note) if part)
    axes.text(x, 1.09, name, ha="center", fontsize=10, fontweight="bold")
    axes.text(x, 1.04, note, ha="center", fontsize=8, color=_GREY)
    axes.plot([x, x], [0, 1], color="#333333", linewidth=1.2, clip_on=False)
    written = -1.0
    for height, text in scale.ticks:
        if height - written < _TICK_GAP:
            continue
        written = height
        axes.plot([x - 0.02, x], [height, height], color="#333333", linewidth=1.2, clip_on=False)
        halo = withStroke(linewidth=2.5, foreground="white")  # keeps the text legible where lines cross it
        axes.text(x - 0.035, height, text, ha="right", va="center", fontsize=8, path_effects=[halo])


def _head(figure: Figure, title: str, sweep: Sweep, metric: str, drawn: str, note: str = "") -> None:
    """A figure's title, what its metric means, and how trials without it are drawn."""
    left, without = 0.25 / figure.get_figwidth(), sum(trial.curve(metric).empty for trial in sweep.trials)
    missing = f"; {without} of {len(sweep.trials)} trials have none ({drawn})" if without else ""
    figure.text(left, 0.94, f"{sweep.name}: {title}", fontsize=13, fontweight="bold")
    figure.text(left, 0.9, f"{report.meaning(metric)}{missing}{note}", fontsize=9, color=_GREY)


def _colours(mode: Mode) -> Colormap:
    """Dark for the good end; without viridis's last yellow, which is lost on white."""
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, 256)))
    return colours.reversed() if mode == "max" else colours


def _shortened(name: str, length: int = 20) -> str:
    """A name with its middle left out if it is long: trials differ at the end."""
    return name if len(name) <= length else f"{name[: length // 2 - 2]}...{name[-(length // 2 - 1) :]}"
