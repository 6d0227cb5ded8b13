"""Step 7 of the loop: a step's experience becomes losses, gradients and optimizer steps.

The formulas are in rlx.algorithms; here they meet the models, the settings and the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlx.algorithms import adaptive, losses
from rlx.algorithms.importance_sampling import importance_weights
from rlx.algorithms.losses import PolicyLossSettings
from rlx.config.algorithm import AlgorithmConfig
from rlx.models import fsdp
from rlx.models.policy import PolicyOutput
from rlx.training.experience import Experience, LogprobBatch, RolloutBatch, balance_over_replicas, minibatches
from rlx.training.trainer import Sums, Trainer


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """What the losses of an optimizer step are divided by: sums over all ranks."""

    tokens: float
    policy: float  # tokens or responses, as algorithm.aggregation counts


def update(trainer: Trainer, batch: Experience, deferred: bool = False) -> tuple[Experience, Sums]:
    """All epochs of optimizer steps on a step's experience; a collective call.

    Args:
        deferred: the first mini-batch has no old log-probabilities yet; the first pass over it gives them.

    Returns:
        The experience that this rank trained on: balanced over replicas, with all columns. And the statistics of the
        losses, summed over optimizer steps.

    Raises:
        FloatingPointError: see `check_norms`.
    """
    train = trainer.config.train
    batch = balance_over_replicas(batch, train.num_minibatches, trainer.mesh)
    parts = minibatches(batch, train.num_minibatches)
    split, sizes = trainer.micro_batches(parts), denominators(trainer, parts)
    sums: Sums = {"positions": sum(micro_batch.positions for part in split for micro_batch in part)}
    for number in range(train.num_minibatches * train.ppo_epochs):
        index = number % train.num_minibatches
        first_pass = deferred and number == 0
        split[index], stats = accumulate(trainer, split[index], sizes[index], number, first_pass)
        if number == 0:  # no weight has changed yet
            sums |= {f"first/{name}": stats[name] for name in ("policy/approx_kl", "updated") if name in stats}
        _add(sums, stats)
        if number > 0 and exceeds_target_kl(trainer, stats, sizes[index]):
            discard_gradients(trainer)
            break
        _add(sums, optimizer_step(trainer, number))
    check_norms(trainer, sums)
    return with_first_pass(batch, split[0]) if deferred else batch, sums


def with_first_pass(batch: Experience, micro_batches: Sequence[Experience]) -> Experience:
    """The batch with the log-probabilities and entropies that the first pass gave its first mini-batch."""
    logprobs, ref_logprobs, entropy = batch.logprobs.clone(), batch.ref_logprobs.clone(), batch.entropy.clone()
    for micro_batch in micro_batches:
        index = micro_batch.row, slice(micro_batch.mask.shape[1])
        logprobs[index] = ref_logprobs[index] = micro_batch.logprobs
        entropy[index] = micro_batch.entropy
    return replace(batch, logprobs=logprobs, ref_logprobs=ref_logprobs, entropy=entropy)


def denominators(trainer: Trainer, parts: Sequence[Experience]) -> list[LossDenominators]:
    """The denominators of each mini-batch; a collective call."""
    sums: Sums = {}
    for i, part in enumerate(parts):
        sums |= {f"tokens/{i}": part.mask.sum(), f"policy/{i}": _token_weights(trainer, part)[1]}
    total = trainer.sum_over_ranks(sums)
    return [LossDenominators(total[f"tokens/{i}"], total[f"policy/{i}"]) for i in range(len(parts))]


def accumulate(
    trainer: Trainer, micro_batches: Sequence[Experience], size: LossDenominators, number: int, first_pass: bool
) -> tuple[list[Experience], Sums]:
    """Gradients of one optimizer step: of its micro-batches and of its supervised rows.

    Args:
        micro_batches: of the optimizer step's mini-batch.
        size: what the losses are divided by.
        number: of the optimizer step within the PPO step.
        first_pass: this pass gives the micro-batches their old log-probabilities.

    Returns:
        The micro-batches, with old log-probabilities; and the statistics of the losses.
    """
    sums: Sums = {"passes": 1.0}
    trainer.set_gradient_sync(last=False)
    if trainer.supervised and "policy" in trainer.learning:
        sums["ptx/loss"] = backward_supervised(trainer, number)
    done = []
    for i, micro_batch in enumerate(micro_batches):
        trainer.set_gradient_sync(last=i == len(micro_batches) - 1)
        micro_batch, stats = backward(trainer, micro_batch, size, first_pass)
        done.append(micro_batch)
        _add(sums, stats)
    return done, sums


def backward(
    trainer: Trainer, micro_batch: Experience, size: LossDenominators, first_pass: bool
) -> tuple[Experience, Sums]:
    """Losses and gradients of one micro-batch: its share of the optimizer step's, over all ranks; see `accumulate`."""
    stats: Sums = {"updated": micro_batch.mask.sum()}
    scale = trainer.mesh.dp_size  # FSDP averages gradients over replicas; the denominators are global already
    if "policy" in trainer.learning:
        settings, temperature = trainer.config.algorithm, trainer.config.rollout.temperature
        entropy = settings.needs_entropy if first_pass else settings.entropy_coef > 0
        output = trainer.policy(micro_batch.inputs, temperature, entropy)
        micro_batch = _with_old_logprobs(micro_batch, output) if first_pass else micro_batch
        loss, policy_stats = policy_losses(trainer, output, micro_batch, size.policy)
        stats |= policy_stats
        if output.values is not None:
            value_loss, value_stats = value_losses(trainer, output.values, micro_batch, size.tokens)
            loss = loss + settings.value_coef * value_loss
            stats |= value_stats
        (loss * scale).backward()
    if trainer.critic is not None:  # after the policy's backward pass, so that one model's activations are alive
        loss, value_stats = value_losses(trainer, trainer.critic(micro_batch.inputs), micro_batch, size.tokens)
        (loss * scale).backward()
        stats |= value_stats
    return micro_batch, stats


