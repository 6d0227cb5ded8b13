"""The PPO loop: what runs on every FSDP rank, from prompts to a reported step.

The loop joins the parts and does none of their work: rollouts are in collector.py, formulas in rlx.algorithms,
optimizer steps in update.py, checkpoints in checkpointing.py. It starts no process and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.algorithms import masking
from rlx.algorithms.advantages import AdvantageInputs, AdvantageSettings, estimate_advantages
from rlx.algorithms.kl import estimate_kl, k3_unbounded
from rlx.models import lora
from rlx.models.policy import PolicyOutput
from rlx.storage.checkpoint_files import Shard
from rlx.storage.checkpoint_writer import FinishedCheckpoint
from rlx.training.checkpointing import Checkpointer
from rlx.training.collector import RolloutCollector, Selection, new_selection
from rlx.training.evaluation.evaluate import evaluate, unread_answers
from rlx.training.experience import Experience, LogprobBatch, RolloutBatch, concat
from rlx.training.metrics import StepCounts, StepTimer, summarize
from rlx.training.reporting import Reporter, failed_episodes
from rlx.training.stats import Sums
from rlx.training.trainer import Trainer, is_policy_alone
from rlx.training.update import gradient_shares, update
from rlx.types import Completion, Phase, has_evaluation


def train(trainer: Trainer, collector: RolloutCollector, checkpointer: Checkpointer, reporter: Reporter) -> None:
    """PPO from the restored step to the last one; every rank calls it."""
    reporter.notify(Phase("engines and first weights"))
    collector.push_weights(trainer.step, starting=True)
    metrics, samples = checkpointer.restored_metrics, list[dict[str, Any]]()
    if trainer.step == 0:
        reporter.notify(Phase("first evaluation"))
        metrics, samples = evaluate(trainer, collector, all_sets=True)
        tell(trainer, reporter, unread_answers(samples, metrics["eval/accuracy"], trainer.config.reward))
    while not record_step(trainer, collector, checkpointer, reporter, metrics, samples):  # until it is the last one
        metrics, samples = train_step(trainer, collector)


def train_step(trainer: Trainer, collector: RolloutCollector) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One step of PPO, from prompts to new weights in the engines; a collective call.

    Completions that are certain to be trained on get their log-probabilities while they are scored, and while the
    chunks after them are generated.

    Returns:
        The step's metrics and the rows of its sample table, as `evaluate` gives them.
    """
    timer = StepTimer()
    trainer.begin_step()
    selection, parts = new_selection(trainer), list[LogprobBatch]()
    while needs_more(trainer, selection):  # once, unless groups of equal scores are left out
        chunks = collector.next_round(selection, trainer.config.train.steps)  # 1 prompts
        for completions in timer.waiting("rollout", chunks):  # 2 tokens, logprobs
            scores = collector.score.begin(completions)  # 3 scores, by a thread
            if not selection.filtered:
                with timer("logprobs"):  # 4 padded [B, T], masks; 5 old and reference logprobs, values
                    parts.append(logprobs_of(trainer, collector, selection.choosable(completions)))
            with timer("reward"):
                collector.finish_scoring(scores, selection)
    chosen = selection.take()
    with timer("logprobs"):
        if not parts:  # 4 and 5 of those that the scores have chosen
            parts.append(logprobs_of(trainer, collector, [each.completion for each in chosen]))
        batch = concat(parts).with_scores(chosen)
        experience, kl_sums = compute_advantages(trainer, batch)  # 6 advantages and returns
    record_gradient_shares(trainer, collector, experience)
    with timer("update"):
        experience, stats = update(trainer, experience)  # 7 losses, backward, clip, optimizer step
    with timer("rollout"):
        collector.wait_for_pending(trainer.step)
    trainer.step += 1
    with timer("sync"):
        collector.push_weights(trainer.step)  # 8 weights to the engines
    collector.keep(trainer.step, selection, experience)
    metrics, samples = evaluate(trainer, collector)
    measured, counts = summarize(trainer, selection, experience, stats, kl_sums, timer.metrics())  # 9 metrics
    metrics |= measured | advance(trainer, counts)
    return metrics | collector.observe(selection), samples


def tell(trainer: Trainer, reporter: Reporter, lines: Sequence[str]) -> None:
    """Tells the person who watches what all ranks know."""
    for line in lines if trainer.mesh.rank == 0 else ():
        reporter.notify(line)


def logprobs_of(trainer: Trainer, collector: RolloutCollector, completions: Sequence[Completion]) -> LogprobBatch:
    """Completions with what the models say of them, once engines have left the GPU that they share with the trainer."""
    collector.sleep_engines()
    return compute_logprobs(trainer, collector.build_batch(completions))


def needs_more(trainer: Trainer, selection: Selection) -> bool:
    """Whether all ranks together lack groups to train on, and may generate another round; a collective call."""
    if selection.rounds == 0:
        return True
    if not selection.filtered or selection.rounds == trainer.config.algorithm.filter_rounds:
        return False
    return selection.count_missing() > 0


