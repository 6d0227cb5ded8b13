"""Population based training as Ray has it: bad trials continue from the checkpoints of good ones, with other settings.

What Ray draws follows from the sweep's seed, the trial and the step.
Left out: when a trial may be judged at all (`schedule`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler
from ray.tune.search.sample import Categorical, Domain, Float, Integer

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.sweeps.records import trial_number
from rlx.sweeps.schedulers.schedule import TIME, Schedule
from rlx.sweeps.space import nearest_in


class ResumablePopulation(PopulationBasedTraining):
    """At an evaluation, a trial of the worst quarter continues from the checkpoint of one of the best quarter if that
    one was there at its own, with randomly changed settings (Jaderberg et al. 2017).

    It looks at each evaluation once, and leaves finished trials as they are.
    """

    def __init__(self, schedule: Schedule) -> None:
        mutations = {key: _mutation(domain) for key, domain in schedule.space.items() if isinstance(domain, Domain)}
        super().__init__(
            time_attr=TIME,
            perturbation_interval=schedule.first_rung,
            hyperparam_mutations=mutations,
            custom_explore_fn=self._allowed,
            log_config=False,
        )
        self.schedule = schedule
        self._before: dict[str, Any] = {}  # settings of the trial that is looked at

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray refuses searches beside this scheduler, as it chooses settings itself; ours only lists the first ones."""
        super().on_trial_add(SimpleNamespace(search_alg=None), trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        step, record = result[TIME], self.schedule.known.get(str(trial))
        if not self.schedule.is_evaluation(result) or step >= self.schedule.steps:
            return TrialScheduler.CONTINUE
        if step == 0 or (record and step == record.step):
            return TrialScheduler.CONTINUE
        self._before = dict(trial.config)
        with _drawing_by(self.schedule.seed, trial_number(str(trial)), step):
            return str(super().on_trial_result(tune_controller, trial, result))

    def _allowed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Changed settings inside their domains: Ray multiplies numbers by 0.8 or 1.2, also those of quantized ranges.

        Those that do not go together, with which a run could not start, are replaced by the ones that the trial had.
        """
        for key, domain in self.schedule.space.items():
            if isinstance(domain, Integer | Float):
                settings[key] = nearest_in(domain, settings[key])
        try:
            if self.schedule.tree is not None:
                from_tree(with_overrides(self.schedule.tree, settings))
        except ConfigError:
            return self._before
        return settings


def _mutation(domain: Domain) -> Any:
    return list(domain.categories) if isinstance(domain, Categorical) else domain


@contextmanager
def _drawing_by(*seed: int) -> Iterator[None]:
    """Makes what is drawn from the generators of Python and NumPy follow from a seed; leaves them as they were."""
    before, before_numpy = random.getstate(), np.random.get_state()
    first, second = np.random.SeedSequence(seed).generate_state(2).tolist()
    random.seed(first)
    np.random.seed(second)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
