"""The doctor: a few steps at learning rate 0, in which trainer, engines and reference must agree; then changed weights,
which the engines must have after a sync.

`examine` runs on every FSDP rank in place of the PPO loop; `verdicts` judges its figures.
Left out: starting the processes (`launch.examine`), and showing the verdicts (rlx.cli.doctor).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlx.algorithms import masking
from rlx.config.run import RunConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.records import CheckpointConfig
from rlx.config.sections.rollout import HARMLESS_SAMPLING
from rlx.models.engine_logprobs import EngineScorer, bad_word_tokens
from rlx.training.collector import RolloutCollector, new_selection
from rlx.training.experience import LogprobBatch, RolloutBatch
from rlx.training.loop import compute_advantages, compute_logprobs
from rlx.training.trainer import Trainer
from rlx.training.update import update

ROUNDS = 2
_NUDGE = 0.1  # of a weight's own spread: far more than an optimizer step does
# Forward passes over other shapes round differently; engine and trainer use other kernels.
_ROUNDING = {"float32": 1e-5, "bfloat16": 0.05}
_MISMATCH = {"float32": 1e-3, "bfloat16": 0.02}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the doctor's report."""

    what: str  # what was measured
    figure: float
    demand: str  # what the figure should be
    passed: bool


def with_no_learning(config: RunConfig) -> RunConfig:
    """Returns the config with learning rates of 0, so that a step changes nothing, and with all logprobs to compare."""
    train = config.train.model_copy(update={"actor_lr": 0.0, "critic_lr": 0.0, "critic_warmup": 0})
    algorithm = config.algorithm.model_copy(update={"old_logprobs": "recomputed"})
    rollout = config.rollout.model_copy(update={"logprobs_every": 1})
    return config.model_copy(update={"train": train, "algorithm": algorithm, "rollout": rollout})


def examine(trainer: Trainer, collector: RolloutCollector) -> dict[str, float]:
    """The figures that `verdicts` judges; every rank calls it."""
    collector.push_weights(trainer.step, starting=True)
    before = weights_fingerprint(trainer)
    figures = {"ratio": 0.0, "clipped": 0.0, "kl": 0.0, "gap": 0.0}
    for _ in range(ROUNDS):
        for name, value in _round_figures(trainer, collector).items():
            figures[name] = max(figures.get(name, 0.0), value)
        collector.push_weights(trainer.step)
    figures["moved"] = trainer.max_over_ranks([float(weights_fingerprint(trainer) != before)])[0]
    return figures | sync_figures(trainer, collector)


def _round_figures(trainer: Trainer, collector: RolloutCollector) -> dict[str, float]:
    """Figures of one round of generation and one update at learning rate 0."""
    batch, kl_sums = compute_advantages(trainer, compute_logprobs(trainer, generate(trainer, collector)))
    batch, stats = update(trainer, batch)
    own = stats.losses.sums | kl_sums | {"updated": stats.losses.tokens, "tokens": batch.mask.sum()}
    s = trainer.sum_over_ranks(own)
    trained, signal = s["updated"], trainer.max_over_ranks([float(batch.advantages.abs().max())])[0]
    return {f"grad_norm/{name}": float(norm) / stats.optimizer_steps for name, norm in stats.grad_norms.items()} | {
        "untrained": float(trained == 0),  # algorithm.mask_truncated may leave nothing
        "ratio": abs(s["policy/ratio"] / trained - 1) if trained else 0.0,
        "clipped": s["policy/clip_fraction"] / max(trained, 1),
        "kl": abs(s["kl/penalty"]) / s["tokens"],
        "gap": engine_gap(trainer, collector, batch),
        "signal": signal if trained else 0.0,
    }


def sync_figures(trainer: Trainer, collector: RolloutCollector) -> dict[str, float]:
    """The gap between engines and changed weights after the weights were sent, and the gap without sending them."""
    with nudged(trainer):
        collector.push_weights(trainer.step)
        batch = compute_logprobs(trainer, generate(trainer, collector), all_rows=True)
        sent = engine_gap(trainer, collector, batch)
    batch = compute_logprobs(trainer, batch, all_rows=True)
    return {"sync_gap": sent, "stale_gap": engine_gap(trainer, collector, batch)}


def generate(trainer: Trainer, collector: RolloutCollector) -> RolloutBatch:
    """This rank's completions of the next prompts."""
    selection = new_selection(trainer)
    # No generation runs ahead of this call: the weights change between two calls.
    for completions in collector.next_round(selection, trainer.step + 1):
        collector.finish_scoring(collector.score.begin(completions), selection)
    collector.sleep_engines()
    chosen = selection.take()
    return collector.build_batch([each.completion for each in chosen]).with_scores(chosen)


