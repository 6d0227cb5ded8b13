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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import LogLocator, MaxNLocator
from rich import box
from rich.console import Console
from rich.table import Table

from rlx import report
from rlx.config import ConfigError, RunConfig, flatten, from_tree, nearest, with_overrides

Setting = int | float | str | None
Mode = Literal["max", "min"]

METRIC = "eval/accuracy"
WATCHED = (METRIC, "eval/reward", "reward/mean", "task/accuracy", "kl/ref", "response/length_mean", "tokens/total")
_DPI = 150
_LABELLED = 5  # curves that are emphasised and named
_GREY = "#777777"


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

    @property
    def steps(self) -> int:
        """Steps done; step 0 is the evaluation before the first."""
        return int(self.history.index.max()) if len(self.history) else 0

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


def load_sweep(uri: str, experiment: str, name: str | None = None, metrics: Sequence[str] = WATCHED) -> Sweep:
    """Reads a sweep, the newest of that name or the newest of all.

    Args:
        metrics: what else to read besides `WATCHED`; each costs a query per trial.

    Raises:
        ConfigError: unknown metric, or no such store, experiment or sweep, or no trial in it.
    """
    watched = tuple(dict.fromkeys([*WATCHED, *metrics]))
    for metric in watched:
        _check_metric(metric, list(report.METRICS))
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
    trials = tuple(_trial(door, run, sweep, varied, watched) for run in children)
    return Sweep(sweep, str(parent.info.run_id), varied, watched, trials)


def _sweep_runs(uri: str, experiment: str) -> list[Any]:
    """The parent runs of an experiment's sweeps, newest first."""
    found = _experiment(uri, experiment)
    sweeps = _search(report.client(uri), found.experiment_id, "rlx.kind", "sweep")
    if not sweeps:
        raise ConfigError(f"no sweep in experiment {experiment!r}: experiments/ppo_sweep.py makes one")
    return sweeps[::-1]


def _experiment(uri: str, name: str) -> Any:
    path = uri.removeprefix("sqlite:///")
    if path != uri and not Path(path).is_file():  # MLflow would make an empty database
        raise ConfigError(f"no MLflow database {path}")
    from mlflow.exceptions import MlflowException

    try:
        experiments = {found.name: found for found in report.client(uri).search_experiments()}
    except MlflowException as error:
        raise ConfigError(f"tracking store {uri}: {' '.join(str(error).split())[:300]}") from None
    if name not in experiments:
        raise ConfigError(f"no experiment {name!r} in {uri}{nearest(name, list(experiments))}")
    return experiments[name]


def _search(door: Any, experiment_id: str, tag: str, value: str) -> list[Any]:
    """All runs with a tag, oldest first."""
    runs: list[Any] = []
    token = None
    while token or not runs:
        page = door.search_runs(
            [experiment_id], f"tags.`{tag}` = '{value}'", order_by=["attributes.start_time ASC"], page_token=token
        )
        runs, token = [*runs, *page], page.token
        if not token:
            break
    return runs


def _trial(door: Any, run: Any, sweep: str, varied: Sequence[str], metrics: Sequence[str]) -> Trial:
    info, params = run.info, dict(run.data.params)
    ended = info.end_time and info.status != "RUNNING"  # a resumed run still has its earlier end
    return Trial(
        name=str(info.run_name).removeprefix(f"{sweep}."),
        run_id=str(info.run_id),
        settings={key: _setting(_logged(params, key)) for key in varied},
        options=_options(params, varied),
        status=str(info.status),
        seconds=(info.end_time - info.start_time) / 1000 if ended else math.nan,
        history=_history(door, run, metrics),
    )


def _history(door: Any, run: Any, metrics: Sequence[str]) -> pd.DataFrame:
    columns = {}
    for metric in metrics:
        logged = door.get_metric_history(run.info.run_id, metric) if metric in run.data.metrics else []
        # A value that is not finite says no more than a missing one, and cannot be ranked or drawn.
        columns[metric] = pd.Series({e.step: e.value for e in logged if math.isfinite(e.value)}, dtype=float)
    return pd.DataFrame(columns).sort_index().rename_axis("step")


def _logged(params: Mapping[str, str], key: str) -> str | None:
    """A setting's text in MLflow; an entry of a dict-valued setting is looked up within that. None is not logged."""
    parent, _, entry = key.rpartition(".")
    if key in params or parent not in params:
        return params.get(key)
    entries = _literal(params[parent])
    return str(entries[entry]) if isinstance(entries, dict) and entry in entries else None


