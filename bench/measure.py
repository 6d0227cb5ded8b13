"""Seconds, memory, operations and profiles of one process: rlx's update and the bare loop are measured alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PEAK_FLOPS = 989e12
"""of an H100 SXM or H200 in dense bf16, NVIDIA's data sheets; what utilisation is counted against"""
_BYTES_PER_S = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12}
"""from their memory, by NVIDIA's data sheets"""


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


def bandwidth(device: str) -> float | None:
    """Bytes a second that a GPU of this name reads from its memory, or None if that is not known here."""
    return next((rate for name, rate in _BYTES_PER_S.items() if name in device), None)


def least_drawing_s(lm: Any, rate: float, *, sequences: float, prompt: float, response: float, longest: float) -> float:
    """The least seconds in which responses are drawn, all at once, by what is read from memory.

    A decode step reads the weights, and keys and values of the sequences that have not ended. All have two bytes.

    Args:
        lm: of transformers.
        rate: bytes that are read in a second.
        sequences: how many.
        prompt: tokens of each, in the mean.
        response: tokens of each, in the mean.
        longest: tokens of the longest response, and so the number of decode steps.
    """
    shape = lm.config
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    body = sum(p.numel() for p in lm.base_model.parameters()) - lm.get_input_embeddings().weight.numel()
    weights = 2 * (body + lm.get_output_embeddings().weight.numel())
    of_token = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * size
    # Where lengths differ more is read, as the long ones have more than their share of it.
    cached = of_token * sequences * response * (prompt + response / 2)
    return float(longest * weights + cached) / rate


def shape_of(path: str) -> Any:
    """A model folder's model without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def profiled(work: Callable[[], object]) -> str:
    """Tables of what takes the time of a call, the GPU's, if there is one, and the CPU's."""
    with torch.profiler.profile() as seen:
        work()
    orders = ["self_device_time_total"] * torch.cuda.is_available() + ["self_cpu_time_total"]
    return "\n".join(str(seen.key_averages().table(sort_by=order, row_limit=25)) for order in orders)
