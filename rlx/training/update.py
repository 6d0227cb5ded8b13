"""Step 7 of the loop: a step's experience becomes losses, gradients and optimizer steps.

The formulas of rlx.algorithms meet the models, the settings and the other ranks here. Left out: how completions become
micro-batches (experience), the optimizers (optimizers), and metrics of what is counted (metrics).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlx.algorithms import adaptive, losses, masking
from rlx.algorithms.dealing import token_draws
from rlx.algorithms.importance_sampling import importance_weights
from rlx.algorithms.losses import PolicyLossSettings
from rlx.config.sections.algorithm import AlgorithmConfig
from rlx.models import fsdp
from rlx.models.policy import PolicyOutput
from rlx.training import aggregation
from rlx.training.experience import (
    Experience,
    LogprobBatch,
    RolloutBatch,
    deal_minibatches,
    minibatches,
    return_to_owners,
)
from rlx.training.optimizers.choice import set_lr
from rlx.training.stats import LossStats, Sums, UpdateStats, add_sums, check_finite
from rlx.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """What the losses of an optimizer step are divided by: sums over all ranks."""

    tokens: float
    policy: float  # tokens or responses, as algorithm.aggregation counts
    is_empty: bool = False  # no token is in the losses of any rank


def update(trainer: Trainer, batch: Experience) -> tuple[Experience, UpdateStats]:
    """All epochs of optimizer steps on a step's experience; a collective call.

    If the run defers log-probabilities (see `Trainer.defers_logprobs`), the first pass gives those of its mini-batch.

    Returns:
        The experience with all columns: this rank's own completions in their order, whichever ranks trained on them.
        And the statistics of the losses and optimizer steps.

    Raises:
        FloatingPointError: see `check_update`.
    """
    train, stats = trainer.config.train, UpdateStats()
    own = torch.arange(len(batch.row), device=batch.row.device)
    batch = replace(batch, row=own, home=own + trainer.mesh.dp_rank * len(own))
    batch = with_uncertain_tokens(trainer, batch)
    deals_again = train.shuffle_minibatches and train.num_minibatches > 1
    for epoch, index in itertools.product(range(train.ppo_epochs), range(train.num_minibatches)):
        if index == 0 and (epoch == 0 or deals_again):
            batch, split, sizes = split_epoch(trainer, batch, epoch)
            stats.positions = stats.positions or sum(micro_batch.positions for part in split for micro_batch in part)
        number = epoch * train.num_minibatches + index
        split[index], losses_here = accumulate(trainer, split[index], sizes[index], number)
        batch = with_pass(batch, split[index])
        stats.passes += 1
        stats.losses.add(losses_here)
        if number == 0:  # no weight has changed yet
            stats.first = losses_here
        elif exceeds_target_kl(trainer, losses_here, sizes[index]):
            discard_gradients(trainer)
            break
        if sizes[index].is_empty and "ptx/loss" not in losses_here.sums:
            discard_gradients(trainer)  # they are 0, and the optimizer's momentum would move the weights all the same
            continue
        add_sums(stats.grad_norms, optimizer_step(trainer, number))
        stats.optimizer_steps += 1
    check_update(trainer, batch, stats)
    return return_to_owners(batch, trainer.mesh), stats


def split_epoch(
    trainer: Trainer, batch: Experience, epoch: int
) -> tuple[Experience, list[list[Experience]], list[LossDenominators]]:
    """Deals a step's experience to the mini-batches of an epoch; a collective call.

    In the first epoch they follow the order of the prompts, which is random. In later ones the prompts are dealt anew.

    Returns:
        The experience that this rank has in this epoch, and the micro-batches and denominators of each mini-batch.
    """
    count, seeds = trainer.config.train.num_minibatches, (trainer.config.seed, trainer.step, epoch)
    batch = deal_minibatches(batch, count, trainer.mesh, seeds if epoch else None, trainer.policy.packs)
    parts = minibatches(batch, count)
    if trainer.config.algorithm.policy_loss == "clip_cov":
        parts = [without_high_covariance(trainer, part, seeds) for part in parts]
    return batch, trainer.micro_batches(parts), denominators(trainer, parts)


def with_uncertain_tokens(trainer: Trainer, batch: Experience) -> Experience:
    """The step's experience with only the tokens of highest entropy kept; a collective call.

    They are the share algorithm.top_entropy_quantile of the step's tokens, as many as torch.quantile gives TRL. Source:
    Wang et al. 2025 (arXiv 2506.01939), whose mini-batches have a limit each.
    """
    share, inside = trainer.config.algorithm.top_entropy_quantile, batch.loss_mask > 0
    if share == 1:
        return batch
    tokens = trainer.sum_over_ranks({"tokens": inside.sum()})["tokens"]
    entropy = batch.entropy.clamp(min=0)  # of a certain token, rounding may make it negative
    limit = aggregation.largest(trainer.mesh, entropy[inside], 1 + int(share * (tokens - 1) + 1e-9))
    return replace(batch, chosen=batch.chosen * (entropy >= limit))


def without_high_covariance(trainer: Trainer, part: Experience, seeds: Sequence[int]) -> Experience:
    """A mini-batch without the tokens that Clip-Cov takes out of the policy loss; a collective call.

    They are drawn by seeds from those whose covariance, that of the old policy, is within the bounds.
    """
    settings, mask = trainer.config.algorithm, part.loss_mask
    own = torch.stack([masking.moments(column, mask) for column in (part.logprobs, part.advantages)])
    total = trainer.mesh.all_reduce_sum(own)
    covariance = losses.covariances(part.logprobs, part.advantages, mask, total)
    inside = (mask > 0) & (covariance >= settings.clip_cov_low) & (covariance <= settings.clip_cov_high)
    draws = token_draws(part.groups, part.samples, mask.shape[1], seeds)
    count = max(1, int(settings.clip_cov_ratio * float(total[0, 0])))
    limit = aggregation.largest(trainer.mesh, draws[inside], count)
    return replace(part, chosen=part.chosen * ~(inside & (draws >= limit)))


def with_pass(batch: Experience, micro_batches: Sequence[Experience]) -> Experience:
    """The batch with the log-probabilities and entropy that the micro-batches of a mini-batch have after a pass."""
    given = ("logprobs", "ref_logprobs", "entropy", "newest_logprobs")
    columns: dict[str, Any] = {name: getattr(batch, name).clone() for name in given}
    for micro_batch in micro_batches:
        for name, column in columns.items():
            column[micro_batch.row, : micro_batch.mask.shape[1]] = getattr(micro_batch, name)
    return replace(batch, **columns)


def denominators(trainer: Trainer, parts: Sequence[Experience]) -> list[LossDenominators]:
    """The denominators of each mini-batch; a collective call."""
    sums: Sums = {}
    for i, part in enumerate(parts):
        sums |= {f"tokens/{i}": part.loss_mask.sum(), f"policy/{i}": _token_weights(trainer, part)[1]}
    total = trainer.sum_over_ranks(sums)
    pairs = [(total[f"tokens/{i}"], total[f"policy/{i}"]) for i in range(len(parts))]
    return [LossDenominators(max(1.0, tokens), max(1.0, policy), tokens == 0) for tokens, policy in pairs]


def accumulate(
    trainer: Trainer, micro_batches: Sequence[Experience], size: LossDenominators, number: int
) -> tuple[list[Experience], LossStats]:
    """Gradients of one optimizer step: of its micro-batches and of its supervised rows.

    Args:
        micro_batches: of the optimizer step's mini-batch.
        size: what the losses are divided by.
        number: of the optimizer step within the PPO step.

    Returns:
        The micro-batches with `newest_logprobs`; if those of the first pass have no old log-probabilities yet, also
        with these and the entropy. And the statistics of the losses.
    """
    stats, gives_old = LossStats(), trainer.defers_logprobs and number == 0
    trainer.set_gradient_sync(last=False)
    if trainer.supervised and trainer.config.algorithm.ptx_coef and "policy" in trainer.learning:  # 0 by a schedule
        stats.sums["ptx/loss"] = backward_supervised(trainer, number)
    done = []
    for i, micro_batch in enumerate(micro_batches):
        trainer.set_gradient_sync(last=i == len(micro_batches) - 1)
        micro_batch, more = backward(trainer, micro_batch, size, gives_old)
        done.append(micro_batch)
        stats.add(more)
    return done, stats


def backward(
    trainer: Trainer, micro_batch: Experience, size: LossDenominators, gives_old: bool = False
) -> tuple[Experience, LossStats]:
    """Losses and gradients of one micro-batch: its share of the optimizer step's, over all ranks; see `accumulate`.

    Args:
        gives_old: the pass gives the micro-batch its old log-probabilities and entropy.
    """
    stats: Sums = {}
    scale = trainer.mesh.dp_size  # FSDP averages gradients over replicas; the denominators are global already
    if "policy" in trainer.learning:
        settings, temperature = trainer.config.algorithm, trainer.config.rollout.temperature
        entropy = settings.needs_entropy if gives_old else settings.entropy_coef > 0
        output = trainer.policy(micro_batch.inputs, temperature, entropy)
        micro_batch = _with_old_logprobs(micro_batch, output) if gives_old else micro_batch
        micro_batch = replace(micro_batch, newest_logprobs=output.logprobs.detach())
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
    return micro_batch, LossStats(stats, micro_batch.loss_mask.sum())


def _with_old_logprobs(micro_batch: Experience, output: PolicyOutput) -> Experience:
    """The micro-batch with the log-probabilities of a pass as the old ones, and the entropy or an estimate of it."""
    old = output.logprobs.detach()
    return replace(micro_batch, logprobs=old, ref_logprobs=old, entropy=output.estimated_entropy.detach())


def policy_losses(trainer: Trainer, output: PolicyOutput, micro_batch: Experience, size: float) -> tuple[Tensor, Sums]:
    """The policy's loss (a scalar), with entropy bonus and KL where they are part of it; and its statistics."""
    settings, mask = trainer.config.algorithm, micro_batch.loss_mask
    weights, _ = _token_weights(trainer, micro_batch)
    correction = rollout_correction(trainer.config.resolved_rollout_correction, settings, micro_batch)
    loss, stats = losses.policy_loss(
        output.logprobs,
        micro_batch.logprobs,
        micro_batch.advantages,
        mask,
        size,
        policy_loss_settings(settings),
        weights * correction * micro_batch.chosen,
    )
    sums: Sums = {"policy/loss": loss.detach()}
    if settings.chooses_tokens:
        sums["policy/left_out_fraction"] = (mask * (1 - micro_batch.chosen)).sum()
    sums |= {f"policy/{name}": total for name, total in stats.items()}
    if output.entropy is not None and settings.entropy_coef > 0:
        loss = loss + settings.entropy_coef * losses.entropy_loss(output.entropy, mask, size, weights)
    if settings.kl_placement == "loss" and trainer.kl.coef > 0:
        logps = output.logprobs, micro_batch.logprobs, micro_batch.ref_logprobs
        kl_loss = losses.kl_loss(*logps, mask, size, settings.kl_estimator, weights)
        loss = loss + trainer.kl.coef * kl_loss
        sums["kl/loss"] = kl_loss.detach()
    return loss, sums


