"""The models of a run as its config asks for them: policy, critic and reference, sharded, with their optimizers.

What they compute is model's; what becomes of them from step to step is worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlx.config.run import RunConfig
from rlx.mesh import DATA, TENSOR
from rlx.models import fsdp, loading, logprobs, lora, tensor_parallel
from rlx.storage.checkpoint_files import Trained


def models(config: RunConfig, path: str, mesh: Any) -> tuple[dict[str, Trained], Any]:
    """Policy and critic with their optimizers, and the reference if it is a copy; all sharded over the grid's mesh."""
    chosen = config.model
    trust, head, seed = chosen.trust_remote_code, chosen.value_head_init, config.seed
    own = head if config.critic == "head" else None
    parts: dict[str, Any] = {
        "policy": loading.load_policy(path, head=own, seed=seed, adapters=adapters(config), trust_remote_code=trust)
    }
    if mesh.device_type == "cuda":
        parts["policy"].kept = _kept(config)
    if config.critic == "separate":
        parts["critic"] = loading.load_critic(path, head=head, seed=seed, trust_remote_code=trust)
    trained = {}
    for name, part in parts.items():
        if config.train.gradient_checkpointing:
            loading.checkpoint_gradients(part)
        sharded = _sharded(config, name, part, mesh)
        trained[name] = Trained(sharded, _optimizer(config, sharded))
    if config.reference != "copy":
        return trained, None
    return trained, _sharded(config, "reference", loading.load_reference(path, trust_remote_code=trust), mesh)


def _sharded(config: RunConfig, name: str, part: Any, mesh: Any) -> Any:
    if config.train.compile:
        loading.compile_layers(part)
    if config.parallel.tp > 1:
        tensor_parallel.split_layers(part, mesh[TENSOR])
        mesh = mesh[DATA]
    return fsdp.shard(part, mesh, getattr(torch, config.model.dtype), offload=name in config.model.offload)


def scattered(config: RunConfig, trained: Mapping[str, Trained]) -> frozenset[str]:
    """The models whose gradients in full, float32 on every rank while micro-batches add up, are more than a sixteenth
    of a worker's GPU memory; none where no other rank could have the rest."""
    if not config.scaling.use_gpu or config.replicas == 1:
        return frozenset()
    sizes = {name: sum(p.numel() for p in t.model.parameters() if p.requires_grad) for name, t in trained.items()}
    return frozenset(name for name, size in sizes.items() if size // config.parallel.tp > _kept(config))


def _kept(config: RunConfig) -> int:
    """How many numbers of float32 may be kept of what could also be had again."""
    return logprobs.kept_on_gpu(config.scaling.resources_per_worker.get("GPU", 1.0))


def adapters(config: RunConfig) -> lora.Adapters | None:
    """The adapters beside the policy's layers; None without."""
    chosen = config.model
    if not chosen.lora_rank:
        return None
    return lora.Adapters(chosen.lora_rank, chosen.lora_alpha, chosen.lora_targets, config.seed)


def average(config: RunConfig, policy: Any) -> dict[str, Tensor]:
    """The average of the policy's trained weights at the start, by name; empty if the config asks for none."""
    if config.train.ema_decay is None:
        return {}
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def _optimizer(config: RunConfig, part: Any) -> torch.optim.Optimizer:
    """AdamW over what is trained; a value head is a group of its own."""
    named = [(name, p) for name, p in part.named_parameters() if p.requires_grad]
    head = [p for name, p in named if name.startswith("value_head.")]
    body = [p for name, p in named if not name.startswith("value_head.")]
    return torch.optim.AdamW(
        [{"params": group} for group in (body, head) if group],
        betas=config.train.adam_betas,
        weight_decay=config.train.weight_decay,
        fused=True,
    )


def learning_rates(config: RunConfig, trained: Mapping[str, Trained]) -> dict[str, list[float]]:
    """Of each model's parameter groups: the body, then a value head, which learns at the critic's."""
    body = {"policy": config.train.actor_lr, "critic": config.train.critic_lr}
    heads = {name: len(part.optimizer.param_groups) - 1 for name, part in trained.items()}
    return {name: [body[name]] + [config.train.critic_lr] * heads[name] for name in trained}
