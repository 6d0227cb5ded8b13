"""A script of experiments/ that runs in processes of its own, for benchmarks and tests that kill them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

_FOLDER = Path(__file__).resolve().parent.parent / "experiments"
_MARK = "RLX_SCRIPT"
_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)


class ScriptRun:
    """One of experiments/ as a process group of its own, as a shell starts it; what it prints is in a file."""

    def __init__(self, output: Path, name: str, *words: str) -> None:
        self.output = output
        self.mark = uuid.uuid4().hex  # in the environment of all its processes
        with output.open("w") as file:
            self.process = subprocess.Popen(  # the driver
                [sys.executable, str(_FOLDER / name), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {_MARK: self.mark},
                start_new_session=True,
            )

    def step(self) -> int:
        """The last step that it has shown; -1 before the first."""
        return max(map(int, _STEP.findall(self.output.read_text())), default=-1)

    def kill(self) -> None:
        """kill -9 of the driver alone."""
        self.process.kill()
        self.process.wait()

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Its processes whose command line has the name."""
        return [process for process in psutil.process_iter() if self._has(process, name)]

    def _has(self, process: psutil.Process, name: str) -> bool:
        try:
            is_mine = process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
            return is_mine and name in " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False