def policy_loss_settings(settings: AlgorithmConfig) -> PolicyLossSettings:
    """The settings of the policy loss as its function takes them."""
    temperatures = settings.sapo_temperature_pos, settings.sapo_temperature_neg
    clips = settings.clip_low, settings.clip_high, settings.dual_clip
    return PolicyLossSettings(settings.policy_loss, *clips, temperatures)


def value_losses(trainer: Trainer, values: Tensor, micro_batch: Experience, size: float) -> tuple[Tensor, Sums]:
    """The critic's loss (a scalar) for its values `[B, T]`, and its statistics."""
    clip = trainer.config.algorithm.value_clip
    loss, stats = losses.value_loss(values, micro_batch.values, micro_batch.returns, micro_batch.loss_mask, size, clip)
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


def gradient_shares(trainer: Trainer, batch: Experience) -> dict[int, float]:
    """The share of each prompt in the gradient of a step's policy loss, by the prompt's id; a collective call.

    With g the gradient at the old policy over all completions of the step, and g_p the part of it that comes from the
    completions of prompt p, the share is (g_p . g) / (g . g). Shares add up to 1; a negative one pulls against the
    others. Weights stay as they are.
    """
    batch, size = with_uncertain_tokens(trainer, batch), denominators(trainer, [batch])[0]
    own, whole = list(dict.fromkeys(batch.groups.tolist())), _policy_gradient(trainer, batch, size)
    square, shares = _dot(whole, whole), dict[int, float]()
    for rank, index in itertools.product(range(trainer.mesh.dp_size), range(len(own))):
        chosen, is_own = batch.rows(batch.groups == own[index]), rank == trainer.mesh.dp_rank
        # A forward pass is a collective call: ranks without the prompt make one that counts for nothing.
        chosen = chosen if is_own else replace(chosen, trained=torch.zeros_like(chosen.trained))
        prompt = trainer.sum_over_ranks({"prompt": float(own[index] if is_own else 0)})["prompt"]
        share = _dot(_policy_gradient(trainer, chosen, size), whole)
        shares[int(prompt)] = share / square if square else 0.0
    return shares


