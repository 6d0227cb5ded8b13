"""What a run needs of the cluster: one bundle per worker, engine and reward model, reserved all together or not at all.

`ResourcePlan.fits` predicts how many runs a cluster holds, with the rules by which Ray places bundles on nodes.
Left out: the reservation, which `actor_group` and Ray Tune make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import ray

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig

Bundle = dict[str, float]
"""amounts by resource name, e.g. {"CPU": 1.0, "GPU": 0.5}; on one node"""
_TOLERANCE = 1e-6  # Ray counts in 1/10000


class BundleIndices(NamedTuple):
    """Which bundles of a placement group belong to the workers, the engines and the reward models."""

    workers: list[int]
    engines: list[int]
    reward_models: list[int]


@dataclass(frozen=True)
class ResourcePlan:
    """The bundles of one run, by what uses them."""

    workers: list[Bundle]
    engines: list[Bundle]
    reward_models: list[Bundle] = field(default_factory=list)
    strategy: str = "PACK"  # of Ray's placement groups
    colocated: bool = False  # each engine shares the bundle and the GPU of a worker

    @property
    def bundles(self) -> list[Bundle]:
        """All bundles in the order in which they are reserved."""
        return [self._unordered[i] for i in self._order]

    @property
    def indices(self) -> BundleIndices:
        """Indices in `bundles`."""
        index = {i: position for position, i in enumerate(self._order)}
        first_engine = len(self.workers)
        first_model = first_engine + (0 if self.colocated else len(self.engines))
        ranges = range(first_engine), range(first_engine, first_model), range(first_model, len(self._unordered))
        workers, engines, models = ([index[i] for i in unordered] for unordered in ranges)
        return BundleIndices(workers, workers if self.colocated else engines, models)

    @property
    def _unordered(self) -> list[Bundle]:
        if self.colocated:
            pairs = zip(self.workers, self.engines, strict=True)
            return [*(_total(pair) for pair in pairs), *self.reward_models]
        return [*self.workers, *self.engines, *self.reward_models]

    @property
    def _order(self) -> list[int]:
        """Largest part of a GPU first: in the order 0.4, 0.4, 0.6, 0.6 the bundles do not fit on two GPUs."""
        size = [(bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)) for bundle in self._unordered]
        return sorted(range(len(size)), key=lambda i: size[i], reverse=True)

    def total(self) -> Bundle:
        """Returns the sum of all bundles, e.g. {"CPU": 2.0}."""
        return _total(self._unordered)

    def __str__(self) -> str:
        counts = {"worker": len(self.workers), "engine": len(self.engines), "reward model": len(self.reward_models)}
        return " and ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)

    def fits(self, nodes: Sequence[Mapping[str, float]], most: int = 10_000) -> int:
        """Returns how many such runs the empty nodes hold at once, as Ray places them one after another."""
        free, count = [_Node(node) for node in nodes], 0
        while count < most and self._place(free):
            count += 1
        return count

    def _place(self, nodes: Sequence[_Node]) -> bool:
        """Takes one run's bundles from the nodes.

        Ray picks nodes by total free resources and does not retry if a node cannot fit the fractional GPUs, so it may
        place fewer runs than would fit.
        """
        chosen = _CHOICES[self.strategy](self.bundles, [dict(node.free) for node in nodes])
        return chosen is not None and all(nodes[i].take(b) for i, b in zip(chosen, self.bundles, strict=True))


class _Node:
    """The free resources of a node."""

    def __init__(self, resources: Mapping[str, float]) -> None:
        self.free = dict(resources)
        self.gpus = [1.0] * int(resources.get("GPU", 0))

    def take(self, bundle: Bundle) -> bool:
        """Takes a bundle if it fits; returns whether it did."""
        amount = bundle.get("GPU", 0.0)
        if not _contains(self.free, bundle) or (chosen := self._choose_gpus(amount)) is None:
            return False
        for i in chosen:
            self.gpus[i] -= min(amount, 1.0)
        _subtract(self.free, bundle)
        return True

    def _choose_gpus(self, amount: float) -> list[int] | None:
        """Returns the GPUs that Ray would give: whole ones, or the fullest one with room for a part; None if none."""
        enough = [i for i, free in enumerate(self.gpus) if free + _TOLERANCE >= min(amount, 1.0)]
        if amount < 1:
            return sorted(enough, key=lambda i: self.gpus[i])[:1] if enough or not amount else None
        return enough[: int(amount)] if len(enough) >= amount else None


# ---------------------------------------------------------------------------------------------------------------------
# Placement rules of Ray's head node (bundle_scheduling_policy.cc): bundles, free resources of each node -> the node of
# each bundle, None if they cannot be placed


def _pack(bundles: Sequence[Bundle], free: list[Bundle]) -> list[int] | None:
    """Uses few nodes: the best node for the first bundle takes all bundles that fit on it, then the next node."""
    chosen, unused = [-1] * len(bundles), list(range(len(free)))
    for i, bundle in enumerate(bundles):
        if chosen[i] >= 0:
            continue
        if (node := _best_node(bundle, free, unused)) is None:
            return None
        unused.remove(node)
        for j in range(i, len(bundles)):
            if chosen[j] < 0 and _contains(free[node], bundles[j]):
                _subtract(free[node], bundles[j])
                chosen[j] = node
    return chosen


def _pack_on_one(bundles: Sequence[Bundle], free: list[Bundle]) -> list[int] | None:
    node = _best_node(_total(bundles), free, range(len(free)))
    return None if node is None else [node] * len(bundles)


def _spread(bundles: Sequence[Bundle], free: list[Bundle], strictly: bool = False) -> list[int] | None:
    """Gives each bundle a node of its own while there are unused nodes; `strictly`: always."""
    chosen: list[int] = []
    for bundle in bundles:
        node = _best_node(bundle, free, [i for i in range(len(free)) if i not in chosen])
        if node is None and not strictly:
            node = _best_node(bundle, free, range(len(free)))
        if node is None:
            return None
        _subtract(free[node], bundle)
        chosen.append(node)
    return chosen


_CHOICES: dict[str, Callable[[Sequence[Bundle], list[Bundle]], list[int] | None]] = {
    "PACK": _pack,
    "STRICT_PACK": _pack_on_one,
    "SPREAD": _spread,
    "STRICT_SPREAD": partial(_spread, strictly=True),
}


def _best_node(bundle: Bundle, free: Sequence[Bundle], candidates: Iterable[int]) -> int | None:
    """Returns the candidate that would keep the largest part of its free resources."""
    able = [i for i in candidates if _contains(free[i], bundle)]
    names = [name for name, amount in bundle.items() if amount]
    return max(able, key=lambda i: -sum(bundle[name] / free[i][name] for name in names), default=None)


def _contains(free: Mapping[str, float], bundle: Bundle) -> bool:
    return all(free.get(name, 0.0) + _TOLERANCE >= amount for name, amount in bundle.items())


def _subtract(free: Bundle, bundle: Bundle) -> None:
    for name, amount in bundle.items():
        free[name] = free.get(name, 0.0) - amount


def _total(bundles: Sequence[Bundle]) -> Bundle:
    names = {name: None for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


# ---------------------------------------------------------------------------------------------------------------------
# The cluster


def plan_resources(config: RunConfig) -> ResourcePlan:
    """Returns the bundles that a config asks for.

    Raises:
        ConfigError: a bundle has more than one GPU and a part of another.
    """
    worker = dict(config.scaling.resources_per_worker)
    if config.scaling.use_gpu:
        worker.setdefault("GPU", 1.0)
    engine = dict(config.rollout.resources_per_engine)
    if colocated := config.rollout.placement == "colocated":
        worker["GPU"] = engine["GPU"] = 0.5  # Ray counts half of the shared GPU for each of the two
    model = dict(config.reward.resources_per_model)
    _check_whole_gpus("scaling.resources_per_worker", worker)
    _check_whole_gpus("rollout.resources_per_engine", engine)
    _check_whole_gpus("reward.resources_per_model", model)
    return ResourcePlan(
        [worker] * config.scaling.num_workers,
        [engine] * config.rollout.num_engines,
        [model] * (config.reward.model_replicas if config.reward.model else 0),
        config.scaling.placement_strategy,
        colocated,
    )


def _check_whole_gpus(key: str, bundle: Bundle) -> None:
    if (count := bundle.get("GPU", 0.0)) > 1 and count != int(count):
        raise ConfigError(f"{key}: {count:g} GPUs are neither a whole number nor a part of one")


def cluster_nodes() -> list[Bundle]:
    """Returns the total resources of each live node of the cluster."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_room(needed: ResourcePlan) -> None:
    """Raises ConfigError, with the numbers, if even the empty cluster could not hold a plan."""
    nodes = cluster_nodes()
    if needed.fits(nodes, 1):
        return
    total, cluster = needed.total(), ray.cluster_resources()
    lacking = [name for name, amount in total.items() if amount > cluster.get(name, 0.0) + _TOLERANCE]
    numbers = ", ".join(f"{total[name]:g} {name} but the cluster has {cluster.get(name, 0.0):g}" for name in lacking)
    if not numbers:
        bundles = ", ".join(_text(bundle) for bundle in needed.bundles)
        numbers = f"{bundles}, which cannot be placed together on {len(nodes)} nodes with {_node_texts(nodes)}"
    raise ConfigError(f"scaling: {needed} need {numbers}")


def _text(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount)


def _node_texts(nodes: Sequence[Bundle]) -> str:
    return " and ".join(_text({name: node.get(name, 0.0) for name in ("CPU", "GPU")}) for node in nodes)
