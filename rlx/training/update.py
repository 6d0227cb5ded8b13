"""Step 7 of the loop: a step's experience becomes losses, gradients and optimizer steps.

The formulas are algorithms.py's; here they meet the models, the settings and the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.algorithms import adaptive, losses
from rlx.models import fsdp
from rlx.models.policy import PolicyOutput
from rlx.training import experience
from rlx.training.experience import Experience, balance_over_replicas
from rlx.training.trainer import Run, Sums


def update(run: Run, batch: Experience, late: bool = False) -> tuple[Experience, Sums]:
    """All epochs of optimizer steps on a batch.

    Args:
        late: `annotate` has left out the first mini-batch; it gets its columns here, from the first pass.

    Returns:
        The batch that this rank has trained on, dealt anew over replicas and with all columns; and the losses'
        statistics, summed over optimizer steps.

    Raises: see `check_norms`.
    """
    batch = balance_over_replicas(batch, run.config.train.num_minibatches, run.grid)
    batches = experience.minibatches(batch, run.config.train.num_minibatches)
    cut, sizes = run.cut(batches), denominators(run, batches)
    sums: Sums = {"positions": sum(micro.ids.numel() for micros in cut for micro in micros)}
    for number, (micros, size) in enumerate(list(zip(cut, sizes, strict=True)) * run.config.train.ppo_epochs):
        done = accumulate(run, micros, size, number, late and number == 0)
        if number == 0:  # nothing has changed yet
            sums |= {f"first/{name}": done[name] for name in ("policy/approx_kl", "updated") if name in done}
            if late:
                fill_first_pass(batch, micros)
        _add(sums, done)
        if number > 0 and exceeds_target_kl(run, done, size):
            discard_gradients(run)
            break
        _add(sums, optimizer_step(run, number))
    check_norms(run, sums)
    return batch, sums


def fill_first_pass(batch: Experience, micros: Sequence[Experience]) -> None:
    """Gives a batch what a first pass over some of its completions has said of them."""
    for micro in micros:
        place = micro.place, slice(micro.mask.shape[1])
        batch.logprobs[place] = batch.ref_logprobs[place] = micro.logprobs
        batch.entropy[place] = micro.entropy


def exceeds_target_kl(run: Run, done: Sums, size: LossDenominators) -> bool:
    """Whether the policy has moved further from the old one than algorithm.target_kl allows, over all ranks."""
    limit = run.config.algorithm.target_kl
    if limit is None or "policy" not in run.learning:
        return False
    return not run.summed(done)["policy/approx_kl"] <= limit * size.tokens  # nor if it is no number


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """What the losses of an optimizer step are divided by: its size over all ranks."""

    tokens: float
    policy: float  # tokens or responses, as algorithm.aggregation has it


def denominators(run: Run, batches: Sequence[Experience]) -> list[LossDenominators]:
    """The size of each mini-batch."""
    sums: Sums = {}
    for i, part in enumerate(batches):
        sums |= {f"tokens/{i}": part.mask.sum(), f"policy/{i}": _token_weights(run, part)[1]}
    total = run.summed(sums)
    return [LossDenominators(total[f"tokens/{i}"], total[f"policy/{i}"]) for i in range(len(batches))]


def accumulate(run: Run, micros: Sequence[Experience], size: LossDenominators, number: int, late: bool) -> Sums:
    """Gradients of the step's optimizer step `number`: of its micro-batches, and of the supervised rows beside them;
    with `late` this pass gives the micro-batches their old logprobs, and minus these for an entropy that is not asked
    for: an exact one takes as long as the loss does."""
    sums: Sums = {"passes": 1.0}
    run.reduce_gradients(False)
    if run.supervised and "policy" in run.learning:
        sums["ptx/loss"] = backward_supervised(run, number)
    for i, micro in enumerate(micros):
        run.reduce_gradients(i == len(micros) - 1)
        _add(sums, backward(run, micro, size, late))
    return sums


def backward(run: Run, micro: Experience, size: LossDenominators, late: bool) -> Sums:
    """Losses and gradients of one micro-batch: its share of the optimizer step's, over all ranks; for `late` see
    `accumulate`."""
    settings, mask = run.config.algorithm, micro.mask
    stats: Sums = {"updated": mask.sum()}
    loss, values = torch.zeros((), device=run.device), None
    if "policy" in run.learning:
        scored = run.policy(*micro.inputs, run.sampling.temperature, settings.entropy_coef > 0)
        if late:
            micro.logprobs.copy_(scored.logprobs.detach())
            micro.entropy.copy_(-micro.logprobs if scored.entropy is None else scored.entropy.detach())
        policy_loss, policy_stats = policy_losses(run, scored, micro, size.policy)
        loss, values = loss + policy_loss, scored.values
        stats |= policy_stats
    if run.critic is not None:
        values = run.critic(*micro.inputs)
    if values is not None:
        value_loss, value_stats = losses.value_loss(
            values, micro.values, micro.returns, mask, size.tokens, settings.value_clip
        )
        loss = loss + (settings.value_coef if run.critic is None else 1.0) * value_loss
        stats |= {"value/loss": value_loss.detach(), "value/clip_fraction": value_stats["clip_fraction"]}
    (loss * run.grid.dp_size).backward()  # FSDP averages gradients over replicas; the denominators are global already
    return stats


def policy_losses(run: Run, scored: PolicyOutput, micro: Experience, size: float) -> tuple[Tensor, Sums]:
    """The policy's loss with entropy bonus and KL, where they are part of it; and its statistics."""
    settings, mask = run.config.algorithm, micro.mask
    weights, _ = _token_weights(run, micro)
    loss, stats = losses.policy_loss(
        scored.logprobs,
        micro.logprobs,
        micro.advantages,
        mask,
        size,
        losses.PolicyLossSettings(settings.policy_loss, settings.clip_low, settings.clip_high, settings.dual_clip),
        weights * run.importance(micro),
    )
    sums: Sums = {"policy/loss": loss.detach()}
    sums |= {f"policy/{name}": total for name, total in stats.items()}
    if scored.entropy is not None:
        loss = loss + settings.entropy_coef * losses.entropy_loss(scored.entropy, mask, size, weights)
    if settings.kl_placement == "loss" and run.kl.coef > 0:
        kl_loss = losses.kl_loss(scored.logprobs, micro.ref_logprobs, mask, size, settings.kl_estimator, weights)
        loss = loss + run.kl.coef * kl_loss
        sums["kl/loss"] = kl_loss.detach()
    return loss, sums


