"""What nodes other than the driver's need of it: the folders of models.

A run works on nodes with other disks. A folder that only the driver has is copied to the others if it is small, and
refused with the name of the node if not. A copy that differs from the driver's folder is made anew; another node's own
folder is never written to.
Left out: prompts, which Ray Data brings to the workers, the storage, which all nodes must reach by themselves, and
records (`rlx.runs.relay`).
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.cluster.connection import is_own_cluster
from rlx.config.errors import ConfigError

_LARGEST_COPY = 512 * 2**20  # bytes
_SAMPLE, _STRIDE = 2**20, 2**24  # bytes of a file that are compared, and from one such part to the next
_PARTS = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py")  # what a model is read from
_MARK = ".copied-by-rlx"
"""an empty file in a folder that rlx has made"""


def other_nodes() -> list[str]:
    """Returns the ids of all live nodes but this one."""
    here = ray.get_runtime_context().get_node_id()
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def bring_folder(path: str, setting: str) -> None:
    """Makes sure that all nodes have a model folder of this node at the same path; copies it to those that do not.

    Folders with the same names, sizes and samples of bytes are taken for the same.

    Args:
        path: a folder, or a name on the hub, which is left to the nodes.
        setting: the setting that names it, for errors.

    Raises:
        ConfigError: a node does not have the folder, and it is too large to be copied or cannot be written there; or
            it has another model there, which rlx has not copied.
    """
    folder = Path(path)
    others = other_nodes() if folder.is_dir() else []
    digest = _digest(path) if others else ""  # a node alone need not read its models for it
    missing = _lacking(others, _has, digest, path)
    if not missing:
        return
    if (size := _size(folder)) > _LARGEST_COPY:
        lacking = f"{_title(missing[0])} does not have it, or has another one"
        raise ConfigError(f"{setting} {path}: {lacking}, and {size >> 20} MiB are too many to be copied")
    content = ray.put(_packed(folder))
    copies = [_on(node, _unpack, content, digest, path) for node in missing]
    for node, copy in zip(missing, copies, strict=True):
        try:
            _result(node, copy)
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(f"{setting} {path}: it cannot be copied to {_title(node)}: {error.cause}") from None


def bring_models(models: Sequence[tuple[str, str]]) -> FolderCopies | None:
    """Brings model folders, each given with its setting, to the nodes that lack them, see `bring_folder`.

    Returns:
        What nodes that join later need of them; None on a cluster of this process, which none can join.

    Raises:
        ConfigError: see `bring_folder`.
    """
    for path, setting in models:
        bring_folder(path, setting)
    return None if is_own_cluster() else FolderCopies.of(path for path, _ in models)


class FolderStore:
    """An actor on the driver's node that gives others its folders; each is read once somebody asks for it."""

    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}  # references to packed folders by their paths

    def content(self, path: str) -> Any:
        """A reference to a packed folder."""
        if path not in self._contents:
            self._contents[path] = ray.put(_packed(Path(path)))
        return self._contents[path]


@dataclass(frozen=True)
class FolderCopies:
    """Model folders of the driver's node, for a process that starts on a node which has joined since."""

    digests: dict[str, str]  # of the folders, by their paths
    store: Any  # actor handle of a `FolderStore`

    @classmethod
    def of(cls, paths: Iterable[str]) -> FolderCopies:
        """Those of this node's folders that may be copied; names on the hub are left to the nodes."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        store = ray.remote(FolderStore).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        folders = [Path(path) for path in dict.fromkeys(paths) if Path(path).is_dir()]
        small = [str(folder) for folder in folders if _size(folder) <= _LARGEST_COPY]
        return cls({path: _digest(path) for path in small}, store)

    def bring_here(self) -> None:
        """Writes the folders that this node lacks.

        Raises:
            ConfigError: this node has another model at such a path, which rlx has not copied.
        """
        for path, digest in self.digests.items():
            if not _has(digest, path):
                _unpack(ray.get(ray.get(self.store.content.remote(path))), digest, path)


def check_path(path: str, setting: str) -> None:
    """Raises ConfigError, naming a node, if a file or folder of this node is not at the same path on all others."""
    missing = _lacking(other_nodes(), os.path.exists, path) if os.path.exists(path) else []
    if missing:
        raise ConfigError(
            f"{setting} {path}: {_title(missing[0])} does not have it. Trials with prompts of their own read them on "
            "their own nodes: use S3, or a folder that all nodes have"
        )


def _title(node: str) -> str:
    return next(f"node {each['NodeManagerAddress']}" for each in ray.nodes() if each["NodeID"] == node)


def _lacking(asked: Sequence[str], has: Callable[..., bool], *what: str) -> list[str]:
    """The nodes that say they do not have it; all are asked at once."""
    answers = [_on(node, has, *what) for node in asked]
    return [node for node, answer in zip(asked, answers, strict=True) if not _result(node, answer)]


def _on(node: str, function: Any, *args: Any) -> Any:
    """Calls a function on a node; does not wait."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(*args)


def _result(node: str, call: Any) -> Any:
    """What a call on a node returns; True if the node is lost meanwhile, because then it needs nothing."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError:
        if node in other_nodes():
            raise
        return True


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    """All files in a folder and those below it, sorted."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _has(digest: str, path: str) -> bool:
    return bool(digest) and _digest(path) == digest


def _digest(path: str) -> str:
    """A checksum of the model in a folder: its files' names, sizes and parts of their bytes; empty without a model."""
    if not Path(path, "config.json").is_file():
        return ""
    found = hashlib.blake2b(digest_size=16)
    for file in _files(Path(path)):
        name, size = file.relative_to(path), file.stat().st_size
        if file.suffix not in _PARTS or any(part.startswith(".") for part in name.parts):  # such as .cache
            continue
        found.update(f"{name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in range(0, size, _STRIDE):
                opened.seek(start)
                found.update(opened.read(_SAMPLE))
    return found.hexdigest()


def _packed(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, mode="w", strict_timestamps=False) as archive:  # stored, not compressed
        for file in _files(folder):
            archive.write(file, str(file.relative_to(folder)))
    return content.getvalue()


def _unpack(content: bytes, digest: str, path: str) -> None:
    """Makes the folder at once: a process that reads it never sees half of it.

    Raises:
        ConfigError: there is another model, which rlx has not copied.
    """
    if _has(digest, path):
        return
    if _digest(path) and not Path(path, _MARK).is_file():
        raise ConfigError("it has another model there: remove that one, or copy this node's folder over it")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as unfinished:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            archive.extractall(f"{unfinished}/model")
        Path(unfinished, "model", _MARK).touch()
        try:
            if Path(path, _MARK).is_file():  # an older copy
                Path(path).rename(f"{unfinished}/older")
            Path(unfinished, "model").rename(path)
        except OSError:
            if not _has(digest, path):  # otherwise another process was faster
                raise
