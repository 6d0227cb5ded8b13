"""Builds one rank's trainer, collector and checkpointer from the config, and restores them from a checkpoint.

Objects that need Ray, vLLM or MLflow are passed in (`TrainingInputs`), so this module runs in a plain process, too. The
objects that it builds are in trainer.py, collector.py and checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections import ModelConfig, RolloutConfig, ScalingConfig, TrainConfig
from rlx.data import prompts, sources
from rlx.data.stream import PromptStream, Share
from rlx.mesh import DATA, TENSOR, Mesh
from rlx.models import fsdp, loading, logprobs, lora, packing, tensor_parallel
from rlx.rewards import scoring
from rlx.rollout.base import Engines
from rlx.storage.checkpoint_catalog import Retention
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.storage.filesystem import Storage
from rlx.training.checkpointing import Checkpointer
from rlx.training.collector import CompletionScorer, RolloutCollector
from rlx.training.reporting import Reporter
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.trainer import SupervisedRows, Trainer, initial_ema
from rlx.types import Sampling, Scorer, ShardedWeight

WeightSource = Callable[[], Sequence[ShardedWeight]]
"""gives the policy's weights for the engines, as they are when it is called on all ranks"""


@dataclass(frozen=True)
class TrainingInputs:
    """What one rank needs to train; torch.distributed is initialized before."""

    config: RunConfig
    model_path: str  # Hugging Face folder or name
    device: torch.device
    tables: Mapping[str, Share]  # this rank's prompts: "train", "held_out", and "ptx" with algorithm.ptx_coef
    folder: Storage  # of the run
    reporter: Reporter
    connect_engines: Callable[[Mesh, WeightSource], Engines]
    connect_scorers: Callable[[Mesh], dict[str, Scorer]]  # reward models and servers; a collective call
    signature: str = ""  # of the config, for checkpoints


def build(inputs: TrainingInputs) -> tuple[Trainer, RolloutCollector, Checkpointer]:
    """This rank's objects, continued from the newest checkpoint if the run has one; a collective call."""
    config = inputs.config
    if inputs.device.type == "cpu":
        torch.set_num_threads(threads(config.scaling))
    mesh = Mesh.of(inputs.device.type, config.parallel.tp)
    _reset_peak_memory(inputs.device)
    models, reference = build_models(config, inputs.model_path, mesh.mesh)
    tokenizer = prompts.load_tokenizer(inputs.model_path, config.model.trust_remote_code)
    trainer = Trainer(
        config=config,
        mesh=mesh,
        device=inputs.device,
        models=models,
        reference=reference,
        base_lrs=base_lrs(config.train, models),
        kl=AdaptiveKL(
            config.algorithm.kl_coef, config.algorithm.adaptive_kl_target, config.algorithm.adaptive_kl_horizon
        ),
        reward_stats=RunningScores(),
        ema=initial_ema(config.train, models["policy"].model),
        supervised=_supervised(inputs, mesh, tokenizer),
        scattered=scattered(config.scaling, config.parallel.tp, models),
    )
    collector = _collector(inputs, trainer, tokenizer)
    retention = Retention(config.checkpoint.keep_last, config.checkpoint.best_by, config.checkpoint.best_mode)
    writer = CheckpointWriter(inputs.folder, retention)
    checkpointer = Checkpointer(trainer, collector.queue, writer, inputs.reporter.notify, inputs.signature)
    checkpointer.restore()
    return trainer, collector, checkpointer


def close(trainer: Trainer, collector: RolloutCollector, checkpointer: Checkpointer, reporter: Reporter) -> None:
    """Ends threads and process groups that would outlive the objects."""
    checkpointer.close()
    collector.engines.close()
    reporter.close()
    trainer.mesh.close()


def threads(scaling: ScalingConfig) -> int:
    """Threads that a worker on a CPU computes with: its share of CPUs, rounded (Ray would round down).

    The engines' share does not count: sums depend on the number of threads, and a resumed run may have other engines.
    """
    return max(1, round(scaling.resources_per_worker.get("CPU", 1.0)))


