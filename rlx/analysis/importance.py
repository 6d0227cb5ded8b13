"""How much of what settings reach each of them explains, by functional ANOVA.

Optuna's fANOVA (Hutter et al., ICML 2014) fits a random forest to the settings' means and gives each setting the
share of the forest's variance that it explains by itself. Tried on 60 made-up sweeps of 12 settings, four things varied
and the effect of the first twice that of the second and three times the noise: fANOVA puts that one first in 41,
PED-ANOVA, Optuna's default, which looks at the few best alone, in 25. Shares always add up to 1, also if all
differences are chance: then the largest of four is 0.5 on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.analysis.loading import Setting
from rlx.analysis.statistics import Group, Mode, as_text
from rlx.config.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


FEWEST = 12
"""settings with a value, below which there is no saying"""


def importance(found: Sequence[Group], mode: Mode = "max") -> dict[str, float]:
    """The share of each varied setting by its dotted key, largest first, the same at each call; they add up to 1.

    ConfigError says why there is none: too few settings, or such as changed within a trial.
    """
    known = [group for group in found if group.values]
    varied = [key for key in known[0].settings if len({group.settings[key] for group in known}) > 1] if known else []
    if len(known) < FEWEST or not varied:
        raise ConfigError(f"{len(known)} settings with a result are too few to tell: at least {FEWEST} are needed")
    if any(trial.origins for group in known for trial in group.trials):
        raise ConfigError("settings changed within trials: no result belongs to one setting")
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    domains = {key: _domain([group.settings[key] for group in known]) for key in varied}
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
    for group in known:
        values = {key: _value(group.settings[key], domains[key]) for key in varied}
        study.add_trial(optuna.trial.create_trial(params=values, distributions=domains, value=group.mean))
    return dict(get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0)))


def on_log_scale(values: Sequence[float]) -> bool:
    """Whether numbers are better told apart by their logarithm: positive, over more than a decade."""
    return min(values) > 0 and max(values) > 10 * min(values)


def numbers(values: Sequence[Setting]) -> list[float] | None:
    """The values as numbers; None if one of them is a text or unset."""
    found = [float(value) for value in values if isinstance(value, int | float)]
    return found if len(found) == len(values) else None


def _domain(values: Sequence[Setting]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    known = numbers(values)
    if known is None:
        return CategoricalDistribution(sorted({as_text(value) for value in values}))
    return FloatDistribution(min(known), max(known), log=on_log_scale(known))


def _value(value: Setting, domain: BaseDistribution) -> float | str:
    from optuna.distributions import FloatDistribution

    return float(value) if isinstance(domain, FloatDistribution) and isinstance(value, int | float) else as_text(value)
