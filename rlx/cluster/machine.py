"""What this machine alone can hold, and whether a cluster's address answers: known before Ray is imported.

Left out: what a cluster that runs can hold (`resources`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from rlx.cluster.leftovers import ray_folder
from rlx.cluster.placement import Bundle, Node
from rlx.cluster.resources import NoRoomError, ResourcePlan, lack
from rlx.config.errors import ConfigError
from rlx.config.reach import speaks_http, why_closed

_RAY_BYTES = 32 << 20
"""of logs and sockets of a short run"""
RAY_PROCESSES = ("gcs_server", "raylet")
"""a cluster's first node has both, each other node the second"""
_HOST_AND_PORT = re.compile(r"(?:ray://)?(\[[^]/]+\]|[^:/]+):(\d{1,5})")
_OTHER_GPUS = ("/dev/kfd", "/dev/dxg", "/dev/accel")
"""devices of GPUs that NVIDIA's library does not count, but Ray may"""


def address_of(ray_address: str | None) -> str | None:
    """Returns the address of the Ray cluster to join; None: one is started in this process."""
    address = ray_address or os.environ.get("RAY_ADDRESS") or None
    return None if address == "local" else address


def check_place(needed: ResourcePlan, ray_address: str | None) -> None:
    """Refuses at once what would be refused once Ray has started; does nothing in a process that has joined a cluster.

    Raises:
        ConfigError: nothing answers at the cluster's address, or a cluster of this machine cannot hold the plan.
    """
    if _has_joined():
        return
    if address := address_of(ray_address):
        _check_answer(address)
    else:
        check_machine(needed, own_resources())
        check_spread(needed)
        check_labels(needed)
        check_ray_folder(ray_folder())


def check_machine(needed: ResourcePlan, own: Bundle) -> None:
    """Raises NoRoomError, with the numbers, if a plan needs more of something than a machine has.

    Args:
        own: what the machine has; what is not named may be there.
    """
    total = needed.total()
    if any(total.get(name, 0.0) > amount for name, amount in own.items()):
        known = Node({name: own.get(name, amount) for name, amount in total.items()})
        text = f"scaling: {needed} need {lack(needed, [known])}; --ray-address joins a larger one"
        raise NoRoomError(text, [known])


def check_spread(needed: ResourcePlan) -> None:
    """Raises ConfigError if a plan wants a node for each of several bundles."""
    most = max(len(needed.workers), len(needed.bundles))
    if needed.strategy == "STRICT_SPREAD" and most > 1:
        raise ConfigError(
            f"scaling.placement_strategy STRICT_SPREAD: {needed} need {most} nodes, and this machine is one; "
            "--ray-address joins a cluster"
        )


def check_labels(needed: ResourcePlan) -> None:
    """Raises ConfigError if a plan asks for a label that only somebody who starts a cluster by hand can give."""
    for selector in needed.labels:
        for name, wanted in selector.items():
            if not name.startswith("ray.io/") and not wanted.startswith("!"):
                raise ConfigError(
                    f"label_selector {name}: this machine has no such label; --ray-address joins a cluster"
                )


def check_ray_folder(folder: Path) -> None:
    """Raises ConfigError if Ray could not even start for want of room in its folder."""
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < _RAY_BYTES:
        raise ConfigError(
            f"Ray needs room in {folder}, where {free / 2**20:.1f} MiB are free: free {_RAY_BYTES >> 20} MiB, or set "
            f"RAY_TMPDIR to a folder on another disk"
        )


def own_resources() -> Bundle:
    """Returns the CPUs and GPUs of this machine at most, as Ray counts them; no GPU where they cannot be counted."""
    counted = {"CPU": float(os.cpu_count() or 1)}
    if not any(Path(device).exists() for device in _OTHER_GPUS):
        counted["GPU"] = float(_visible(_nvidia_gpus()))
    return counted


def _visible(count: int) -> int:
    """How many of so many GPUs CUDA_VISIBLE_DEVICES shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return count
    return 0 if shown in ("", "NoDevFiles", "-1") else min(count, len(shown.split(",")))


def _nvidia_gpus() -> int:
    """How many GPUs NVIDIA's driver manages; 0 without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() == 0:
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        library.nvmlShutdown()
    return count.value


def _has_joined() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _check_answer(address: str) -> None:
    """Raises ConfigError if an address is none, or nothing listens there; Ray itself would try for a minute."""
    scheme, mark, _ = address.partition("://")
    if found := _HOST_AND_PORT.fullmatch(address):
        reason = why_closed(found[1].strip("[]"), int(found[2]))
        if reason:
            raise ConfigError(f"ray_address {address}: no Ray cluster answers there ({reason}); `ray start` makes one")
        if speaks_http(found[1].strip("[]"), int(found[2])):
            raise ConfigError(
                f"ray_address {address}: that is a web server, perhaps Ray's dashboard, which `ray job submit` takes; "
                "give the port of the head here, 6379 unless it was told another one"
            )
    elif address == "auto":
        if not _runs_ray():
            raise ConfigError("ray_address auto: no Ray cluster is on this machine; `ray start` makes one")
    elif not (mark and _has_client(scheme)):
        raise ConfigError(f"ray_address {address}: expected auto, HOST:PORT or ray://HOST:PORT")


def _has_client(scheme: str) -> bool:
    """Whether a package of this name is installed, which may have a client of Ray: a service's own."""
    return scheme not in sys.stdlib_module_names and bool(importlib.util.find_spec(scheme))


def _runs_ray() -> bool:
    """Whether a node of Ray is on this machine; True where that cannot be seen."""
    names = list(Path("/proc").glob("[0-9]*/comm"))
    return not names or any(_text(file).strip() in RAY_PROCESSES for file in names)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended meanwhile
        return ""
