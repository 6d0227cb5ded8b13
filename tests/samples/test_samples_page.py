"""The page of completions: its data, hostile texts, and what a browser makes of it."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from rlx.samples import page
from rlx.samples.choosing import ShownStep
from rlx.samples.columns import Kind
from rlx.samples.reader import KeptCompletion

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'><!--"


def row(group: int, sample: int) -> KeptCompletion:
    """A completion without numbers of training."""
    return KeptCompletion(
        step=1,
        kind=Kind.TRAINING,
        prompt_index=group,
        group=group,
        sample=sample,
        trained=True,
        question=f"question {group}",
        expected="",
        prompt="",
        completion="",
        answer=None,
        score=0.0,
        correct=False,
        finish="stop",
        version=0,
        staleness=0,
        token_ids=(1,),
        tokens=("x",),
        engine_logprobs=None,
        logprobs=None,
        ratios=None,
        advantages=None,
    )


def trained(group: int, sample: int, **changes: Any) -> KeptCompletion:
    """A completion of three tokens with numbers of training."""
    values = {
        "tokens": ("one", " two", "<|end|>"),
        "token_ids": (1, 2, 3),
        "engine_logprobs": (-1.0, -2.0, -0.5),
        "logprobs": (-1.25, -2.0, -0.25),
        "ratios": (1.0, 2.0, math.inf),
        "advantages": (0.5, 0.5, 0.5),
        "rewards": {"task": 1.0},
    }
    return replace(row(group, sample), **values | changes)


def shown(*rows: KeptCompletion, step: int = 1, run: str = "r", kept: int | None = None) -> ShownStep:
    return ShownStep(run, rows[0].kind, step, rows, len(rows) if kept is None else kept)


def held_out(prompt: int, step: int, correct: bool) -> KeptCompletion:
    """An answer to one of the same prompts in every evaluation."""
    tokens = ("the answer: ", str(prompt), " of ", str(step))
    known = {"kind": Kind.HELD_OUT, "step": step, "correct": correct, "score": float(correct), "tokens": tokens}
    return replace(row(prompt, 0), **known)


def test_a_row_refers_to_texts_and_has_short_numbers() -> None:
    data = page.page_data([shown(trained(0, 0, answer="7", score=1 / 3), row(1, 0))])
    first, second = data["rows"]
    texts = [data["texts"][reference] for reference in first["tokens"]]
    assert texts == ["one", " two", "<|end|>"] and data["texts"][first["answer"]] == "7"
    assert first["mismatch"] == [0.25, 0.0, -0.25] and first["logprobs"] == [-1.25, -2.0, -0.25]
    assert first["advantages"] == 0.5  # equal for all tokens
    assert first["ratios"] == [1.0, 2.0, None] and first["score"] == 0.3333
    assert (second["mismatch"], second["answer"], second["rewards"]) == (None, None, [None])
    assert data["rewards"] == ["task"] and data["sources"] == ["r · training · step 1"]
    assert len(data["texts"]) == len(set(data["texts"]))


def test_the_lead_says_how_many_are_left_out() -> None:
    assert "All 2 completions of 1 steps and evaluations of r." in page.completions_page(
        "t", [shown(row(0, 0), row(0, 1))]
    )
    some = page.completions_page("t", [shown(row(0, 0), kept=5000)])
    assert "1 of 5,000 completions" in some and "the same prompts are shown everywhere" in some


def hostile() -> str:
    """A page in which every text that a model or a person may have written is hostile."""
    texts = {name: EVIL for name in ("question", "expected", "prompt", "completion", "answer", "finish")}
    spoilt = trained(0, 0, tokens=(EVIL, "\u2028</SCRIPT>", "ok"), rewards={EVIL: 1.0}, **texts)
    return page.completions_page(EVIL, [shown(spoilt, run=EVIL)], {EVIL: EVIL})


def test_hostile_texts_stay_texts() -> None:
    found = hostile()
    assert EVIL not in found and "<img" not in found
    assert len(re.findall(r"</script>", found, re.IGNORECASE)) == 2  # those of the page itself
    data = re.search(r'id="data">(.*?)</script>', found, re.DOTALL)
    assert data and EVIL in json.loads(data[1])["texts"]
    assert "default-src 'none'" in found and not re.search(r"""(src|href)=["'](?!data:)""", found)


