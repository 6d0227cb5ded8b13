"""Trials of a sweep in groups: means with 95 % intervals, ranks, what two groups differ by, and a picture of it.

A group is one setting over its seeds, or, to compare the values of one varied setting, all trials of one value.
Intervals are Student's t: they suppose runs that differ by chance alone, so whatever else a sweep varies within a group
counts as chance too. Runs can agree by luck, and all answer the same held-out questions: an accuracy's interval is at
least as wide as that of one share of so many questions, since others might have been drawn. Two settings answer the
same ones, so their difference is better known than that says. The best of many means is flattered by having been
picked; no interval here corrects for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from rlx.analysis.loading import Setting, Sweep, Trial, check_metric
from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import DEFAULT_METRIC

Mode = Literal["max", "min"]

LEVEL = 0.95
SEED = "seed"
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
NAMED = len(_COLOURS)
"""groups whose curves a figure names: the best ones"""
BANDS = 3
"""groups whose curves a figure draws with their intervals: more would hide each other"""


@dataclass(frozen=True, eq=False)
class Group:
    """Trials that are taken together, and the last values of the metric of those that have ended."""

    label: str
    settings: dict[str, Setting]  # what they have in common
    trials: tuple[Trial, ...]  # best first
    ended: tuple[Trial, ...]  # those that have values
    values: tuple[float, ...]  # one per setting and seed: trials that differ in nothing count once, with their mean
    mean: float  # NaN without values
    half: float  # half the width of its 95 % interval; NaN for fewer than two values
    questions: int | None  # how many of them each value is the share of right answers to; None for other metrics


# ---------------------------------------------------------------------------------------------------------------------
# Means and differences


def mean_interval(values: Sequence[float], questions: int | None = None) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval: t * s / sqrt(n) with n - 1 degrees of freedom; NaN for n = 1.

    Of shares of right answers to the same questions, no less than `of_questions`.
    """
    count = len(values)
    if count < 2:
        return float(np.mean(values)) if count else math.nan, math.nan
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    return mean, max(_quantile(count - 1) * spread / math.sqrt(count), of_questions(mean, questions))


def of_questions(share: float, questions: int | None) -> float:
    """Half the width of Wilson's 95 % interval of a share of so many questions; unlike the plain 1.96 * sqrt(p (1 - p)
    / n) it is not 0 if all are right. 0 for what is no such share."""
    if questions is None:
        return 0.0
    z = _quantile(math.inf)
    return z * math.sqrt(share * (1 - share) / questions + (z / questions / 2) ** 2) / (1 + z * z / questions)


def difference(one: Group, other: Group) -> tuple[float, float]:
    """How much higher one group's mean is, and half the width of the 95 % interval of that, after Welch: the groups may
    spread unequally. NaN if one of them has fewer than two values; of accuracies, no less than the questions allow."""
    parts = [float(np.var(group.values, ddof=1)) / len(group.values) for group in (one, other) if len(group.values) > 1]
    if len(parts) < 2:
        return one.mean - other.mean, math.nan
    least = math.hypot(*(of_questions(group.mean, group.questions) for group in (one, other)))
    counts = (len(one.values) - 1, len(other.values) - 1)
    if not sum(parts):
        return one.mean - other.mean, least
    freedom = sum(parts) ** 2 / sum(part**2 / count for part, count in zip(parts, counts, strict=True))
    return one.mean - other.mean, max(_quantile(freedom) * math.sqrt(sum(parts)), least)


def _quantile(freedom: float) -> float:
    """Student's t within which 95 % lie."""
    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def difference_sentence(one: Group, other: Group) -> str:
    """By how much two groups differ, in a sentence."""
    gap, half = difference(one, other)
    if math.isnan(half):
        return f"The means differ by {as_text(gap)}; there is no interval without two runs of each."
    verdict = "more than chance" if abs(gap) > half else "which may be chance"
    return f"The means differ by {as_text(gap, 2)} ± {as_text(half, 2)} (95 %, Welch): {verdict}."


def final(trial: Trial, metric: str) -> float:
    """A trial's last value of a metric, that of the model which it left behind; NaN if it has none."""
    curve = trial.curve(metric)
    return float(curve.iloc[-1]) if len(curve) else math.nan


def mean_curve(group: Group, metric: str) -> pd.DataFrame:
    """Mean and 95 % interval by step of the trials that have ended: columns mean, low, high.

    One that ended before the others keeps its last value, as in the table: the mean of fewer would jump.
    """
    curves = [trial.curve(metric) for trial in group.ended]
    values = pd.concat(curves, axis=1).sort_index().ffill().dropna() if curves else pd.DataFrame()
    rows = [mean_interval(list(row), group.questions) for row in values.to_numpy()]
    bounds = [(mean, mean - half, mean + half) for mean, half in rows]
    return pd.DataFrame(bounds, values.index, ["mean", "low", "high"], dtype=float)


