"""What nodes other than the driver's need of it: the folders of models.

A run works on nodes with other disks. A folder that only the driver has is copied to the others if it is small, and
refused with the name of the node if not.
Left out: prompts, which Ray Data brings to the workers, the storage, which all nodes must reach by themselves, and
records (`rlx.runs.relay`).
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.config.errors import ConfigError

_LARGEST_COPY = 512 * 2**20  # bytes


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


def check_path(path: str, setting: str) -> None:
    """Raises ConfigError, naming a node, if a file or folder of this node is not at the same path on all others."""
    missing = [node for node in other_nodes() if not _on(node, os.path.exists, path)] if os.path.exists(path) else []
    if missing:
        raise ConfigError(
            f"{setting} {path}: {_title(missing[0])} does not have it. Trials with prompts of their own read them on "
            "their own nodes: use S3, or a folder that all nodes have"
        )


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
