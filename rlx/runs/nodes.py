"""What nodes other than the driver's need of it: the model's folder, and a way to its tracking service.

A run works on nodes with other disks. A folder that only the driver has is copied to the others if it is small, and
refused with the name of the node if not. Records for a database on the driver's disk go through an actor there.
Left out: prompts, which Ray Data brings to the workers, and the storage, which all nodes must reach by themselves.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.config.errors import ConfigError
from rlx.tracking.base import RunStatus, TrackingService

_LARGEST_COPY = 512 * 2**20  # bytes
_AT_ONCE = 4  # calls of MLflow; SQLite writes one by one, and more than its 15 connections fail after 30 s


_own_clusters = set[str]()  # addresses


def note_own_cluster() -> None:
    """Notes that this process has started the cluster that it is in."""
    _own_clusters.add(ray.get_runtime_context().gcs_address)


def is_own_cluster() -> bool:
    """Whether this process has started its cluster; any other may grow, and have nodes with other disks."""
    return ray.get_runtime_context().gcs_address in _own_clusters


def other_nodes() -> list[str]:
    """Returns the ids of all live nodes but this one."""
    here = ray.get_runtime_context().get_node_id()
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def bring_folder(path: str, setting: str) -> None:
    """Makes sure that all nodes have a model folder of this node at the same path; copies it to those that do not.

    Args:
        path: a folder, or a name on the hub, which is left to the nodes.
        setting: the setting that names it, for errors.

    Raises:
        ConfigError: a node does not have the folder, and it is too large to be copied or cannot be written there.
    """
    folder = Path(path)
    missing = [node for node in other_nodes() if not _on(node, _has, path)] if folder.is_dir() else []
    if not missing:
        return
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > _LARGEST_COPY:
        lacking = f"{_title(missing[0])} does not have it"
        raise ConfigError(f"{setting} {path}: {lacking}, and {size >> 20} MiB are too many to be copied")
    content = ray.put(_packed(folder))
    for node in missing:
        try:
            _on(node, _unpack, content, path)
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(f"{setting} {path}: it cannot be copied to {_title(node)}: {error.cause}") from None


def _title(node: str) -> str:
    return next(f"node {each['NodeManagerAddress']}" for each in ray.nodes() if each["NodeID"] == node)


def _on(node: str, function: Any, *args: Any) -> Any:
    """Calls a function on a node; returns True if the node is lost meanwhile, because then it needs nothing."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        return ray.get(ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(*args))
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError:
        if node in other_nodes():
            raise
        return True


def _has(path: str) -> bool:
    return Path(path, "config.json").is_file()


def _packed(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            archive.add(file, str(file.relative_to(folder)))
    return content.getvalue()


def _unpack(content: bytes, path: str) -> None:
    """Makes the folder at once: a process that reads it never sees half of it."""
    if _has(path):
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as unfinished:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(f"{unfinished}/model", filter="data")
        try:
            Path(unfinished, "model").rename(path)
        except OSError:
            if not _has(path):  # otherwise another process was faster
                raise


# ---------------------------------------------------------------------------------------------------------------------
# Records


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
