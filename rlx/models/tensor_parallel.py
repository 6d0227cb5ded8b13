"""The training processes as a grid: replicas in rows, the tensor-parallel neighbours that share a replica's matrices in
columns; and how decoder layers are cut over neighbours.

Embeddings, norms and heads are not cut: neighbours hold them alike. Sharding over replicas is model's (FSDP2).
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
    """For a norm of each head by itself: its weight is every process's, its gradient the sum over all heads."""
    # In [B, T, heads, size] neighbours hold heads of their own, as they would hold parts of a sequence.
    return SequenceParallel(sequence_dim=2, use_local_output=True)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": _norm_of_heads,
}
"""how transformers' plans cut a layer"""


def layer_plan(config: Any, tp: int) -> dict[str, ParallelStyle]:
    """How the decoder layers of a model with this transformers config are cut, by name pattern: its own plan.

    Raises:
        ConfigError: it has none, or one that asks for more than is done here, or its sizes are no multiples of `tp`.
    """
    where = f"parallel.tp {tp}: model {config.name_or_path or config.model_type}"
    # Entries beside the layers are those of the embedding, which stays whole.
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if not plan:
        raise ConfigError(f"{where} ({config.model_type}) has no tensor-parallel plan in transformers")
    if unknown := {name: style for name, style in plan.items() if style not in _STYLES}:
        name, style = next(iter(unknown.items()))
        raise ConfigError(f"{where} cuts {name} as {style}; known: {', '.join(_STYLES)}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and size % tp:
            raise ConfigError(f"{where} has {key} {size}, no multiple of {tp}")
    return {name: _STYLES[style]() for name, style in plan.items()}


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the decoder layers of a policy or critic over the processes of a mesh, on its device.

    Raises:
        ConfigError: see `layer_plan`.
    """
    bases = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part.base_model is part)
    base = next(bases)
    plan = layer_plan(base.config, mesh.size())
    # All have read the same file: nothing need be sent.
    parallelize_module(base.to(mesh.device_type), mesh, plan, src_data_rank=None)
