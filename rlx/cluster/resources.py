"""What a run needs of the cluster: one bundle per worker, engine and reward model, in two placement groups.

`ResourcePlan.fits` predicts how many runs a cluster holds, with the rules by which Ray places bundles on nodes. Only
what asks a cluster imports Ray: a plan is made and checked before.
Left out: the reservations, which `processes`, Ray Train and Ray Tune make.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.types import Notify

Bundle = dict[str, float]
"""amounts by resource name, e.g. {"CPU": 1.0, "GPU": 0.5}; on one node"""
_TOLERANCE = 1e-6  # Ray counts in 1/10000
_LOOK_S = 2.0  # between two looks at the nodes
_LABELS = "labels {}"  # a made-up resource of the nodes that meet a label selector


class BundleIndices(NamedTuple):
    """Which bundles of a run's own placement group belong to the engines and the reward models."""

    engines: list[int]
    reward_models: list[int]


class RoleLabels(NamedTuple):
    """The labels that nodes must have, by what is to run there, as Ray's label selectors."""

    workers: Mapping[str, str] = {}
    engines: Mapping[str, str] = {}
    reward_models: Mapping[str, str] = {}


@dataclass(frozen=True)
class ResourcePlan:
    """The bundles of one run, by what uses them.

    Engines and reward models are in one placement group, `bundles`: that of the Tune trial, or one of the run's own.
    Ray Train reserves the workers in a second group. A colocated engine is in none: it uses the GPU of its worker.
    """

    workers: list[Bundle]
    engines: list[Bundle]
    reward_models: list[Bundle] = field(default_factory=list)
    strategy: str = "PACK"  # of Ray's placement groups
    labels: RoleLabels = field(default_factory=RoleLabels)
    colocated: bool = False  # each engine runs beside a worker, on its GPU
    accelerator: str | None = None  # kind of the workers' GPUs

    @property
    def bundles(self) -> list[Bundle]:
        """The bundles of engines and reward models in the order in which they are reserved."""
        return [self._unordered[i] for i in self._order]

    @property
    def selectors(self) -> list[dict[str, str]]:
        """The label selector of each of `bundles`."""
        engines = [] if self.colocated else [self.labels.engines] * len(self.engines)
        unordered = [*engines, *[self.labels.reward_models] * len(self.reward_models)]
        return [dict(unordered[i]) for i in self._order]

    @property
    def indices(self) -> BundleIndices:
        """Indices in `bundles`."""
        index = {i: position for position, i in enumerate(self._order)}
        first_model = len(self._unordered) - len(self.reward_models)
        ranges = range(first_model), range(first_model, len(self._unordered))
        return BundleIndices(*([index[i] for i in unordered] for unordered in ranges))

    @property
    def _unordered(self) -> list[Bundle]:
        return [*([] if self.colocated else self.engines), *self.reward_models]

    @property
    def _order(self) -> list[int]:
        """Largest part of a GPU first: in the order 0.4, 0.4, 0.6, 0.6 the bundles do not fit on two GPUs."""
        size = [(bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)) for bundle in self._unordered]
        return sorted(range(len(size)), key=lambda i: size[i], reverse=True)

    def total(self) -> Bundle:
        """Returns the sum of all bundles, e.g. {"CPU": 2.0}."""
        return _total([*_reserved_workers(self), *self._unordered])

    def __str__(self) -> str:
        counts = {"worker": len(self.workers), "engine": len(self.engines), "reward model": len(self.reward_models)}
        return " and ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)

    def fits(self, nodes: Sequence[Node], most: int = 10_000) -> int:
        """Returns how many such runs the empty nodes hold at once, as Ray places their groups.

        Both groups of each run find room when runs start one after another, and when the engines of all of them start
        before the workers of the first.
        """
        free, count = [_FreeNode(node) for node in nodes], 0
        while count < most and self._place_first(free) and self._place_second(free):
            count += 1
        while count and not self._fits_engines_first(nodes, count):
            count -= 1
        return count

    def _fits_engines_first(self, nodes: Sequence[Node], count: int) -> bool:
        free = [_FreeNode(node) for node in nodes]
        engines = all(self._place_first(free) for _ in range(count))
        return engines and all(self._place_second(free) for _ in range(count))

    def _place_first(self, nodes: Sequence[_FreeNode]) -> bool:
        return self._place(nodes, self.bundles, self.selectors)

    def _place_second(self, nodes: Sequence[_FreeNode]) -> bool:
        return self._place(nodes, _reserved_workers(self), [dict(self.labels.workers)] * len(self.workers))

    def _place(
        self, nodes: Sequence[_FreeNode], bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]]
    ) -> bool:
        """Takes the bundles of a group from the nodes.

        Ray picks nodes by total free resources and does not retry if a node cannot fit the fractional GPUs, so it may
        place fewer runs than would fit.
        """
        able = [node.offer(selectors) for node in nodes]
        chosen = _CHOICES[self.strategy](_labelled(bundles, selectors), able)
        return chosen is not None and all(nodes[i].take(b) for i, b in zip(chosen, bundles, strict=True))


@dataclass(frozen=True)
class Node:
    """A node of the cluster: what it has in all, and its labels."""

    resources: Bundle
    labels: Mapping[str, str] = field(default_factory=dict)


def _labelled(bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]]) -> list[Bundle]:
    """The bundles with a resource for each label selector, which only nodes with these labels have; see `offer`."""
    return [b | ({_LABELS.format(dict(s)): 1.0} if s else {}) for b, s in zip(bundles, selectors, strict=True)]


