"""Searches by name: they choose a sweep's candidates from its search space.

A search is a Searcher of Ray Tune: it suggests settings, and is told their accuracy.
Left out: which trial runs when, and what is kept of it (`trial_source`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice, product
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search import Searcher
from ray.tune.search.sample import Categorical, Domain, Float, Integer, Quantized
from ray.tune.search.variant_generator import generate_variants

from rlx.config.errors import ConfigError
from rlx.config.sweep import DEFAULT_METRIC, SearchName
from rlx.sweeps.choices import MOST_TRIALS
from rlx.sweeps.space import MODE, SINGLE_VALUE, Space, complete_settings, extremes, is_log, names_prompts, quantum

Points = Sequence[dict[str, Any]]
"""candidates to suggest first, in this order: those that a sweep tried before a resume"""


_MOST_COMBINED = 200  # of the values of settings that say what prompts a trial has: each reads files


class ListSearch(Searcher):
    """Suggests the candidates of a list and learns nothing."""

    def __init__(self, candidates: Sequence[dict[str, Any]]) -> None:
        super().__init__(DEFAULT_METRIC, MODE)
        self.candidates = list(candidates)

    def suggest(self, trial_id: str) -> Any:
        return self.candidates.pop(0) if self.candidates else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass


def _random(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Samples each setting from its domain independently; the same seed gives the same candidates in every sweep.

    Each sample has all values of a `grid_search`; where nothing is sampled, there is one.
    """
    state = np.random.RandomState(seed)
    rounds = count if any(isinstance(domain, Domain) for domain in space.values()) else 1
    return _listed(each for _ in range(rounds) for each in generate_variants(space, random_state=state))


