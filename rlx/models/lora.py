"""TODO rlx.models.lora."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlx.config.errors import ConfigError
from rlx.config.sections import ALL_LAYERS
from rlx.types import ShardedWeight

_ADAPTER = "default"  # peft's name for the only adapter
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters beside frozen weights: W + alpha / rank * B A (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linear layers; none: all but the output layer
    seed: int  # of A; B is zero, so that a policy starts as its reference


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Within it the policy is what it was before its adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in policy.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # its own method also makes the adapters untrainable
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def engine_weights(policy: nn.Module) -> list[ShardedWeight]:
    """The policy's weights as the engines load them: Hugging Face names, adapters merged in, no value head."""
    named = {name.removeprefix("lm."): p for name, p in policy.named_parameters() if name.startswith("lm.")}

    def weight(name: str, base: Tensor) -> ShardedWeight:
        layer = name.removesuffix(f"{_BASE}weight")
        down, up = (named.get(f"{layer}.{side}.{_ADAPTER}.weight") for side in ("lora_A", "lora_B"))
        if layer == name or down is None or up is None:
            return ShardedWeight(name.replace(_BASE, "."), tuple(base.shape), (base,))
        adapted: Any = policy.get_submodule(f"lm.{layer}")
        merged = partial(_merged, scale=adapted.scaling[_ADAPTER])
        return ShardedWeight(f"{layer}.weight", tuple(base.shape), (base, down, up), merged)

    return [weight(name, p) for name, p in named.items() if ".lora_" not in name]


def adapter_weights(policy: nn.Module) -> list[ShardedWeight]:
    """The adapters alone, under the names that peft gives them in a file."""
    named = [(name, p) for name, p in policy.named_parameters() if ".lora_" in name]
    return [
        ShardedWeight(
            f"base_model.model.{name.removeprefix('lm.').replace(f'.{_ADAPTER}.', '.')}",
            tuple(p.shape),
            (p,),
        )
        for name, p in named
    ]


def _merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    return base + scale * (up @ down)


def add_adapters(lm: Any, adapters: Adapters) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets, where = list(adapters.targets) or ALL_LAYERS, f"model.lora_targets {', '.join(adapters.targets)}"
    config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=targets)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(adapters.seed)  # every rank draws the same
        try:
            inject_adapter_in_model(config, lm, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    for name, layer in lm.named_modules():
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer.get_base_layer(), nn.Linear):
            raise ConfigError(f"{where}: {name} is no linear layer, and only these reach the engines")
    if isinstance(lm.get_output_embeddings(), BaseTunerLayer) and lm.config.tie_word_embeddings:
        raise ConfigError(
            f"{where}: the output layer is tied to the embedding here, its adapters would not reach the engines"
        )
