"""Seconds and memory of one process: rlx's update and the bare loop are measured by the same few lines."""

from __future__ import annotations

import time
from pathlib import Path

import torch


class Memory:
    """The most that this process holds: on a GPU what torch has allocated there, on a CPU what is resident above what
    was when this was made, once the models were there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0 if device.type == "cuda" else _resident("VmRSS")

    def forget(self) -> None:
        """Counts the peak from here on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """In bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _resident("VmHWM") - self._start


def _resident(which: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {which}: memory is measured on Linux alone")


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
