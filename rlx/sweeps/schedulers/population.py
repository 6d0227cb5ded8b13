"""Population based training as Ray has it: bad trials continue from the checkpoints of good ones, with other settings.

Left out: when a trial may be judged at all (`schedule`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler
from ray.tune.search.sample import Categorical, Domain, Integer

from rlx.sweeps.schedulers.schedule import TIME, Schedule
from rlx.sweeps.space import Space, last, rounded


class ResumablePopulation(PopulationBasedTraining):
    """It looks at each evaluation once, and leaves finished trials as they are."""

    def __init__(self, schedule: Schedule) -> None:
        mutations = {key: _mutation(domain) for key, domain in schedule.space.items() if isinstance(domain, Domain)}
        super().__init__(
            time_attr=TIME,
            perturbation_interval=schedule.first_rung,
            hyperparam_mutations=mutations,
            custom_explore_fn=_clamp_to(schedule.space),
            log_config=False,
        )
        self.schedule = schedule

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray refuses searches beside this scheduler, as it chooses settings itself; ours only lists the first ones."""
        super().on_trial_add(SimpleNamespace(search_alg=None), trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        step, record = result[TIME], self.schedule.known.get(str(trial))
        if not self.schedule.is_evaluation(result) or step >= self.schedule.steps:
            return TrialScheduler.CONTINUE
        if step == 0 or (record and step == record.step):
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
