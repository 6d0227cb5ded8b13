"""One rank's models and optimizers, and the state of training that changes from step to step.

loop.py has the order in which a step uses them, update.py the losses and optimizer steps. This module leaves out
engines and rewards (collector), checkpoints (checkpointing) and records (reporting).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config.run import RunConfig
from rlx.config.sections.train import TrainConfig
from rlx.data.stream import PromptStream
from rlx.mesh import Mesh
from rlx.models import fsdp
from rlx.storage.checkpoint_files import ModelAndOptimizer
from rlx.training import experience
from rlx.training.experience import AnyBatch, RolloutBatch, build_batch
from rlx.training.optimizers.groups import base_lrs
from rlx.types import Completion, Replay


@dataclass(frozen=True)
class SupervisedRows:
    """Answers of a data set that the policy learns in addition to the reward (algorithm.ptx_coef)."""

    stream: PromptStream
    tokenizer: Any
    end: tuple[int, ...]  # what follows an answer: the first of `loading.end_tokens`; nothing if the model has none
    max_tokens: int  # longer answers are cut
    batch_size: int  # rows of an optimizer step, over all replicas

    def batch(self, optimizer_step: int, device: torch.device) -> RolloutBatch:
        """This replica's rows of an optimizer step, counted over the whole run."""
        self.stream.position = optimizer_step * self.batch_size
        rows = []
        for prompt in self.stream.next(self.batch_size):
            ids = self.tokenizer(prompt.answer, add_special_tokens=False).input_ids
            ids = (*ids, *self.end)[: self.max_tokens]
            rows.append(Completion(prompt, 0, ids, (0.0,) * len(ids), finished=True, version=0))
        return build_batch(rows, self.tokenizer.pad_token_id or 0).to(device)


@dataclass
class Trainer:
    """The models that a rank trains, and its progress."""

    config: RunConfig  # of the current step, see `begin_step`
    mesh: Mesh
    device: torch.device
    models: dict[str, ModelAndOptimizer]  # "policy", and "critic" if it is a model of its own
    reference: Any  # the frozen reference, if it is a model of its own
    base_lrs: dict[str, list[float]]  # by model: each parameter group's learning rate before the schedule
    kl: AdaptiveKL
    reward_stats: RunningScores
    ema: dict[str, Tensor]  # average of the policy's weights, by name; empty if none is kept
    supervised: SupervisedRows | None = None
    reduced_each_pass: frozenset[str] = frozenset()  # models whose gradients are reduced in each backward pass
    kept_unsharded: frozenset[str] = frozenset()  # models whose weights stay gathered until an optimizer step
    replay: Replay | None = None  # None: all steps that are left, for the first time
    step: int = 0  # PPO steps done; also the version of the weights
    tokens: int = 0  # response tokens generated so far, by all ranks
    seconds: float = 0.0  # of the steps so far
    evaluation: dict[str, float] = field(default_factory=dict)  # the newest evaluation's metrics
    told: set[str] = field(default_factory=set)  # see `reporting.failed_episodes`
    aggregates: dict[str, Metric] = field(default_factory=dict)  # by metric; to make one takes longer than to use it

    @property
    def policy(self) -> Any:
        return self.models["policy"].model

    @property
    def critic(self) -> Any:
        """The value model; None if the critic is a head on the policy, or there is none."""
        return self.models["critic"].model if "critic" in self.models else None

    @property
    def learning(self) -> list[str]:
        """The models that learn in the current step; the policy does not while the critic warms up."""
        warming_up = self.step < self.config.train.critic_warmup
        return [name for name in self.models if not (warming_up and name == "policy")]

    @property
    def defers_logprobs(self) -> bool:
        """Whether the update's first pass gives the first mini-batch its old log-probabilities.

        The policy is still the old one in that pass, so a separate pass is saved. The run must have no reference and no
        critic, recompute log-probabilities, choose no tokens by them, and score a step's rollouts in one piece.
        """
        algorithm = self.config.algorithm
        is_late = algorithm.old_logprobs == "recomputed" and not algorithm.chooses_tokens
        return is_policy_alone(self) and is_late and self.config.rollout.num_chunks == 1

    def begin_step(self) -> None:
        """Takes the numbers that settings with a schedule have in the next step; they follow from steps and tokens."""
        if self.config.schedules:
            self.config = self.config.at(self.step, self.tokens)
            self.base_lrs = base_lrs(self.config.train, self.models)
        if self.config.algorithm.adaptive_kl_target is None:
            self.kl.coef = self.config.algorithm.kl_coef

    def is_due(self, every: int) -> bool:
        """Whether the current step is the last, or one of every `every` steps (0: never)."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def micro_batches(self, batches: Sequence[AnyBatch]) -> list[list[AnyBatch]]:
        """The micro-batches of each batch, equally many on every rank: each forward pass is a collective call."""
        budget, packs = self.config.train.micro_batch_tokens, self.policy.packs
        # Cut and packed on the CPU: on a GPU, each length that Python reads is a wait.
        batches = [batch.to(torch.device("cpu")) for batch in batches]
        counts = self.max_over_ranks([experience.micro_batch_count(batch, budget, packs) for batch in batches])
        pairs = zip(batches, counts, strict=True)
        parts = [experience.micro_batches(batch, int(count), packs) for batch, count in pairs]
        return [[part.to(self.device) for part in each] for each in parts]

    def reshard(self) -> None:
        """Frees the full weights that FSDP gathered for forward passes that no backward pass follows."""
        for model in (*(each.model for each in self.models.values()), self.reference):
            if model is not None:
                fsdp.reshard(model)

    def set_gradient_sync(self, last: bool) -> None:
        """Tells FSDP whether the next backward pass is the last one before an optimizer step.

        Only the last pass reduces gradients over ranks; for a model that is `reduced_each_pass` each one does. The
        weights of a model that is `kept_unsharded` are gathered (and cast) once for all passes.
        """
        for name, each in self.models.items():
            model = cast(FSDPModule, each.model)
            model.set_requires_gradient_sync(last or name in self.reduced_each_pass)
            model.set_reshard_after_backward(last or name not in self.kept_unsharded)

    def update_ema(self) -> None:
        """Moves the average of the policy's weights towards them, after an optimizer step."""
        if not self.ema:
            return
        decay = self.config.train.ema_decay or 0.0
        for name, weight in self.policy.named_parameters():
            if name in self.ema:
                self.ema[name].mul_(decay).add_(weight.detach(), alpha=1 - decay)

    def sum_over_ranks(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each value summed over all replicas; the same on every rank. A collective call."""
        # Not through Python numbers: each of them would wait for the GPU.
        each = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values.values()]
        total = torch.stack(each)
        return dict(zip(values, self.mesh.all_reduce_sum(total).tolist(), strict=True))

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over all ranks. A collective call."""
        highest = torch.tensor(values, dtype=torch.float64, device=self.device)
        return list(self.mesh.all_reduce_max(highest).tolist())


def is_policy_alone(trainer: Trainer) -> bool:
    """Whether neither a reference nor a critic scores what the policy has said."""
    return trainer.config.resolved_reference == "none" and trainer.config.resolved_critic == "none"


def initial_ema(train: TrainConfig, policy: Any) -> dict[str, Tensor]:
    """The average of the policy's trained weights before the first step, by name; empty without train.ema_decay."""
    if train.ema_decay is None:
        return {}
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
