"""The result of a sweep in one sentence. Left out: the statistics behind it (statistics.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.analysis.statistics import Group, difference
from rlx.analysis.style import as_text
from rlx.config.sections import DEFAULT_METRIC


def summary_sentence(groups: Sequence[Group], metric: str = DEFAULT_METRIC) -> str:
    """States which setting wins, by how much, and whether the intervals overlap.

    Args:
        groups: the settings, best first.
    """
    with_values = [group for group in groups if group.values]
    if not with_values:
        return f"No trial has ended with {metric} yet."
    best, *others = with_values
    wins = f"{best.label} {'wins' if others else 'ends'} with {metric} {_mean_text(best)}"
    if not others:
        return f"{wins}; there is no other setting to compare it with."
    second = others[0]
    comparison = f"{wins}; the next is {_mean_text(second)} ({second.label})"
    if math.isnan(best.half_width + second.half_width):
        return f"{comparison}: with one run of a setting, the difference may be chance; use --seeds 3."
    is_apart = abs(best.mean - second.mean) > best.half_width + second.half_width
    return f"{comparison}: the intervals {'do not overlap' if is_apart else 'overlap'}."


def difference_sentence(first: Group, second: Group) -> str:
    """States by how much the means of two groups differ, and whether that may be chance."""
    gap, half_width = difference(first, second)
    if math.isnan(half_width):
        return f"The means differ by {as_text(gap)}; there is no interval without two runs of each."
    verdict = "more than chance" if abs(gap) > half_width else "which may be chance"
    return f"The means differ by {as_text(gap, 2)} ± {as_text(half_width, 2)} (95 %, Welch): {verdict}."


def _mean_text(group: Group) -> str:
    count = len(group.values)
    interval = "" if math.isnan(group.half_width) else f" ± {as_text(group.half_width, 2)}"
    return f"{as_text(group.mean)}{interval} over {count} run{'s' if count > 1 else ''}"