def _with_old_logprobs(micro_batch: Experience, output: PolicyOutput) -> Experience:
    """The micro-batch with the log-probabilities of a pass as the old ones, and the entropy or an estimate of it."""
    return replace(micro_batch, logprobs=output.logprobs.detach(), entropy=output.estimated_entropy.detach())


def policy_losses(trainer: Trainer, output: PolicyOutput, micro_batch: Experience, size: float) -> tuple[Tensor, Sums]:
    """The policy's loss (a scalar), with entropy bonus and KL where they are part of it; and its statistics."""
    settings, mask = trainer.config.algorithm, micro_batch.mask
    weights, _ = _token_weights(trainer, micro_batch)
    loss, stats = losses.policy_loss(
        output.logprobs,
        micro_batch.logprobs,
        micro_batch.advantages,
        mask,
        size,
        PolicyLossSettings(settings.policy_loss, settings.clip_low, settings.clip_high, settings.dual_clip),
        weights * rollout_correction(trainer.config.resolved_rollout_correction, settings, micro_batch),
    )
    sums: Sums = {"policy/loss": loss.detach()}
    sums |= {f"policy/{name}": total for name, total in stats.items()}
    if output.entropy is not None and settings.entropy_coef > 0:
        loss = loss + settings.entropy_coef * losses.entropy_loss(output.entropy, mask, size, weights)
    if settings.kl_placement == "loss" and trainer.kl.coef > 0:
        estimator = settings.kl_estimator
        kl_loss = losses.kl_loss(output.logprobs, micro_batch.ref_logprobs, mask, size, estimator, weights)
        loss = loss + trainer.kl.coef * kl_loss
        sums["kl/loss"] = kl_loss.detach()
    return loss, sums


def value_losses(trainer: Trainer, values: Tensor, micro_batch: Experience, size: float) -> tuple[Tensor, Sums]:
    """The critic's loss (a scalar) for its values `[B, T]`, and its statistics."""
    clip = trainer.config.algorithm.value_clip
    loss, stats = losses.value_loss(values, micro_batch.values, micro_batch.returns, micro_batch.mask, size, clip)
    return loss, {"value/loss": loss.detach(), "value/clip_fraction": stats["clip_fraction"]}


