"""Ends a command with one line when the Ray cluster that it started dies; says it when Ray has no room for objects.

Ray itself would wait a minute and print a page after the first, and stand still without a word after the second.
Left out: clusters that the command joined, whose processes and disks are nobody's here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import ray

from rlx.cluster.leftovers import ray_folder
from rlx.cluster.machine import RAY_PROCESSES
from rlx.types import Notify

_LOOK_S, _LOOK_AT_DISK_S = 1.0, 10.0
_FULL_BYTES = 1 << 20
_SPILLED_BYTES = 100 << 20
"""what Ray writes to the disk at once: its min_spilling_size. Where it does not fit, Ray tries for ever"""
_ANSWER_S = 5.0
"""for a storage to say whether a run has begun"""
_MOST_OF_DISK = 0.95
"""share of a disk beyond which Ray writes no more objects to it: its local_fs_capacity_threshold"""
_SPILLED_FROM = 0.8
"""share of the object store from which on Ray writes objects to the disk: its object_spilling_threshold"""


def end_with_ray(way_on: Callable[[], str], notify: Notify, signal_received: Callable[[], int | None]) -> None:
    """Watches Ray's processes that this one has started, and the disk that they use.

    Args:
        way_on: returns what the person can do next, when it is to be said.
        notify: called once if Ray has no room for objects any more.
        signal_received: the signal by which this process was told to end, if it was. Batch systems send it to Ray's
            processes, too, which is no failure of Ray's.
    """
    if needed := dict(_ray_children()):
        for target, arguments in ((_watch, (needed, way_on, signal_received)), (_watch_disk, (way_on, notify))):
            threading.Thread(target=target, args=arguments, daemon=True, name=f"ray{target.__name__}").start()


def _watch(needed: dict[int, str], way_on: Callable[[], str], signal_received: Callable[[], int | None]) -> None:
    while len(left := dict(_ray_children()).keys() & needed.keys()) == len(needed):
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)
    if not ray.is_initialized():  # this process has ended them
        return
    dead, number = ", ".join(needed[pid] for pid in needed if pid not in left), signal_received()
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    said = "interrupted:" if number else f"error: Ray's {dead} died{lack_of_room(ray_folder())};"
    print(f"{show_cursor}{said} {_in_time(way_on)}", file=sys.stderr, flush=True)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the workers end with their raylet
    os._exit(128 + number if number else 1)  # every call of Ray would wait for the dead


def _in_time(way_on: Callable[[], str]) -> str:
    """What a function says that looks at a storage, which may hang or fail where Ray dies."""
    said = list[str]()

    def ask() -> None:
        with suppress(Exception):
            said.append(way_on())

    asked = threading.Thread(target=ask, daemon=True)
    asked.start()
    asked.join(_ANSWER_S)
    return said[0] if said else "the storage does not answer; --resume goes on with what has begun"


def lack_of_room(folder: Path) -> str:
    """A hint if a disk is full, on which Ray keeps logs and objects that do not fit into memory; else an empty text."""
    try:
        is_full = shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:
        return ""
    return f": {folder} is full, free some or set RAY_TMPDIR to a folder on another disk" if is_full else ""


def _watch_disk(way_on: Callable[[], str], notify: Notify) -> None:
    """Says once that objects fit neither into memory nor onto the disk; in a thread, as Ray may not answer."""
    while ray.is_initialized():
        if lacks_room_for_objects(ray_folder()) and _share_of_store() > _SPILLED_FROM:
            notify(
                f"warning: Ray's object store is full, and so is {ray_folder()}, where it would keep more: the run may "
                f"stand still. Free some of that disk; or end the run and set RAY_TMPDIR to another disk, then "
                f"{_in_time(way_on)}"
            )
            return
        time.sleep(_LOOK_AT_DISK_S)


def lacks_room_for_objects(folder: Path) -> bool:
    """Whether Ray could not write objects that do not fit into memory to a folder's disk."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return False
    return disk.free < max(_SPILLED_BYTES, (1 - _MOST_OF_DISK) * disk.total)


def _share_of_store() -> float:
    """The share of the cluster's object store that holds objects."""
    total, free = (each().get("object_store_memory", 0.0) for each in (ray.cluster_resources, ray.available_resources))
    return 1 - free / total if total else 0.0


def _ray_children() -> Iterator[tuple[int, str]]:
    """The living processes of Ray that this one has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            pid, _, rest = stat.read_text().partition(" (")
            name, _, fields = rest.rpartition(") ")
            state, parent = fields.split()[:2]
            if name in RAY_PROCESSES and int(parent) == os.getpid() and state != "Z":
                yield int(pid), name
