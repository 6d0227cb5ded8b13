"""A way to the tracking service from all nodes: records for a database on the driver's disk go through an actor there.

Left out: the records themselves (rlx.tracking).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.cluster.connection import is_own_cluster
from rlx.cluster.nodes import other_nodes
from rlx.tracking.base import RunStatus, TrackingService

_AT_ONCE = 4  # calls of MLflow; SQLite writes one by one, and more than its 15 connections fail after 30 s


def reachable(service: TrackingService) -> TrackingService:
    """Returns a tracking service as all nodes reach it, also those that join later. Call it in the driver.

    MLflow opens a SQLite database itself, so only a process of this node can write to it: others ask an actor here. On
    a cluster that this process has started for itself, and with a server, the service itself is returned.
    """
    is_alone = is_own_cluster() and not other_nodes()
    if isinstance(service, RelayedService) or not service.address.startswith("sqlite:") or is_alone:
        return service
    return start_relay(service)


def start_relay(service: TrackingService) -> RelayedService:
    """Returns a service whose calls an actor on this node makes; it ends with the last copy of the service."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(_Relay).options(num_cpus=0, max_concurrency=_AT_ONCE, scheduling_strategy=here).remote(service)
    return RelayedService(actor, service.title, service.address)


class _Relay:
    """Calls the tracking service on the node whose disk it is on."""

    def __init__(self, service: TrackingService) -> None:
        self._service, self._writers = service, dict[str, Any]()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self._service, method)(*args, **options)

    def write(self, run_id: str, method: str, *args: Any, **options: Any) -> None:
        if run_id not in self._writers:
            self._writers[run_id] = self._service.writer(run_id)
        getattr(self._writers[run_id], method)(*args, **options)


class RelayedService:
    """A tracking service that an actor on another node calls. Implements `TrackingService`."""

    def __init__(self, actor: Any, title: str, address: str) -> None:
        self.actor, self.title, self.address = actor, title, address

    def check(self) -> None:
        self._call("check")

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

    def reopen_run(self, run_id: str, at: int) -> bool:
        return bool(self._call("reopen_run", run_id, at))

    def writer(self, run_id: str) -> RelayedRun:
        return RelayedRun(self.actor, run_id)

    def is_refusal(self, error: Exception) -> bool:
        return bool(self._call("is_refusal", error))

    def cause(self, error: Exception) -> str:
        return str(self._call("cause", error))

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return _answer(self.actor.call.remote(method, *args, **options))


class RelayedRun:
    """Writes to one run through an actor on another node. Implements `RunWriter`."""

    def __init__(self, actor: Any, run_id: str) -> None:
        self._actor, self._run_id = actor, run_id

    def log(self, metrics: Mapping[str, float], step: int, at: int) -> None:
        self._write("log", metrics, step, at)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._write("log_samples", rows, step)

    def log_text(self, name: str, text: str) -> None:
        self._write("log_text", name, text)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._write("set_tags", tags)

    def end(self, status: RunStatus, at: int) -> None:
        self._write("end", status, at)

    def _write(self, method: str, *args: Any) -> None:
        _answer(self._actor.write.remote(self._run_id, method, *args))


def _answer(call: Any) -> Any:
    """The result of a call; raises what the client of the service has raised."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause or error) from None
