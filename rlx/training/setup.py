"""Builds one rank's trainer, collector and checkpointer from the config, and restores them from a checkpoint.

Objects that need Ray, vLLM or MLflow are passed in (`TrainingInputs`), so this module runs in a plain process, too. The
objects that it builds are in trainer.py, collector.py and checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.sections.scaling import ScalingConfig
from rlx.data import prompts, sources
from rlx.data.curriculum import CurriculumStream
from rlx.data.mixture import JoinedRows, MixedOrder
from rlx.data.stream import PromptStream, Share
from rlx.mesh import DATA, SEQUENCE, TENSOR, Mesh, Sharing
from rlx.models import fsdp, loading, lora, packing, tensor_parallel
from rlx.models.policy import Critic, Policy
from rlx.rollout.base import Engines
from rlx.samples.evaluations import OutcomeWriter
from rlx.samples.writer import CompletionWriter, Keeping, discard_after
from rlx.storage.checkpoint_catalog import Retention
from rlx.storage.checkpoint_files import ModelAndOptimizer, new_copies
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.storage.filesystem import Storage
from rlx.training.checkpointing import Checkpointer, PinnedMemory
from rlx.training.collector import RolloutCollector
from rlx.training.evaluation.sets import QuestionSet, ScoredSource, ScorerMaker, SetMaker
from rlx.training.optimizers.choice import make_optimizer
from rlx.training.optimizers.groups import base_lrs
from rlx.training.reporting import Reporter
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.trainer import (
    SupervisedRows,
    Trainer,
    gathered,
    initial_ema,
    scattered,
    spare_numbers,
)
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
    attributed_step: int | None = None  # see `Trainer.attributed_step`


def build(inputs: TrainingInputs) -> tuple[Trainer, RolloutCollector, Checkpointer]:
    """This rank's objects, continued from the newest checkpoint if the run has one; a collective call."""
    config = inputs.config
    if inputs.device.type == "cpu":
        torch.set_num_threads(threads(config.scaling))
    mesh = Mesh.of(inputs.device.type, config.parallel.tp, config.parallel.sp)
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
        gathered=keep_gathered(config.scaling, config.parallel.tp, config.model, models, reference),
        attributed_step=inputs.attributed_step,
    )
    collector = _collector(inputs, trainer, tokenizer)
    kept = config.checkpoint
    retention = Retention(kept.keep_last, kept.best_by, kept.best_mode, kept.keep_every)
    settle = collector.completions.wait if collector.completions else None
    writer = CheckpointWriter(inputs.folder, retention, settle)
    copies = PinnedMemory(inputs.reporter.notify).copies if trainer.device.type == "cuda" else new_copies
    checkpointer = Checkpointer(trainer, collector.queue, writer, inputs.reporter.notify, copies, inputs.signature)
    checkpointer.restore()
    if mesh.rank == 0:
        discard_after(inputs.folder, trainer.step, inputs.reporter.notify)
    return trainer, collector, checkpointer


def close(trainer: Trainer, collector: RolloutCollector, checkpointer: Checkpointer, reporter: Reporter) -> None:
    """Ends threads and process groups that would outlive the objects."""
    checkpointer.close()
    collector.engines.close()
    if collector.completions:
        collector.completions.close()
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
    ends = loading.end_tokens(inputs.model_path, tokenizer, config.model.trust_remote_code)
    sampling, scorer = sampling_of(config.rollout, ends), ScorerMaker(remote, tokenizer, mesh)
    parts = zip(config.data.parts, config.reward_parts, strict=True)
    return RolloutCollector(
        engines=engines,
        queue=_queue(trainer, engines, ends, _training_prompts(inputs, mesh)),
        sampling=sampling,
        score=scorer([ScoredSource(part, reward, part.seed, part.num_prompts) for part, reward in parts]),
        evaluations=_evaluations(inputs, sampling, scorer),
        train=config.train,
        algorithm=config.algorithm,
        rollout=config.rollout,
        completions=_completion_writer(inputs, mesh, tokenizer),
        outcomes=OutcomeWriter(inputs.folder, inputs.reporter.notify) if mesh.rank == 0 else None,
        sources=config.data.labels,
    )