def _grid(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Tries every combination of the choices."""
    for key, domain in space.items():
        if isinstance(domain, Domain) and not isinstance(domain, Categorical):
            raise ConfigError(f"--search grid needs a list of values for {key}: use tune.choice")
    lists = {k: tune.grid_search(d.categories) if isinstance(d, Categorical) else d for k, d in space.items()}
    return _listed(generate_variants(lists))


def _listed(variants: Iterable[tuple[Any, dict[str, Any]]]) -> ListSearch:
    """A search of what Ray makes of a space; `choices.refuse_many` refuses those of which not all are made."""
    return ListSearch([drawn for _, drawn in islice(variants, MOST_TRIALS + 1)])


def _optuna(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Optuna's tree-structured Parzen estimator."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    for key, domain in space.items():
        if isinstance(domain, Integer) and quantum(domain) not in (None, 1) and is_log(domain):
            raise ConfigError(f"--search optuna takes no multiples on a log scale for {key}: use tune.lograndint")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = OptunaSearch.convert_search_space(space)
    return OptunaSearch(space, metric=DEFAULT_METRIC, mode=MODE, seed=seed, points_to_evaluate=list(points) or None)


class GaussianProcessSearch(Searcher):
    """Suggests the maximum of the upper confidence bound of a Gaussian process, after ten random points.

    Ray's BayesOptSearch hangs once one of its first ten trials has failed, ends when the best point has been tried, and
    fits one length scale to ranges of different widths. Here another point is sampled instead, and all ranges are
    scaled to 0 to 1.
    """

    _RANDOM_POINTS = 10

    def __init__(self, ranges: Mapping[str, Float], seed: int, points: Points) -> None:
        from bayes_opt import BayesianOptimization, UtilityFunction  # type: ignore[import-untyped]

        super().__init__(DEFAULT_METRIC, MODE)
        self._ranges, self._points, self._random = ranges, list(points), np.random.RandomState(seed)
        self._process = BayesianOptimization(None, dict.fromkeys(ranges, (0, 1)), random_state=seed, verbose=0)
        self._utility = UtilityFunction(kind="ucb", kappa=2.576, xi=0)
        self._suggested: dict[str, dict[str, float]] = {}  # by trial, scaled to 0 to 1

    def suggest(self, trial_id: str) -> dict[str, Any]:
        point = self._points.pop(0) if self._points else None
        scaled = {key: _scale(self._ranges[key], value) for key, value in point.items()} if point else self._new_point()
        self._suggested[trial_id] = scaled
        return point or {key: _unscale(self._ranges[key], value) for key, value in scaled.items()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if result:
            self._process.register(self._suggested[trial_id], result[DEFAULT_METRIC])

    def _new_point(self) -> dict[str, float]:
        if len(self._suggested) >= self._RANDOM_POINTS:
            best = {key: float(value) for key, value in self._process.suggest(self._utility).items()}
            if not self._was_suggested(best):
                return best
        return {key: float(self._random.uniform()) for key in self._ranges}

    def _was_suggested(self, point: dict[str, float]) -> bool:
        values = list(point.values())
        return any(np.allclose(values, [earlier[key] for key in point]) for earlier in self._suggested.values())


def _scale(domain: Float, value: float) -> float:
    """Returns where in a range a value lies: 0 at the lower end, 1 at the upper one (on a log scale for loguniform)."""
    low, high = domain.lower, domain.upper
    if is_log(domain):
        low, high, value = np.log([low, high, value])
    return float((value - low) / (high - low))


def _unscale(domain: Float, part: float) -> float:
    """Returns the value of a range at a part of it, 0 to 1."""
    if is_log(domain):
        return float(domain.lower * (domain.upper / domain.lower) ** part)
    return float(domain.lower + (domain.upper - domain.lower) * part)


def _bayesopt(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """A Gaussian process over ranges of numbers."""
    for key, domain in space.items():
        if not isinstance(domain, Float) or isinstance(domain.sampler, Quantized):
            raise ConfigError(f"--search bayesopt needs an unbroken range for {key}: use tune.uniform")
    return GaussianProcessSearch(space, seed, points)


def _hyperopt(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """HyperOpt's tree-structured Parzen estimator."""
    from ray.tune.search.hyperopt import HyperOptSearch

    space = HyperOptSearch.convert_search_space(space)
    options = {"metric": DEFAULT_METRIC, "mode": MODE, "random_state_seed": seed}
    return HyperOptSearch(space, points_to_evaluate=list(points) or None, **options)


SEARCHES: dict[SearchName, Callable[[Space, int, int, Points], Searcher]] = {
    "random": _random,
    "grid": _grid,
    "optuna": _optuna,
    "bayesopt": _bayesopt,
    "hyperopt": _hyperopt,
}
ADAPTIVE = ("optuna", "bayesopt", "hyperopt")
"""searches that learn from the accuracy of their suggestions"""


def searcher(name: SearchName, space: Space, count: int, seed: int, points: Points = ()) -> Searcher:
    """Returns a search by name.

    Args:
        count: candidates to try; a grid has its own number.
        points: what the sweep had tried before a resume, in order.

    Raises:
        ConfigError: the space does not fit the search.
    """
    if name not in ADAPTIVE:
        return SEARCHES[name](space, count, seed, points)
    varied = {key: domain for key, domain in space.items() if isinstance(domain, Domain)}
    if lists := [key for key, domain in space.items() if isinstance(domain, dict)]:
        if "grid_search" in space[lists[0]]:
            raise ConfigError(f"--search {name} does not try all values: {lists[0]} needs tune.choice, not grid_search")
        raise ConfigError(
            f"--search {name} takes no dict that does not vary: give {lists[0]} as a setting of the sweep"
        )
    if not varied:
        raise ConfigError(f"--search {name} has nothing to vary: no setting of the space has a range or choices")
    for key, domain in varied.items():
        if isinstance(domain, Categorical) and not all(isinstance(value, SINGLE_VALUE) for value in domain.categories):
            raise ConfigError(f"--search {name}: the choices of {key} must be numbers, texts or booleans")
    tried = [{key: settings[key] for key in varied} for settings in points]
    return SEARCHES[name](varied, count, seed + len(tried), tried)  # the same seed would give the same ones again


def known_settings(search: Searcher, space: Space) -> list[dict[str, Any]]:
    """Returns the settings of trials that are known before a sweep starts.

    Of a search that learns, they are those that say what prompts a trial may have, in all combinations; where these are
    more than `_MOST_COMBINED`, in so many that each value is in one.
    """
    if isinstance(search, ListSearch):
        return [complete_settings(space, settings) for settings in search.candidates]
    values = {key: extremes(domain) for key, domain in space.items() if names_prompts(key)}
    combined: Iterable[tuple[Any, ...]] = product(*values.values())
    if math.prod(map(len, values.values())) > _MOST_COMBINED:
        combined = islice(zip(*map(cycle, values.values()), strict=True), max(map(len, values.values())))
    return [complete_settings(space, dict(zip(values, each, strict=True))) for each in combined]