def _setting(text: str | None) -> Setting:
    value = _literal(text) if text is not None else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _literal(text: str) -> Any:
    """The Python value that a text spells, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _options(params: Mapping[str, str], varied: Sequence[str]) -> dict[str, str]:
    """What to give on the command line for a run's settings: the varied ones, then those not at their default."""
    options = {key: _option(_logged(params, key)) for key in varied}
    for key, default in flatten(RunConfig()).items():
        logged = params.get(key)
        # Unset, or a setting that is newer than the run: only the first can be given.
        same = logged == str(default) if logged is not None else default is None or not _takes_none(key)
        if not same and key != "name":  # the rerun is another run
            options.setdefault(key, _option(logged))
    return options


def _option(text: str | None) -> str:
    value = _literal(text) if text is not None else None
    return json.dumps(value) if isinstance(value, dict | tuple | list | None) else str(text)


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
        row = _summary(trial, metric, mode)
        return (True, 0.0, 0.0) if math.isnan(row["final"]) else (False, sign * row["final"], sign * row["best"])

    return sorted(sweep.trials, key=place)


def rank(sweep: Sweep, metric: str = METRIC, mode: Mode = "max") -> pd.DataFrame:
    """One row per trial, as `ranked`: rank, name, varied settings, last, best and first value, and what it took."""
    rows = []
    for place, trial in enumerate(ranked(sweep, metric, mode), 1):
        tokens = trial.curve("tokens/total")
        rows.append(
            {"rank": place, "trial": trial.name}
            | trial.settings
            | _summary(trial, metric, mode)
            | {"steps": trial.steps, "tokens/total": tokens.iloc[-1] if len(tokens) else math.nan}
            | {"seconds": trial.seconds, "status": trial.status}
        )
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


def write(
    sweep: Sweep, folder: Path, uri: str, metric: str = METRIC, mode: Mode = "max"
) -> list[Path]:
    """Writes tables and figures into a folder and stores them with the sweep's MLflow run; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rank(sweep, metric, mode)
    table.to_csv(folder / "trials.csv", index=False)
    (folder / "trials.md").write_text(f"# Sweep {sweep.name}, by {metric} ({mode})\n\n{format_table(table)}\n")
    figures = {
        "learning_curves.png": curves_figure(sweep, metric, mode),
        "parallel_coordinates.png": parallel_coordinates_figure(sweep, metric, mode),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=_DPI)
    paths = [folder / name for name in ("trials.csv", "trials.md", *figures)]
    report.log_files(uri, sweep.run_id, paths, "analysis")
    return paths


def _summary(trial: Trial, metric: str, mode: Mode) -> dict[str, float]:
    """A trial's last, best and first value of a metric; the first is that before training."""
    curve = trial.curve(metric)
    if curve.empty:
        return dict.fromkeys(("final", "best", "first"), math.nan)
    best = curve.max() if mode == "max" else curve.min()
    return {"final": float(curve.iloc[-1]), "best": float(best), "first": float(curve.get(0, math.nan))}


def _text(value: Any) -> str:
    """A cell or an axis label: four digits of a number, whole numbers whole."""
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return "-"
    if value == int(value):
        return f"{int(value):,}"
    # 12345.67 would become 1.235e+04.
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}".replace("e-0", "e-")


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def curves_figure(sweep: Sweep, metric: str = METRIC, mode: Mode = "max") -> Figure:
    """Learning curves, one line per trial, coloured by rank; the best ones are drawn thick and named."""
    trials = [trial for trial in ranked(sweep, metric, mode) if len(trial.curve(metric))]
    figure = Figure(figsize=(10, 5.6))
    axes = figure.add_axes((0.08, 0.11, 0.68, 0.72))
    _title(figure, f"{sweep.name}: {metric}", _meaning(metric))
    axes.set_xlabel("PPO step (0: before training)")
    axes.set_ylabel(metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not trials:
        _say_empty(axes, metric)
        return figure
    colours = _colours("min")  # a low rank is good
    norm = Normalize(1, max(2, len(trials)))
    for place, trial in reversed(list(enumerate(trials, 1))):
        _draw_curve(axes, trial, metric, colours(norm(place)), place)
    axes.margins(x=0.02, y=0.05)
    _name_curves(axes, trials[:_LABELLED], metric, [colours(norm(place)) for place in range(1, len(trials) + 1)])
    _rank_bar(figure, colours, norm, len(trials))
    return figure
