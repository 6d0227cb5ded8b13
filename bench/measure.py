"""Seconds, memory, operations and profiles of one process: rlx's update and the bare loop are measured alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PEAK_FLOPS = 989e12
"""of an H100 SXM or H200 in dense bf16, NVIDIA's data sheets; what utilisation is counted against"""


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


def operations(backbone: Any, head: int, tokens: float, scored: float, pairs: float) -> float:
    """Floating-point operations of a model's forward and backward pass, at the least.

    6 per weight and token, and for causal attention 6 x layers x heads x head size x L^2 over L tokens: half of PaLM's
    12. Nothing that is computed again counts. Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.

    Args:
        backbone: of transformers; its embedding costs nothing.
        head: weights of the output layer, which sees `scored` of the tokens.
        pairs: the sum of L^2 over all sequences.
    """
    shape = backbone.config
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    body = sum(p.numel() for p in backbone.parameters()) - backbone.get_input_embeddings().weight.numel()
    attention = shape.num_hidden_layers * shape.num_attention_heads * size * pairs
    return 6.0 * (body * tokens + head * scored + attention)


def profiled(work: Callable[[], object]) -> str:
    """Tables of what takes the time of a call, the GPU's, if there is one, and the CPU's."""
    with torch.profiler.profile() as seen:
        work()
    orders = ["self_device_time_total"] * torch.cuda.is_available() + ["self_cpu_time_total"]
    return "\n".join(str(seen.key_averages().table(sort_by=order, row_limit=25)) for order in orders)
