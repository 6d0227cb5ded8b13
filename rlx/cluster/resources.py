"""What a run needs of the cluster: a bundle per worker, engine, reward model and environment, in two placement groups.

`ResourcePlan.fits` predicts how many runs a cluster holds, with the rules by which Ray places bundles on nodes. Only
what asks a cluster imports Ray: a plan is made and checked before.
Left out: the reservations, which `processes`, Ray Train and Ray Tune make.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlx.cluster.placement import TOLERANCE, Bundle, FreeNode, Node, meets, place, total_of
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.sections.scaling import ScalingConfig
from rlx.types import Notify

_LOOK_S = 2.0  # between two looks at the nodes
_PARTS = 10_000  # of a GPU that Ray tells apart


class BundleIndices(NamedTuple):
    """Which bundles of a run's own placement group belong to the engines, the reward models and the environments."""

    engines: list[int]
    reward_models: list[int]
    environments: list[int]


class RoleLabels(NamedTuple):
    """The labels that nodes must have, by what is to run there, as Ray's label selectors."""

    workers: Mapping[str, str] = {}
    engines: Mapping[str, str] = {}
    reward_models: Mapping[str, str] = {}
    environments: Mapping[str, str] = {}


@dataclass(frozen=True)
class ResourcePlan:
    """The bundles of one run, by what uses them.

    Engines, reward models and environments are in one placement group, `bundles`: that of the Tune trial, or one of the
    run's own. Ray Train reserves the workers in a second group. A colocated engine is in none: it uses the GPU of its
    worker.
    """

    workers: list[Bundle]
    engines: list[Bundle]
    reward_models: list[Bundle] = field(default_factory=list)
    strategy: str = "PACK"  # of Ray's placement groups
    labels: RoleLabels = field(default_factory=RoleLabels)
    colocated: bool = False  # each engine runs beside a worker, on its GPU
    accelerator: str | None = None  # kind of the workers' GPUs
    environments: list[Bundle] = field(default_factory=list)

    @property
    def bundles(self) -> list[Bundle]:
        """The bundles of engines, reward models and environments in the order in which they are reserved."""
        unordered = list(itertools.chain(*self._kinds))
        return [unordered[i] for i in self._order]

    @property
    def selectors(self) -> list[dict[str, str]]:
        """The label selector of each of `bundles`."""
        labels = zip(
            (self.labels.engines, self.labels.reward_models, self.labels.environments), self._kinds, strict=True
        )
        unordered = [selector for selector, bundles in labels for _ in bundles]
        return [dict(unordered[i]) for i in self._order]

    @property
    def indices(self) -> BundleIndices:
        """Indices in `bundles`."""
        index = {i: position for position, i in enumerate(self._order)}
        ends = itertools.accumulate(map(len, self._kinds), initial=0)
        return BundleIndices(*([index[i] for i in range(*edges)] for edges in itertools.pairwise(ends)))

    @property
    def _kinds(self) -> tuple[list[Bundle], list[Bundle], list[Bundle]]:
        return ([] if self.colocated else self.engines), self.reward_models, self.environments

    @property
    def _order(self) -> list[int]:
        """Largest part of a GPU first: in the order 0.4, 0.4, 0.6, 0.6 the bundles do not fit on two GPUs."""
        size = [(bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)) for bundle in itertools.chain(*self._kinds)]
        return sorted(range(len(size)), key=lambda i: size[i], reverse=True)

    def total(self) -> Bundle:
        """Returns the sum of all bundles, e.g. {"CPU": 2.0}."""
        return total_of([*_reserved_workers(self), *itertools.chain(*self._kinds)])

    def __str__(self) -> str:
        counts = {"worker": len(self.workers), "engine": len(self.engines), "reward model": len(self.reward_models)}
        counts["environment"] = len(self.environments)
        return " and ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)

    def fits(self, nodes: Sequence[Node], most: int = 10_000) -> int:
        """Returns how many such runs the empty nodes hold at once, as Ray places their groups.

        Both groups of each run find room when runs start one after another, and when the engines of all of them start
        before the workers of the first.
        """
        free, count = [FreeNode(node) for node in nodes], 0
        while count < most and self._place_first(free) and self._place_second(free):
            count += 1
        while count and not self._fits_engines_first(nodes, count):
            count -= 1
        return count

    def _fits_engines_first(self, nodes: Sequence[Node], count: int) -> bool:
        free = [FreeNode(node) for node in nodes]
        engines = all(self._place_first(free) for _ in range(count))
        return engines and all(self._place_second(free) for _ in range(count))

    def _place_first(self, nodes: Sequence[FreeNode]) -> bool:
        return place(nodes, self.bundles, self.selectors, self.strategy)

    def _place_second(self, nodes: Sequence[FreeNode]) -> bool:
        return place(nodes, _reserved_workers(self), [dict(self.labels.workers)] * len(self.workers), self.strategy)


