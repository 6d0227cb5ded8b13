"""Ray Tune's schedulers by name: they stop bad trials early, or make a trial continue from a better one.

All of them judge a trial at its evaluations alone. It waits there, so it ends at the step where it is stopped.
Left out: which settings are tried (`searchers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search.sample import Categorical, Domain, Integer

from rlx.config.sections import SchedulerName
from rlx.sweeps.space import Space, last, rounded

_TIME = "step"


@dataclass(frozen=True)
class Schedule:
    """What a scheduler needs to know of a sweep."""

    steps: int  # of each trial
    eval_every: int  # steps between evaluations; 0: only after the last step
    space: Space
    steps_done: Mapping[str, int] = field(default_factory=dict)  # by trial name, before a resume

    @property
    def first_rung(self) -> int:
        """The step of the first evaluation that training can have changed."""
        return min(self.steps, self.eval_every or self.steps)

    def is_evaluation(self, result: Mapping[str, Any]) -> bool:
        """Whether a trial has evaluated at a step that it reports."""
        return result[_TIME] % self.first_rung == 0 or result[_TIME] >= self.steps


def _fifo(schedule: Schedule) -> TrialScheduler:
    return FIFOScheduler()


def _asha(schedule: Schedule) -> TrialScheduler:
    """Stops the worse half at each rung (Li et al. 2020); the first rung comes after the first evaluation."""
    return _ASHA(
        schedule, time_attr=_TIME, max_t=schedule.steps + 1, grace_period=schedule.first_rung, reduction_factor=2
    )


def _hyperband(schedule: Schedule) -> TrialScheduler:
    """Successive halving in brackets; each rung waits for all of its trials (Li et al. 2018)."""
    return _HyperBand(schedule, time_attr=_TIME, max_t=schedule.steps + 1, reduction_factor=2)


def _median(schedule: Schedule) -> TrialScheduler:
    """Stops a trial whose best is below the median of the others' means so far (Golovin et al. 2017)."""
    return _Median(
        schedule,
        time_attr=_TIME,
        grace_period=schedule.first_rung,
        min_samples_required=3,
        min_time_slice=math.inf,  # otherwise it pauses a trial at each step until there are three others
    )


def _pbt(schedule: Schedule) -> TrialScheduler:
    """After each evaluation the worst quarter continues from the checkpoints of the best quarter, with randomly changed
    settings (Jaderberg et al. 2017)."""
    mutations = {key: _mutation(domain) for key, domain in schedule.space.items() if isinstance(domain, Domain)}
    return _ResumablePopulation(
        schedule,
        time_attr=_TIME,
        perturbation_interval=schedule.first_rung,
        hyperparam_mutations=mutations,
        custom_explore_fn=_clamp_to(schedule.space),
        log_config=False,
    )


SCHEDULERS: dict[SchedulerName, Callable[[Schedule], TrialScheduler]] = {
    "none": _fifo,
    "asha": _asha,
    "hyperband": _hyperband,
    "median": _median,
    "pbt": _pbt,
}
REPLAYING = ("asha", "hyperband", "median")
"""schedulers that get the earlier reports of the trials again when a sweep is resumed"""


class _AtEvaluations(TrialScheduler):
    """Keeps from one of Ray's schedulers the steps without an evaluation."""

    def __init__(self, schedule: Schedule, **options: Any) -> None:
        super().__init__(**options)
        self.schedule = schedule

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if not self.schedule.is_evaluation(result):
            return TrialScheduler.CONTINUE
        return str(super().on_trial_result(tune_controller, trial, result))


class _ASHA(_AtEvaluations, ASHAScheduler):
    pass


class _HyperBand(_AtEvaluations, HyperBandScheduler):
    pass


class _Median(_AtEvaluations, MedianStoppingRule):
    pass


class _ResumablePopulation(_AtEvaluations, PopulationBasedTraining):
    """It looks at each evaluation once, and leaves finished trials as they are."""

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray refuses searches beside this scheduler, as it chooses settings itself; ours only lists the first ones."""
        super().on_trial_add(SimpleNamespace(search_alg=None), trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        step, seen = result[_TIME], (0, self.schedule.steps_done.get(str(trial)))
        if step in seen or step >= self.schedule.steps:
            return TrialScheduler.CONTINUE
        return str(super().on_trial_result(tune_controller, trial, result))


def _mutation(domain: Domain) -> Any:
    return list(domain.categories) if isinstance(domain, Categorical) else domain


def _clamp_to(space: Space) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a function that keeps changed settings inside their domains: Ray multiplies them by 0.8 or 1.2."""

    def clamp(settings: dict[str, Any]) -> dict[str, Any]:
        for key, domain in space.items():
            if isinstance(domain, Domain) and hasattr(domain, "lower"):
                upper = last(domain) if isinstance(domain, Integer) else domain.upper
                value = settings[key] if isinstance(domain, Integer) else rounded(settings[key])
                settings[key] = min(max(value, domain.lower), upper)
        return settings

    return clamp
