"""Completions as one HTML page that opens offline: search, filters, two steps or runs side by side, coloured tokens.

The layout is samples.html; samples.js draws what is in view. All texts are data for the script, which never reads them
as HTML. Left out: which completions are shown (choosing.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from rlx.samples.choosing import ShownStep
from rlx.samples.reader import KeptCompletion

_NAMES = {"training": "training", "held_out": "held-out"}
_TOKEN_VALUES = ("mismatch", "logprobs", "ratios", "advantages")


def completions_page(title: str, steps: Sequence[ShownStep], facts: Mapping[str, str] | None = None) -> str:
    """Renders the page.

    Args:
        facts: listed below the title, by name.
    """
    files = jinja2.PackageLoader("rlx.samples", "")
    environment = jinja2.Environment(loader=files, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    shown, kept = sum(len(step.rows) for step in steps), sum(step.kept for step in steps)
    some = f"{shown:,} of {kept:,} completions" if shown < kept else f"All {kept:,} completions"
    runs = dict.fromkeys(step.run for step in steps)
    lead = f"{some} of {len(steps)} steps and evaluations of {' and '.join(runs)}. "
    lead += "Where some are left out, the same prompts are shown everywhere." if shown < kept else ""
    template = environment.get_template("samples.html")
    return template.render(title=title, lead=lead.strip(), facts=facts or {}, data=page_data(steps))


def page_data(steps: Sequence[ShownStep]) -> dict[str, Any]:
    """What the script gets: texts once each, sources, and a row for each completion that refers to them."""
    texts: dict[str, int] = {}
    rewards = list(dict.fromkeys(name for step in steps for row in step.rows for name in row.rewards))
    sources = [f"{step.run} · {_NAMES[step.kind]} · step {step.step}" for step in steps]
    rows = [_row(number, row, texts, rewards) for number, step in enumerate(steps) for row in step.rows]
    return {"texts": list(texts), "rewards": rewards, "sources": sources, "rows": rows, "opens": _opening(steps)}


def _opening(steps: Sequence[ShownStep]) -> list[int | None]:
    """The places of what is shown at first, and of what is beside it: the newest of the first run, and the second run.

    Of the first run it is the newest step of which the second run has some prompts, too, and of that run the nearest
    such step. Without one, or with one run, nothing is beside the newest.
    """
    if not steps:
        return [None, None]
    own = [place for place, step in enumerate(steps) if step.run == steps[0].run]
    asked = [{(row.question, row.sample) for row in step.rows} for step in steps]
    for place in reversed(own):
        others = [
            other
            for other, step in enumerate(steps)
            if step.run != steps[0].run and step.kind == steps[place].kind and asked[place] & asked[other]
        ]
        if others:
            return [place, min(others, key=lambda other: abs(steps[other].step - steps[place].step))]
    return [own[-1], None]


def _row(source: int, row: KeptCompletion, texts: dict[str, int], rewards: Sequence[str]) -> dict[str, Any]:
    def refer(text: str) -> int:
        return texts.setdefault(text, len(texts))

    return {
        "source": source,
        "prompt": row.prompt_index,
        "sample": row.sample,
        "question": refer(row.question),
        "expected": refer(row.expected),
        "read": refer(row.prompt),
        "answer": None if row.answer is None else refer(row.answer),
        "score": _short(row.score),
        "rewards": [_short(row.rewards.get(name)) for name in rewards],
        "correct": row.correct,
        "finish": refer(row.finish),
        "dataSource": None if row.source is None else refer(row.source),
        "staleness": row.staleness,
        "leftOut": row.kind == "training" and not row.trained,
        "tokens": [refer(text) for text in row.tokens],
        "turns": row.turns,
        "episode": _episode(row),
        **{name: _packed(getattr(row, name)) for name in _TOKEN_VALUES},
    }


def _episode(row: KeptCompletion) -> dict[str, Any] | None:
    """What is shown of the environment: figures of the whole, and the rewards of turns."""
    played = row.played
    if played is None:
        return None
    observations = [turn.observation for turn in played.turns]
    return {
        "calls": sum(each.calls for each in observations),
        "errors": sum(each.call_errors for each in observations),
        "seconds": _short(played.seconds),
        "failure": played.told_failure,
        "rewards": [_short(each.reward) for each in observations],
        "last": observations[-1].text,
    }


def _packed(values: Iterable[float] | None) -> list[float | None] | float | None:
    """One value for each token; a number if all are equal."""
    if values is None:
        return None
    short = [_short(value) for value in values]
    return short[0] if len(set(short)) == 1 else short


def _short(value: float | None) -> float | None:
    """Four digits are enough to read; JSON has no infinity."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