def engine_gap(trainer: Trainer, collector: RolloutCollector, batch: LogprobBatch) -> float:
    """Mean difference of a token's log-probability between engine and trainer, over all ranks.

    With sampling options that alter the distribution, the trainer's is computed from its logits with these options.
    """
    is_altered = bool(trainer.config.rollout.altering)
    ours = altered_logprobs(trainer, collector, batch) if is_altered else batch.logprobs
    difference = masking.masked_sum((ours - batch.rollout_logprobs).abs(), batch.mask)
    s = trainer.sum_over_ranks({"difference": difference, "tokens": batch.mask.sum()})
    return s["difference"] / s["tokens"]


@torch.no_grad()
def altered_logprobs(trainer: Trainer, collector: RolloutCollector, batch: LogprobBatch) -> Tensor:
    """Log-probabilities `[B, T]` of the tokens in the distribution that the sampling options make of the trainer's.

    Raises:
        ValueError: an option whose effect is not known here.
    """
    used = [(name, value) for name, value in collector.sampling.options if name not in HARMLESS_SAMPLING]
    sampling = replace(collector.sampling, options=tuple(used))
    bad = bad_word_tokens(collector.score.tokenizer, sampling.bad_words)
    logprobs = torch.zeros_like(batch.mask)
    policy: Any = trainer.policy
    for part in trainer.micro_batches([batch])[0]:
        assert part.inputs
        first = policy.sequence_group.rank * policy.sequence_group.length(len(part.inputs.before))
        policy.engine_scorer = EngineScorer(part.inputs, part.prompt_lengths, sampling, bad, first)
        scored = policy(part.inputs, sampling.temperature).logprobs
        logprobs[part.row, : scored.shape[1]] = scored
    policy.engine_scorer = None
    trainer.reshard()
    return logprobs


def weights_fingerprint(trainer: Trainer) -> list[float]:
    """Sums over this rank's shards that change when a weight does."""
    weights = [p.detach() for each in trainer.models.values() for p in each.model.parameters()]
    return [float(cast(DTensor, p).to_local().double().abs().sum()) for p in weights]


@contextmanager
def nudged(trainer: Trainer) -> Iterator[None]:
    """Context in which all trained weights of the policy are changed."""
    shards = [cast(DTensor, p).to_local() for p in trainer.policy.parameters() if p.requires_grad]
    before = [shard.clone() for shard in shards]
    with torch.no_grad():
        for shard in shards:
            spread = float(shard.square().mean().sqrt()) if shard.count_nonzero() else 0.5  # an adapter's B is 0
            wave = torch.cos(torch.arange(shard.numel(), device=shard.device, dtype=shard.dtype))
            shard.add_(_NUDGE * spread * wave.view_as(shard))
        yield
        for shard, old in zip(shards, before, strict=True):
            shard.copy_(old)


def starts_at_reference(reference: str, model: ModelConfig, checkpoint: CheckpointConfig) -> bool:
    """Whether the policy begins as its reference is; `reference`: which one it has, `RunConfig.resolved_reference`."""
    if reference == "none" or model.reference_path:
        return False
    copies_start = reference == "copy" and model.reference_weights == "start" and checkpoint.init_state == "weights"
    return copies_start or checkpoint.init_from is None


def verdicts(figures: Mapping[str, float], dtype: str, starts_at_reference: bool) -> list[Verdict]:
    """Judges the figures of `examine`, one line each; `dtype`: of the engines."""
    rounding, mismatch = _ROUNDING[dtype], _MISMATCH[dtype]
    stale = figures["stale_gap"]

    def at_most(what: str, name: str, limit: float) -> Verdict:
        return Verdict(what, figures[name], f"at most {limit:g}", figures[name] <= limit)

    lines = [
        at_most("rounds without a token to train on", "untrained", 0.0),
        at_most("ratio of current to old policy, its distance from 1", "ratio", rounding),
        at_most("fraction of tokens whose ratio is clipped", "clipped", 0.0),
        at_most("weights moved at learning rate 0", "moved", 0.0),
        at_most("engine against trainer, mean difference of logprobs", "gap", mismatch),
        at_most("the same after a sync of changed weights", "sync_gap", mismatch),
        Verdict("the same without the sync", stale, "more than twice the line above", stale > 2 * figures["sync_gap"]),
    ]
    if starts_at_reference:
        lines.insert(3, at_most("KL to the reference at the start, per token", "kl", rounding))
    return lines + [_norm_verdict(name, figures) for name in sorted(figures) if name.startswith("grad_norm/")]


def _norm_verdict(name: str, figures: Mapping[str, float]) -> Verdict:
    """Judges a model's gradient norm.

    If all scores of every prompt are equal, the policy has nothing to learn from, and a norm of 0 is correct.
    """
    norm = figures[name]
    must_learn = figures["signal"] > 0 and name == "grad_norm/policy"
    passed = math.isfinite(norm) and (norm > 0 or not must_learn)
    demand = "finite, not 0" if must_learn else "finite"
    return Verdict(f"gradient norm of the {name.partition('/')[2]}", norm, demand, passed)
