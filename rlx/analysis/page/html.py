"""Sections as one HTML file, which contains all it needs: styles, scripts, plotly, and the numbers of the curves.

The layout is the Jinja template page.html. It escapes every text that a model or a person has written, and
`_figure_html` those of figures, which plotly would read as HTML. page.js sorts and filters tables and draws the
selected metric. Left out: what the sections show (sections.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import jinja2
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from rlx.analysis.page.explorer import Explorer
from rlx.analysis.tables import cell_texts

_MIN_FILTERED = 3  # rows; a shorter table needs no filter


@dataclass(frozen=True, eq=False)
class PageSection:
    """A heading, a note of a sentence or two, and the contents, in this order."""

    title: str
    note: str = ""
    figure: go.Figure | None = None
    explorer: Explorer | None = None  # whose metrics the figure shows, one at a time
    table: pd.DataFrame | None = None
    links: Mapping[str, str] = field(default_factory=dict)  # addresses by the text of the table's cells
    text: str = ""


@dataclass(frozen=True)
class _Cell:
    text: str
    kind: str  # its CSS class: number or text
    key: str  # a number in full, to sort by; empty for texts and for no value
    address: str | None


@dataclass(frozen=True)
class _Table:
    columns: list[tuple[str, str]]  # names and kinds
    rows: list[list[_Cell]]
    has_filter: bool


@dataclass(frozen=True)
class _Contents:
    """A section as the template takes it."""

    title: str
    note: str
    text: str
    figure: str | None
    explorer: dict[str, Any] | None
    table: _Table | None


def render_sections(title: str, lead: str, facts: Mapping[str, str], sections: Sequence[PageSection]) -> str:
    """Renders the template.

    Args:
        lead: the sentence below the title.
        facts: listed below the lead, by name.
    """
    # The pages of rlx look alike: style.css is that of completions.
    files = jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in ("rlx.analysis.page", "rlx.samples")])
    environment = jinja2.Environment(loader=files, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    contents = [_contents(section, f"figure-{number}") for number, section in enumerate(sections, 1)]
    template = environment.get_template("page.html")
    return template.render(title=title, lead=lead, facts=facts, sections=contents, plotly=get_plotlyjs())


def _contents(section: PageSection, name: str) -> _Contents:
    return _Contents(
        title=section.title,
        note=section.note,
        text=section.text,
        figure=None if section.figure is None else _figure_html(section.figure, name),
        explorer=None if section.explorer is None else asdict(section.explorer),
        table=None if section.table is None else _table(section.table, section.links),
    )


def _figure_html(figure: go.Figure, name: str) -> str:
    """A figure as an HTML element with the id `name`, without the JavaScript of plotly."""
    config = {"responsive": True, "displaylogo": False}
    literal = go.Figure(_without_markup(json.loads(figure.to_json())))
    return str(literal.to_html(config, full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=name))


def _without_markup(part: Any) -> Any:
    """A part of a figure whose texts plotly shows as they are, and not as HTML; their lines remain lines."""
    if isinstance(part, dict):
        plain = {"ticktext"} if "values" in part else set()  # of parallel coordinates, which plotly never reads as HTML
        return {key: value if key in plain else _without_markup(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_without_markup(each) for each in part]
    return escape(part, quote=False).replace("\n", "<br>") if isinstance(part, str) else part


def _table(table: pd.DataFrame, links: Mapping[str, str]) -> _Table:
    kinds = ["number" if pd.api.types.is_numeric_dtype(table[column]) else "text" for column in table]
    rows = [
        [_cell(*cell, links) for cell in zip(row, kinds, texts, strict=True)]
        for row, texts in zip(table.itertuples(index=False), cell_texts(table), strict=True)
    ]
    return _Table(list(zip(map(str, table.columns), kinds, strict=True)), rows, len(rows) >= _MIN_FILTERED)


def _cell(value: Any, kind: str, text: str, links: Mapping[str, str]) -> _Cell:
    key = repr(float(value)) if kind == "number" and not pd.isna(value) else ""
    return _Cell(text, kind, key, links.get(text))
