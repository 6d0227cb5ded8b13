"""What a run needs of the cluster: a bundle for each worker, engine and reward model, reserved whole or not at all.

How many of them fit is worked out as Ray places them, a part of a GPU on one GPU. Reserving is crew's and Tune's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import ray

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig

Bundle = dict[str, float]
_ROUNDING = 1e-6  # Ray counts in 1/10000


@dataclass(frozen=True)
class ResourcePlan:
    """The bundles of one run, by what they are for."""

    workers: list[Bundle]
    engines: list[Bundle]
    reward_models: list[Bundle] = field(default_factory=list)
    strategy: str = "PACK"  # of Ray's placement groups
    shared: bool = False  # each engine is in the bundle of a worker, on the same GPU

    @property
    def bundles(self) -> list[Bundle]:
        """All of them in the order in which they are reserved."""
        return [self._all[i] for i in self._order]

    @property
    def places(self) -> tuple[list[int], list[int], list[int]]:
        """Which of `bundles` are the workers', the engines' and the reward models'."""
        place = {i: position for position, i in enumerate(self._order)}
        first = len(self.workers)
        second = first + (0 if self.shared else len(self.engines))
        ranges = range(first), range(first, second), range(second, len(self._all))
        workers, engines, models = ([place[i] for i in indices] for indices in ranges)
        return workers, workers if self.shared else engines, models

    @property
    def _all(self) -> list[Bundle]:
        if self.shared:
            pairs = zip(self.workers, self.engines, strict=True)
            return [*(_total(pair) for pair in pairs), *self.reward_models]
        return [*self.workers, *self.engines, *self.reward_models]

    @property
    def _order(self) -> list[int]:
        """The largest part of a GPU first: 0.4, 0.4, 0.6, 0.6 would not find room on two GPUs in this order."""
        size = [(bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)) for bundle in self._all]
        return sorted(range(len(size)), key=lambda i: size[i], reverse=True)

    def total(self) -> Bundle:
        """All bundles together, e.g. {"CPU": 2.0}."""
        return _total(self._all)

    def __str__(self) -> str:
        counts = {"worker": len(self.workers), "engine": len(self.engines), "reward model": len(self.reward_models)}
        return " and ".join(f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items() if n)

    def fits(self, nodes: Sequence[Mapping[str, float]], most: int = 10_000) -> int:
        """How many such runs the empty nodes hold at once, as Ray places them one after the other."""
        free, count = [_Node(node) for node in nodes], 0
        while count < most and self._is_placed(free):
            count += 1
        return count

    def _is_placed(self, nodes: Sequence[_Node]) -> bool:
        """Takes a run's bundles from the nodes. Ray's head chooses them by their sums, and chooses no others when one
        then cannot cut the parts from its GPUs; it may place less than there would be room for."""
        chosen = _CHOICES[self.strategy](self.bundles, [dict(node.free) for node in nodes])
        return chosen is not None and all(nodes[i].takes(b) for i, b in zip(chosen, self.bundles, strict=True))


class _Node:
    """What is free on a node."""

    def __init__(self, resources: Mapping[str, float]) -> None:
        self.free = dict(resources)
        self.gpus = [1.0] * int(resources.get("GPU", 0))

    def takes(self, bundle: Bundle) -> bool:
        """Takes a bundle if there is room for it."""
        asked = bundle.get("GPU", 0.0)
        if not _holds(self.free, bundle) or (chosen := self._gpus(asked)) is None:
            return False
        for i in chosen:
            self.gpus[i] -= min(asked, 1.0)
        _take(self.free, bundle)
        return True

    def _gpus(self, asked: float) -> list[int] | None:
        """Which GPUs Ray would give: whole ones, or a part of the fullest one that has room; None if there are none."""
        enough = [i for i, free in enumerate(self.gpus) if free + _ROUNDING >= min(asked, 1.0)]
        if asked < 1:
            return sorted(enough, key=lambda i: self.gpus[i])[:1] if enough or not asked else None
        return enough[: int(asked)] if len(enough) >= asked else None


# ---------------------------------------------------------------------------------------------------------------------
# Which node Ray's head chooses for each bundle (bundle_scheduling_policy.cc); None if it finds none


def _packed(bundles: Sequence[Bundle], rooms: list[Bundle]) -> list[int] | None:
    """On as few nodes as possible: the best one for the first bundle takes all that it can, then another the next."""
    places, unused = [-1] * len(bundles), list(range(len(rooms)))
    for i, bundle in enumerate(bundles):
        if places[i] >= 0:
            continue
        if (node := _best(bundle, rooms, unused)) is None:
            return None
        unused.remove(node)
        for j in range(i, len(bundles)):
            if places[j] < 0 and _holds(rooms[node], bundles[j]):
                _take(rooms[node], bundles[j])
                places[j] = node
    return places