def rollout_correction(kind: str, settings: AlgorithmConfig, batch: LogprobBatch) -> Tensor:
    """The importance weight of each token, `[B, T]`: old to rollout policy, truncated or masked as configured."""
    return importance_weights(
        batch.logprobs,
        batch.rollout_logprobs,
        batch.mask,
        kind,
        settings.rollout_correction_low,
        settings.rollout_correction_high,
        settings.rollout_correction_level,
    )


def backward_supervised(trainer: Trainer, number: int) -> Tensor:
    """Gradients of the supervised loss of an optimizer step; this rank's share of the loss, a scalar."""
    assert trainer.supervised
    train = trainer.config.train
    optimizer_step = trainer.step * train.ppo_epochs * train.num_minibatches + number
    rows: RolloutBatch = trainer.supervised.batch(optimizer_step, trainer.device)
    tokens = trainer.sum_over_ranks({"tokens": rows.mask.sum()})["tokens"]
    total = torch.zeros((), device=trainer.device)
    for micro_batch in trainer.micro_batches([rows])[0]:
        output = trainer.policy(micro_batch.inputs, 1.0)
        loss = losses.supervised_loss(output.logprobs, micro_batch.mask, tokens)
        (trainer.config.algorithm.ptx_coef * loss * trainer.mesh.dp_size).backward()
        total += loss.detach()
    return total


def exceeds_target_kl(trainer: Trainer, stats: Sums, size: LossDenominators) -> bool:
    """Whether the policy has moved further from the old one than algorithm.target_kl allows; a collective call."""
    limit = trainer.config.algorithm.target_kl
    if limit is None or "policy" not in trainer.learning:
        return False
    return not trainer.sum_over_ranks(stats)["policy/approx_kl"] <= limit * size.tokens  # true for a nan


def optimizer_step(trainer: Trainer, number: int) -> Sums:
    """Clips the gradients and applies them at the schedule's learning rate; gives their norms before clipping."""
    norms: Sums = {"updates": 1.0}
    for name in trainer.learning:
        norm = fsdp.clip_gradients(trainer.models[name].model, trainer.config.train.max_grad_norm)
        norms |= {f"grad_norm/{name}": norm, f"updates/{name}": 1.0}
    for name in trainer.learning:
        optimizer = trainer.models[name].optimizer
        for group, lr in zip(optimizer.param_groups, trainer.base_lrs[name], strict=True):
            group["lr"] = lr * scheduled_lr_scale(trainer, name, number)
        optimizer.step()
        optimizer.zero_grad()
    trainer.update_ema()
    return norms


def check_norms(trainer: Trainer, sums: Sums) -> None:
    """Checks all gradient norms of a step at once. A wait for each would leave the GPU idle between optimizer steps.

    Raises:
        FloatingPointError: a norm is not finite. The weights are unusable then, and are neither sent nor saved.
    """
    for name in trainer.learning:
        if not math.isfinite(sums[f"grad_norm/{name}"]):  # the sum of all norms, none of which is negative
            raise FloatingPointError(
                f"step {trainer.step + 1}: a gradient norm of the {name} is not finite; its weights are "
                f"unusable, and neither sent nor saved; a lower learning rate may help"
            )


def scheduled_lr_scale(trainer: Trainer, name: str, number: int) -> float:
    """The schedule's factor at an optimizer step; the policy's schedule starts after the critic's warm-up."""
    train = trainer.config.train
    skipped = train.critic_warmup if name == "policy" else 0
    per_step = train.ppo_epochs * train.num_minibatches
    position, total = (trainer.step - skipped) * per_step + number, (train.steps - skipped) * per_step
    return adaptive.lr_scale(position, train.warmup_steps, total, train.lr_schedule)


def discard_gradients(trainer: Trainer) -> None:
    """Drops the gradients of an optimizer step that is not taken."""
    for each in trainer.models.values():
        each.optimizer.zero_grad()


def _token_weights(trainer: Trainer, batch: Experience) -> tuple[Tensor, Tensor]:
    config = trainer.config
    return losses.token_weights(batch.mask, config.algorithm.aggregation, config.rollout.max_tokens)


def _add(sums: Sums, more: Mapping[str, float | Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
