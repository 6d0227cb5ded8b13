"""One HTML page with the result of a sweep: a sentence, the options of the sweep, tables, figures, samples.

The page opens offline: it contains the JavaScript of plotly, once, and fetches nothing. Its layout is the Jinja
template page.html, which escapes every text that a model or a person has written. Left out: the figures (figures.py).
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
from rlx.analysis.importance import importance, varied_settings
from rlx.analysis.loading import Sweep, Trial
from rlx.analysis.sentences import difference_sentence, summary_sentence
from rlx.analysis.statistics import Group
from rlx.analysis.style import NUM_BANDS, as_text, short_names
from rlx.config.errors import ConfigError
from rlx.config.sections import Mode
from rlx.tracking import metrics

_SELECTION_BIAS = (
    "The best of many means looks better than it is, because it was selected: to be sure, run it again on fresh seeds."
)


@dataclass(frozen=True, eq=False)
class PageSection:
    """A heading, a note of a sentence or two, and the contents, in this order."""

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
    """Renders the page.

    Args:
        compared: the settings of the sweep, best first, under "settings"; further comparisons under their titles.
        recipe: the best setting as YAML; empty if it is not known.
        uri: the tracking store with the samples.
    """
    settings = compared["settings"]
    order = f"{'highest' if mode == 'max' else 'lowest'} first"
    facts = {
        "options": ", ".join(f"{key} {value}" for key, value in sweep.options.items()),
        "varied": ", ".join(sweep.varied) or "nothing",
        "ranked by": f"{metric}, {order}: {metrics.meaning(metric)}",
    }
    sections = [
        _ranking(settings, sweep.num_questions_of(metric)),
        *_figures(settings, metric, mode),
        *(_comparison(title, groups, metric) for title, groups in compared.items() if groups is not settings),
        *_samples(settings, uri),
        *_best_setting(sweep, settings, recipe),
        PageSection(
            "Every trial",
            "Best last value first.",
            table=without_empty_columns(tables.trial_table(sweep, metric, mode)),
        ),
    ]
    return render_sections(f"Sweep {sweep.name}", summary_sentence(settings, metric), facts, sections)


# ---------------------------------------------------------------------------------------------------------------------
# Sections


def _ranking(settings: Sequence[Group], num_questions: int | None) -> PageSection:
    floor = f", and at least the interval of a share of {num_questions} questions" if num_questions else ""
    note = (
        f"Settings by the mean of the last value over their runs; ± is half the 95 % interval (Student's t{floor}). "
        "Tokens (generated) and seconds (of steps and evaluations, without the start of engines; the first step of a "
        f"process is slow) are the mean of the runs. {_SELECTION_BIAS if len(settings) > 1 else ''}"
    )
    return PageSection("Settings, ranked", note, table=tables.group_table(settings))


def _figures(settings: Sequence[Group], metric: str, mode: Mode) -> list[PageSection]:
    """Figures of the settings that have values, and of what they vary, if they vary anything."""
    rated = [group for group in settings if group.values]
    if not rated:
        return []
    means = (
        f"Mean over the runs of each setting, the best {NUM_BANDS} with their 95 % intervals; a run that ended early "
        "keeps its last value. Click a name to hide it."
    )
    sections = [
        PageSection("Intervals", "The mean of each setting and the runs behind it.", figures.intervals(rated, metric)),
        PageSection("Learning curves", means, figures.curves(rated, metric)),
    ]
    if varied_settings(rated):
        drag = "A line per setting. Drag along an axis to select a range of it; click on the axis to end the selection."
        sections += [
            PageSection("Parallel coordinates", drag, figures.parallel_coordinates(rated, metric)),
            PageSection("Slices", "The means by one varied setting at a time.", figures.slices(rated, metric)),
            _importance(rated, mode),
        ]
    costs = "The mean of each setting over the mean cost of its runs."
    return [*sections, PageSection("Cost and result", costs, figures.costs(rated, metric))]


def _importance(rated: Sequence[Group], mode: Mode) -> PageSection:
    title = "Importance of each setting"
    try:
        shares = importance(rated, mode)
    except ConfigError as error:
        return PageSection(title, f"Not given: {error}.")
    note = (
        "fANOVA: the share of the differences between the means that each setting explains by itself. The shares add "
        "up to 100 % even if all differences are chance: rely on them only if intervals above do not overlap."
    )
    return PageSection(title, note, figures.importances(shares))


def _comparison(title: str, groups: Sequence[Group], metric: str) -> PageSection:
    rated = [group for group in groups if group.values]
    note = difference_sentence(*rated) if len(rated) == 2 else ""
    if "sweep" in groups[0].settings:
        note += " Each was selected as the best of its sweep, which makes both look better than they are."
    figure = figures.curves(rated, metric) if rated else None
    return PageSection(f"Compared {title}", note, figure, tables.group_table(groups))


def _samples(settings: Sequence[Group], uri: str) -> list[PageSection]:
    """The answers of the best trial of the best setting and the worst trial of the worst one to the same prompts."""
    title = "Samples of the best and the worst trial"
    ended = [trial for group in settings for trial in group.ended]
    if len(ended) < 2:
        return []
    best, worst = ended[0], ended[-1]
    table = side_by_side(loading.samples(uri, best), loading.samples(uri, worst))
    if table.empty:
        return [PageSection(title, "Not given: MLflow has no prompt that both answered.")]
    note = f"Greedy answers at the last evaluation. Best: {_described(best)}. Worst: {_described(worst)}."
    return [PageSection(title, note, table=table)]


def side_by_side(best: pd.DataFrame, worst: pd.DataFrame) -> pd.DataFrame:
    """Joins the samples of two trials on the prompts that both answered.

    Returns:
        Columns prompt, answer, and completion and score of each trial.
    """
    left = best.drop_duplicates("prompt")[["prompt", "answer", "completion", "score"]]
    right = worst.drop_duplicates("prompt")[["prompt", "completion", "score"]]
    return left.merge(right, on="prompt", suffixes=(", best", ", worst"))


def without_empty_columns(table: pd.DataFrame) -> pd.DataFrame:
    """A table without the columns that have no value in any row."""
    return table.loc[:, (table.notna() & (table != "")).any()]


def _described(trial: Trial) -> str:
    """The name of a trial with its settings."""
    settings = zip(short_names(trial.settings), trial.settings.values(), strict=True)
    return f"{trial.name} ({', '.join(f'{name} {as_text(value)}' for name, value in settings)})"


def _best_setting(sweep: Sweep, settings: Sequence[Group], recipe: str) -> list[PageSection]:
    title = "The best setting"
    if not settings[0].values:
        return []
    if not recipe:
        return [PageSection(title, "Not given: its config.yaml is not in MLflow, or is of another version of rlx.")]
    seed = " --seed 100" if statistics.SEED in sweep.varied else ""
    note = f"This is best.yaml, beside this page. To run it: rlx train --config best.yaml{seed}"
    return [PageSection(title, note, text=recipe)]


# ---------------------------------------------------------------------------------------------------------------------
# HTML


def render_sections(title: str, lead: str, facts: Mapping[str, str], sections: Sequence[PageSection]) -> str:
    """Renders the template.

    Args:
        lead: the sentence below the title.
        facts: listed below the lead, by name.
    """
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("page.html").read_text()
    )
    contents: list[dict[str, Any]] = [
        {"title": section.title, "note": section.note, "text": section.text}
        | {"figure": None if section.figure is None else _figure_html(section.figure, f"figure-{number}")}
        | {"table": None if section.table is None else _table_cells(section.table)}
        for number, section in enumerate(sections, 1)
    ]
    return template.render(title=title, lead=lead, facts=facts, sections=contents, plotly=get_plotlyjs())


def _figure_html(figure: go.Figure, name: str) -> str:
    """A figure as an HTML element with the id `name`, without the JavaScript of plotly."""
    config = {"responsive": True, "displaylogo": False}
    return str(figure.to_html(config, full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=name))


def _table_cells(table: pd.DataFrame) -> dict[str, Any]:
    """The columns and rows of a table as the template takes them: pairs of CSS class and text."""
    kinds = ["number" if pd.api.types.is_numeric_dtype(table[column]) else "text" for column in table]
    rows = [[as_text(cell) for cell in row] for row in table.itertuples(index=False)]
    return {
        "columns": list(zip(map(str, table.columns), kinds, strict=True)),
        "rows": [list(zip(kinds, row, strict=True)) for row in rows],
    }
