"""The parts of the page: samples, tables that sort and filter, links to MLflow, and the escaping of all texts."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest
from sweep_cases import groups_of, sweep, trial

from rlx.analysis import progress
from rlx.analysis.page import explorer, figures, html, sections, trial_figures
from rlx.analysis.page.explorer import Explorer, MetricChoice, MetricCurve
from rlx.analysis.page.html import PageSection
from rlx.config.sweep import DEFAULT_METRIC
from rlx.tracking.metrics import METRICS

LR = "train.actor_lr"
TWO_ROWS = pd.DataFrame({"t": ["a", "b"]})
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def answers(**texts: str) -> pd.DataFrame:
    """A sample table with a completion per prompt."""
    columns = ["step", "prompt", "completion", "answer", "score"]
    return pd.DataFrame([(9, prompt, text, "yes", 1.0) for prompt, text in texts.items()], columns=columns)


def test_samples_are_side_by_side_by_prompt() -> None:
    table = sections.side_by_side(answers(one="yes", two="no", three="a"), answers(three="b", one="c", four="d"))
    assert table["prompt"].tolist() == ["one", "three"]
    assert table["completion, best"].tolist() == ["yes", "a"]
    assert table["completion, worst"].tolist() == ["c", "b"]
    assert sections.side_by_side(answers(), answers(one="yes")).empty


def test_a_repeated_prompt_is_shown_once() -> None:
    twice = pd.concat([answers(one="yes"), answers(one="no")])
    assert sections.side_by_side(twice, twice)["completion, best"].tolist() == ["yes"]


def test_empty_columns_are_left_out() -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["", ""], "c": [None, None], "d": ["", "x"]})
    assert list(sections.without_empty_columns(table)) == ["a", "d"]


def rendered(*sections: PageSection) -> str:
    return html.render_sections("title", "lead", {}, sections)


def test_texts_are_escaped_everywhere() -> None:
    evil = "<script>alert(1)</script>"
    figure = go.Figure(go.Scatter(x=[1], y=[1], name=evil))
    choice = MetricChoice(evil, evil, (0, 1), (MetricCurve(0, (1.0, 2.0)),))
    curves, table = Explorer(((0, 1),), (choice,)), pd.DataFrame({evil: [evil] * 3})
    section = PageSection(evil, evil, figure, curves, table, {evil: evil}, evil)
    page = html.render_sections(evil, evil, {evil: evil}, [section])
    assert evil not in page
    assert page.count("&lt;script&gt;alert(1)") == 18  # one of them of the figure, as plotly takes it
    assert page.count(r'"\u003cscript\u003ealert(1)') == 2  # in the data of the selector


def test_texts_of_settings_are_no_markup_in_figures() -> None:
    """Every string of every figure is either a text without markup, or has line breaks of the figure's own."""
    prompts = ["Use <b>bold</b> & <a>.", "First,<br>then <i>2</i>."]
    tried = sweep(*(trial(i, {"data.system_prompt": each}, {0: 0.1, 9: 0.5}) for i, each in enumerate(prompts)))
    groups, history = groups_of(tried), progress.best_so_far(tried, DEFAULT_METRIC, "max")
    drawn = [
        figures.intervals(groups, DEFAULT_METRIC),
        figures.curves(groups, DEFAULT_METRIC),
        figures.slices(groups, DEFAULT_METRIC),
        trial_figures.best_values(history, DEFAULT_METRIC),
    ]
    for figure in drawn:
        page = rendered(PageSection("s", figure=figure)).rpartition("</style>")[2]
        sent = re.sub(r"\\u00([0-9a-f]{2})", lambda code: chr(int(code[1], 16)), page[page.rindex("Plotly.newPlot") :])
        assert "&lt;b&gt;bold&lt;/b&gt; &amp; &lt;a&gt;" in sent and "&lt;br&gt;then &lt;i&gt;" in sent
        assert set(re.findall(r"<\w+", sent.partition("</script>")[0])) <= {"<br"}
    lines = html._without_markup(figures.parallel_coordinates(groups, DEFAULT_METRIC).to_plotly_json())
    assert lines["data"][0]["dimensions"][0]["ticktext"] == sorted(prompts)  # plotly takes these for no HTML
    assert lines["layout"]["margin"]["l"] > 7 * max(map(len, prompts))


def test_table_cells_are_rounded_and_keep_the_number_to_sort_by() -> None:
    page = rendered(PageSection("s", table=pd.DataFrame({"n": [0.123456, None], "t": ["a", None]})))
    assert '<td class="number" data-key="0.123456">0.123</td><td class="text">a</td>' in page
    assert '<td class="number">-</td><td class="text">-</td>' in page


