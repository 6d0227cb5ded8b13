"""The importance of each setting: the share of the differences between results that it explains, by functional ANOVA.

The fANOVA of Optuna (Hutter et al., ICML 2014) fits a random forest to the means of the candidates, and gives each
setting the share of the variance of the forest that it explains by itself. In 60 simulated sweeps of 12 candidates,
with four settings varied and the effect of the first twice that of the second and three times the noise, fANOVA ranked
the first highest in 41. PED-ANOVA, the default of Optuna, which only considers the few best results, did so in 25.

The shares always add up to 1, even if all differences are chance: then the largest of four is 0.5 on average.
Left out: what two settings do only together, which counts for neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.analysis.loading import SettingValue
from rlx.analysis.statistics import Group
from rlx.analysis.style import setting_text
from rlx.config.errors import ConfigError
from rlx.config.sweep import Mode

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MIN_GROUPS = 12
"""the smallest number of groups with a value for which an importance is given"""
_ALIKE = "all settings have the same result, or nearly"


def importance(groups: Sequence[Group], mode: Mode) -> dict[str, float]:
    """The share of each varied setting by its dotted key, largest first; they add up to 1. It is deterministic.

    Raises:
        ConfigError: too few groups, settings that changed within a trial, or results that do not differ.
    """
    rated = [group for group in groups if group.values]
    varied = varied_settings(rated)
    if len(rated) < MIN_GROUPS or not varied:
        raise ConfigError(f"{len(rated)} settings with a result are too few to tell: at least {MIN_GROUPS} are needed")
    if any(trial.origins for group in rated for trial in group.trials):
        raise ConfigError("settings changed within trials: no result belongs to one setting")
    if len({group.mean for group in rated}) == 1:
        raise ConfigError(_ALIKE)
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    domains = {key: _domain([group.settings[key] for group in rated]) for key in varied}
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
    for group in rated:
        values = {key: _parameter(group.settings[key], domains[key]) for key in varied}
        study.add_trial(optuna.trial.create_trial(params=values, distributions=domains, value=group.mean))
    try:
        return dict(get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0)))
    except RuntimeError:  # no tree of the forest has found a difference
        raise ConfigError(_ALIKE) from None


def varied_settings(groups: Sequence[Group]) -> list[str]:
    """The dotted keys of the settings with more than one value."""
    keys = list(groups[0].settings) if groups else []
    return [key for key in keys if len({group.settings[key] for group in groups}) > 1]


def on_log_scale(values: Sequence[float]) -> bool:
    """Whether a logarithmic scale separates the numbers better: positive numbers over more than a factor of ten."""
    return min(values) > 0 and max(values) > 10 * min(values)


def numbers(values: Sequence[SettingValue]) -> list[float] | None:
    """The values as numbers; None if one of them is a text or unset."""
    converted = [float(value) for value in values if isinstance(value, int | float)]
    return converted if len(converted) == len(values) else None


def _domain(values: Sequence[SettingValue]) -> BaseDistribution:
    """The range or the choices of the values of a setting, as Optuna describes them."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    as_numbers = numbers(values)
    if as_numbers is None:
        return CategoricalDistribution(sorted({setting_text(value) for value in values}))
    return FloatDistribution(min(as_numbers), max(as_numbers), log=on_log_scale(as_numbers))


def _parameter(value: SettingValue, domain: BaseDistribution) -> float | str:
    """A value in the form that the domain accepts."""
    from optuna.distributions import FloatDistribution

    return (
        float(value)
        if isinstance(domain, FloatDistribution) and isinstance(value, int | float)
        else setting_text(value)
    )