def _reserved_workers(needed: ResourcePlan) -> list[Bundle]:
    """Returns the workers' bundles as Ray Train reserves them: it adds the kind of accelerator by itself."""
    kind = {f"accelerator_type:{needed.accelerator}": 0.001} if needed.accelerator else {}
    return [{**worker, **kind} for worker in needed.workers]


# ---------------------------------------------------------------------------------------------------------------------
# The cluster


def plan_resources(config: RunConfig) -> ResourcePlan:
    """Returns the bundles that a config asks for.

    Raises:
        ConfigError: a bundle has more than one GPU and a part of another, or nothing says whether engines beside
            workers on GPUs have any.
    """
    _check_engines(config.scaling, config.rollout)
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
    hosts = config.environment.num_actors if config.environment.name else 0
    roles = config.scaling, config.rollout, config.reward, config.environment
    return ResourcePlan(
        [worker] * config.scaling.num_workers,
        [engine] * config.rollout.num_engines,
        [model] * (config.reward.model_replicas if config.reward.model else 0),
        config.scaling.placement_strategy,
        RoleLabels(*(each.label_selector for each in roles)),
        colocated,
        config.scaling.accelerator_type if worker.get("GPU") else None,
        [dict(config.environment.resources_per_actor)] * hosts,
    )


def sharing_gpus(runs: int, scaling: ScalingConfig, rollout: RolloutConfig, reward: RewardConfig) -> dict[str, Any]:
    """Returns the settings, by dotted key, with which so many runs share the GPUs that one would have to itself.

    While one run updates, the engines draw for another: engines on one GPU take turns, so that runs do not draw at the
    same time and then update at the same time. Each engine has so much less memory for its KV cache.

    Raises:
        ConfigError: a run uses no GPU, whole GPUs for a process, one GPU in turns, or several workers.
    """
    option = f"--interleave {runs}"
    if not scaling.use_gpu:
        raise ConfigError(f"{option}: runs use no GPU (scaling.use_gpu); --max-concurrent is for CPUs")
    if rollout.placement == "colocated":
        raise ConfigError(f"{option}: with rollout.placement colocated one run already uses its GPUs in turns")
    if scaling.num_workers > 1:
        raise ConfigError(
            f"{option}: Ray may give two of the {scaling.num_workers} workers of a run parts of one GPU, which NCCL "
            "refuses; it is for scaling.num_workers 1"
        )
    bundles = {
        "scaling.resources_per_worker": {"GPU": 1.0} | scaling.resources_per_worker,
        "rollout.resources_per_engine": rollout.resources_per_engine,
        "reward.resources_per_model": reward.resources_per_model,
    }
    for key, bundle in bundles.items():
        if (gpus := bundle.get("GPU", 0.0)) > 1:
            several = "rollout.tensor_parallel takes" if key == "rollout.resources_per_engine" else f"{key} has"
            raise ConfigError(
                f"{option}: {several} {gpus:g} GPUs; Ray shares a GPU only where a process has one at most"
            )
    shared = {key: _shared(bundle, runs) for key, bundle in bundles.items() if bundle.get("GPU")}
    memory = rollout.gpu_memory_utilization / runs
    return {**shared, "rollout.gpu_memory_utilization": memory, "rollout.alternate": True}


def _shared(bundle: Bundle, runs: int) -> Bundle:
    """A bundle with its part of the GPU, rounded down: three thirds of Ray's four digits are one GPU."""
    return {**bundle, "GPU": math.floor(_PARTS * bundle["GPU"] / runs) / _PARTS}


def _check_engines(scaling: ScalingConfig, rollout: RolloutConfig) -> None:
    """Refuses bundles of engines that were meant for CPUs, or from which the GPU was left out by mistake."""
    if scaling.use_gpu and rollout.placement == "separate" and "GPU" not in rollout.resources_per_engine:
        raise ConfigError(
            f"rollout.resources_per_engine has no GPU, and workers have (scaling.use_gpu): "
            f"--rollout.resources-per-engine.GPU {rollout.tensor_parallel} adds it; 0 is for engines on CPUs"
        )


