"""The page's parts: samples side by side, tables in HTML, and that no text of a model's becomes part of the page."""

import pandas as pd
import plotly.graph_objects as go

from rlx.analysis import page
from rlx.analysis.page import PageSection


def answers(**texts: str) -> pd.DataFrame:
    """A sample table with a completion per prompt."""
    columns = ["step", "prompt", "completion", "answer", "score"]
    return pd.DataFrame([(9, prompt, text, "yes", 1.0) for prompt, text in texts.items()], columns=columns)


def test_samples_stand_side_by_side_by_prompt() -> None:
    shown = page.side_by_side(answers(one="yes", two="no", three="a"), answers(three="b", one="c", four="d"))
    assert shown["prompt"].tolist() == ["one", "three"]
    assert shown["completion, best"].tolist() == ["yes", "a"]
    assert shown["completion, worst"].tolist() == ["c", "b"]
    assert page.side_by_side(answers(), answers(one="yes")).empty


def test_a_prompt_that_comes_twice_is_shown_once() -> None:
    twice = pd.concat([answers(one="yes"), answers(one="no")])
    assert page.side_by_side(twice, twice)["completion, best"].tolist() == ["yes"]


def test_empty_columns_are_left_out() -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["", ""], "c": [None, None], "d": ["", "x"]})
    assert list(page._filled(table)) == ["a", "d"]


def test_texts_are_escaped_wherever_they_stand() -> None:
    evil = "<script>alert(1)</script>"
    figure = go.Figure(go.Scatter(x=[1], y=[1], name=evil))
    section = PageSection(evil, evil, figure, pd.DataFrame({evil: [evil]}), evil)
    html = page._html(evil, evil, {evil: evil}, [section])
    assert evil not in html
    assert html.count("&lt;script&gt;alert(1)") == 10


def test_a_table_has_its_cells_as_a_person_reads_them() -> None:
    html = page._html("t", "l", {}, [PageSection("s", table=pd.DataFrame({"n": [0.5, None], "t": ["a", None]}))])
    assert '<th class="number">n</th><th class="text">t</th>' in html
    assert '<td class="number">0.5</td><td class="text">a</td>' in html
    assert '<td class="number">-</td><td class="text">-</td>' in html
