"""When a trial of a sweep is stopped early, or goes on from a better one: Ray Tune's schedulers, by name.

All judge a trial by its newest held-out accuracy at each step that it reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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

from rlx.config.run import RunConfig
from rlx.config.sections import SchedulerName
from rlx.sweeps.space import Space, last, rounded

_TIME = "step"


def _fifo(config: RunConfig, space: Space, begun: Mapping[str, int]) -> TrialScheduler:
    return FIFOScheduler()


def _asha(config: RunConfig, space: Space, begun: Mapping[str, int]) -> TrialScheduler:
    """Stops the worse half at each rung (Li et al. 2020); the first rung comes after the first evaluation."""
    return ASHAScheduler(
        time_attr=_TIME, max_t=config.train.steps + 1, grace_period=first_rung(config), reduction_factor=2
    )


def _hyperband(config: RunConfig, space: Space, begun: Mapping[str, int]) -> TrialScheduler:
    """Successive halving in brackets, each rung waiting for all of its trials (Li et al. 2018)."""
    return HyperBandScheduler(time_attr=_TIME, max_t=config.train.steps + 1, reduction_factor=2)


def _median(config: RunConfig, space: Space, begun: Mapping[str, int]) -> TrialScheduler:
    """Stops a trial whose best is below the median of the others' means so far (Golovin et al. 2017)."""
    return MedianStoppingRule(
        time_attr=_TIME,
        grace_period=first_rung(config),
        min_samples_required=3,
        min_time_slice=math.inf,  # or it pauses a trial at each step until there are three others
    )


def _pbt(config: RunConfig, space: Space, begun: Mapping[str, int]) -> TrialScheduler:
    """After each evaluation the worst quarter goes on from the checkpoints of the best quarter, with settings changed
    at random (Jaderberg et al. 2017)."""
    mutations = {key: _mutation(domain) for key, domain in space.items() if isinstance(domain, Domain)}
    return _Population(
        config.train.steps,
        begun,
        time_attr=_TIME,
        perturbation_interval=first_rung(config),
        hyperparam_mutations=mutations,
        custom_explore_fn=_within(space),
        log_config=False,
    )


SCHEDULERS: dict[SchedulerName, Callable[[RunConfig, Space, Mapping[str, int]], TrialScheduler]] = {
    "none": _fifo,
    "asha": _asha,
    "hyperband": _hyperband,
    "median": _median,
    "pbt": _pbt,
}
PAUSING = ("hyperband", "pbt")
"""schedulers under which trials take turns, so that all must be there: each is handed its newest checkpoint"""
REPLAYING = ("asha", "hyperband", "median")
"""schedulers that are told of a sweep's past again when it goes on"""


def first_rung(config: RunConfig) -> int:
    """The step of the first evaluation that training can have changed."""
    return min(config.train.steps, config.eval.every or config.train.steps)


class _Population(PopulationBasedTraining):
    """Ray's, but a trial that goes on after a resume of the sweep is next due when it would have been, and one that has
    done all its steps stays as it is."""

    def __init__(self, steps: int, begun: Mapping[str, int], **options: Any) -> None:
        super().__init__(**options)
        self.steps, self.begun = steps, begun

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        super().on_trial_add(tune_controller, trial)
        done = self.begun.get(trial.trial_id, 0)
        self._trial_state[trial].last_perturbation_time = done - done % self._perturbation_interval

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if result[_TIME] >= self.steps:
            return TrialScheduler.CONTINUE
        return str(super().on_trial_result(tune_controller, trial, result))


def _mutation(domain: Domain) -> Any:
    return list(domain.categories) if isinstance(domain, Categorical) else domain


def _within(space: Space) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keeps changed settings inside their domains: Ray multiplies by 0.8 or 1.2 whatever comes of it."""

    def bounded(settings: dict[str, Any]) -> dict[str, Any]:
        for key, domain in space.items():
            if isinstance(domain, Domain) and hasattr(domain, "lower"):
                upper = last(domain) if isinstance(domain, Integer) else domain.upper
                value = settings[key] if isinstance(domain, Integer) else rounded(settings[key])
                settings[key] = min(max(value, domain.lower), upper)
        return settings

    return bounded
