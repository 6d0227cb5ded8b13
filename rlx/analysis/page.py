"""One HTML page of what a sweep has found: the answer in a sentence, what was asked, tables, figures, samples.

It opens offline: all of plotly's javascript is in it, once, and nothing else is fetched. How it looks is page.html's, a
Jinja template, which escapes whatever a model or a person has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from rlx.analysis import figures, loading, statistics, tables
from rlx.analysis.importance import importance
from rlx.analysis.loading import Sweep, Trial
from rlx.analysis.statistics import Group, Mode, as_text, short_names
from rlx.config.errors import ConfigError
from rlx.tracking import metrics

_PICKED = "The best of many means is flattered by having been picked: to be sure of it, run it again on fresh seeds."


@dataclass(frozen=True, eq=False)
class PageSection:
    """A heading, what is to be known of it in a sentence or two, and what it shows, in this order."""

    title: str
    note: str = ""
    figure: go.Figure | None = None
    table: pd.DataFrame | None = None
    text: str = ""


def render(
    sweep: Sweep,
    compared: Mapping[str, Sequence[Group]],
    recipe: str,
    uri: str,
    metric: str,
    mode: Mode,
) -> str:
    """The page of a sweep's settings.

    Args:
        compared: its settings, best first, under "settings"; further groups under what they are.
        recipe: the best setting as YAML; nothing if it is not known.
        uri: where samples are read from.
    """
    found = compared["settings"]
    order = f"{'highest' if mode == 'max' else 'lowest'} first"
    facts = {
        "asked": ", ".join(f"{key} {value}" for key, value in sweep.asked.items()),
        "varied": ", ".join(sweep.varied) or "nothing",
        "ranked by": f"{metric}, {order}: {metrics.meaning(metric)}",
    }
    sections = [
        _ranking(found, sweep.questions_of(metric)),
        *_pictures(found, metric, mode),
        *(_compared(title, groups, metric) for title, groups in compared.items() if groups is not found),
        *_answers(found, uri),
        *_again(sweep, found, recipe),
        PageSection("Every trial", "Best last value first.", table=_filled(tables.trial_table(sweep, metric, mode))),
    ]
    return _html(f"Sweep {sweep.name}", statistics.summary_sentence(found, metric), facts, sections)


# ---------------------------------------------------------------------------------------------------------------------
# What it says


def _ranking(found: Sequence[Group], questions: int | None) -> PageSection:
    floor = f", but no less than {questions} other questions could change" if questions else ""
    note = (
        f"Settings by the mean of the last value over their runs; ± is half the 95 % interval: Student's t{floor}. "
        "Tokens (generated) and seconds (of steps and evaluations, not of the start of engines; a process is slow in "
        f"its first step) are a run's on average. {_PICKED if len(found) > 1 else ''}"
    )
    return PageSection("Settings, ranked", note, table=tables.table(found))


def _pictures(found: Sequence[Group], metric: str, mode: Mode) -> list[PageSection]:
    """Figures of the settings that have values; of what they vary, if they do."""
    known = [group for group in found if group.values]
    if not known:
        return []
    means = (
        f"Means of each setting's runs, the best {statistics.BANDS} with their 95 % intervals; a run that ended early "
        "keeps its last value. Click a name to hide it."
    )
    sections = [
        PageSection("Intervals", "Each setting's mean and the runs behind it.", figures.intervals(known, metric)),
        PageSection("Learning curves", means, figures.curves(known, metric)),
    ]
    if figures.varied(known):
        drag = "A line per setting. Drag along an axis to pick a range of it; a click on the axis lets go."
        sections += [
            PageSection("Parallel coordinates", drag, figures.parallel_coordinates(known, metric)),
            PageSection("Slices", "The means by one varied setting at a time.", figures.slices(known, metric)),
            _importance(known, mode),
        ]
    costs = "The means against what a run took on average."
    return [*sections, PageSection("Cost and result", costs, figures.costs(known, metric))]


def _importance(known: Sequence[Group], mode: Mode) -> PageSection:
    title = "Importance of each setting"
    try:
        shares = importance(known, mode)
    except ConfigError as error:
        return PageSection(title, f"Not given: {error}.")
    note = (
        "fANOVA: the share of the differences between the means that each setting explains by itself. The shares add "
        "up to 100 % even where all differences are chance: read them only if intervals above lie apart."
    )
    return PageSection(title, note, figures.importances(shares))


def _compared(title: str, groups: Sequence[Group], metric: str) -> PageSection:
    known = [group for group in groups if group.values]
    told = statistics.difference_sentence(*known) if len(known) == 2 else ""
    told += " Each was picked as the best of its sweep, which flatters both." if "sweep" in groups[0].settings else ""
    drawn = figures.curves(known, metric) if known else None
    return PageSection(f"Compared {title}", told, drawn, tables.table(groups))


def _answers(found: Sequence[Group], uri: str) -> list[PageSection]:
    """What the best trial of the best setting and the worst of the worst answered to the same held-out prompts."""
    title = "Samples of the best and the worst trial"
    ended = [trial for group in found for trial in group.ended]
    if len(ended) < 2:
        return []
    shown = side_by_side(loading.samples(uri, ended[0]), loading.samples(uri, ended[-1]))
    if shown.empty:
        return [PageSection(title, "Not given: MLflow has no prompt that both answered.")]
    note = f"Greedy answers at the last evaluation. Best: {_who(ended[0])}. Worst: {_who(ended[-1])}."
    return [PageSection(title, note, table=shown)]


def side_by_side(best: pd.DataFrame, worst: pd.DataFrame) -> pd.DataFrame:
    """Samples of two trials by the prompts that both answered: prompt, answer, each one's completion and score."""
    one = best.drop_duplicates("prompt")[["prompt", "answer", "completion", "score"]]
    other = worst.drop_duplicates("prompt")[["prompt", "completion", "score"]]
    return one.merge(other, on="prompt", suffixes=(", best", ", worst"))


