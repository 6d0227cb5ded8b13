"""What a sweep tries: search spaces as plain Python, and ways to draw settings from them, by name.

A search is a Searcher of Ray Tune: it suggests settings and is told what they came to. Which trial runs when, and what
is kept of it, is trials.py's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search import Searcher
from ray.tune.search.sample import Categorical, Domain, Float, LogUniform, Quantized
from ray.tune.search.variant_generator import generate_variants

from rlx.config.errors import ConfigError
from rlx.config.sections import DEFAULT_METRIC, SearchName
from rlx.sweeps.space import MODE, SINGLE_VALUE, Space

# ---------------------------------------------------------------------------------------------------------------------
# Searches

Points = Sequence[dict[str, Any]]
"""settings that are to be suggested first, in this order: those of a sweep that goes on"""


class ListSearch(Searcher):
    """Suggests what is in a list, whatever comes of it."""

    def __init__(self, settings: Sequence[dict[str, Any]]) -> None:
        super().__init__(DEFAULT_METRIC, MODE)
        self.settings = list(settings)

    def suggest(self, trial_id: str) -> Any:
        return self.settings.pop(0) if self.settings else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass


def _random(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Each setting drawn from its domain by itself; a seed draws the same in every sweep."""
    state = np.random.RandomState(seed)
    return ListSearch([drawn for _ in range(count) for _, drawn in generate_variants(space, random_state=state)])


def _grid(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Every combination of the choices."""
    for key, domain in space.items():
        if isinstance(domain, Domain) and not isinstance(domain, Categorical):
            raise ConfigError(f"--search grid needs a list of values for {key}: use tune.choice")
    lists = {k: tune.grid_search(d.categories) if isinstance(d, Categorical) else d for k, d in space.items()}
    return ListSearch([drawn for _, drawn in generate_variants(lists)])


def _optuna(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Optuna's tree-structured Parzen estimator."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = OptunaSearch.convert_search_space(space)
    return OptunaSearch(space, metric=DEFAULT_METRIC, mode=MODE, seed=seed, points_to_evaluate=list(points) or None)


class GaussianProcessSearch(Searcher):
    """Suggests where a Gaussian process over what its suggestions came to promises most, after a few at random.

    Ray's BayesOptSearch waits for ever once one of its first ten trials has failed, ends when the best point has been
    tried and does not see beyond the widest range; here another point is drawn, and all ranges are 0 to 1.
    """

    _AT_RANDOM = 10

    def __init__(self, ranges: Mapping[str, Float], seed: int, points: Points) -> None:
        from bayes_opt import BayesianOptimization, UtilityFunction  # type: ignore[import-untyped]

        super().__init__(DEFAULT_METRIC, MODE)
        self._ranges, self._points, self._draws = ranges, list(points), np.random.RandomState(seed)
        self._process = BayesianOptimization(None, dict.fromkeys(ranges, (0, 1)), random_state=seed, verbose=0)
        self._promise = UtilityFunction(kind="ucb", kappa=2.576, xi=0)
        self._given: dict[str, dict[str, float]] = {}  # by trial, as parts of the ranges

    def suggest(self, trial_id: str) -> dict[str, Any]:
        point = self._points.pop(0) if self._points else None
        parts = {key: _part(self._ranges[key], value) for key, value in point.items()} if point else self._new()
        self._given[trial_id] = parts
        return point or {key: _at(self._ranges[key], part) for key, part in parts.items()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if result:
            self._process.register(self._given[trial_id], result[DEFAULT_METRIC])

    def _new(self) -> dict[str, float]:
        if len(self._given) >= self._AT_RANDOM:
            best = {key: float(value) for key, value in self._process.suggest(self._promise).items()}
            if not any(
                np.allclose(list(best.values()), [known[key] for key in best]) for known in self._given.values()
            ):
                return best
        return {key: float(self._draws.uniform()) for key in self._ranges}


def _part(domain: Float, value: float) -> float:
    """Where in a range a value lies: 0 at its lower end, 1 at its upper one."""
    low, high, at = (
        np.log([domain.lower, domain.upper, value]) if _is_log(domain) else (domain.lower, domain.upper, value)
    )
    return float((at - low) / (high - low))


def _at(domain: Float, part: float) -> float:
    """The value at a part of a range."""
    if _is_log(domain):
        return float(domain.lower * (domain.upper / domain.lower) ** part)
    return float(domain.lower + (domain.upper - domain.lower) * part)


def _is_log(domain: Float) -> bool:
    return isinstance(domain.sampler, LogUniform)


def _bayesopt(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """Gaussian processes over ranges of numbers."""
    _need("bayes_opt", "bayesopt")
    for key, domain in space.items():
        if not isinstance(domain, Float) or isinstance(domain.sampler, Quantized):
            raise ConfigError(f"--search bayesopt needs an unbroken range for {key}: use tune.uniform")
    return GaussianProcessSearch(space, seed, points)


def _hyperopt(space: Space, count: int, seed: int, points: Points) -> Searcher:
    """HyperOpt's tree-structured Parzen estimator."""
    _need("hyperopt", "hyperopt")
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
"""searches that learn from what came of their suggestions"""


def searcher(name: SearchName, space: Space, count: int, seed: int, points: Points = ()) -> Searcher:
    """A search by name.

    Args:
        count: settings to try, of the searches that do not count themselves.
        points: what an earlier part of the sweep has tried, in order.

    Raises:
        ConfigError: the space is not for it, or its library is missing.
    """
    if name not in ADAPTIVE:
        return SEARCHES[name](space, count, seed, points)
    varied = {key: domain for key, domain in space.items() if isinstance(domain, Domain)}
    if lists := [key for key, domain in space.items() if isinstance(domain, dict)]:
        raise ConfigError(f"--search {name} draws by itself: use tune.choice for {lists[0]}, not tune.grid_search")
    if not varied:
        raise ConfigError(f"--search {name} has nothing to vary: no setting of the space has a range or choices")
    for key, domain in varied.items():
        if isinstance(domain, Categorical) and not all(isinstance(value, SINGLE_VALUE) for value in domain.categories):
            raise ConfigError(f"--search {name} takes single values alone as choices, which those of {key} are not")
    tried = [{key: settings[key] for key in varied} for settings in points]
    return SEARCHES[name](varied, count, seed + len(tried), tried)  # the same seed would draw the same again


def _need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"--search {extra} needs the package {package}: pip install 'rlx[search]'")