def _reset_peak_memory(device: torch.device) -> None:
    """Measures peak memory from here on: this process may have done another run before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _collector(inputs: TrainingInputs, trainer: Trainer, tokenizer: Any) -> RolloutCollector:
    config, mesh = inputs.config, trainer.mesh
    engines = inputs.connect_engines(mesh, partial(weights_for_engines, config.rollout, config.model, trainer.policy))
    remote = inputs.connect_scorers(mesh)
    sampling = sampling_of(config.rollout, tokenizer)

    def scorer(seed: int, size: int) -> CompletionScorer:
        local = scoring.scorers(config.reward, partial(sources.answer_checker, config.data, seed, size))
        return CompletionScorer(config.reward, local | remote, tokenizer, mesh)

    return RolloutCollector(
        engines=engines,
        queue=_queue(config, engines, sampling, _share(inputs, "train", mesh).stream(config.seed)),
        sampling=sampling,
        score=scorer(config.data.seed, config.data.num_prompts),
        held_out=_share(inputs, "held_out", mesh).in_order(),
        score_held_out=scorer(config.eval.seed, config.eval.num_prompts),
        train=config.train,
        algorithm=config.algorithm,
        rollout=config.rollout,
    )


def _share(inputs: TrainingInputs, table: str, mesh: Mesh) -> Share:
    """This replica's share of a prompt table."""
    share = inputs.tables[table]
    assert (share.rank, share.ranks) == (mesh.dp_rank, mesh.dp_size), "prompts of another rank"
    return share


def _supervised(inputs: TrainingInputs, mesh: Mesh, tokenizer: Any) -> SupervisedRows | None:
    config = inputs.config
    if not config.data.ptx_source:
        return None
    rows = _share(inputs, "ptx", mesh).stream(config.seed)
    return SupervisedRows(rows, tokenizer, config.rollout.max_tokens, config.data.ptx_batch)


def weights_for_engines(rollout: RolloutConfig, model: ModelConfig, policy: Any) -> list[ShardedWeight]:
    """The policy's weights for the engines: all of them, or the adapters alone."""
    if rollout.placement == "colocated":
        torch.cuda.empty_cache()
        dist.barrier()  # all engines on these GPUs wake up once the first rank says so
    adapters_only = model.lora_sync == "adapter"
    return lora.adapter_weights(policy) if adapters_only else lora.engine_weights(policy)


def sampling_of(rollout: RolloutConfig, tokenizer: Any) -> Sampling:
    """How training completions are sampled."""
    return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, (tokenizer.eos_token_id,))


def _queue(config: RunConfig, engines: Engines, sampling: Sampling, prompts: PromptStream) -> RolloutQueue:
    """Each prompt gets `samples_per_prompt` completions, and a greedy one where the estimator needs it."""
    train, rollout = config.train, config.rollout
    samplings = [sampling] * train.samples_per_prompt
    if config.algorithm.estimator.needs_greedy:
        samplings.append(sampling.greedy)
    return RolloutQueue(
        engines,
        prompts,
        samplings,
        train.prompts_per_step,
        rollout.num_chunks,
        rollout.max_staleness,
        config.resolved_logprobs_every,
    )


# --- models and optimizers


def build_models(config: RunConfig, path: str, device_mesh: Any) -> tuple[dict[str, ModelAndOptimizer], Any]:
    """Policy and critic with their optimizers, and the reference if it is a copy; all sharded over a device mesh."""
    model = config.model
    trust, head, seed = model.trust_remote_code, model.value_head_init, config.seed
    policy = loading.load_policy(
        path,
        head=head if config.resolved_critic == "head" else None,
        seed=seed,
        adapters=adapters(config.model, seed),
        trust_remote_code=trust,
    )
    if device_mesh.device_type == "cuda":
        policy.stored_logits = _kept_numbers(config.scaling)
    policy.packs = config.resolved_packing and can_pack(policy, path, is_asked=config.train.packing is True)
    parts: dict[str, Any] = {"policy": policy}
    if config.resolved_critic == "separate":
        parts["critic"] = loading.load_critic(path, head=head, seed=seed, trust_remote_code=trust)
    sharder = _Sharder(config, device_mesh, policy.packs)
    models = {name: sharder.trained(name, part) for name, part in parts.items()}
    if config.resolved_reference != "copy":
        return models, None
    reference = loading.load_reference(path, trust_remote_code=trust)
    return models, sharder.sharded("reference", reference)


