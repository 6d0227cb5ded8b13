"""How settings, numbers and groups look in tables, sentences and figures: short names, rounded numbers, colors.

Left out: statistics, and every kind of figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from numbers import Real
from typing import Any

_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_GREY = "#b8b8b8"
NUM_NAMED = len(_COLORS)
"""how many groups a figure of curves names: the best ones"""
NUM_BANDS = 3
"""how many groups a figure of curves draws with their intervals: more would hide each other"""


def colors(count: int) -> list[str]:
    """A color for each of `count` groups, best first: distinct for the named groups, grey for the others."""
    return [*_COLORS, *[_GREY] * count][:count]


def short_names(keys: Iterable[str]) -> list[str]:
    """Dotted keys without their sections, except where two would become equal."""
    keys = list(keys)
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def settings_labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of each candidate, all of the same keys, in one line: actor_lr 0.0001, epochs 2."""
    keys = list(settings[0]) if settings else []
    columns = [short_texts([each[key] for each in settings]) for key in keys]
    named = list(zip(short_names(keys), columns, strict=True))
    return [", ".join(f"{name} {texts[i]}" for name, texts in named) or "the one setting" for i in range(len(settings))]


def progress_text(done: Sequence[int], planned: int | None) -> str:
    """How far trials are: 4 to 6 of 40 steps."""
    least, most = min(done), max(done)
    return f"{least}{f' to {most}' if most > least else ''}{f' of {planned}' if planned else ''} steps"


def setting_text(value: Any) -> str:
    """A setting in full, so that different ones look different: 0.9999 is not 1. Errors of rounding are left out."""
    return as_text(value, 12)


def short_texts(values: Iterable[Any], longest: int = 60) -> list[str]:
    """The values of one setting as names and figures have them: of a long text, such as a system prompt, its beginning
    and its end, or of those that would look alike the part in which they differ."""
    texts = [setting_text(value) for value in values]
    short = _told_apart({text: _ends(text, longest) for text in texts}, longest)
    return [short[text] for text in texts] if len({*short.values()}) == len(short) else texts


def _told_apart(short: Mapping[str, str], longest: int) -> dict[str, str]:
    """Short texts by the whole ones, where those that are alike are replaced."""
    found = dict(short)
    for each in set(short.values()):
        alike = [text for text in short if short[text] == each]
        if len(alike) > 1:  # fewer each time: the parts begin where the texts differ first
            found |= _told_apart(_parts(alike, longest), longest)
    return found


def _parts(texts: Sequence[str], longest: int) -> dict[str, str]:
    """The part in which each text differs from the others, and what stands beside it, as far as there is room."""
    before = _shared_beginning(texts)
    rests = [text.removeprefix(before) for text in texts]
    after = _shared_beginning([rest[::-1] for rest in rests])[::-1]
    parts = [_ends(rest.removesuffix(after), longest // 2) for rest in rests]  # there is room for what all share
    room = (longest - 2 - max(map(len, parts))) // 2
    left = before if len(before) <= room + 1 else f"…{before[len(before) - room :]}"
    right = after if len(after) <= room + 1 else f"{after[:room]}…"
    return {text: f"{left}{part}{right}" for text, part in zip(texts, parts, strict=True)}


def _shared_beginning(texts: Sequence[str]) -> str:
    return "".join(at[0] for at in takewhile(lambda at: len(set(at)) == 1, zip(*texts, strict=False)))


def _ends(text: str, longest: int) -> str:
    """The beginning and the end of a text that is longer than this."""
    end = longest // 3
    return text if len(text) <= longest else f"{text[: longest - end - 1]}…{text[-end:]}"


def as_text(value: Any, digits: int = 3) -> str:
    """A table cell or axis label: a number rounded to `digits`, integers and thousands in full, "-" for no value."""
    if value is None:
        return "-"
    if not isinstance(value, Real):
        return str(value)
    number = float(value)
    if math.isnan(number):
        return "-"
    if number.is_integer() or abs(number) >= 10 ** max(digits, 3):  # the format .3g turns 12345.67 into 1.23e+04
        return f"{number:,.0f}"
    return f"{number:,.{digits}g}".replace("e-0", "e-")
