"""The lineage of a trial of population based training, as settings that a run from the start can have.

A trial that was behind went on from a checkpoint of a better one with other settings. Its lineage are the stretches of
runs that lead to its last weights; with the settings of each stretch from its first step on, one run does them all.
Left out: running it (rlx.sweeps.tuner), and whether it is better than one candidate from start to end (rlx.analysis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, setting_at, with_overrides
from rlx.config.run import may_change
from rlx.config.sections.base import flatten
from rlx.runs.run_folder import saved_config
from rlx.storage.addresses import without_options
from rlx.storage.filesystem import Storage
from rlx.sweeps.records import SweepPlan, TrialRecord, TrialState
from rlx.sweeps.trainable import newest_attempt


@dataclass(frozen=True)
class Stretch:
    """Steps that one run did with the same settings."""

    run: str
    start: int  # steps done before
    end: int
    settings: Mapping[str, Any]  # the varied ones


def lineage_of(sweep: Storage, trial: str, steps: int, varied: Sequence[str]) -> list[Stretch]:
    """Returns the stretches that lead to the last weights of a trial, the first one first.

    Args:
        sweep: its folder.
        steps: that the trial has done.
        varied: the settings that the sweep varies.

    Raises:
        ConfigError: the settings of a run cannot be read, or the runs lead in a circle.
    """
    run, end, stretches = newest_attempt(sweep, trial), steps, list[Stretch]()
    while True:
        config = from_tree(saved_config(sweep / "runs" / run))
        origin, values = config.checkpoint.init_from, flatten(config)
        is_branch = bool(origin) and config.checkpoint.init_state == "all"
        *_, donor, checkpoint = ["", "", *without_options(str(origin)).split("/")]
        start = int(checkpoint.rpartition("_")[2]) if is_branch else 0
        stretches.insert(0, Stretch(run, start, end, {key: setting_at(values, key) for key in varied}))
        if not is_branch:
            return stretches
        if start >= end or len(stretches) > steps:
            raise ConfigError(
                f"{sweep.path}/runs/{run} went on from step {start}, and was not evaluated since (last at {end})"
            )
        run, end = donor, start


def scheduled_settings(lineage: Sequence[Stretch]) -> dict[str, Any]:
    """Returns the settings of a lineage: a schedule by steps for each that changed, the value for each that did not.

    Raises:
        ConfigError: a setting changed that can have no schedule.
    """
    settings: dict[str, Any] = {}
    for key in lineage[0].settings:
        points: dict[str, Any] = {}
        for stretch in lineage:
            if not points or stretch.settings[key] != list(points.values())[-1]:
                points[str(stretch.start)] = stretch.settings[key]
        if len(points) > 1 and not may_change(key):
            raise ConfigError(f"{key} changed in the lineage, and can have no schedule: leave it out of the space")
        settings[key] = points if len(points) > 1 else points["0"]
    return settings


def never_changed(lineage: Sequence[Stretch]) -> bool:
    """Whether all stretches have the same settings, so that they are no schedule."""
    return all(each.settings == lineage[0].settings for each in lineage)


def best_trial(plan: SweepPlan, records: Mapping[str, TrialRecord]) -> str:
    """Returns the trial with the best last value of the sweep's metric, of those that have not failed.

    Raises:
        ConfigError: none has been evaluated.
    """
    sign = 1.0 if plan.mode == "max" else -1.0
    values = {name: sign * record.reports[-1][1] for name, record in records.items() if _is_compared(record)}
    if not values:
        raise ConfigError(f"no trial of sweep {plan.name} has been evaluated yet, or those that were have failed")
    return max(values, key=lambda name: values[name])


def _is_compared(record: TrialRecord) -> bool:
    return bool(record.reports) and record.state is not TrialState.FAILED


def constant_settings(
    plan: SweepPlan, records: Mapping[str, TrialRecord], lineages: Mapping[str, Sequence[Stretch]], winner: str
) -> tuple[dict[str, Any], str]:
    """Returns the settings to compare a schedule with, and which they are, in words.

    They are those of the best trial that never changed, or those that the winner had for most of its steps.

    Args:
        lineages: of all trials, by name.
    """
    never = {name: records[name] for name, each in lineages.items() if len(each) == 1 and _is_compared(records[name])}
    if never:
        best = best_trial(plan, never)
        return dict(lineages[best][0].settings), f"those of {best}, the best trial that never changed"
    longest = max(lineages[winner], key=lambda stretch: stretch.end - stretch.start)
    return dict(longest.settings), f"those that {winner} had from step {longest.start} to {longest.end}, its longest"


def rerun_tree(plan: SweepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a sweep's trials with those of a lineage, as a config that is complete.

    Raises:
        ConfigError: they do not work together.
    """
    shared = {key: value for key, value in plan.tree.items() if key not in ("name", "storage")}
    tree = with_overrides(shared, settings)
    from_tree(dict(tree), f"the lineage of sweep {plan.name}")
    return tree