def _packed_on_one(bundles: Sequence[Bundle], rooms: list[Bundle]) -> list[int] | None:
    node = _best(_total(bundles), rooms, range(len(rooms)))
    return None if node is None else [node] * len(bundles)


def _spread(bundles: Sequence[Bundle], rooms: list[Bundle], strictly: bool = False) -> list[int] | None:
    """Each on a node of its own, as long as there are such."""
    places: list[int] = []
    for bundle in bundles:
        node = _best(bundle, rooms, [i for i in range(len(rooms)) if i not in places])
        if node is None and not strictly:
            node = _best(bundle, rooms, range(len(rooms)))
        if node is None:
            return None
        _take(rooms[node], bundle)
        places.append(node)
    return places


_CHOICES: dict[str, Callable[[Sequence[Bundle], list[Bundle]], list[int] | None]] = {
    "PACK": _packed,
    "STRICT_PACK": _packed_on_one,
    "SPREAD": _spread,
    "STRICT_SPREAD": partial(_spread, strictly=True),
}


def _best(bundle: Bundle, rooms: Sequence[Bundle], among: Iterable[int]) -> int | None:
    """The node that would be left with the largest parts of what it has free."""
    able = [i for i in among if _holds(rooms[i], bundle)]
    asked = [name for name, amount in bundle.items() if amount]
    return max(able, key=lambda i: -sum(bundle[name] / rooms[i][name] for name in asked), default=None)


def _holds(room: Mapping[str, float], bundle: Bundle) -> bool:
    return all(room.get(name, 0.0) + _ROUNDING >= amount for name, amount in bundle.items())


def _take(room: Bundle, bundle: Bundle) -> None:
    for name, amount in bundle.items():
        room[name] = room.get(name, 0.0) - amount


def _total(bundles: Sequence[Bundle]) -> Bundle:
    names = {name: None for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


# ---------------------------------------------------------------------------------------------------------------------
# The cluster


def plan_resources(config: RunConfig) -> ResourcePlan:
    """What a config asks for.

    Raises:
        ConfigError: more than one GPU, but not whole ones.
    """
    per_worker = dict(config.scaling.resources_per_worker)
    if config.scaling.use_gpu:
        per_worker.setdefault("GPU", 1.0)
    per_engine = dict(config.rollout.resources_per_engine)
    if shared := config.rollout.placement == "colocated":
        per_worker["GPU"] = per_engine["GPU"] = 0.5  # what each takes of their GPU, as Ray counts it
    models = config.reward.model_replicas if config.reward.model else 0
    asked = {
        "scaling.resources_per_worker": per_worker,
        "rollout.resources_per_engine": per_engine,
        "reward.resources_per_model": dict(config.reward.resources_per_model),
    }
    for key, bundle in asked.items():
        if (count := bundle.get("GPU", 0.0)) > 1 and count != int(count):
            raise ConfigError(f"{key}: {count:g} GPUs are neither whole ones nor a part of one")
    worker, engine, model = asked.values()
    return ResourcePlan(
        [worker] * config.scaling.num_workers,
        [engine] * config.rollout.num_engines,
        [model] * models,
        config.scaling.placement_strategy,
        shared,
    )


def nodes() -> list[Bundle]:
    """What each live node of the cluster has in all."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_room(needed: ResourcePlan) -> None:
    """ConfigError, with the numbers, for a plan that the cluster could not hold if it were empty."""
    there = nodes()
    if needed.fits(there, 1):
        return
    total, cluster = needed.total(), ray.cluster_resources()
    lacking = [name for name, amount in total.items() if amount > cluster.get(name, 0.0) + _ROUNDING]
    numbers = ", ".join(f"{total[name]:g} {name} but the cluster has {cluster.get(name, 0.0):g}" for name in lacking)
    if not numbers:
        shares = ", ".join(_text(bundle) for bundle in needed.bundles)
        numbers = f"{shares}, which do not go together on {len(there)} nodes with {_texts(there)}"
    raise ConfigError(f"scaling: {needed} need {numbers}")


def _text(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount)


def _texts(nodes: Sequence[Bundle]) -> str:
    return " and ".join(_text({name: node.get(name, 0.0) for name in ("CPU", "GPU")}) for node in nodes)