@torch.no_grad()
def compute_logprobs(trainer: Trainer, batch: RolloutBatch, *, all_rows: bool = False) -> LogprobBatch:
    """Adds the old policy's log-probabilities and entropy, the reference's log-probabilities and the values.

    Without a reference its log-probabilities are the policy's own; without a critic the values are 0.

    Args:
        all_rows: compute also those of the first mini-batch that the run defers, see `Trainer.defers_logprobs`;
            without it they are 0, and `update` computes them.
    """
    columns = {name: torch.zeros_like(batch.mask) for name in ("logprobs", "ref_logprobs", "values", "entropy")}
    if needs_no_model(trainer):
        said = batch.rollout_logprobs
        return batch.with_logprobs(columns | {"logprobs": said, "ref_logprobs": said, "entropy": -said})
    rows = len(batch.scores)
    first = rows // trainer.config.train.num_minibatches if trainer.defers_logprobs and not all_rows else 0
    for micro_batch in trainer.micro_batches([batch.rows(slice(first, None))])[0] if first < rows else ():
        output = old_policy_output(trainer, micro_batch)
        reference = reference_logprobs(trainer, micro_batch)
        values = output.values if trainer.critic is None else trainer.critic(micro_batch.inputs)
        grids = {
            "logprobs": output.logprobs,
            "ref_logprobs": output.logprobs if reference is None else reference,
            "values": values,
            "entropy": output.estimated_entropy,
        }
        for name, grid in grids.items():
            if grid is not None:
                columns[name][micro_batch.row, : grid.shape[1]] = grid
    trainer.reshard()
    return batch.with_logprobs(columns)


def needs_no_model(trainer: Trainer) -> bool:
    """Whether the engines' log-probabilities are all that the update needs."""
    return is_policy_alone(trainer) and trainer.config.algorithm.old_logprobs == "rollout"


def old_policy_output(trainer: Trainer, batch: RolloutBatch) -> PolicyOutput:
    """The old policy's log-probabilities, entropy and values; or what the engines reported for the tokens."""
    if trainer.config.algorithm.old_logprobs == "rollout":
        return PolicyOutput(batch.rollout_logprobs, None, None)
    settings, temperature = trainer.config.algorithm, trainer.config.rollout.temperature
    output: PolicyOutput = trainer.policy(batch.inputs, temperature, settings.needs_entropy)
    return output


def reference_logprobs(trainer: Trainer, batch: RolloutBatch) -> Tensor | None:
    """The reference's log-probabilities `[B, T]`; None without a reference."""
    temperature = trainer.config.rollout.temperature
    if trainer.reference is not None:
        return trainer.reference(batch.inputs, temperature).logprobs
    if trainer.config.resolved_reference == "none":
        return None
    with lora.adapters_off(trainer.policy):
        return trainer.policy(batch.inputs, temperature).logprobs


def compute_advantages(trainer: Trainer, batch: LogprobBatch) -> tuple[Experience, Sums]:
    """Adds advantages and returns `[B, T]`; also gives sums of the KL to the reference over this rank's tokens.

    They are of two estimates: `kl/ref` is k3 without a bound, `kl/penalty` is that of algorithm.kl_estimator. Episodes
    whose environment failed are not in them.
    """
    settings, mask = trainer.config.algorithm, batch.mask
    scores, greedy_scores = normalize_rewards(trainer, batch)
    log_ratio = batch.logprobs - batch.ref_logprobs
    kl = estimate_kl(log_ratio, settings.kl_estimator)
    turn_rewards = batch.turn_rewards if trainer.config.environment.rewards == "turn" else None
    inputs = AdvantageInputs(scores, kl, batch.values, mask, batch.groups, greedy_scores, batch.counted, turn_rewards)
    kl_coef = trainer.kl.coef if settings.kl_placement == "reward" else 0.0
    advantages, returns = estimate_advantages(
        settings.advantage, inputs, AdvantageSettings(kl_coef, settings.gamma, settings.gae_lambda)
    )
    if settings.whiten_advantages:
        total = trainer.mesh.all_reduce_sum(masking.moments(advantages, batch.loss_mask))
        advantages = masking.masked_whiten(advantages, mask, total)
    ref, counted = k3_unbounded(log_ratio), mask * batch.counted[:, None]
    sums: Sums = {"kl/ref": masking.masked_sum(ref, counted), "kl/penalty": masking.masked_sum(kl, counted)}
    return batch.with_advantages(advantages, returns), sums


