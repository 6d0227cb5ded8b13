"""Low-rank adapters on a policy, and the names under which weights leave it for engines and files.

Left out: sending weights (rollout), writing files (storage, export).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.sections.model import ALL_LAYERS
from rlx.types import ShardedWeight

_ADAPTER = "default"  # the name that peft gives the only adapter
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters beside frozen weights: W + alpha / rank * B A (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linear layers; empty: all but the output layer
    seed: int  # of A; B starts at zero, so that a policy starts equal to its reference


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Context in which the policy computes without its adapters, as the reference does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # the public method would also make the adapters untrainable
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def engine_weights(policy: nn.Module) -> list[ShardedWeight]:
    """The weights of a policy as engines load them: Hugging Face names, adapters merged, without the value head."""
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
    """The adapters only, under the names that they have in a file of peft."""
    named = [(name, p) for name, p in policy.named_parameters() if ".lora_" in name]
    return [ShardedWeight(_name_in_file(name), tuple(p.shape), (p,)) for name, p in named]


def _name_in_file(name: str) -> str:
    return f"base_model.model.{name.removeprefix('lm.').replace(f'.{_ADAPTER}.', '.')}"


def _merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale * B A, `[out, in]` float32, from W `[out, in]` of any precision, A `[rank, in]` and B `[out, rank]`."""
    return base + scale * (up @ down)


def add_adapters(lm: Any, adapters: Adapters) -> None:
    """Adds trainable adapters to a causal language model in place, and freezes its own weights.

    Raises:
        ConfigError: a target names no linear layer, or a layer whose adapters could not be merged for the engines.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    check_targets(lm, adapters.targets)
    targets, setting = list(adapters.targets) or ALL_LAYERS, " ".join(("model.lora_targets", *adapters.targets))
    config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=targets)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(adapters.seed)  # the same on every rank
        try:
            inject_adapter_in_model(config, lm, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"{setting}: {one_line(error, 200)}") from None
    for name, layer in lm.named_modules():
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer.get_base_layer(), nn.Linear):
            raise ConfigError(f"{setting}: {name} is not a linear layer: engines receive adapters of no other")


def check_targets(lm: Any, targets: Sequence[str]) -> None:
    """Raises ConfigError for a name that is not the end of the names of linear layers, which peft drops if others
    match, or is that of an output layer whose weights are the embedding's.

    The model's weights are not read: they may be on the meta device.
    """
    for target in targets:
        if target == ALL_LAYERS:
            raise ConfigError(f"model.lora_targets {target}: leave the setting empty for all but the output layer")
        named = {name: module for name, module in lm.named_modules() if f".{name}".endswith(f".{target}")}
        others = [name for name, module in named.items() if not isinstance(module, nn.Linear)]
        if others:
            said = f"{others[0]} is not a linear layer but {type(named[others[0]]).__name__}"
            raise ConfigError(f"model.lora_targets {target}: {said}: engines receive adapters of no other")
        if not named:
            hint = nearest(target, _linear_names(lm, parts=target.count(".") + 1))
            raise ConfigError(f"model.lora_targets {target}: no linear layer of the model is called that{hint}")
        is_tied = getattr(lm.config, "tie_word_embeddings", False)
        if is_tied and lm.get_output_embeddings() in named.values():
            raise ConfigError(
                f"model.lora_targets {target}: the output layer is tied to the embedding: engines would not receive "
                "its adapters"
            )


def _linear_names(lm: nn.Module, parts: int) -> list[str]:
    """The last parts of the names of all linear layers."""
    names = [name.split(".") for name, module in lm.named_modules() if isinstance(module, nn.Linear)]
    return sorted({".".join(name[-parts:]) for name in names})
