"""Trials in groups: means with 95 % intervals, ranks, and the difference of two groups.

A group is one candidate over its seeds, or, to compare the values of one varied setting, all trials of one value.

Intervals are Student's t. They assume that the runs of a group differ by chance alone, so whatever else a sweep varies
within a group counts as chance too. Runs can agree by luck, and all trials answer the same held-out questions: the
interval of an accuracy is at least as wide as the interval of one share of that many questions, because the
questions are a sample. For the difference of two candidates this is cautious, because both answer the same questions.

Left out: a correction for choosing the best of many means, which makes the best look better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from rlx.analysis.loading import SettingValue, Sweep, Trial, check_metric
from rlx.analysis.style import settings_labels
from rlx.config.errors import ConfigError, nearest
from rlx.config.sweep import Mode
from rlx.tracking.base import RunStatus

LEVEL = 0.95
SEED = "seed"


class Estimate(NamedTuple):
    """A number, and half the width of its 95 % interval; NaN where the interval is not known."""

    value: float
    half_width: float


@dataclass(frozen=True, eq=False)
class Group:
    """Trials that are compared as one, and the final values of the metric of those that have ended."""

    label: str
    settings: dict[str, SettingValue]  # which all trials have in common
    trials: tuple[Trial, ...]  # best first
    ended: tuple[Trial, ...]  # the trials that have a final value
    values: tuple[float, ...]  # one per candidate and seed: trials with equal settings count once, with their mean
    mean: float  # NaN without values
    half_width: float  # of the 95 % interval of the mean; NaN for fewer than two values
    num_questions: int | None  # each value is a share of correct answers to this number; None for other metrics
    step: float = 0.0  # what the values are rounded to, as far as the sweep shows it
    diverged: tuple[Trial, ...] = ()  # the trials that have ended with a value that is not finite
    chosen_from: int = 1  # so many candidates, of which it was the best: the reason why it is compared

    @property
    def has_failed(self) -> bool:
        """Whether a trial has failed or diverged. A candidate of which one has is not compared: those of its seeds that
        went well may be the ones that suit it."""
        return bool(self.diverged) or any(trial.status == RunStatus.FAILED for trial in self.trials)

    @property
    def is_compared(self) -> bool:
        """Whether a candidate can be the best: it has a value, and no trial of it has failed."""
        return bool(self.values) and not self.has_failed

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval; NaN if it is not known."""
        return self.mean - self.half_width, self.mean + self.half_width


# ---------------------------------------------------------------------------------------------------------------------
# Means and differences


def mean_interval(values: Sequence[float], num_questions: int | None = None, step: float = 0.0) -> Estimate:
    """The mean with its 95 % interval, half width t * s / sqrt(n) with n - 1 degrees of freedom; NaN for n < 2.

    Args:
        num_questions: if the values are shares of correct answers to the same questions, their number. The half width
            is then at least `wilson_half_width`.
        step: what the values are rounded to, so that their standard deviation is at least step / sqrt(12): those that
            are equal by luck would be known exactly otherwise.
    """
    count = len(values)
    if count < 2:
        return Estimate(float(np.mean(values)) if count else math.nan, math.nan)
    mean, spread = float(np.mean(values)), _spread(values, step)
    half_width = _t_quantile(count - 1) * spread / math.sqrt(count)
    return Estimate(mean, max(half_width, wilson_half_width(mean, num_questions)))


def _spread(values: Sequence[float], step: float) -> float:
    """The standard deviation of values that are rounded to a step: at least that of the rounding."""
    return max(float(np.std(values, ddof=1)), step / math.sqrt(12))


def share_of_look(looks: int) -> float:
    """The share of a chance that an interval has when candidates have been compared so often, until one is shown to be
    behind: nearly the constant of Pocock (1977, Biometrika 64). It is about twice Bonferroni's share, for looks repeat
    much of each other."""
    return 2 / (looks + 1)


def wilson_half_width(share: float, num_questions: int | None) -> float:
    """Half the width of the 95 % interval of a share of `num_questions` (Wilson, 1927); 0 for None.

    Unlike 1.96 * sqrt(p (1 - p) / n) it is not 0 for a share of 0 or 1.
    """
    if num_questions is None:
        return 0.0
    z = _t_quantile(math.inf)
    variance = share * (1 - share) / num_questions + (z / num_questions / 2) ** 2
    return z * math.sqrt(variance) / (1 + z * z / num_questions)


def difference(first: Group, second: Group) -> Estimate:
    """The mean of the first group minus that of the second, with its 95 % interval for unequal variances (Welch, 1947).

    The half width is NaN if a group has fewer than two values. For accuracies it is at least `wilson_half_width`, and
    the deviation of each group is at least that of rounding, as in `mean_interval`.
    """
    gap, pair = first.mean - second.mean, (first, second)
    if min(len(group.values) for group in pair) < 2:
        return Estimate(gap, math.nan)
    variances = [_spread(group.values, group.step) ** 2 / len(group.values) for group in pair]
    least = math.hypot(*(wilson_half_width(group.mean, group.num_questions) for group in pair))
    if not sum(variances):
        return Estimate(gap, least)
    degrees = [len(group.values) - 1 for group in pair]
    shares = [variance**2 / degree for variance, degree in zip(variances, degrees, strict=True)]
    quantile = _t_quantile(sum(variances) ** 2 / sum(shares))
    return Estimate(gap, max(quantile * math.sqrt(sum(variances)), least))


def _t_quantile(degrees_of_freedom: float) -> float:
    """The t within which 95 % of Student's distribution lie."""
    return float(stdtrit(degrees_of_freedom, (1 + LEVEL) / 2))