class _FreeNode:
    """The free resources of a node."""

    def __init__(self, node: Node) -> None:
        self.labels, self.free = node.labels, dict(node.resources)
        self.gpus = [1.0] * int(node.resources.get("GPU", 0))

    def offer(self, selectors: Sequence[Mapping[str, str]]) -> Bundle:
        """What is free, with one more resource for each label selector that the node meets."""
        met = [dict(selector) for selector in selectors if selector and _meets(self.labels, selector)]
        return self.free | {_LABELS.format(selector): 1e9 for selector in met}

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


def _meets(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels meet a selector: a value, !value, in(a,b) or !in(a,b) for each label."""
    return all(_matches(labels.get(name), wanted) for name, wanted in selector.items())


def _reserved_workers(needed: ResourcePlan) -> list[Bundle]:
    """Returns the workers' bundles as Ray Train reserves them: it adds the kind of accelerator by itself."""
    kind = {f"accelerator_type:{needed.accelerator}": 0.001} if needed.accelerator else {}
    return [{**worker, **kind} for worker in needed.workers]


def _matches(value: str | None, wanted: str) -> bool:
    if wanted.startswith("!"):
        return not _matches(value, wanted[1:])
    inside = re.fullmatch(r"in\((.*)\)", wanted)
    return value in ([each.strip() for each in inside[1].split(",")] if inside else [wanted])


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
    if kind := config.scaling.accelerator_type:  # Ray Train adds it to the workers' bundles itself
        engine |= {f"accelerator_type:{kind}": 0.001} if engine.get("GPU") else {}
    if colocated := config.rollout.placement == "colocated":
        engine["GPU"] = worker["GPU"]  # the same one: the worker reserves it for both
        worker["CPU"] = worker.get("CPU", 0.0) + engine.get("CPU", 0.0)
    model = dict(config.reward.resources_per_model)
    _check_whole_gpus("scaling.resources_per_worker", worker)
    _check_whole_gpus("rollout.resources_per_engine", engine)
    _check_whole_gpus("reward.resources_per_model", model)
    return ResourcePlan(
        [worker] * config.scaling.num_workers,
        [engine] * config.rollout.num_engines,
        [model] * (config.reward.model_replicas if config.reward.model else 0),
        config.scaling.placement_strategy,
        RoleLabels(config.scaling.label_selector, config.rollout.label_selector, config.reward.label_selector),
        colocated,
        config.scaling.accelerator_type if worker.get("GPU") else None,
    )


def _check_whole_gpus(key: str, bundle: Bundle) -> None:
    if (count := bundle.get("GPU", 0.0)) > 1 and count != int(count):
        raise ConfigError(f"{key}: {count:g} GPUs are neither a whole number nor a part of one")


def cluster_nodes() -> list[Node]:
    """Returns the live nodes of the cluster."""
    import ray

    return [Node(dict(node["Resources"]), dict(node["Labels"])) for node in ray.nodes() if node["Alive"]]


def check_room(needed: ResourcePlan) -> None:
    """Raises ConfigError, with the numbers, if even the empty cluster could not hold a plan."""
    nodes = cluster_nodes()
    if not needed.fits(nodes, 1):
        raise ConfigError(f"scaling: {needed} need {lack(needed, nodes)}")


def wait_for_room(needed: ResourcePlan, patience_s: float, notify: Notify) -> None:
    """Returns when the cluster, if it were empty, could hold a plan; asks the autoscaler for what is missing.

    Raises:
        ConfigError: it could not after `patience_s`; the text has the numbers.
    """
    from ray.autoscaler.sdk import request_resources

    nodes, deadline = cluster_nodes(), time.monotonic() + patience_s
    if needed.fits(nodes, 1):
        return
    notify(f"waiting for nodes, {patience_s:.0f} s at most: {needed} need {lack(needed, nodes)}")
    ask_for(needed, 1)
    try:
        while not needed.fits(cluster_nodes(), 1):
            if time.monotonic() > deadline:
                check_room(needed)
            time.sleep(_LOOK_S)
    finally:
        request_resources(bundles=[])  # from here on placement groups ask for themselves


def ask_for(needed: ResourcePlan, times: int) -> None:
    """Asks an autoscaler for nodes that hold so many such runs, instead of what was asked for before.

    The cluster keeps that in mind, also after this process has been killed, until someone asks for no bundles.
    """
    from ray.autoscaler.sdk import request_resources

    workers = _reserved_workers(needed)
    selectors = [*needed.selectors, *[dict(needed.labels.workers)] * len(workers)]
    request_resources(bundles=[*needed.bundles, *workers] * times, bundle_label_selectors=selectors * times)


def lack(needed: ResourcePlan, nodes: Sequence[Node]) -> str:
    """What a plan needs, and what the nodes have instead."""
    total, cluster = needed.total(), _total([node.resources for node in nodes])
    lacking = [name for name, amount in total.items() if amount > cluster.get(name, 0.0) + _TOLERANCE]
    numbers = ", ".join(f"{total[name]:g} {name} but the cluster has {cluster.get(name, 0.0):g}" for name in lacking)
    if not numbers:
        bundles = ", ".join(_text(bundle) for bundle in [*_reserved_workers(needed), *needed.bundles])
        numbers = f"{bundles}, which cannot be placed together on {len(nodes)} nodes with {_node_texts(nodes)}"
    return numbers


def _text(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount)


def _node_texts(nodes: Sequence[Node]) -> str:
    return " and ".join(_text({name: node.resources.get(name, 0.0) for name in ("CPU", "GPU")}) for node in nodes)


def remove_groups(bundle: Bundle) -> None:
    """Removes the placement groups whose every bundle has as much memory as this one.

    Ray Train's group stays, with all that it reserves, when its controller is killed before the group is registered.
    """
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    for key, row in placement_group_table().items():
        same = all(reserved.get("memory") == bundle["memory"] for reserved in row["bundles"].values())
        if same and row["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(key)))
