"""Schedulers by name. Left out: what they know of a sweep (`schedule`), how they see candidates (`seeds_as_one`)."""

from __future__ import annotations

import math
from collections.abc import Callable

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, MedianStoppingRule, TrialScheduler

from rlx.config.sweep import SchedulerName
from rlx.sweeps.schedulers.doubling import DoublingRungs
from rlx.sweeps.schedulers.population import ResumablePopulation
from rlx.sweeps.schedulers.racing import RaceScheduler
from rlx.sweeps.schedulers.remembering import Remembering
from rlx.sweeps.schedulers.schedule import Schedule
from rlx.sweeps.schedulers.seeds_as_one import AsOne


def _of_candidates(inner: TrialScheduler, schedule: Schedule) -> TrialScheduler:
    """One of Ray's schedulers as rlx uses it: it judges candidates, and knows on a resume what it knew before."""
    return Remembering(AsOne(inner, schedule), schedule)


def _asha(schedule: Schedule) -> TrialScheduler:
    """Stops the worse half at each rung (Li et al. 2020); the first rung comes after the first evaluation."""
    unit = schedule.rung_by
    if unit != "steps":
        return _of_candidates(DoublingRungs(unit), schedule)
    asha = ASHAScheduler(time_attr=unit, max_t=schedule.steps + 1, grace_period=schedule.first_rung, reduction_factor=2)
    return _of_candidates(asha, schedule)


def _hyperband(schedule: Schedule) -> TrialScheduler:
    """Successive halving in brackets; each rung waits for all of its candidates (Li et al. 2018)."""
    hyperband = HyperBandScheduler(time_attr=schedule.rung_by, max_t=schedule.steps + 1, reduction_factor=2)
    return _of_candidates(hyperband, schedule)


def _median(schedule: Schedule) -> TrialScheduler:
    """Stops a candidate whose best is below the median of the others' means so far (Golovin et al. 2017)."""
    median = MedianStoppingRule(
        time_attr=schedule.rung_by,
        grace_period=schedule.first_rung if schedule.rung_by == "steps" else 1.0,  # not before training
        min_samples_required=3,
        min_time_slice=math.inf,  # otherwise it pauses a trial at each step until there are three others
    )
    return _of_candidates(median, schedule)


SCHEDULERS: dict[SchedulerName, Callable[[Schedule], TrialScheduler]] = {
    "none": lambda schedule: FIFOScheduler(),
    "asha": _asha,
    "hyperband": _hyperband,
    "median": _median,
    "pbt": ResumablePopulation,
    "race": RaceScheduler,
}