def _policy_gradient(trainer: Trainer, batch: Experience, size: LossDenominators) -> list[Tensor]:
    """The gradient of the policy's loss by weight, each of the weight's shape; the weights' own end empty."""
    discard_gradients(trainer)
    settings, (parts,) = trainer.config.algorithm, trainer.micro_batches([batch])
    for number, part in enumerate(parts):
        trainer.set_gradient_sync(last=number == len(parts) - 1)
        output = trainer.policy(part.inputs, trainer.config.rollout.temperature, settings.entropy_coef > 0)
        if settings.old_logprobs == "recomputed":  # the policy is still the old one
            part = replace(part, logprobs=output.logprobs.detach())
        loss, _ = policy_losses(trainer, output, part, size.policy)
        (loss * trainer.mesh.dp_size).backward()
    weights = [weight for weight in trainer.policy.parameters() if weight.requires_grad]
    gradient = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in weights]
    discard_gradients(trainer)
    return gradient


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The inner product of two gradients, whose tensors are of any shape; a collective call."""
    products = [(a.detach() * b.detach()).sum() for a, b in zip(left, right, strict=True)]
    return float(sum(fsdp.full_tensor(each).double() for each in products))


def exceeds_target_kl(trainer: Trainer, stats: LossStats, size: LossDenominators) -> bool:
    """Whether the policy has moved further from the old one than algorithm.target_kl allows; a collective call."""
    limit = trainer.config.algorithm.target_kl
    if limit is None or "policy" not in trainer.learning:
        return False
    name = "policy/approx_kl"
    return not trainer.sum_over_ranks({name: stats.sums[name]})[name] <= limit * size.tokens  # true for a nan


def optimizer_step(trainer: Trainer, number: int) -> Sums:
    """Clips gradients and applies them at the schedule's learning rate; gives their norms before clipping, by model."""
    norms: Sums = {}
    for name in trainer.learning:
        model, limit = trainer.models[name].model, trainer.config.train.max_grad_norm
        norms[name] = fsdp.clip_gradients(model, limit)
    for name in trainer.learning:
        optimizer = trainer.models[name].optimizer
        for group, lr in zip(optimizer.param_groups, trainer.base_lrs[name], strict=True):
            set_lr(group, lr * scheduled_lr_scale(trainer, name, number))
        optimizer.step()
        optimizer.zero_grad()
    trainer.update_ema()
    return norms


def check_update(trainer: Trainer, batch: Experience, stats: UpdateStats) -> None:
    """Checks all numbers of a step at once: a wait for each would leave the GPU idle. A collective call.

    Raises:
        FloatingPointError: see `check_finite`.
    """
    weights = {name: fsdp.weight_norm(trainer.models[name].model) for name in stats.grad_norms}
    first, all_passes = (each.sums.get("policy/approx_kl", 0.0) for each in (stats.first, stats.losses))
    before = first + masking.masked_sum(batch.values, batch.mask)
    sums = trainer.sum_over_ranks({"before": before, "passes": all_passes})
    numbers = {f"a gradient norm of the {name}": norm for name, norm in stats.grad_norms.items()}
    numbers |= {f"the norm of the weights of the {name}": norm for name, norm in weights.items()}
    check_finite(trainer.step + 1, sums["before"], numbers | {"the KL of the policy": sums["passes"]})


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
    return losses.token_weights(batch.loss_mask, config.algorithm.aggregation, config.rollout.max_tokens)