def _evaluations(inputs: TrainingInputs, sampling: Sampling, scorer: ScorerMaker) -> list[QuestionSet]:
    """The questions of evaluations, the held-out prompts first."""
    config, share = inputs.config, partial(_share, inputs, scorer.mesh)
    maker = SetMaker(config.eval, config.data, config.reward_parts, sampling, scorer, share)
    held_out = maker.held_out()
    return [held_out, *(maker.of(each, config.reward, held_out) for each in config.eval.sets)]


def _completion_writer(inputs: TrainingInputs, mesh: Mesh, tokenizer: Any) -> CompletionWriter | None:
    """What keeps this replica's completions; None with tracking.completions 0, and on all but its first process."""
    share = inputs.config.tracking.completions
    if share == 0 or not mesh.is_leader:
        return None
    keeping = Keeping(share, inputs.config.seed, mesh.dp_rank, mesh.dp_size)
    return CompletionWriter(inputs.folder, keeping, tokenizer, inputs.reporter.notify)


def _share(inputs: TrainingInputs, mesh: Mesh, names: Sequence[str]) -> Share:
    """This replica's share of prompt tables, as one."""
    shares = [inputs.tables[name] for name in names]
    share = shares[0] if len(shares) == 1 else replace(shares[0], rows=JoinedRows(tuple(each.rows for each in shares)))
    assert (share.rank, share.ranks) == (mesh.dp_rank, mesh.dp_size), "prompts of another rank"
    return share


def _training_prompts(inputs: TrainingInputs, mesh: Mesh) -> PromptStream:
    config, names = inputs.config, sources.table_names(inputs.config.data, "train")
    share = _share(inputs, mesh, names)
    if config.data.curriculum == "none" and not isinstance(share.rows, JoinedRows):
        return share.stream(config.seed)
    sizes = share.rows.sizes if isinstance(share.rows, JoinedRows) else [len(share.rows)]
    order = MixedOrder(config.seed, sizes, [each.weight for each in config.data.sources] or [1.0])
    if config.data.curriculum == "none":
        return share.stream(config.seed, order)
    target, period = config.data.curriculum_range, config.data.curriculum_period
    return CurriculumStream(share.rows, config.seed, share.rank, share.ranks, mixed=order, target=target, period=period)


def _supervised(inputs: TrainingInputs, mesh: Mesh, tokenizer: Any) -> SupervisedRows | None:
    config = inputs.config
    if not config.data.ptx_source:
        return None
    rows = _share(inputs, mesh, ["ptx"]).stream(config.seed)
    return SupervisedRows(rows, tokenizer, config.rollout.max_tokens, config.data.ptx_batch)


def weights_for_engines(rollout: RolloutConfig, model: ModelConfig, policy: Any) -> list[ShardedWeight]:
    """The policy's weights for the engines: all of them, or the adapters alone."""
    if rollout.placement == "colocated":
        torch.cuda.empty_cache()
        dist.barrier()  # all engines on these GPUs wake up once the first rank says so
    adapters_only = model.lora_sync == "adapter"
    return lora.adapter_weights(policy) if adapters_only else lora.engine_weights(policy)


def sampling_of(rollout: RolloutConfig, ends: tuple[int, ...]) -> Sampling:
    """How training completions are sampled; `ends`: the tokens that end one, see `loading.end_tokens`."""
    return Sampling(
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        rollout.max_tokens,
        ends,
        min_p=rollout.min_p,
        min_tokens=rollout.min_tokens,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        bad_words=rollout.bad_words,
        stop=rollout.stop,
        options=tuple(rollout.sampling_options.items()),
    )


