"""Deletes what earlier clusters and engines, and processes that were killed, have left in the temporary folder.

Left out: what is younger than a day, of other users, or of a process that is still there.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_KEPT_S = 24 * 3600.0  # the logs of a failed run are there for a day
_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_(\d+)")  # Ray's, with its driver's process id
_RENDEZVOUS = re.compile(r"vllm_dist_[0-9a-f]{32}")  # vLLM's, one file for each engine
_OWN = re.compile(r"rlx-(?:sandbox|adapter|check|(?:library|space)-(\d+))-\w{8}")
"""rlx's own folders; those that last as long as a process have its id"""
_SHARED_MEMORY = Path("/dev/shm")


def clear_leftovers() -> None:
    """Deletes Ray's session folders, vLLM's files and rlx's own folders; what cannot be deleted stays."""
    temporary = Path(tempfile.gettempdir())
    places = [(ray_folder() / "ray", _SESSION), (temporary, _RENDEZVOUS), (temporary, _OWN), (_SHARED_MEMORY, _OWN)]
    for path, process in (each for place in places for each in _found(*place)):
        if not (process and Path("/proc", process).exists()):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def ray_folder() -> Path:
    """The folder below which Ray keeps logs, sockets and objects that do not fit into memory."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp")


def _found(folder: Path, name: re.Pattern[str]) -> list[tuple[Path, str | None]]:
    """This user's files and folders of such a name that have not changed for a day, with the process id in the name."""
    old = list[tuple[Path, str | None]]()
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):  # another process has deleted it meanwhile
                found, status = name.fullmatch(path.name), path.lstat()
                is_mine = status.st_uid == os.getuid() and not path.is_symlink()
                if found and is_mine and time.time() - status.st_mtime > _KEPT_S:
                    old.append((path, next(iter(found.groups()), None)))
    return old
