"""The parts of the page: samples side by side, tables in HTML, and the escaping of all texts."""

import pandas as pd
import plotly.graph_objects as go

from rlx.analysis import page
from rlx.analysis.page import PageSection


def answers(**texts: str) -> pd.DataFrame:
    """A sample table with a completion per prompt."""
    columns = ["step", "prompt", "completion", "answer", "score"]
    return pd.DataFrame([(9, prompt, text, "yes", 1.0) for prompt, text in texts.items()], columns=columns)


def test_samples_are_side_by_side_by_prompt() -> None:
    table = page.side_by_side(answers(one="yes", two="no", three="a"), answers(three="b", one="c", four="d"))
    assert table["prompt"].tolist() == ["one", "three"]
    assert table["completion, best"].tolist() == ["yes", "a"]
    assert table["completion, worst"].tolist() == ["c", "b"]
    assert page.side_by_side(answers(), answers(one="yes")).empty


def test_a_repeated_prompt_is_shown_once() -> None:
    twice = pd.concat([answers(one="yes"), answers(one="no")])
    assert page.side_by_side(twice, twice)["completion, best"].tolist() == ["yes"]


def test_empty_columns_are_left_out() -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["", ""], "c": [None, None], "d": ["", "x"]})
    assert list(page.without_empty_columns(table)) == ["a", "d"]


def test_texts_are_escaped_everywhere() -> None:
    evil = "<script>alert(1)</script>"
    figure = go.Figure(go.Scatter(x=[1], y=[1], name=evil))
    section = PageSection(evil, evil, figure, pd.DataFrame({evil: [evil]}), evil)
    html = page.render_sections(evil, evil, {evil: evil}, [section])
    assert evil not in html
    assert html.count("&lt;script&gt;alert(1)") == 10


def test_table_cells_are_rounded_and_aligned() -> None:
    html = page.render_sections(
        "t", "l", {}, [PageSection("s", table=pd.DataFrame({"n": [0.5, None], "t": ["a", None]}))]
    )
    assert '<th class="number">n</th><th class="text">t</th>' in html
    assert '<td class="number">0.5</td><td class="text">a</td>' in html
    assert '<td class="number">-</td><td class="text">-</td>' in html