def in_browser(tmp_path: Path, text: str, actions: str = "") -> str:
    """The page's DOM after actions in a browser."""
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{{{actions}}}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [str(CHROMIUM), *options, "--virtual-time-budget=20000", f"file://{tmp_path}/page.html"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def title_of(dom: str) -> Any:
    found = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert found
    return json.loads(unescape(found[1]))


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

HELPERS = """
const controls = document.querySelector("form.controls");
const fire = () => controls.elements.show.dispatchEvent(new Event("input", {bubbles: true}));
const set = values => { for (const name in values) {
  const control = controls.elements[name];
  if (control.type === "checkbox") control.checked = values[name];
  else control.value = control.options
    ? [...control.options].find(each => [each.text, each.value].includes(values[name])).value : values[name];
} controls.elements.colour.dispatchEvent(new Event("input", {bubbles: true})); fire(); };
const status = () => document.querySelector("[role=status]").textContent;
const cards = () => [...document.querySelectorAll("article")].map(card =>
  [...card.querySelectorAll(".tokens")].map(body => body.textContent));
const seen = [];
"""


@needs_chromium
def test_hostile_texts_do_nothing_in_a_browser(tmp_path: Path) -> None:
    show = "document.querySelector('details').open = true;"
    count = """setTimeout(() => { document.title = JSON.stringify([document.querySelectorAll("img").length,
      document.scripts.length, document.querySelector(".tokens").firstChild.textContent,
      document.querySelector("details pre").textContent]); }, 500);"""
    assert title_of(in_browser(tmp_path, hostile(), show + count)) == [
        0,
        3,
        EVIL,
        EVIL,
    ]  # its data, its script and this one


@pytest.mark.slow
@needs_chromium
def test_a_browser_filters_searches_and_orders(tmp_path: Path) -> None:
    rows = [
        trained(0, 0, score=2.0, correct=True, question="Apples?"),
        trained(0, 1, score=-1.0, question="Apples?", finish="length"),
        trained(1, 0, score=0.5, question="Pears?", tokens=("a", "longer", " answer", "!"), advantages=(0.1,) * 4),
    ]
    rows[2] = replace(rows[2], engine_logprobs=None, logprobs=None, ratios=None, token_ids=(1, 2, 3, 4))
    actions = """
    set({show: "everything", colour: "none"}); seen.push([status(), cards().length]);
    set({answers: "right"}); seen.push([status(), cards().length]);
    set({answers: "all", finish: "length"}); seen.push([status(), cards().length]);
    set({finish: "all", search: "LONGER pears"}); seen.push([status(), cards()[0][0]]);
    set({search: "nothing of this"}); seen.push([status(), cards().length]);
    set({search: "", order: "lowest score first"});
    const score = each => /score (\\S+?)(?=task)/.exec(each.textContent)[1];
    seen.push([...document.querySelectorAll("article .facts")].map(score));
    set({order: "longest first"}); seen.push(cards()[0][0]);
    document.title = JSON.stringify(seen);"""
    found = title_of(in_browser(tmp_path, page.completions_page("t", [shown(*rows)]), HELPERS + actions))
    assert found == [
        ["3 of 3 completions: 1 right, mean score 0.5", 3],
        ["1 of 3 completions: 1 right, mean score 2", 1],
        ["1 of 3 completions: 0 right, mean score \u22121", 1],
        ["1 of 3 completions: 0 right, mean score 0.5", "alonger answer!"],
        ["0 of 3 completions", 0],
        ["\u22121", "0.5", "2"],
        "alonger answer!",
    ]


@pytest.mark.slow
@needs_chromium
def test_two_evaluations_stand_side_by_side_on_the_same_prompts(tmp_path: Path) -> None:
    early = shown(*[held_out(prompt, 0, correct=prompt == 2) for prompt in (1, 2, 3)], step=0)
    late = shown(*[held_out(prompt, 9, correct=prompt != 3) for prompt in (3, 2, 1, 4)], step=9)
    actions = """
    set({show: "r · held-out · step 0", beside: "r · held-out · step 9"}); seen.push([status(), cards()]);
    set({differ: true}); seen.push([status(), cards()]);
    document.title = JSON.stringify(seen);"""
    both, differing = title_of(in_browser(tmp_path, page.completions_page("t", [early, late]), HELPERS + actions))
    pairs = [[f"the answer: {prompt} of {step}" for step in (0, 9)] for prompt in (1, 2, 3)]
    assert both == [
        "3 of 3 pairs on the same prompts: 1 right, mean score 0.333; beside it 2 right, mean score 0.667",
        pairs,
    ]
    assert differing[1] == pairs[:1]  # the other two are right, or wrong, in both


OPENED = """seen.push([controls.elements.show, controls.elements.beside].map(each => each.selectedOptions[0].text));
    document.title = JSON.stringify([...seen, cards()]);"""


@pytest.mark.slow
@needs_chromium
def test_two_runs_open_on_the_first_with_the_second_beside_it(tmp_path: Path) -> None:
    """On the newest step of the first run that can be compared, with the nearest one of the second."""
    first = [shown(held_out(1, step, correct=True), step=step, run="mix") for step in (0, 10, 20)]
    trained_on = shown(trained(7, 0), step=20, run="mix")
    second = [shown(held_out(1, step, correct=True), step=step, run="t1") for step in (0, 18, 40)]
    text = page.completions_page("t", [*first, trained_on, *second, shown(row(8, 0), step=40, run="t1")])
    opened, found = title_of(in_browser(tmp_path, text, HELPERS + OPENED))
    assert opened == ["mix · held-out · step 20", "t1 · held-out · step 18"]
    assert found == [["the answer: 1 of 20", "the answer: 1 of 18"]]


@pytest.mark.slow
@needs_chromium
def test_one_run_opens_on_its_newest_step_alone(tmp_path: Path) -> None:
    text = page.completions_page("t", [shown(held_out(1, step, correct=True), step=step) for step in (0, 10)])
    opened, found = title_of(in_browser(tmp_path, text, HELPERS + OPENED))
    assert opened == ["r · held-out · step 10", "nothing"] and found == [["the answer: 1 of 10"]]


def test_without_a_common_prompt_the_first_run_is_shown_alone() -> None:
    steps = [shown(row(1, 0), run="mix"), shown(row(2, 0), run="mix"), shown(row(3, 0), run="t1")]
    assert page.page_data(steps)["opens"] == [1, None] and page.page_data([])["opens"] == [None, None]


@pytest.mark.slow
@needs_chromium
def test_tokens_are_coloured_by_the_selected_quantity(tmp_path: Path) -> None:
    actions = """
    const colours = () => [...document.querySelectorAll(".tokens span")].map(span => span.style.background);
    for (const colour of ["advantage", "engine minus trainer", "ratio", "none"]) {
      set({colour});
      seen.push(colours());
    }
    document.querySelector(".tokens span").dispatchEvent(new Event("pointerover", {bubbles: true}));
    seen.push(document.querySelector(".token").textContent);
    document.title = JSON.stringify(seen);"""
    text = page.completions_page("t", [shown(trained(0, 0))])
    advantage, mismatch, ratio, none, told = title_of(in_browser(tmp_path, text, HELPERS + actions))
    blue, orange = "rgba(33, 102, 172, 0.6)", "rgba(217, 95, 2, 0.6)"
    assert advantage == [blue] * 3
    assert mismatch == [blue, "", orange]
    assert ratio == ["", blue, ""]  # the last is infinite, which JSON has not
    assert none == [""] * 3
    expected = [
        "advantage 0.5",
        "engine minus trainer 0.25",
        "ratio 1",
        "log-probability \u22121.25",
        "engine's \u22121",
    ]
    assert told.split("  \u00b7  ") == ['"one"', "token 1", *expected]


@pytest.mark.slow
@needs_chromium
def test_thousands_of_rows_are_made_as_they_come_into_view(tmp_path: Path) -> None:
    rows = [trained(group, 0, question=f"question {group}") for group in range(2000)]
    actions = """
    seen.push([status(), cards().length < 200]);
    const first = cards().length;
    scrollTo(0, document.body.scrollHeight);
    dispatchEvent(new Event("scroll"));  // a browser without a window draws no frames, so it sends none
    seen.push(cards().length > first && cards().length < 400);
    document.title = JSON.stringify(seen);"""
    text = page.completions_page("t", [shown(*rows)])
    first, grows = title_of(in_browser(tmp_path, text, HELPERS + actions))
    assert first == ["2000 of 2000 completions: 0 right, mean score 0".replace("2000", "2,000"), True]
    assert grows
    assert len(text) < 2_000_000