def test_a_header_is_a_button_that_says_how_it_is_sorted() -> None:
    page = rendered(PageSection("s", table=pd.DataFrame({"n": [1], "t": ["a"]})))
    head = '<th class="{}" scope="col" aria-sort="none"><button type="button">{}</button></th>'
    assert all(head.format(kind, name) in page for kind, name in (("number", "n"), ("text", "t")))


def test_longer_tables_have_a_filter() -> None:
    page = rendered(PageSection("long", table=pd.DataFrame({"n": [1] * 3})), PageSection("short", table=TWO_ROWS))
    assert re.findall(r'aria-label="Filter the rows of: (.*?)"', page) == ["long"]


def test_cells_with_an_address_are_links() -> None:
    page = rendered(PageSection("s", table=TWO_ROWS, links={"b": "http://server/#/runs/1?a=b&c=d"}))
    links = re.findall(r'<a href="http://server.*?</a>', page)
    assert links == ['<a href="http://server/#/runs/1?a=b&amp;c=d" target="_blank" rel="noopener">b</a>']


# ---------------------------------------------------------------------------------------------------------------------
# Links to MLflow


def every_trial(uri: str) -> PageSection:
    several = sweep(trial(3, {LR: 1.0}, {9: 0.5}), trial(4, {LR: 2.0}, {9: 0.6}))
    return sections.every_trial(replace(several, experiment_id="7"), uri, DEFAULT_METRIC, "max")


def test_names_of_trials_lead_to_their_runs_on_a_server() -> None:
    section = every_trial("https://user:secret@mlflow.example/path/")
    run = "https://mlflow.example/path/#/experiments/7/runs/{}?workflowType=machine_learning"
    assert section.links == {"trial_00003": run.format(3), "trial_00004": run.format(4)}
    assert section.text == ""
    assert "secret" not in rendered(section)


def test_a_database_comes_with_the_command_that_serves_it() -> None:
    section = every_trial("sqlite:////a folder/mlflow.db")
    command, path = section.text.splitlines()
    assert command == "mlflow ui --backend-store-uri 'sqlite:////a folder/mlflow.db'"
    assert path.endswith(" /#/experiments/7/runs/RUN?workflowType=machine_learning")
    assert section.links["trial_00003"].startswith("http://127.0.0.1:5000/#/experiments/7/runs/3?")


# ---------------------------------------------------------------------------------------------------------------------
# In a browser

ACTIONS = """
const section = [...document.querySelectorAll("section")].at(-1);
const shown = () => [...section.querySelectorAll("tbody tr")].filter(row => !row.hidden);
const cells = column => shown().map(row => row.cells[column].textContent).join(" ");
const seen = [];
const [number, text] = section.querySelectorAll("th");
for (const header of [number, number, text]) {
  header.firstElementChild.click();
  seen.push([header.getAttribute("aria-sort"), cells(header.cellIndex)]);
}
const input = section.querySelector("input");
input.value = "A1 x";
input.dispatchEvent(new Event("input"));
seen.push([section.querySelector("[role=status]").textContent, cells(1)]);
const select = document.querySelector("select");
select.value = "kl/ref";
select.dispatchEvent(new Event("change"));
const figure = document.querySelector(".plotly-graph-div");
seen.push([document.querySelector(".meaning").textContent, figure.layout.yaxis.title.text, figure.data[0].y]);
document.title = JSON.stringify(seen);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_sorts_filters_and_selects(tmp_path: Path) -> None:
    histories = [pd.DataFrame({"reward/mean": [0.1, 0.2], "kl/ref": [0.3, 0.4]}, index=[1, 2])]
    data = explorer.gather_curves(histories)
    groups = groups_of(sweep(trial(0, {LR: 1.0}, {9: 0.5})))
    table = pd.DataFrame({"n": [0.1, None, 1e-5, 0.1004], "t": ["a2 x", "a10 x", None, "a1 x"]})
    selector = PageSection("metrics", figure=explorer.draw_first(groups, data), explorer=data)
    page = rendered(selector, PageSection("table", table=table))
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{ACTIONS}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [str(CHROMIUM), *options, "--virtual-time-budget=20000", f"file://{tmp_path}/page.html"]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found and json.loads(unescape(found[1])) == [
        ["ascending", "1e-5 0.1 0.1 -"],
        ["descending", "0.1 0.1 1e-5 -"],
        ["ascending", "a1 x a2 x a10 x -"],
        ["2 of 4 rows", "a1 x a10 x"],
        [METRICS["kl/ref"], "kl/ref", [0.3, 0.4]],
    ]
