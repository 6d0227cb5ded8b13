"""The result of a sweep in one sentence. Left out: the statistics behind it (statistics.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.analysis.statistics import Group, difference
from rlx.analysis.style import as_text


def summary_sentence(groups: Sequence[Group], metric: str) -> str:
    """States which setting is first and by how much. It wins only if its interval does not overlap the next one's.

    Args:
        groups: the settings, best first.
    """
    compared = [group for group in groups if group.is_compared]
    if not compared:
        what = "setting without a failed trial" if any(group.values for group in groups) else "trial"
        return f"No {what} has ended with a finite {metric}."
    best, *others = compared
    if not others:
        return f"{best.label} ends with {metric} {mean_text(best)}; there is no other setting to compare it with."
    is_population = any(trial.origins for group in compared for trial in group.trials)
    more = "rlx lineage says how to run the best on fresh seeds" if is_population else "use --seeds 3"  # pbt takes none
    return _first_two(best, others[0], metric, more)


def _first_two(best: Group, second: Group, metric: str, more: str) -> str:
    gap, doubt = abs(best.mean - second.mean), best.half_width + second.half_width
    if gap > doubt:
        wins = f"{best.label} wins with {metric} {mean_text(best)}"
        return f"{wins}; the next is {mean_text(second)} ({second.label}): the intervals do not overlap."
    ahead = f"ahead of {second.label} by {as_text(gap, 2)}" if gap else f"level with {second.label}"
    is_known = not math.isnan(doubt)
    reason = "intervals overlap" if is_known else f"with one run of a setting there is no interval; {more}"
    means = f"{metric} {mean_text(best)} against {mean_text(second)}"
    return f"{best.label} is {ahead}; not shown to be better: {reason} ({means})."


def difference_sentence(first: Group, second: Group) -> str:
    """States by how much the means of two groups differ, and whether that may be chance."""
    gap, half_width = difference(first, second)
    if math.isnan(half_width):
        return f"The means differ by {as_text(gap)}; there is no interval without two runs of each."
    verdict = "more than chance" if abs(gap) > half_width else "which may be chance"
    return f"The means differ by {as_text(gap, 2)} ± {as_text(half_width, 2)} (95 %, Welch): {verdict}."


def mean_text(group: Group) -> str:
    """The mean of a group with its interval and its number of runs."""
    count = len(group.values)
    interval = "" if math.isnan(group.half_width) else f" ± {as_text(group.half_width, 2)}"
    return f"{as_text(group.mean)}{interval} over {count} run{'s' if count > 1 else ''}"
