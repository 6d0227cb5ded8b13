"""Builds a run's models: loads them, cuts them over the ranks, gives those that are trained their optimizers.

It also decides what may stay in a GPU's memory. Left out: how models are loaded and cut (rlx.models).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.scaling import ScalingConfig
from rlx.data import prompts
from rlx.mesh import DATA, SEQUENCE, TENSOR, SequenceGroup
from rlx.models import fsdp, loading, logprobs, lora, packing, tensor_parallel
from rlx.models.policy import Critic, Policy
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.training.optimizers.choice import make_optimizer


@dataclass(frozen=True)
class Models:
    """A rank's models, sharded over all ranks, and what of them stays whole between passes; the same on all ranks."""

    trained: dict[str, ModelAndOptimizer]  # "policy", and "critic" if it is a model of its own
    reference: Any  # frozen; None unless it is a model of its own
    reduced_each_pass: frozenset[str]  # the models whose gradients are reduced in each backward pass
    kept_unsharded: frozenset[str]  # the models whose weights stay gathered until an optimizer step


def build_models(config: RunConfig, path: str, device_mesh: Any) -> Models:
    """Loads the models of a run and cuts them over a device mesh; a collective call.

    Raises:
        ConfigError: a model cannot be loaded, does not fit the policy, or does not take packed rows that it has to.
    """
    load = _Loader(config, path)
    parts: dict[str, Any] = {"policy": load.policy(device_mesh.device_type)}
    if config.resolved_critic == "separate":
        parts["critic"] = load.critic()
    teacher = {"reference": load.teacher()} if config.model.reference_path else {}
    parts["policy"].packs = load.can_pack(parts | teacher)
    shard = _Sharder(config, device_mesh, parts["policy"].packs)
    trained = {name: shard.trained(name, part) for name, part in parts.items()}
    modules: dict[str, Any] = {name: each.model for name, each in trained.items()}
    if config.resolved_reference == "copy":  # loaded last: by then the others are cut
        modules["reference"] = shard.sharded("reference", teacher.get("reference") or load.copy())
    kept = kept_unsharded(config.scaling, config.parallel.tp, config.model, modules)
    for name in kept:  # `Trainer.reshard`, or the last backward pass before an optimizer step, frees these weights
        modules[name].set_reshard_after_forward(False)
    reduced = reduced_each_pass(config.scaling, config.parallel.tp, trained)
    return Models(trained, modules.get("reference"), reduced, kept)


@dataclass(frozen=True)
class _Loader:
    """Loads the models that the config names, whole, beside a policy from this path."""

    config: RunConfig
    path: str

    @property
    def dtype(self) -> loading.Precision:
        """The dtype of what is trained: as saved, because FSDP makes weights float32.

        Adapters and tensor parallelism need float32 before that.
        """
        return torch.float32 if self.config.model.lora_rank or self.config.parallel.tp > 1 else "auto"

    @property
    def frozen_dtype(self) -> loading.Precision:
        """The dtype of a reference: as saved; FSDP casts what it cuts, but not what tensor parallelism has cut."""
        return getattr(torch, self.config.model.dtype) if self.config.parallel.tp > 1 else "auto"

    def policy(self, device_type: str) -> Policy:
        """The policy, with a value head if that is the critic, and with adapters."""
        config, model = self.config, self.config.model
        policy = loading.load_policy(
            self.path,
            head=model.value_head_init if config.resolved_critic == "head" else None,
            seed=config.seed,
            adapters=adapters_of(model, config.seed),
            trust_remote_code=model.trust_remote_code,
            dtype=self.dtype,
        )
        if device_type == "cuda":
            policy.stored_logits = 2 * spare_numbers(config.scaling)  # an eighth of the memory
        return policy

    def critic(self) -> Critic:
        """A critic with weights of its own."""
        model, start, setting = self.config.model, self.path, "model.path"
        if model.critic_path:
            start, setting = model.critic_path, "model.critic_path"
            self._check_tokens(start, setting)
        return loading.load_critic(
            start,
            head=model.value_head_init,
            seed=self.config.seed,
            trust_remote_code=model.trust_remote_code,
            dtype=self.dtype,
            setting=setting,
        )

    def teacher(self) -> Policy:
        """The model in model.reference_path, frozen."""
        start, setting = str(self.config.model.reference_path), "model.reference_path"
        self._check_tokens(start, setting)
        trust = self.config.model.trust_remote_code
        return loading.load_reference(start, trust_remote_code=trust, dtype=self.frozen_dtype, setting=setting)

    def copy(self) -> Policy:
        """The policy once more, frozen."""
        model = self.config.model
        adapters, trust = adapters_of(model, self.config.seed), model.trust_remote_code
        return loading.load_reference(self.path, adapters=adapters, trust_remote_code=trust, dtype=self.frozen_dtype)

    def can_pack(self, parts: Mapping[str, Any]) -> bool:
        """Whether the models take packed rows; raises ConfigError if one does not that has to."""
        config = self.config
        asked_by = "parallel.sp" if config.parallel.sp > 1 else "train.packing" if config.train.packing else None
        return config.resolved_packing and all(
            packing.can_pack(loading.transformer(part), self._where(name), asked_by, config.parallel.sp)
            for name, part in parts.items()
        )

    def _check_tokens(self, other: str, setting: str) -> None:
        """Raises ConfigError if another model's tokenizer numbers tokens in another way than the policy's."""
        trust = self.config.model.trust_remote_code
        own, theirs = (prompts.load_tokenizer(each, trust).get_vocab() for each in (self.path, other))
        if own != theirs:
            raise ConfigError(f"{setting} {other}: its tokenizer is another one than that of {self.path}")

    def _where(self, name: str) -> str:
        """The setting and the path that a model comes from."""
        model = self.config.model
        others = {"critic": model.critic_path, "reference": model.reference_path}
        return f"model.{name}_path {others[name]}" if others.get(name) else f"model.path {self.path}"


