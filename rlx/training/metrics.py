"""The metrics of a step: means of evaluations, and the statistics of training over all ranks.

Each is stated once: its name, how it is aggregated over ranks (aggregation.py), this rank's values. Names and meanings
are in rlx.tracking.metrics. A metric that does not apply to a run is left out.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from rlx.algorithms import kl
from rlx.algorithms.importance_sampling import importance_weights
from rlx.training.aggregation import (
    Deviation,
    EffectiveFraction,
    Excess,
    ExplainedVariance,
    Maximum,
    Mean,
    Minimum,
    Ratio,
    Total,
    Updates,
    over_ranks,
)
from rlx.training.collector import Selection
from rlx.training.experience import Experience
from rlx.training.rollout_queue import reports_logprobs
from rlx.training.stats import LossStats, Sums, UpdateStats
from rlx.training.trainer import Trainer
from rlx.training.update import rollout_correction
from rlx.types import FailureKind, ScoredCompletion

T = TypeVar("T")


class StepTimer:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Context whose time counts for a part."""
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self._seconds[f"time/{part}"] = self._seconds.get(f"time/{part}", 0.0) + spent

    def waiting(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """The items as they come; the wait for each counts for a part."""
        iterator, end = iter(items), object()
        while True:
            with self(part):
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item

    def metrics(self) -> dict[str, float]:
        """Seconds of each part by metric name, and of the whole step so far."""
        return self._seconds | {"time/step": time.perf_counter() - self.started}


def sample_rows(scored: Sequence[ScoredCompletion]) -> list[dict[str, Any]]:
    """Rows of the sample table."""
    return [
        {
            "score": each.score,
            "answer": each.completion.prompt.answer,
            "completion": each.text,
            "prompt": each.completion.prompt.question,
        }
        for each in scored
    ]


def mean_over_ranks(trainer: Trainer, scored: Sequence[ScoredCompletion], prefix: str) -> dict[str, float]:
    """Accuracy, reward and length, mean over all ranks' answers; a collective call."""
    updates: Updates = {
        f"{prefix}/accuracy": (Mean, [each.is_correct for each in scored]),
        f"{prefix}/reward": (Mean, [each.score for each in scored]),
        f"{prefix}/length": (Mean, [each.completion.num_drawn for each in scored]),
    }
    labels = trainer.config.data.labels
    return over_ranks(trainer, updates) | by_source(trainer, labels, scored, f"{prefix}/accuracy", f"{prefix}/reward")


def failed_fraction(trainer: Trainer, scored: Sequence[ScoredCompletion], prefix: str) -> dict[str, float]:
    """The share of all ranks' answers whose environment has failed, which count as wrong; a collective call.

    Without an environment it is no call, and nothing.
    """
    if not trainer.config.environment.name:
        return {}
    return over_ranks(trainer, {f"{prefix}/failed_fraction": (Mean, [each.completion.has_failed for each in scored])})


def by_source(
    trainer: Trainer, labels: Sequence[str], scored: Sequence[ScoredCompletion], accuracy: str, reward: str
) -> dict[str, float]:
    """Two metrics for each source of prompts, under their names with the source's; a collective call if there are any.

    A source without answers on any rank is left out.
    """
    updates: Updates = {}
    for number, label in enumerate(labels):
        own = [each for each in scored if each.completion.prompt.source == number]
        updates[f"{accuracy}/{label}"] = (Mean, [each.is_correct for each in own])
        updates[f"{reward}/{label}"] = (Mean, [each.score for each in own])
    return over_ranks(trainer, updates) if updates else {}


@dataclass(frozen=True)
class StepCounts:
    """What a step adds to the counts of a run, over all ranks."""

    completions: int  # that were trained on
    generated: int  # response tokens
    seconds: float
    kl: float | None  # mean to the reference; None without one, and while the critic warms up


def summarize(
    trainer: Trainer,
    selection: Selection,
    batch: Experience,
    stats: UpdateStats,
    kl_sums: Sums,
    seconds: Mapping[str, float],
) -> tuple[dict[str, float], StepCounts]:
    """The step's metrics and counts over all ranks; a collective call.

    What judges the policy (rewards, accuracy, entropy, the KL to the reference) is of the episodes whose environment
    has not failed, as the losses are; what describes the step's work is of all.

    Call it after the update: with deferred log-probabilities, the old ones exist only then.

    Args:
        selection: whose completions the step has chosen from.
        batch: that the step trained on.
        stats: of `update`.
        kl_sums: of `loop.compute_advantages`.
        seconds: of the step's parts, by metric name.
    """
    updates = _of_scores(trainer, selection) | _of_episodes(trainer, selection) | _of_tokens(trainer, batch, stats)
    counted = replace(batch, mask=batch.mask * batch.counted[:, None])
    updates |= _of_kl(trainer, counted, kl_sums) | _of_policy(trainer, counted, stats)
    updates |= _of_values(trainer, batch, stats) | _of_mismatch(trainer, batch, stats.first)
    metrics = dict(seconds) | over_ranks(trainer, updates) | _known_here(trainer, stats)
    labels = trainer.config.data.labels
    metrics |= by_source(trainer, labels, selection.counted, "task/accuracy", "reward/mean")
    completions, generated, trained = (metrics.pop(name) for name in _NOT_REPORTED)
    # While the critic warms up, the policy is the reference.
    kl_ref = metrics.get("kl/ref") if stats.policy_learned else None
    # Engines draw while this process waits, and also while it does other work.
    drawing = max(metrics["time/rollout"], metrics["time/generation"])
    rates = {
        "tokens/rollout_per_s": generated / drawing,
        "tokens/update_per_s": trained / metrics["time/update"],
    }
    return metrics | rates, StepCounts(int(completions), int(generated), seconds["time/step"], kl_ref)


_NOT_REPORTED = ("completions", "generated", "trained")
"""sums from which `summarize` computes other metrics and counts"""


def _of_scores(trainer: Trainer, selection: Selection) -> Updates:
    candidates, counted = selection.candidates, selection.counted
    scores, groups = [each.score for each in counted], len(candidates) / selection.samples
    lengths = [each.completion.num_drawn for each in candidates]
    updates: Updates = {
        "reward/mean": (Mean, scores),
        "reward/std": (Deviation, scores),
        "task/accuracy": (Mean, [each.is_correct for each in counted]),
        "response/length_mean": (Mean, lengths),
        "response/length_min": (Minimum, lengths),
        "response/length_max": (Maximum, lengths),
        "response/truncated_fraction": (Mean, [not each.completion.finished for each in candidates]),
        "staleness/mean": (Mean, [trainer.step - 1 - each.completion.version for each in candidates]),
        "groups/varied_fraction": (Ratio, selection.varied, groups),
        "generated": (Total, selection.tokens),
        "time/generation": (Maximum, selection.seconds),
        "time/scoring": (Maximum, selection.scoring_seconds),
    }
    for name in trainer.config.reward.reported:
        own = [each.scores_by_function[name] for each in counted if name in each.scores_by_function]
        updates[f"reward/{name}"] = (Mean, own)
    updates |= _of_sources(trainer.config.data.labels, selection)
    return updates | ({"groups/generated": (Total, groups)} if selection.filtered else {})


def _of_sources(labels: Sequence[str], selection: Selection) -> Updates:
    """The share of each source of prompts in what is trained on, and in what was generated where that is more."""
    counted = {"fraction": selection.taken} | ({"generated": selection.candidates} if selection.filtered else {})
    return {
        f"source/{name}/{label}": (Mean, [each.completion.prompt.source == number for each in completions])
        for name, completions in counted.items()
        for number, label in enumerate(labels)
    }


def _of_episodes(trainer: Trainer, selection: Selection) -> Updates:
    """What episodes were like; nothing without an environment."""
    completions = [each.completion for each in selection.candidates if each.completion.episode]
    if not completions:
        return {}
    episodes = [each.episode for each in completions if each.episode]
    turns = [turn for episode in episodes for turn in episode.turns]
    calls = [sum(turn.observation.calls for turn in episode.turns) for episode in episodes]
    errors = sum(turn.observation.call_errors for turn in turns)
    config = trainer.config
    no_room = [
        # A turn of the policy that has filled the room itself is none of them.
        not (each.finished or each.has_failed or len(each.token_ids) >= config.rollout.max_tokens)
        and len(episode.turns) < config.environment.max_turns
        for each, episode in zip(completions, episodes, strict=True)
    ]
    return {
        "episode/turns": (Mean, [len(episode.turns) for episode in episodes]),
        "episode/contexts": (Mean, [1 + len(episode.contexts) for episode in episodes]),
        "episode/tool_calls": (Mean, calls),
        "episode/tool_use_fraction": (Mean, [count > 0 for count in calls]),
        "episode/tool_errors": (Mean, [errors / len(episodes)] * len(episodes)),
        "episode/no_room_fraction": (Mean, no_room),
        "episode/failed_fraction": (Mean, [bool(episode.failure) for episode in episodes]),
        **{
            f"episode/{kind}_fraction": (Mean, [each.kind == kind for each in episodes])
            for kind in get_args(FailureKind)
        },
        "episode/retries": (Mean, [episode.retries for episode in episodes]),
        "tokens/policy_per_episode": (Mean, [each.num_drawn for each in completions]),
        "tokens/environment_per_episode": (Mean, [len(each.token_ids) - each.num_drawn for each in completions]),
        "time/environment": (Mean, [episode.seconds for episode in episodes]),
    }


def _of_tokens(trainer: Trainer, batch: Experience, stats: UpdateStats) -> Updates:
    tokens = batch.prompt_lengths.sum() + batch.response_lengths.sum()  # with those that an environment has said
    return {
        "completions": (Total, len(batch.mask)),
        "trained": (Total, tokens * stats.optimizer_steps / trainer.config.train.num_minibatches),
        "tokens/padding_fraction": (Excess, stats.positions, tokens),
        "memory/peak_gib": (Maximum, _peak_gib(trainer.device)),
    }


def _of_kl(trainer: Trainer, batch: Experience, kl_sums: Sums) -> Updates:
    if trainer.config.resolved_reference == "none":
        return {}
    updates: Updates = {name: (Ratio, kl_sums[name], batch.mask.sum()) for name in ("kl/ref", "kl/penalty")}
    if trainer.config.algorithm.kl_placement == "reward":
        objective = (batch.scores * batch.counted).sum() - trainer.kl.coef * kl_sums["kl/penalty"]
        updates["reward/minus_kl"] = (Ratio, objective, batch.counted.sum())
    return updates


def _of_policy(trainer: Trainer, batch: Experience, stats: UpdateStats) -> Updates:
    drawn, trained, sums = batch.mask.bool(), batch.loss_mask.bool(), stats.losses.sums
    entropy = {"policy/entropy": (Mean, batch.entropy[drawn])}
    updates: Updates = {**entropy, **_spread("advantage", batch.advantages[trained])}
    if not stats.policy_learned:
        return updates
    updates |= {name: (Ratio, sums[name], stats.losses.tokens) for name in _PER_TOKEN if name in sums}
    of_passes = [name for name in ("policy/loss", "kl/loss", "ptx/loss") if name in sums]
    updates |= {name: _per_pass(trainer, name, stats) for name in of_passes}
    return updates | {"policy/grad_norm": (Ratio, stats.grad_norms["policy"], stats.optimizer_steps)}


_PER_TOKEN = (
    *(f"policy/{name}_fraction" for name in ("clip", "clip_low", "clip_high", "dual_clip", "left_out")),
    "policy/approx_kl",
    "policy/ratio",
)
"""sums over tokens that losses report; some only where their setting is on"""


def _spread(name: str, values: Tensor) -> Updates:
    """Mean and standard deviation of values of any shape."""
    return {f"{name}/mean": (Mean, values), f"{name}/std": (Deviation, values)}


def _of_values(trainer: Trainer, batch: Experience, stats: UpdateStats) -> Updates:
    sums = stats.losses.sums
    if trainer.config.resolved_critic == "none" or "value/loss" not in sums:
        return {}
    mask = batch.loss_mask.bool()
    updates: Updates = {
        **_spread("value", batch.values[mask]),
        **_spread("return", batch.returns[mask]),
        "value/loss": _per_pass(trainer, "value/loss", stats),
        "value/clip_fraction": (Ratio, sums["value/clip_fraction"], stats.losses.tokens),
        "value/explained_variance": (ExplainedVariance, batch.values, batch.returns, batch.loss_mask),
    }
    if "critic" in stats.grad_norms:  # a head's gradient is part of the policy's
        updates["value/grad_norm"] = (Ratio, stats.grad_norms["critic"], stats.optimizer_steps)
    return updates


def _per_pass(trainer: Trainer, name: str, stats: UpdateStats) -> tuple[Any, ...]:
    """A loss, mean over the passes of a step: of each pass a rank has its share, and all ranks have the same passes."""
    return Ratio, stats.losses.sums[name], stats.passes / trainer.mesh.dp_size


def _of_mismatch(trainer: Trainer, batch: Experience, first: LossStats) -> Updates:
    settings, kind = trainer.config.algorithm, trainer.config.resolved_rollout_correction
    if settings.old_logprobs == "rollout":  # the first ratios are those of engine and trainer
        total = first.sums.get("policy/approx_kl")
        return {} if total is None else {"mismatch/kl": (Ratio, total, first.tokens)}
    if not reports_logprobs(trainer.step - 1, trainer.config.resolved_logprobs_every):
        return {}
    mask, ratios = batch.mask.bool(), _ratios(settings.rollout_correction_level, batch)
    reweighted = (rollout_correction(kind, settings, batch) != ratios) & (kind != "none")
    return {
        "mismatch/kl": (Mean, kl.k3_unbounded(batch.rollout_logprobs - batch.logprobs)[mask]),
        "mismatch/max_abs": (Maximum, (batch.logprobs - batch.rollout_logprobs)[mask].abs()),
        "mismatch/clipped_fraction": (Mean, reweighted[mask]),
        "mismatch/weight_max": (Maximum, ratios[mask]),
        "mismatch/effective_fraction": (EffectiveFraction, ratios[mask]),
    }


def _ratios(level: str, batch: Experience) -> Tensor:
    """The ratio of old policy to rollout policy, `[B, T]`, neither truncated nor masked."""
    return importance_weights(batch.logprobs, batch.rollout_logprobs, batch.mask, "tis", 0.0, math.inf, level)


def _known_here(trainer: Trainer, stats: UpdateStats) -> dict[str, float]:
    """What every rank knows without the others."""
    metrics = _scheduled(trainer)
    if trainer.config.resolved_reference != "none":
        metrics["kl/coef"] = trainer.kl.coef
    if stats.policy_learned:
        rates = trainer.models["policy"].optimizer.param_groups
        metrics |= {"policy/lr": float(rates[0]["lr"]), "policy/updates": float(stats.optimizer_steps)}
    if trainer.config.algorithm.normalize_rewards:
        running_mean, scale = trainer.reward_stats.shift_and_scale()
        metrics |= {"reward/running_mean": running_mean, "reward/running_std": 1 / scale}
    return metrics


def _scheduled(trainer: Trainer) -> dict[str, float]:
    """The numbers of the step that have a schedule."""
    config = trainer.config
    keys = (key.partition(".") for key in config.schedules)
    return {f"schedule/{section}.{key}": getattr(getattr(config, section), key) for section, _, key in keys}


def _peak_gib(device: torch.device) -> float:
    """The most memory that this process has held: on its GPU, or in main memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