def _queue(trainer: Trainer, engines: Engines, ends: tuple[int, ...], prompts: PromptStream) -> RolloutQueue:
    """Each prompt gets `samples_per_prompt` completions, and a greedy one where the estimator needs it."""
    config = trainer.config
    train, rollout = config.train, config.rollout

    def samplings(step: int) -> list[Sampling]:
        """Of the completions that are trained on after so many steps."""
        sampling = sampling_of(config.at(step, trainer.tokens).rollout, ends)
        greedy = [sampling.greedy] if config.algorithm.estimator.needs_greedy else []
        return [sampling] * train.samples_per_prompt + greedy

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
    trust, seed = model.trust_remote_code, config.seed
    # As saved: weights become float32 when FSDP cuts them, but adapters and tensor parallelism need it before.
    dtype: loading.Precision = torch.float32 if model.lora_rank or config.parallel.tp > 1 else "auto"
    policy = loading.load_policy(
        path,
        head=model.value_head_init if config.resolved_critic == "head" else None,
        seed=seed,
        adapters=adapters(config.model, seed),
        trust_remote_code=trust,
        dtype=dtype,
    )
    if device_mesh.device_type == "cuda":
        policy.stored_logits = spare_numbers(config.scaling)
    parts: dict[str, Any] = {"policy": policy}
    if config.resolved_critic == "separate":
        parts["critic"] = _critic(model, path, seed, dtype)
    teacher = {"reference": _teacher(model, path, dtype)} if model.reference_path else {}
    asked_by = "parallel.sp" if config.parallel.sp > 1 else "train.packing" if config.train.packing else None
    policy.packs = config.resolved_packing and all(
        packing.can_pack(loading.transformer(part), _where(model, path, name), asked_by, config.parallel.sp)
        for name, part in (parts | teacher).items()
    )
    sharder = _Sharder(config, device_mesh, policy.packs)
    models = {name: sharder.trained(name, part) for name, part in parts.items()}
    if config.resolved_reference != "copy":
        return models, None
    if teacher:
        return models, sharder.sharded("reference", teacher["reference"])
    reference = loading.load_reference(path, adapters=adapters(model, seed), trust_remote_code=trust, dtype=dtype)
    return models, sharder.sharded("reference", reference)


def keep_gathered(
    scaling: ScalingConfig, tp: int, settings: ModelConfig, models: Mapping[str, ModelAndOptimizer], reference: Any
) -> frozenset[str]:
    """Tells FSDP which models' weights stay in memory after a forward pass: those of `gathered`. A collective call.

    `Trainer.reshard`, or the last backward pass before an optimizer step, frees them. Call it before the first pass.
    """
    modules = {name: each.model for name, each in models.items()} | ({"reference": reference} if reference else {})
    kept = gathered(scaling, tp, settings, modules)
    for name in kept:
        modules[name].set_reshard_after_forward(False)
    return kept


def _teacher(model: ModelConfig, path: str, dtype: loading.Precision) -> Policy:
    """The model in model.reference_path, frozen.

    Raises:
        ConfigError: it numbers tokens in another way than the policy does.
    """
    start, setting = str(model.reference_path), "model.reference_path"
    _check_tokens(model, path, start, setting)
    return loading.load_reference(start, trust_remote_code=model.trust_remote_code, dtype=dtype, setting=setting)


def _check_tokens(model: ModelConfig, path: str, other: str, setting: str) -> None:
    """Raises ConfigError if the tokenizers of two models number tokens differently."""
    own, theirs = (prompts.load_tokenizer(each, model.trust_remote_code).get_vocab() for each in (path, other))
    if own != theirs:
        raise ConfigError(f"{setting} {other}: its tokenizer is another one than that of {path}")


def _critic(model: ModelConfig, path: str, seed: int, dtype: loading.Precision) -> Critic:
    """A critic with weights of its own.

    Raises:
        ConfigError: model.critic_path numbers tokens in another way than the policy does.
    """
    trust, start = model.trust_remote_code, model.critic_path or path
    if model.critic_path:
        _check_tokens(model, path, start, "model.critic_path")
    setting = "model.critic_path" if model.critic_path else "model.path"
    return loading.load_critic(
        start,
        head=model.value_head_init,
        seed=seed,
        trust_remote_code=trust,
        dtype=dtype,
        setting=setting,
    )


def _where(model: ModelConfig, path: str, name: str) -> str:
    """The setting and the path that a model comes from."""
    others = {"critic": model.critic_path, "reference": model.reference_path}
    return f"model.{name}_path {others[name]}" if others.get(name) else f"model.path {path}"


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
            part.sharing = Sharing.of(device_mesh[SEQUENCE])
            device_mesh = init_device_mesh(device_mesh.device_type, (device_mesh.size(),))  # FSDP cuts over all ranks
        dtype = getattr(torch, model.dtype)
        return fsdp.shard(part, device_mesh, dtype, offload=name in model.offload)


def adapters(model: ModelConfig, seed: int) -> lora.Adapters | None:
    """The adapters beside the policy's layers; None without model.lora_rank."""
    if not model.lora_rank:
        return None
    return lora.Adapters(model.lora_rank, model.lora_alpha, model.lora_targets, seed)