def _filled(table: pd.DataFrame) -> pd.DataFrame:
    """A table without columns in which nothing stands."""
    return table.loc[:, (table.notna() & (table != "")).any()]


def _who(trial: Trial) -> str:
    settings = zip(short_names(trial.settings), trial.settings.values(), strict=True)
    return f"{trial.name} ({', '.join(f'{name} {as_text(value)}' for name, value in settings)})"


def _again(sweep: Sweep, found: Sequence[Group], recipe: str) -> list[PageSection]:
    title = "The best setting"
    if not found[0].values:
        return []
    if not recipe:
        return [PageSection(title, "Not given: its config.yaml is not in MLflow, or of another version of rlx.")]
    seed = " --seed 100" if statistics.SEED in sweep.varied else ""
    note = f"As best.yaml, beside this page. It runs by: python experiments/ppo.py --config best.yaml{seed}"
    return [PageSection(title, note, text=recipe)]


# ---------------------------------------------------------------------------------------------------------------------
# HTML


def _html(title: str, lead: str, facts: Mapping[str, str], sections: Sequence[PageSection]) -> str:
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("page.html").read_text()
    )
    shown: list[dict[str, Any]] = [
        {"title": each.title, "note": each.note, "text": each.text}
        | {"figure": None if each.figure is None else _figure(each.figure, f"figure-{place}")}
        | {"table": None if each.table is None else _table(each.table)}
        for place, each in enumerate(sections, 1)
    ]
    return template.render(title=title, lead=lead, facts=facts, sections=shown, plotly=get_plotlyjs())


def _figure(figure: go.Figure, name: str) -> str:
    config = {"responsive": True, "displaylogo": False}
    return str(figure.to_html(config, full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=name))


def _table(table: pd.DataFrame) -> dict[str, Any]:
    """A table's columns and rows, each cell with its CSS class."""
    kinds = ["number" if pd.api.types.is_numeric_dtype(table[column]) else "text" for column in table]
    rows = [[as_text(cell) for cell in row] for row in table.itertuples(index=False)]
    return {
        "columns": list(zip(map(str, table.columns), kinds, strict=True)),
        "rows": [list(zip(kinds, row, strict=True)) for row in rows],
    }
