"""Tensor parallelism: cuts the matrices of decoder layers over the processes of one replica.

The cuts are those of the plan that transformers has for the model. Embeddings, norms and heads are not cut: every
process holds them in full. Left out: sharding over replicas (fsdp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from rlx.config.errors import ConfigError


def _norm_of_heads() -> ParallelStyle:
    """The style of a norm that is applied to each head: processes share its weight, gradients are summed over heads."""
    # In [B, T, heads, size] each process holds some heads, as with sequence parallelism it would hold some positions.
    return SequenceParallel(sequence_dim=2, use_local_output=True)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": _norm_of_heads,
}
"""the ways to cut a layer that plans of transformers name"""


def layer_plan(config: Any, tp: int) -> dict[str, ParallelStyle]:
    """How the decoder layers of a model with this transformers config are cut over `tp` processes, by name pattern.

    Raises:
        ConfigError: the model has no plan, the plan has an unknown style, or a size is not a multiple of `tp`.
    """
    subject = f"parallel.tp {tp}: model {config.name_or_path or config.model_type}"
    # Entries outside the layers belong to the embedding, which is not cut.
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if not plan:
        raise ConfigError(f"{subject} ({config.model_type}) has no tensor-parallel plan in transformers")
    if unknown := {name: style for name, style in plan.items() if style not in _STYLES}:
        name, style = next(iter(unknown.items()))
        raise ConfigError(f"{subject} cuts {name} as {style}; known: {', '.join(_STYLES)}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and size % tp:
            raise ConfigError(f"{subject} has {key} {size}, not a multiple of {tp}")
    return {name: _STYLES[style]() for name, style in plan.items()}


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the decoder layers of a policy or critic in place over the processes of a mesh, on its devices.

    Raises:
        ConfigError: see `layer_plan`.
    """
    modules = model.modules()
    base = next(module for module in modules if isinstance(module, PreTrainedModel) and module.base_model is module)
    plan = layer_plan(base.config, mesh.size())
    # All processes have read the same file: src_data_rank None broadcasts nothing.
    parallelize_module(base.to(mesh.device_type), mesh, plan, src_data_rank=None)