@dataclass(frozen=True)
class _Sharder:
    """Cuts models over a device mesh as the config says."""

    config: RunConfig
    device_mesh: Any
    packs: bool  # whether the models take packed rows

    def trained(self, name: str, part: Any) -> ModelAndOptimizer:
        if self.config.train.gradient_checkpointing:
            loading.checkpoint_gradients(part)
        sharded = self.sharded(name, part)
        return ModelAndOptimizer(sharded, _optimizer(self.config.train, sharded))

    def sharded(self, name: str, part: Any) -> Any:
        model, device_mesh = self.config.model, self.device_mesh
        if self.packs:
            packing.enable(loading.transformer(part))
        if self.config.train.compile or (self.config.resolved_compile and loading.can_compile()):
            loading.compile_layers(part)
        if self.config.parallel.tp > 1:
            tensor_parallel.split_layers(part, device_mesh[TENSOR])
            device_mesh = device_mesh[DATA]
        return fsdp.shard(part, device_mesh, getattr(torch, model.dtype), offload=name in model.offload)


def can_pack(policy: Any, path: str, is_asked: bool) -> bool:
    """Whether a policy, not sharded yet, takes packed rows.

    Raises:
        ConfigError: it does not, although train.packing asks for it.
    """
    reason = packing.obstacle(policy.lm)
    if reason and is_asked:
        raise ConfigError(f"train.packing: model.path {path}: {reason}")
    return reason is None


def scattered(scaling: ScalingConfig, tp: int, models: Mapping[str, ModelAndOptimizer]) -> frozenset[str]:
    """The models whose gradients are reduced in each backward pass, so that no rank ever holds all of them.

    These are the models whose full float32 gradients would take more than a sixteenth of a worker's GPU memory while
    micro-batches add up. There are none if no other rank could hold the other parts.
    """
    if not scaling.use_gpu or scaling.num_workers == tp:
        return frozenset()
    sizes = {name: sum(p.numel() for p in m.model.parameters() if p.requires_grad) for name, m in models.items()}
    limit = _kept_numbers(scaling)
    return frozenset(name for name, size in sizes.items() if size // tp > limit)


def _kept_numbers(scaling: ScalingConfig) -> int:
    """How many float32 numbers may stay in a worker's GPU memory although they could be computed again."""
    return logprobs.stored_logits_on_gpu(scaling.resources_per_worker.get("GPU", 1.0))


def adapters(model: ModelConfig, seed: int) -> lora.Adapters | None:
    """The adapters beside the policy's layers; None without model.lora_rank."""
    if not model.lora_rank:
        return None
    return lora.Adapters(model.lora_rank, model.lora_alpha, model.lora_targets, seed)


def _optimizer(train: TrainConfig, model: Any) -> torch.optim.Optimizer:
    """AdamW over the weights that are trained; a value head is a parameter group of its own."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    head = [p for name, p in named if name.startswith("value_head.")]
    body = [p for name, p in named if not name.startswith("value_head.")]
    return torch.optim.AdamW(
        [{"params": group} for group in (body, head) if group],
        betas=train.adam_betas,
        weight_decay=train.weight_decay,
        fused=True,
    )


def base_lrs(train: TrainConfig, models: Mapping[str, ModelAndOptimizer]) -> dict[str, list[float]]:
    """Learning rates of each model's parameter groups: the body, then a value head, which has the critic's."""
    body = {"policy": train.actor_lr, "critic": train.critic_lr}
    heads = {name: len(each.optimizer.param_groups) - 1 for name, each in models.items()}
    return {name: [body[name]] + [train.critic_lr] * heads[name] for name in models}