def backward_supervised(run: Run, number: int) -> Tensor:
    """Gradients of the supervised loss on the rows that go with an optimizer step; this rank's share of the loss."""
    rows = run.answers(number)
    tokens = run.summed({"tokens": rows.mask.sum()})["tokens"]
    total = torch.zeros((), device=run.device)
    for micro in run.cut([rows])[0]:
        scored = run.policy(*micro.inputs, 1.0)
        loss = losses.supervised_loss(scored.logprobs, micro.mask, tokens)
        (run.config.algorithm.ptx_coef * loss * run.grid.dp_size).backward()
        total += loss.detach()
    return total


def optimizer_step(run: Run, number: int) -> Sums:
    """Clips the gradients and applies them at the schedule's learning rate; gives their norms before clipping."""
    norms: Sums = {"updates": 1.0}
    for name in run.learning:
        norm = fsdp.clip_gradients(run.trained[name].model, run.config.train.max_grad_norm)
        norms |= {f"grad_norm/{name}": norm, f"updates/{name}": 1.0}
    for name in run.learning:
        optimizer = run.trained[name].optimizer
        for group, lr in zip(optimizer.param_groups, run.rates[name], strict=True):
            group["lr"] = lr * scheduled_lr_scale(run, name, number)
        optimizer.step()
        optimizer.zero_grad()
    run.update_average()
    return norms


def check_norms(run: Run, sums: Sums) -> None:
    """Looks at all of a step's norms at once: to wait for each would leave the GPU idle between optimizer steps.

    Raises:
        FloatingPointError: one is not finite. The weights are spoilt then, and are neither sent nor saved.
    """
    for name in run.learning:
        if not math.isfinite(sums[f"grad_norm/{name}"]):  # the sum of them: none is negative
            raise FloatingPointError(
                f"step {run.step + 1}: a gradient norm of the {name} is not finite; its weights are spoilt, and "
                f"neither sent nor saved; a lower learning rate may help"
            )


def scheduled_lr_scale(run: Run, name: str, number: int) -> float:
    """The schedule's factor at the step's optimizer step `number`. The policy's begins after the critic's warm-up."""
    train = run.config.train
    late, per_step = train.critic_warmup if name == "policy" else 0, train.ppo_epochs * train.num_minibatches
    place, total = (run.step - late) * per_step + number, (train.steps - late) * per_step
    return adaptive.lr_scale(place, train.warmup_steps, total, train.lr_schedule)


def discard_gradients(run: Run) -> None:
    for trained in run.trained.values():
        trained.optimizer.zero_grad()


def _token_weights(run: Run, batch: Experience) -> tuple[Tensor, Tensor]:
    return losses.token_weights(batch.mask, run.config.algorithm.aggregation, run.config.rollout.max_tokens)


def _add(sums: Sums, more: Mapping[str, float | Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
