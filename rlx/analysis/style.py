"""How settings, numbers and groups look in tables, sentences and figures: short names, rounded numbers, colors.

Left out: statistics, and every kind of figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def settings_label(settings: Mapping[str, Any]) -> str:
    """Settings in one line: actor_lr 0.0001, epochs 2."""
    parts = zip(short_names(settings), settings.values(), strict=True)
    return ", ".join(f"{name} {short_text(value)}" for name, value in parts) or "the one setting"


def progress_text(done: Sequence[int], planned: int | None) -> str:
    """How far trials are: 4 to 6 of 40 steps."""
    least, most = min(done), max(done)
    return f"{least}{f' to {most}' if most > least else ''}{f' of {planned}' if planned else ''} steps"


def setting_text(value: Any) -> str:
    """A setting in full, so that different ones look different: 0.9999 is not 1. Errors of rounding are left out."""
    return as_text(value, 12)


def short_text(value: Any, longest: int = 60) -> str:
    """A setting as names and figures have it: of a long text, such as a system prompt, its beginning and its end."""
    text, end = setting_text(value), longest // 3
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