# ---------------------------------------------------------------------------------------------------------------------
# Trials


def final_value(trial: Trial, metric: str) -> float:
    """The last value of a metric, which belongs to the model that the trial left; NaN if it has none, or no finite
    one."""
    curve = trial.curve(metric)
    return float(curve.iloc[-1]) if len(curve) and not has_diverged(trial, metric) else math.nan


def has_diverged(trial: Trial, metric: str) -> bool:
    """Whether the last value of a metric that a trial has logged is not finite."""
    logged = trial.logged(metric)
    return len(logged) > 0 and math.isinf(logged.iloc[-1])


def has_ended(trial: Trial, metric: str) -> bool:
    """Whether a trial has ended with a finite value of the metric: one that failed, was interrupted or waits has not,
    whatever it logged before."""
    return _is_over(trial) and not math.isnan(final_value(trial, metric))


def _is_over(trial: Trial) -> bool:
    return trial.status not in (RunStatus.RUNNING, RunStatus.FAILED) and not trial.was_cut


def best_value(trial: Trial, metric: str, mode: Mode) -> float:
    """The best value of a metric after any step of training; NaN if the trial has none."""
    curve = trial.curve(metric)
    curve = curve[curve.index > 0]
    return float(curve.max() if mode == "max" else curve.min())


def rank_trials(sweep: Sweep, metric: str, mode: Mode) -> list[Trial]:
    """The trials by their final value, best first, then by their best value; then trials without the metric, those that
    were cut, and last those that failed."""
    sign = -1.0 if mode == "max" else 1.0

    def sort_key(trial: Trial) -> tuple[bool, bool, bool, float, float]:
        final, has_failed = final_value(trial, metric), trial.status == RunStatus.FAILED
        return has_failed, trial.was_cut, math.isnan(final), sign * final, sign * best_value(trial, metric, mode)

    return sorted(sweep.trials, key=sort_key)


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def group_trials(sweep: Sweep, metric: str, mode: Mode, by: str | None = None) -> list[Group]:
    """The candidates of a sweep as groups, best mean first; then those of which a trial failed, and last those without
    a value.

    Args:
        by: group by the values of this varied setting instead, whose trials that failed are left out.

    Raises:
        ConfigError: the metric was not loaded, or `by` was not varied.
    """
    check_metric(metric, sweep.metrics)
    if by is not None and by not in sweep.varied:
        raise ConfigError(f"--by {by}: sweep {sweep.name} varies {', '.join(sweep.varied)}{nearest(by, sweep.varied)}")
    keys = [key for key in sweep.varied if key != SEED] if by is None else [by]
    trials_by_settings: dict[tuple[SettingValue, ...], list[Trial]] = {}
    for trial in rank_trials(sweep, metric, mode):
        trials_by_settings.setdefault(tuple(trial.settings[key] for key in keys), []).append(trial)
    num_questions = sweep.num_questions_of(metric)
    finals = [final_value(trial, metric) for trial in sweep.trials if has_ended(trial, metric)]
    step = resolution(np.array(finals))
    settings = [dict(zip(keys, values, strict=True)) for values in trials_by_settings]
    groups = [
        _group(*each, metric, num_questions, step)
        for each in zip(settings_labels(settings), settings, trials_by_settings.values(), strict=True)
    ]
    ranked = best_first(groups, mode)
    return ranked if by else sorted(ranked, key=lambda group: (not group.values, group.has_failed))


def best_first(groups: Iterable[Group], mode: Mode) -> list[Group]:
    """Groups by their means, groups without a mean last; equal ones keep their order."""
    sign = -1 if mode == "max" else 1
    return sorted(groups, key=lambda group: (math.isnan(group.mean), sign * group.mean))


def mean_curve(group: Group, metric: str) -> pd.DataFrame:
    """Mean and 95 % interval by step over the trials that have ended: columns mean, low, high.

    A trial that ended before the others keeps its last value, as in the table: otherwise the mean would jump where
    the trial ends.
    """
    curves = [trial.curve(metric) for trial in group.ended]
    values = pd.concat(curves, axis=1).sort_index().ffill().dropna() if curves else pd.DataFrame()
    estimates = [mean_interval(list(row), group.num_questions) for row in values.to_numpy()]
    bounds = [(mean, mean - half_width, mean + half_width) for mean, half_width in estimates]
    return pd.DataFrame(bounds, values.index, ["mean", "low", "high"], dtype=float)


def _group(
    label: str,
    settings: dict[str, SettingValue],
    trials: Sequence[Trial],
    metric: str,
    num_questions: int | None,
    step: float,
) -> Group:
    ended = tuple(trial for trial in trials if has_ended(trial, metric))
    values_by_settings: dict[tuple[SettingValue, ...], list[float]] = {}
    for trial in ended:
        values_by_settings.setdefault(tuple(trial.settings.values()), []).append(final_value(trial, metric))
    values = tuple(float(np.mean(repeated)) for repeated in values_by_settings.values())
    estimate = mean_interval(values, num_questions, step)
    return Group(
        label=label,
        settings=settings,
        trials=tuple(trials),
        ended=ended,
        diverged=tuple(trial for trial in trials if _is_over(trial) and has_diverged(trial, metric)),
        values=values,
        mean=estimate.value,
        half_width=estimate.half_width,
        num_questions=num_questions,
        step=step,
    )


def resolution(values: NDArray[np.float64]) -> float:
    """The smallest difference between two values that are not equal, up to errors of floating point; 0 if all are."""
    steps = np.diff(np.unique(np.round(values, 12)))
    return float(steps.min()) if len(steps) else 0.0
