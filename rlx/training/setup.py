"""One rank's live objects made of the config and what launch has started, and restored from a checkpoint.

What becomes of them is worker's and train_loop's; the models are roles'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from rlx.algorithms import adaptive
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.data import prompts, sources, stream
from rlx.mesh import DATA, TENSOR, Mesh
from rlx.models import fsdp, loading, logprobs, lora, tensor_parallel
from rlx.rewards import reward_model, scoring
from rlx.rewards.remote import RemoteReward
from rlx.rollout.engine_group import EngineGroup
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.runs import ray_train
from rlx.storage.checkpoint_catalog import Retention
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.storage.filesystem import Storage, retry
from rlx.tracking.memory import NullTracker
from rlx.tracking.tracker import OutboxTracker
from rlx.training import trainer
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.trainer import Run
from rlx.types import Sampling, Scorer, ShardedWeight


def build_run(setup: Mapping[str, Any]) -> Run:
    """This rank's objects, continued from the newest checkpoint if the run has one.

    Args:
        setup: `config` tree, `model` folder, `engines` and `reward_models` handles, `tracking` (MLflow's address),
            `folder` (the run's storage), `box` (see controller).
    """
    config = RunConfig.model_validate(setup["config"])
    if not setup.get("examine"):
        _check_shared(setup["folder"])
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(threads(config))
    grid = Mesh.of(device.type, config.parallel.tp)
    _forget_peak(device)
    trained, reference = models(config, setup["model"], grid.mesh)
    tokenizer = prompts.load_tokenizer(setup["model"], config.model.trust_remote_code)
    held_out = stream.read_shard("held_out")
    recorded, say = grid.rank == 0 and not setup.get("examine"), partial(ray_train.notify, setup["box"])
    settings, source, chosen = config.algorithm, config.data, config.checkpoint
    sampling = _sampling(config, tokenizer)
    fleet = _fleet(config, setup, grid, device, trained["policy"].model)
    remote = _remote_scorers(config, setup["reward_models"], grid.dp_rank)
    run = Run(
        config=config,
        device=device,
        grid=grid,
        trained=trained,
        average=trainer.initial_ema(config, trained["policy"].model),
        rates=learning_rates(config, trained),
        copy=reference,
        rounds=_rounds(config, fleet, sampling, _stream("train", config.seed, grid)),
        supervised=_stream("ptx", config.seed, grid) if source.ptx_source else None,
        held_out=stream.prompts(held_out, range(grid.dp_rank, len(held_out), grid.dp_size)),
        fleet=fleet,
        sampling=sampling,
        tokenizer=tokenizer,
        scorers=_scorers(config, source.seed, source.num_prompts) | remote,
        held_out_scorers=_scorers(config, config.eval.seed, config.eval.num_prompts) | remote,
        tracker=OutboxTracker(setup["tracking"], setup["folder"], "rank_0", say) if recorded else NullTracker(),
        saver=CheckpointWriter(setup["folder"], Retention(chosen.keep_last, chosen.best_by, chosen.best_mode)),
        box=setup["box"],
        kl=adaptive.AdaptiveKL(settings.kl_coef, settings.adaptive_kl_target, settings.adaptive_kl_horizon),
        scores=adaptive.RunningScores(),
        scattered=scattered(config, trained),
    )
    run.restore()
    return run


def threads(config: RunConfig) -> int:
    """That a worker on a CPU computes with: its share, rounded, where Ray would round down. What engines have does not
    count: sums depend on the number of threads, and engines may be others after a resume."""
    return max(1, round(config.scaling.resources_per_worker.get("CPU", 1.0)))


def _forget_peak(device: torch.device) -> None:
    """Has peak memory counted from here on: this process may have done another run before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _check_shared(folder: Storage) -> None:
    """ConfigError if this worker's node does not see the run's folder that the driver has made."""
    if not retry((folder / "run.json").exists, f"reading {folder.path}"):
        node = ray.util.get_node_ip_address()
        raise ConfigError(
            f"storage: {folder.path} is not there on node {node}: name a folder that all nodes have mounted, or s3"
        )


def _stream(table: str, seed: int, grid: Mesh) -> stream.PromptStream:
    """This replica's share of a prompt table."""
    return stream.PromptStream(stream.read_shard(table), seed, grid.dp_rank, grid.dp_size)


def _fleet(config: RunConfig, setup: Mapping[str, Any], grid: Mesh, device: torch.device, policy: Any) -> EngineGroup:
    settings, engines = config.rollout, setup["engines"]
    # Adapters go to an engine's own process, which writes them down for vLLM.
    alone = config.model.lora_sync == "adapter"
    return EngineGroup(
        pool=EnginePool(engines, config.seed, grid.dp_rank, settings.timeout_s, settings.sync_timeout_s),
        mesh=grid,
        sync=WeightSync(
            engines, grid, device, getattr(torch, config.model.dtype), None if alone else settings.transport
        ),
        retries=settings.retries,
        notify=partial(ray_train.notify, setup["box"]),
        weights=partial(_weights, config, policy),
    )


def _weights(config: RunConfig, policy: Any) -> list[ShardedWeight]:
    """What engines are sent of the policy: all of its weights, or its adapters alone."""
    if config.rollout.placement == "colocated":
        torch.cuda.empty_cache()
        dist.barrier()  # the engines wake on these GPUs, all of them once the first rank says so
    alone = config.model.lora_sync == "adapter"
    return lora.adapter_weights(policy) if alone else lora.engine_weights(policy)


def _sampling(config: RunConfig, tokenizer: Any) -> Sampling:
    chosen = config.rollout
    return Sampling(chosen.temperature, chosen.top_p, chosen.top_k, chosen.max_tokens, (tokenizer.eos_token_id,))


def _rounds(config: RunConfig, fleet: EngineGroup, sampling: Sampling, prompts: stream.PromptStream) -> RolloutQueue:
    """Each prompt is answered so many times, and greedily once more if the estimator asks for that."""
    train, ahead = config.train, config.rollout.max_staleness
    samplings = [sampling] * train.samples_per_prompt
    if config.algorithm.estimator.needs_greedy:
        samplings.append(sampling.greedy)
    return RolloutQueue(fleet, prompts, samplings, train.prompts_per_step, config.rollout.num_chunks, ahead)


def _scorers(config: RunConfig, seed: int, size: int) -> dict[str, Scorer]:
    return scoring.scorers(config.reward, sources.answer_checker(config.data, seed, size))


def _remote_scorers(config: RunConfig, models: Sequence[Any], replica: int) -> dict[str, Scorer]:
    settings = config.reward
    remote: dict[str, Scorer] = {}
    if settings.model:
        patient = reward_model.ModelReward(models, config.rollout.timeout_s, replica)
        patient([])  # until they are loaded
        remote["model"] = replace(patient, timeout_s=settings.timeout_s)
    if settings.url:
        remote["url"] = RemoteReward.from_config(settings)
    return remote


def models(config: RunConfig, path: str, mesh: Any) -> tuple[dict[str, ModelAndOptimizer], Any]:
    """Policy and critic with their optimizers, and the reference if it is a copy; all sharded over the grid's mesh."""
    chosen = config.model
    trust, head, seed = chosen.trust_remote_code, chosen.value_head_init, config.seed
    own = head if config.critic == "head" else None
    parts: dict[str, Any] = {
        "policy": loading.load_policy(path, head=own, seed=seed, adapters=adapters(config), trust_remote_code=trust)
    }
    if mesh.device_type == "cuda":
        parts["policy"].stored_logits = _kept(config)
    if config.critic == "separate":
        parts["critic"] = loading.load_critic(path, head=head, seed=seed, trust_remote_code=trust)
    trained = {}
    for name, part in parts.items():
        if config.train.gradient_checkpointing:
            loading.checkpoint_gradients(part)
        sharded = _sharded(config, name, part, mesh)
        trained[name] = ModelAndOptimizer(sharded, _optimizer(config, sharded))
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


def scattered(config: RunConfig, trained: Mapping[str, ModelAndOptimizer]) -> frozenset[str]:
    """The models whose gradients in full, float32 on every rank while micro-batches add up, are more than a sixteenth
    of a worker's GPU memory; none where no other rank could have the rest."""
    if not config.scaling.use_gpu or config.replicas == 1:
        return frozenset()
    sizes = {name: sum(p.numel() for p in t.model.parameters() if p.requires_grad) for name, t in trained.items()}
    return frozenset(name for name, size in sizes.items() if size // config.parallel.tp > _kept(config))


def _kept(config: RunConfig) -> int:
    """How many numbers of float32 may be kept of what could also be had again."""
    return logprobs.stored_logits_on_gpu(config.scaling.resources_per_worker.get("GPU", 1.0))


def adapters(config: RunConfig) -> lora.Adapters | None:
    """The adapters beside the policy's layers; None without."""
    chosen = config.model
    if not chosen.lora_rank:
        return None
    return lora.Adapters(chosen.lora_rank, chosen.lora_alpha, chosen.lora_targets, config.seed)


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


def learning_rates(config: RunConfig, trained: Mapping[str, ModelAndOptimizer]) -> dict[str, list[float]]:
    """Of each model's parameter groups: the body, then a value head, which learns at the critic's."""
    body = {"policy": config.train.actor_lr, "critic": config.train.critic_lr}
    heads = {name: len(part.optimizer.param_groups) - 1 for name, part in trained.items()}
    return {name: [body[name]] + [config.train.critic_lr] * heads[name] for name in trained}