# ---------------------------------------------------------------------------------------------------------------------
# Groups and their order


def groups(sweep: Sweep, metric: str = DEFAULT_METRIC, mode: Mode = "max", by: str | None = None) -> list[Group]:
    """A sweep's settings, or the values of the varied setting `by`, best mean first; those without a value come last.

    ConfigError if the metric was not loaded, or `by` was not varied.
    """
    check_metric(metric, sweep.metrics)
    if by is not None and by not in sweep.varied:
        raise ConfigError(f"--by {by}: sweep {sweep.name} varies {', '.join(sweep.varied)}{nearest(by, sweep.varied)}")
    keys = [key for key in sweep.varied if key != SEED] if by is None else [by]
    names = dict(zip(keys, short_names(keys), strict=True))
    found: dict[tuple[Setting, ...], list[Trial]] = {}
    for trial in ranked(sweep, metric, mode):
        found.setdefault(tuple(trial.settings[key] for key in keys), []).append(trial)
    count = sweep.questions_of(metric)
    made = [_group(dict(zip(keys, each, strict=True)), names, trials, metric, count) for each, trials in found.items()]
    return best_first(made, mode)


def best_first(found: Iterable[Group], mode: Mode = "max") -> list[Group]:
    """Groups by their means, those without one last; equal ones stay in order."""
    sign = -1 if mode == "max" else 1
    return sorted(found, key=lambda group: (math.isnan(group.mean), sign * group.mean))


def _group(
    settings: dict[str, Setting], names: dict[str, str], trials: list[Trial], metric: str, questions: int | None
) -> Group:
    ended = tuple(trial for trial in trials if trial.status != "RUNNING" and len(trial.curve(metric)))
    same: dict[tuple[Setting, ...], list[float]] = {}
    for trial in ended:
        same.setdefault(tuple(trial.settings.values()), []).append(final(trial, metric))
    values = tuple(float(np.mean(each)) for each in same.values())
    label = ", ".join(f"{names[key]} {as_text(value)}" for key, value in settings.items()) or "the one setting"
    return Group(label, settings, tuple(trials), ended, values, *mean_interval(values, questions), questions)


def short_names(keys: Iterable[str]) -> list[str]:
    """Dotted keys without their sections, where that does not make two alike."""
    keys = list(keys)
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def ranked(sweep: Sweep, metric: str = DEFAULT_METRIC, mode: Mode = "max") -> list[Trial]:
    """The trials, best last value first, then by best value; those without the metric come last."""
    sign = -1.0 if mode == "max" else 1.0

    def place(trial: Trial) -> tuple[bool, float, float]:
        last = final(trial, metric)
        return math.isnan(last), sign * last, sign * _best(trial, metric, mode)

    return sorted(sweep.trials, key=place)


def summary_sentence(found: Sequence[Group], metric: str = DEFAULT_METRIC) -> str:
    """Which setting wins, by how much, and whether that may be chance: one sentence of the groups, best first."""
    known = [group for group in found if group.values]
    if not known:
        return f"No trial has ended with {metric} yet."
    best, *others = known
    wins = f"{best.label} {'wins' if others else 'comes'} with {metric} {_value(best)}"
    if not others:
        return f"{wins}; there is no other setting to compare it with."
    after = f"{wins}; the next is {_value(others[0])} ({others[0].label})"
    if math.isnan(best.half + others[0].half):
        return f"{after}: a single run of a setting cannot tell its effect from chance, --seeds 3 would."
    apart = abs(best.mean - others[0].mean) > best.half + others[0].half
    return f"{after}: the intervals {'do not overlap' if apart else 'overlap'}."


def _value(group: Group) -> str:
    count = len(group.values)
    interval = "" if math.isnan(group.half) else f" ± {as_text(group.half, 2)}"
    return f"{as_text(group.mean)}{interval} over {count} run{'s' if count > 1 else ''}"


def as_text(value: Any, digits: int = 3) -> str:
    """A cell or an axis label: so many digits of a number, but whole numbers and thousands whole; - for none."""
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 1000:  # .3g would make 1.23e+04 of 12345.67
        return f"{value:,.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-")


def _best(trial: Trial, metric: str, mode: Mode) -> float:
    curve = trial.curve(metric)
    return float(curve.max() if mode == "max" else curve.min())


# ---------------------------------------------------------------------------------------------------------------------
# One static picture


def shades(count: int) -> list[str]:
    """A colour for each of so many groups, best first: distinct ones for those that are named, grey for the others."""
    return [*_COLOURS, *["#b8b8b8"] * count][:count]
