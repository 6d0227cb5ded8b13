"""How many trials of a sweep run at once, as nodes come and go; nodes for the others are asked of an autoscaler.

Left out: what fits on which nodes (`rlx.cluster.resources`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from rlx.cluster import connection, nodes
from rlx.cluster.placement import Node
from rlx.cluster.resources import ask_for, cluster_nodes
from rlx.config.errors import ConfigError, one_line
from rlx.sweeps.choices import PAUSING
from rlx.sweeps.records import SweepPlan

_LOG = logging.getLogger("rlx")
_MOST_ASKED = 200  # trials for which an autoscaler is asked at once
_COUNT_NODES_S = 5.0  # between two looks at the nodes of the cluster
_MOMENT_S = 1.0  # for which Tune's loop waits for a copy of the models


def concurrency(plan: SweepPlan, found: Sequence[Node]) -> int:
    """Returns how many trials can run at once on these nodes, at least 1."""
    most = min(plan.total_trials, plan.max_concurrent or plan.total_trials)
    return max(1, plan.resources.fits(found, most))


def most_at_once(plan: SweepPlan) -> int | None:
    """Returns how many trials Tune may run at once where it starts all of them at first; None: that is not needed.

    Raises:
        ConfigError: the placement strategy does not allow that.
    """
    if plan.scheduler not in PAUSING or (count := concurrency(plan, cluster_nodes())) >= plan.total_trials:
        return None
    if plan.resources.strategy.startswith("STRICT"):
        raise ConfigError(
            f"--scheduler {plan.scheduler} with {plan.total_trials} trials, {count} at once, needs "
            f"scaling.placement_strategy PACK or SPREAD"
        )
    return count


class NeededModel(NamedTuple):
    """A model that trials need on every node."""

    path: str  # its folder, or its name on the Hub
    setting: str  # the one that names it


class Room:
    """How many trials of a sweep may run at once, as nodes come and go; asks an autoscaler for the nodes of the others.

    New nodes get the models, and count once they have them.
    """

    def __init__(self, plan: SweepPlan, models: Sequence[NeededModel]) -> None:
        self._plan, self._models = plan, models
        self._counted: list[Node] = []
        self._is_joined = not connection.is_own_cluster()
        self._count, self._nodes, self._until = 1, set[str](), 0.0  # until then, of `time.monotonic()`, nothing changes
        self._copying: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_copying": None}  # Tune copies what its callbacks and searches refer to

    @property
    def is_due(self) -> bool:
        """Whether it is time to look at the nodes again."""
        return time.monotonic() >= self._until

    def trials(self, open_trials: int) -> int:
        """Returns how many may run at once; `open_trials`: those that are not over."""
        if self.is_due:
            self._until = time.monotonic() + _COUNT_NODES_S
            found = cluster_nodes()
            # Counting takes a second for hundreds of nodes and trials.
            if found != self._counted and self._all_have_models():
                self._count, self._counted = concurrency(self._plan, found), found
            if self._is_joined:
                ask_for(self._plan.resources, min(open_trials, self._plan.max_concurrent or open_trials, _MOST_ASKED))
        return self._count

    def _all_have_models(self) -> bool:
        """Begins to bring the models to new nodes, in a thread: Tune's loop, which asks, waits for a moment only."""
        if new := set(nodes.other_nodes()) - self._nodes:
            if not (self._copying and self._copying.is_alive()):
                self._copying = threading.Thread(target=self._bring_to, args=(new,), daemon=True)
                self._copying.start()
            self._copying.join(_MOMENT_S)
        return not new - self._nodes

    def _bring_to(self, new: set[str]) -> None:
        if all([_bring(model) for model in self._models]):
            self._nodes |= new


def _bring(model: NeededModel) -> bool:
    """Copies a model to the nodes that lack it; False if that has to be tried again."""
    try:
        nodes.bring_folder(*model)
        return True
    except (ConfigError, ray.exceptions.RayError) as error:  # a node that is about to go is no reason to end a sweep
        _LOG.warning("the sweep goes on: %s", one_line(error, 300))
        return False
