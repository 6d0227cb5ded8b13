"""Ends a command with one line when the Ray cluster that it started dies. Ray would wait a minute and print a page.

Left out: clusters that the command joined, whose processes are nobody's here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ray

from rlx.cluster.leftovers import ray_folder

_NEEDED = ("gcs_server", "raylet")
_LOOK_S = 1.0
_FULL_BYTES = 1 << 20


def end_with_ray(way_on: str) -> None:
    """Watches Ray's processes that this one has started.

    Args:
        way_on: what the person can do next.
    """
    if needed := dict(_ray_children()):
        threading.Thread(target=_watch, args=(needed, way_on), daemon=True, name="ray-watch").start()


def _watch(needed: dict[int, str], way_on: str) -> None:
    while len(left := dict(_ray_children()).keys() & needed.keys()) == len(needed):
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)
    if not ray.is_initialized():  # this process has ended them
        return
    dead = ", ".join(needed[pid] for pid in needed if pid not in left)
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{show_cursor}error: Ray's {dead} died{lack_of_room(ray_folder())}; {way_on}", file=sys.stderr, flush=True)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the workers end with their raylet
    os._exit(1)  # every call of Ray would wait for the dead


def lack_of_room(folder: Path) -> str:
    """A hint if a disk is full, on which Ray keeps logs and objects that do not fit into memory; else an empty text."""
    try:
        is_full = shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:
        return ""
    return f": {folder} is full, free some or set RAY_TMPDIR to a folder on another disk" if is_full else ""


def _ray_children() -> Iterator[tuple[int, str]]:
    """The living processes of Ray that this one has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            pid, _, rest = stat.read_text().partition(" (")
            name, _, fields = rest.rpartition(") ")
            state, parent = fields.split()[:2]
            if name in _NEEDED and int(parent) == os.getpid() and state != "Z":
                yield int(pid), name