@dataclass(frozen=True)
class _Sharder:
    """Cuts models over a device mesh as the config says."""

    config: RunConfig
    device_mesh: Any
    packs: bool  # whether the models take packed rows

    def trained(self, name: str, part: Any) -> ModelAndOptimizer:
        if self.config.train.gradient_checkpointing:
            loading.checkpoint_gradients(part, self.config.train.checkpointed_layers)
        sharded, train = self.sharded(name, part), self.config.train
        return ModelAndOptimizer(
            sharded, make_optimizer(train, sharded, "critic_lr" if name == "critic" else "actor_lr")
        )

    def sharded(self, name: str, part: Any) -> Any:
        model, device_mesh = self.config.model, self.device_mesh
        if self.packs:
            packing.enable(loading.transformer(part))
        if self.config.train.compile or (self.config.resolved_compile and loading.can_compile()):
            loading.compile_layers(part)
        if self.config.parallel.tp > 1:
            tensor_parallel.split_layers(part, device_mesh[TENSOR])
            device_mesh = device_mesh[DATA]
        if self.config.parallel.sp > 1:
            part.sequence_group = SequenceGroup.of(device_mesh[SEQUENCE])
            device_mesh = init_device_mesh(device_mesh.device_type, (device_mesh.size(),))  # FSDP cuts over all ranks
        dtype = getattr(torch, model.dtype)
        return fsdp.shard(part, device_mesh, dtype, offload=name in model.offload)


def adapters_of(model: ModelConfig, seed: int) -> lora.Adapters | None:
    """The adapters beside the policy's layers; None without model.lora_rank."""
    if not model.lora_rank:
        return None
    return lora.Adapters(model.lora_rank, model.lora_alpha, model.lora_targets, seed)


# --- what may stay in a GPU's memory


def reduced_each_pass(scaling: ScalingConfig, tp: int, models: Mapping[str, ModelAndOptimizer]) -> frozenset[str]:
    """The models whose gradients are reduced in each backward pass, so that no rank ever holds all of them.

    These are the models whose full float32 gradients would take more than a sixteenth of a worker's GPU memory while
    micro-batches add up. There are none if no other rank could hold the other parts. A collective call.
    """
    if not scaling.use_gpu or scaling.num_workers == tp:
        return frozenset()
    sizes = {name: sum(p.numel() for p in m.model.parameters() if p.requires_grad) for name, m in models.items()}
    limit = spare_numbers(scaling)
    return frozenset(name for name, size in sizes.items() if size // tp > limit)


def kept_unsharded(scaling: ScalingConfig, tp: int, settings: ModelConfig, models: Mapping[str, Any]) -> frozenset[str]:
    """The models whose weights stay gathered from the first pass to the last one before an optimizer step.

    All that are not offloaded do, if together they take at most a sixteenth of a worker's GPU memory, or if no other
    rank could hold the other parts; on CPUs, too, where models are small. A collective call.

    Args:
        models: all that are computed with, the reference too.
    """
    kept = {name: model for name, model in models.items() if name not in settings.offload}
    if scaling.use_gpu and scaling.num_workers > tp:
        numbers = sum(weight.numel() for model in kept.values() for weight in model.parameters()) // tp
        if numbers * getattr(torch, settings.dtype).itemsize > spare_numbers(scaling) * torch.float32.itemsize:
            return frozenset()
    return frozenset(kept)


def spare_numbers(scaling: ScalingConfig) -> int:
    """How many float32 numbers may stay in each worker's GPU memory although they could be computed again.

    It is the same on all workers, the least of their GPUs'. A collective call.
    """
    own = torch.tensor(logprobs.sixteenth_of_gpu(scaling.resources_per_worker.get("GPU", 1.0)), device="cuda")
    dist.all_reduce(own, op=dist.ReduceOp.MIN)
    return int(own)
