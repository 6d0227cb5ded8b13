"""A way to the tracking services from all nodes: records for the driver's disk go through an actor there.

So do those for a service that takes the records of a run from one process.

Left out: the records themselves (rlx.tracking).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.cluster.connection import is_own_cluster
from rlx.cluster.nodes import other_nodes
from rlx.config.errors import one_line
from rlx.config.sections.records import BackendName
from rlx.tracking.base import Failure, Reach, RunStatus, TrackingService

_AT_ONCE = 4  # calls of MLflow; SQLite writes one by one, and more than its 15 connections fail after 30 s
_VARIABLES = "WANDB_"


def reachable(services: Sequence[TrackingService]) -> Sequence[TrackingService]:
    """Returns tracking services as all processes reach them, also those of nodes that join later.

    Call it in the driver. On a cluster that this process has started for itself, all processes reach its disk.
    """
    is_alone = is_own_cluster() and not other_nodes()
    near = {Reach.ANYWHERE, Reach.NODE} if is_alone else {Reach.ANYWHERE}
    return [service if service.reach in near else start_relay(service) for service in services]


def from_driver(services: Sequence[TrackingService], reachable: Sequence[TrackingService]) -> list[TrackingService]:
    """Returns the services as the driver uses them: itself, where the cluster may end first, or as all others do."""
    pairs = zip(services, reachable, strict=True)
    return [others if itself.reach is Reach.PROCESS else itself for itself, others in pairs]


def start_relay(service: TrackingService) -> RelayedService:
    """Returns a service whose calls an actor on this node makes; it ends with the last copy of the service."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(_Relay).options(num_cpus=0, max_concurrency=_AT_ONCE, max_restarts=-1, scheduling_strategy=here)
    own = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    return RelayedService(actor.remote(service, own), service.name, service.title, service.address)


class _Relay:
    """Calls the tracking service on the driver's node.

    Args:
        variables: of the driver's environment, which an older cluster does not have. They travel in memory alone: among
            them may be a key, and Ray logs those of a `runtime_env`.
    """

    def __init__(self, service: TrackingService, variables: Mapping[str, str]) -> None:
        os.environ |= variables
        self._service, self._writers = service, dict[str, Any]()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self._service, method)(*args, **options)

    def write(self, run_id: str, method: str, *args: Any, **options: Any) -> Any:
        if run_id not in self._writers:
            self._writers[run_id] = self._service.writer(run_id)
        return getattr(self._writers[run_id], method)(*args, **options)


class RelayedService:
    """A tracking service that an actor calls. Implements `TrackingService`."""

    reach = Reach.ANYWHERE

    def __init__(self, actor: Any, name: BackendName, title: str, address: str) -> None:
        self.actor, self.name, self.title, self.address = actor, name, title, address

    def check(self, experiment: str) -> None:
        self._call("check", experiment)

    def browse_command(self) -> str:
        return str(self._call("browse_command"))

    def run_page(self, run_id: str | None) -> str:
        return str(self._call("run_page", run_id))

    def make_run(
        self,
        key: str,
        experiment: str,
        name: str,
        *,
        parent: str | None,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        at: int,
    ) -> str:
        return str(self._call("make_run", key, experiment, name, parent=parent, params=params, tags=tags, at=at))

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        self._call("reopen_run", run_id, at, params, tags)

    def writer(self, run_id: str) -> RelayedRun:
        return RelayedRun(self.actor, run_id)

    def failure(self, error: Exception) -> Failure:
        try:
            return Failure(self._call("failure", error))
        except ray.exceptions.RayError:  # the actor is being restarted: the service has said nothing
            return Failure.AWAY

    def cause(self, error: Exception) -> str:
        try:
            return str(self._call("cause", error))
        except ray.exceptions.RayError:
            return one_line(error)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return _answer(self.actor.call.remote(method, *args, **options))


class RelayedRun:
    """Writes to one run through an actor. Implements `RunWriter`."""

    def __init__(self, actor: Any, run_id: str) -> None:
        self._actor, self._run_id = actor, run_id

    def missing(self) -> str:
        return str(self._write("missing"))

    def log(self, metrics: Mapping[str, float], step: int, at: int, again: bool = False) -> None:
        self._write("log", metrics, step, at, again)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int, again: bool = False) -> None:
        self._write("log_samples", rows, step, again)

    def log_text(self, name: str, text: str) -> None:
        self._write("log_text", name, text)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._write("set_tags", tags)

    def end(self, status: RunStatus, at: int) -> None:
        self._write("end", status, at)

    def _write(self, method: str, *args: Any) -> Any:
        return _answer(self._actor.write.remote(self._run_id, method, *args))


def _answer(call: Any) -> Any:
    """The result of a call; raises what the client of the service has raised."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause or error) from None
