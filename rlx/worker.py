"""One rank's live objects: built from the config, restored from a checkpoint, and what they say to other ranks.

The order in which they are used is train_loop's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlx import algorithms, checkpoint, data, experience, model, report, rewards, tasks
from rlx.checkpoint import Trained
from rlx.config import RunConfig
from rlx.rollout import sync
from rlx.rollout.pool import Rollouts
from rlx.types import Checker, Completion, Experience, Prompt, Sampling


@dataclass
class Run:
    """What a rank works with, and what of its state a checkpoint keeps."""

    config: RunConfig
    device: torch.device
    rank: int
    ranks: int
    trained: dict[str, Trained]  # the policy, and the critic if it is a model of its own
    base_lr: list[tuple[dict[str, Any], float]]  # optimizer parameter groups and their learning rates
    reference: Any
    prompts: data.PromptStream
    held_out: list[Prompt]  # this rank's share
    rollouts: Rollouts
    sampling: Sampling
    tokenizer: Any
    checker: Checker
    held_out_checker: Checker
    tracker: report.Tracker
    kl: algorithms.AdaptiveKL
    step: int = 0  # PPO steps done; also the version of the weights
    updates: int = 0  # optimizer steps done
    tokens: int = 0  # response tokens generated so far, by all ranks
    evaluation: dict[str, float] = field(default_factory=dict)  # the newest

    @property
    def policy(self) -> Any:
        return self.trained["policy"].model

    @property
    def critic(self) -> Any:
        """The value model; None if it is a head on the policy."""
        return self.trained["critic"].model if "critic" in self.trained else None

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and after the last, is to be done now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def score(self, completions: Sequence[Completion], checker: Checker) -> list[float]:
        """One score per completion."""
        settings = self.config.reward
        return rewards.score(
            self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True),
            [c.prompt.answer for c in completions],
            [c.prompt.entry for c in completions],
            settings.function,
            checker,
            re.compile(settings.answer_pattern) if settings.answer_pattern else None,
        )

    def experience(self, completions: Sequence[Completion], scores: Sequence[float]) -> Experience:
        """Completions and their scores as tensors on this rank's device."""
        return experience.build(completions, scores, self.tokenizer.pad_token_id or 0).to(self.device)

    def cut(self, batches: Sequence[Experience]) -> list[list[Experience]]:
        """The micro-batches of each batch: as many on every rank, since each forward pass gathers shards."""
        budget = self.config.train.micro_batch_tokens
        counts = self.largest([float(experience.micro_batch_count(batch, budget)) for batch in batches])
        return [experience.micro_batches(batch, int(count)) for batch, count in zip(batches, counts, strict=True)]

    def reduce_gradients(self, now: bool) -> None:
        """Whether the next backward pass reduces gradients over ranks, or keeps them for a later one."""
        for trained in self.trained.values():
            cast(FSDPModule, trained.model).set_requires_gradient_sync(now)

    def push(self, version: int, timeout_s: float) -> None:
        """Sends the policy to the engines; returns on every rank once they have it."""
        sync.push(
            model.engine_parameters(self.policy),
            self.rollouts.engines,
            version,
            sender=self.rank == 0,
            dtype=getattr(torch, self.config.model.dtype),
            timeout_s=timeout_s,
        )
        dist.barrier()

    def summed(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each value summed over all ranks."""
        total = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over all ranks."""
        highest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return list(highest.tolist())

    def report(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """The step's metrics to MLflow and Ray Train, with a checkpoint when one is due."""
        self.evaluation |= {key: value for key, value in metrics.items() if key.startswith("eval/")}
        due = self.step > 0 and self.is_due(self.config.checkpoint.every)
        started = time.perf_counter()
        with checkpoint.written(self.trained, self.manifest(), self.rank) if due else nullcontext(None) as folder:
            if folder:
                metrics = metrics | {"time/checkpoint": time.perf_counter() - started}
            self.tracker.log_samples(samples, self.step)
            self.tracker.log(metrics, self.step)
            ray.train.report(
                metrics | self.evaluation | {"step": self.step},
                checkpoint=ray.train.Checkpoint.from_directory(folder) if folder else None,
                checkpoint_dir_name=f"step_{self.step:06d}" if folder else None,
            )

    def manifest(self) -> dict[str, Any]:
        """All state beside tensors. Nothing on a rank draws from its global random state, so none is kept."""
        return {
            "step": self.step,  # also the weight version
            "updates": self.updates,
            "tokens": self.tokens,
            "kl": self.kl.state_dict(),
            "cursor": self.prompts.cursor(),
            "evaluation": self.evaluation,
            "mlflow_run_id": self.tracker.run_id,
            "config": self.config.model_dump(mode="json"),
        }

    def restore(self, folder: str) -> None:
        """Continues from a checkpoint folder."""
        manifest = checkpoint.load(folder, self.trained)
        self.step, self.updates, self.tokens = manifest["step"], manifest["updates"], manifest["tokens"]
        self.kl.load_state_dict(manifest["kl"])
        self.prompts.seek(manifest["cursor"])
        self.evaluation = manifest["evaluation"]


class Clock:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[f"time/{part}"] = time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Seconds of each part by metric name, and of the whole so far."""
        return self._seconds | {"time/step": time.perf_counter() - self.started}


def assemble(setup: Mapping[str, Any]) -> Run:
    """This rank's objects, continued from the newest checkpoint if the run has one.

    Args:
        setup: `config` tree, `model` folder, `engines` handles, `tracking` (uri, MLflow run id).
    """
    config = RunConfig.model_validate(setup["config"])
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    trained, reference = _models(config, setup["model"], init_device_mesh(device.type, (ranks,)))
    tokenizer = data.load_tokenizer(setup["model"], config.model.trust_remote_code)
    held_out = data.read_shard("held_out")
    uri, run_id = setup["tracking"]
    settings, rollout = config.algorithm, config.rollout
    run = Run(
        config=config,
        device=device,
        rank=rank,
        ranks=ranks,
        trained=trained,
        base_lr=_learning_rates(config, trained),
        reference=reference,
        prompts=data.PromptStream(data.read_shard("train"), config.seed, rank, ranks),
        held_out=data.prompts(held_out, range(rank, len(held_out), ranks)),
        rollouts=Rollouts(setup["engines"], config.seed, rank, rollout.timeout_s),
        sampling=Sampling(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, (tokenizer.eos_token_id,)
        ),
        tokenizer=tokenizer,
        checker=tasks.answer_checker(config.data, config.data.seed, config.data.size),
        held_out_checker=tasks.answer_checker(config.data, config.eval.seed, config.eval.size),
        tracker=report.Tracker(uri, run_id if rank == 0 else None),
        kl=algorithms.AdaptiveKL(settings.kl_coef, settings.kl_target, settings.kl_horizon),
    )
    if newest := ray.train.get_checkpoint():
        with newest.as_directory() as folder:
            run.restore(folder)
    return run


def _models(config: RunConfig, path: str, mesh: Any) -> tuple[dict[str, Trained], Any]:
    """Policy and critic with their optimizers, and the reference; all sharded over the mesh."""
    trust, dtype = config.model.trust_remote_code, getattr(torch, config.model.dtype)
    separate = config.model.critic == "separate"
    policy = model.load_policy(path, head=not separate, trust_remote_code=trust)
    parts = {"policy": policy} | ({"critic": model.load_critic(path, trust_remote_code=trust)} if separate else {})
    trained = {}
    for name, part in parts.items():
        sharded = model.shard(part, mesh, dtype)
        head = [p for n, p in sharded.named_parameters() if n.startswith("value_head.")]
        body = [p for n, p in sharded.named_parameters() if not n.startswith("value_head.")]
        optimizer = torch.optim.AdamW(
            [{"params": group} for group in (body, head) if group],
            betas=config.train.adam_betas,
            weight_decay=config.train.weight_decay,
            fused=True,
        )
        trained[name] = Trained(sharded, optimizer)
    reference = model.shard(model.load_reference(path, trust_remote_code=trust), mesh, dtype)
    return trained, reference


def _learning_rates(config: RunConfig, trained: Mapping[str, Trained]) -> list[tuple[dict[str, Any], float]]:
    """Each optimizer parameter group with its learning rate before the schedule; value heads learn at the critic's."""
    rates = []
    for name, part in trained.items():
        body, *head = part.optimizer.param_groups
        rates.append((body, config.train.actor_lr if name == "policy" else config.train.critic_lr))
        rates += [(group, config.train.critic_lr) for group in head]
    return rates