def normalize_rewards(trainer: Trainer, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """The scores `[B]` and the greedy completions' scores `[B]`, normalized and clipped as configured.

    Normalization uses the mean and deviation of all scores trained on so far, by all ranks, without those of episodes
    whose environment failed.
    """
    settings, columns = trainer.config.algorithm, [batch.scores, batch.greedy_scores]
    if settings.normalize_rewards:
        total = trainer.mesh.all_reduce_sum(masking.moments(batch.scores, batch.counted))
        trainer.reward_stats.update(*total.tolist())
        mean, scale = trainer.reward_stats.shift_and_scale()
        columns = [(column - mean) * scale for column in columns]
    if settings.reward_clip is not None:
        columns = [column.clamp(-settings.reward_clip, settings.reward_clip) for column in columns]
    return columns[0], columns[1]


def record_gradient_shares(trainer: Trainer, collector: RolloutCollector, experience: Experience) -> None:
    """Keeps each prompt's share in the gradient, if a replay asks for that of this step; a collective call."""
    replay, step = trainer.replay, trainer.step + 1
    if replay and replay.attributes_gradient and replay.until == step:
        collector.keep_shares(step, gradient_shares(trainer, experience))


def advance(trainer: Trainer, counts: StepCounts) -> dict[str, float]:
    """Adapts the KL coefficient to a step, and adds the step to the run's counts, which are metrics too."""
    if counts.kl is not None:
        trainer.kl.update(counts.kl, counts.completions)
    trainer.tokens += counts.generated
    trainer.seconds += counts.seconds
    return {"tokens/total": float(trainer.tokens), "time/total": trainer.seconds}


def record_step(
    trainer: Trainer,
    collector: RolloutCollector,
    checkpointer: Checkpointer,
    reporter: Reporter,
    metrics: dict[str, float],
    samples: Sequence[Mapping[str, Any]],
) -> bool:
    """Records the current step and begins its checkpoint when one is due; returns whether the step is the last.

    A checkpoint is reported with the first step after it has become complete.
    """
    tell(trainer, reporter, failed_episodes(trainer.step, metrics, trainer.told))
    end = decide_end(trainer, checkpointer, reporter)
    if not (end.is_last or has_evaluation(metrics)):  # which may make it the last one, see `ends_here`
        collector.begin_next()
    finished = [checkpoint] if end.has_finished and (checkpoint := checkpointer.take_finished()) else []
    if finished:
        metrics = metrics | {"time/checkpoint_write": finished[0].seconds}
    trainer.evaluation |= {key: value for key, value in metrics.items() if key.startswith("eval/")}
    is_due = checkpointer.is_due(end.is_last or end.needs_checkpoint)
    shards: Mapping[str, Shard] = {}
    if is_due:
        shards, seconds = checkpointer.copy_state()
        metrics = metrics | add_pause(trainer, metrics, seconds)
    reporter.log_samples(samples, trainer.step)
    reporter.log(metrics, trainer.step)
    if is_due:
        save(checkpointer, reporter, shards, metrics)
    if end.is_last or not trainer.config.checkpoint.async_save:
        finished += iter(checkpointer.take_finished, None)  # until there is none
    report(trainer, reporter, metrics, finished, is_last=end.is_last)
    return end.is_last or (has_evaluation(metrics) and ends_here(trainer, checkpointer, reporter, metrics))


def add_pause(trainer: Trainer, metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Adds a pause for a checkpoint to the run's seconds; returns the times of the step with the pause."""
    trainer.seconds += seconds
    pause = {"time/checkpoint": seconds, "time/step": metrics["time/step"] + seconds}
    return pause | {"time/total": trainer.seconds}


def ends_here(trainer: Trainer, checkpointer: Checkpointer, reporter: Reporter, metrics: dict[str, float]) -> bool:
    """Whether rank 0 was asked to stop because of an evaluation it has just reported; a collective call.

    If so, the step is reported once more as the last one, with a checkpoint of it.
    """
    if not decide_end(trainer, checkpointer, reporter).is_last:
        return False
    if checkpointer.is_due(is_last=True):
        save(checkpointer, reporter, checkpointer.copy_state()[0], metrics)
    report(trainer, reporter, metrics, list(iter(checkpointer.take_finished, None)), is_last=True)
    return True


def save(
    checkpointer: Checkpointer, reporter: Reporter, shards: Mapping[str, Shard], metrics: Mapping[str, float]
) -> None:
    """Begins to write a checkpoint. Records are safe before it: none is ever ahead of them."""
    reporter.flush()
    checkpointer.save(shards, metrics, reporter.run_id)


def report(
    trainer: Trainer,
    reporter: Reporter,
    metrics: Mapping[str, float],
    finished: Sequence[FinishedCheckpoint],
    *,
    is_last: bool,
) -> None:
    """Passes the step, with the newest evaluation, to whoever started training; a collective call."""
    step = {**metrics, **trainer.evaluation, "step": trainer.step}
    reporter.report(step, is_last=is_last, checkpoints=finished)


class StepEnd(NamedTuple):
    """What all ranks do at the end of a step."""

    is_last: bool  # all steps are done, or rank 0 was asked to stop
    needs_checkpoint: bool  # a machine is about to be taken away
    has_finished: bool  # rank 0 has a finished checkpoint to report


def decide_end(trainer: Trainer, checkpointer: Checkpointer, reporter: Reporter) -> StepEnd:
    """What all ranks do at the end of the current step; a collective call."""
    finished = trainer.mesh.rank == 0 and checkpointer.has_finished()
    mine = [reporter.should_stop(trainer.step), reporter.should_checkpoint(), finished]
    asked, needed, finished = (value > 0 for value in trainer.max_over_ranks([float(each) for each in mine]))
    return StepEnd(trainer.step >= trainer.config.train.steps or asked, needed, finished)
