"""By which rules Ray places the bundles of a group on nodes: those of its head node (bundle_scheduling_policy.cc).

Left out: which bundles a run has, and how many runs fit (resources.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

Bundle = dict[str, float]
"""amounts by resource name, e.g. {"CPU": 1.0, "GPU": 0.5}; on one node"""
TOLERANCE = 1e-6
"""Ray counts in 1/10000"""
_LABELS = "labels {}"  # a made-up resource of the nodes that meet a label selector


@dataclass(frozen=True)
class Node:
    """A node of the cluster: what it has in all, and its labels."""

    resources: Bundle
    labels: Mapping[str, str] = field(default_factory=dict)


def place(
    nodes: Sequence[FreeNode], bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]], strategy: str
) -> bool:
    """Takes the bundles of a group from the nodes; returns whether they found room.

    Ray picks nodes by total free resources and does not retry if a node cannot fit the fractional GPUs, so it may
    place fewer groups than would fit.

    Args:
        selectors: the label selector of each bundle.
        strategy: of Ray's placement groups.
    """
    able = [node.offer(selectors) for node in nodes]
    chosen = _CHOICES[strategy](_labelled(bundles, selectors), able)
    return chosen is not None and all(nodes[i].take(b) for i, b in zip(chosen, bundles, strict=True))


def _labelled(bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]]) -> list[Bundle]:
    """The bundles with a resource for each label selector, which only nodes with these labels have; see `offer`."""
    return [b | ({_LABELS.format(dict(s)): 1.0} if s else {}) for b, s in zip(bundles, selectors, strict=True)]


class FreeNode:
    """The free resources of a node."""

    def __init__(self, node: Node) -> None:
        self.labels, self.free = node.labels, dict(node.resources)
        self.gpus = [1.0] * int(node.resources.get("GPU", 0))

    def offer(self, selectors: Sequence[Mapping[str, str]]) -> Bundle:
        """What is free, with one more resource for each label selector that the node meets."""
        met = [dict(selector) for selector in selectors if selector and meets(self.labels, selector)]
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
        enough = [i for i, free in enumerate(self.gpus) if free + TOLERANCE >= min(amount, 1.0)]
        if amount < 1:
            return sorted(enough, key=lambda i: self.gpus[i])[:1] if enough or not amount else None
        return enough[: int(amount)] if len(enough) >= amount else None


# ---------------------------------------------------------------------------------------------------------------------
# The strategies: bundles, free resources of each node -> the node of each bundle, None if they cannot be placed


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
    node = _best_node(total_of(bundles), free, range(len(free)))
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


def meets(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels meet a selector: a value, !value, in(a,b) or !in(a,b) for each label."""
    return all(_matches(labels.get(name), wanted) for name, wanted in selector.items())


def _matches(value: str | None, wanted: str) -> bool:
    if wanted.startswith("!"):
        return not _matches(value, wanted[1:])
    inside = re.fullmatch(r"in\((.*)\)", wanted)
    return value in ([each.strip() for each in inside[1].split(",")] if inside else [wanted])


def _contains(free: Mapping[str, float], bundle: Bundle) -> bool:
    return all(free.get(name, 0.0) + TOLERANCE >= amount for name, amount in bundle.items())


def _subtract(free: Bundle, bundle: Bundle) -> None:
    for name, amount in bundle.items():
        free[name] = free.get(name, 0.0) - amount


def total_of(bundles: Sequence[Bundle]) -> Bundle:
    names = {name: None for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