def _check_whole_gpus(key: str, bundle: Bundle) -> None:
    if (count := bundle.get("GPU", 0.0)) > 1 and count != int(count):
        raise ConfigError(f"{key}: {count:g} GPUs are neither a whole number nor a part of one")


def cluster_nodes() -> list[Node]:
    """Returns the live nodes of the cluster."""
    import ray

    return [Node(dict(node["Resources"]), dict(node["Labels"])) for node in ray.nodes() if node["Alive"]]


class NoRoomError(ConfigError):
    """The nodes could not hold a plan, even if they were empty."""

    def __init__(self, message: str, nodes: Sequence[Node] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


def check_room(needed: ResourcePlan) -> None:
    """Raises NoRoomError, with the numbers, if even the empty cluster could not hold a plan."""
    nodes = cluster_nodes()
    if not needed.fits(nodes, 1):
        raise NoRoomError(f"scaling: {needed} need {lack(needed, nodes)}", nodes)


def wait_for_room(needed: ResourcePlan, patience_s: float, notify: Notify) -> None:
    """Returns when the cluster, if it were empty, could hold a plan; asks the autoscaler for what is missing.

    Raises:
        NoRoomError: it could not after `patience_s`; the text has the numbers.
    """
    from ray.autoscaler.sdk import request_resources

    if not patience_s:
        check_room(needed)
        return
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

    bundles = [*needed.bundles, *_reserved_workers(needed)]
    request_resources(bundles=bundles * times, bundle_label_selectors=_all_selectors(needed) * times)


def _all_selectors(needed: ResourcePlan) -> list[dict[str, str]]:
    """Returns the label selector of each bundle: of engines and reward models, then of workers."""
    return [*needed.selectors, *[dict(needed.labels.workers)] * len(needed.workers)]


def lack(needed: ResourcePlan, nodes: Sequence[Node]) -> str:
    """What a plan needs, and what the nodes have instead."""
    counted = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
    total, cluster = needed.total(), total_of([node.resources for node in nodes])
    lacking = [name for name, amount in total.items() if amount > cluster.get(name, 0.0) + TOLERANCE]
    numbers = ", ".join(f"{total[name]:g} {name} but the cluster has {cluster.get(name, 0.0):g}" for name in lacking)
    unmet = [s for s in _all_selectors(needed) if s and not any(meets(node.labels, s) for node in nodes)]
    if unmet and not numbers:
        labels = " and ".join(f"{name}={value}" for name, value in unmet[0].items())
        return f"a node with the labels {labels}, which none of {counted} has"
    if not numbers:
        bundles = ", ".join(_text(bundle) for bundle in [*_reserved_workers(needed), *needed.bundles])
        numbers = f"{bundles}, which {needed.strategy} cannot place on {counted} with {_node_texts(nodes)}"
    return numbers


@contextmanager
def naming_ways_out(tree: Mapping[str, Any], *, in_python: bool = False) -> Iterator[None]:
    """Of a new run or sweep for which there is no room: names the setting with which there would be, if one is known.

    Args:
        tree: its config, with what was given alone: other settings may follow that one.
        in_python: the setting is named as configs have it, not as an option of a command.
    """
    try:
        yield
    except NoRoomError as error:
        raise ConfigError(f"{error}{_way_out(tree, error.nodes, in_python)}") from None


def _way_out(tree: Mapping[str, Any], nodes: Sequence[Node], in_python: bool) -> str:
    """The end of a line that names a setting with which the plan of a config is valid and fits; empty if none is."""
    config = from_tree(dict(tree))
    if not config.scaling.use_gpu:
        return ""
    ways: list[tuple[str, Any, str]] = [
        ("rollout.placement", "colocated", ", where engines take turns with the workers"),
        *(("rollout.num_engines", count, "") for count in range(config.rollout.num_engines - 1, 0, -1)),
    ]
    for key, value, meaning in ways:
        with suppress(ConfigError):
            if plan_resources(from_tree(with_overrides(tree, {key: value}))).fits(nodes, 1):
                setting = f"{key}: {value}" if in_python else f"--{key.replace('_', '-')} {value}"
                return f"; there is room with {setting}{meaning}"
    return ""


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
