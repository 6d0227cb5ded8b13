"""The metrics of a step: evaluation on held-out prompts, and the statistics of training over all ranks.

Names and meanings of the metrics are in rlx.tracking.metrics. A metric that does not apply to a run is left out.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from rlx.algorithms import kl, masking
from rlx.algorithms.importance_sampling import importance_weights
from rlx.training.collector import RolloutCollector, Selection
from rlx.training.experience import Experience
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.trainer import Sums, Trainer
from rlx.training.update import rollout_correction
from rlx.types import ScoredCompletion

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


def evaluate(trainer: Trainer, collector: RolloutCollector) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Greedy answers to the held-out prompts: their metrics over all ranks, and some of this rank's as sample rows.

    With train.ema_decay the averaged weights are evaluated as well. A collective call.
    """
    started = time.perf_counter()
    scored = collector.evaluate(trainer.step)
    metrics = mean_over_ranks(scored, "eval", trainer.device)
    if trainer.ema:
        with trainer.ema_weights():
            collector.push_weights(trainer.step)
            metrics |= mean_over_ranks(collector.evaluate(trainer.step), "eval/ema", trainer.device)
        collector.push_weights(trainer.step)
    metrics["time/eval"] = time.perf_counter() - started
    return metrics, sample_rows(scored[: trainer.config.tracking.samples], collector.score.tokenizer)


def sample_rows(scored: Sequence[ScoredCompletion], tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of the sample table."""
    texts = tokenizer.batch_decode([each.completion.token_ids for each in scored], skip_special_tokens=True)
    return [
        {
            "score": each.score,
            "answer": each.completion.prompt.answer,
            "completion": text,
            "prompt": each.completion.prompt.question,
        }
        for each, text in zip(scored, texts, strict=True)
    ]


def mean_over_ranks(scored: Sequence[ScoredCompletion], prefix: str, device: torch.device) -> dict[str, float]:
    """Accuracy, reward and length, mean over all ranks' answers; a collective call."""
    columns = {
        "accuracy": [float(each.is_correct) for each in scored],
        "reward": [each.score for each in scored],
        "length": [float(len(each.completion.token_ids)) for each in scored],
    }
    metrics = {}
    for name, column in columns.items():
        mean = MeanMetric().to(device)
        mean.update(torch.tensor(column, device=device))
        metrics[f"{prefix}/{name}"] = float(mean.compute())
    return metrics


def rollout_sums(trainer: Trainer, batch: Experience, selection: Selection) -> Sums:
    """Sums over this rank's rollouts and training batch, for the step's metrics.

    Call it after the update: with deferred log-probabilities, the old ones exist only then.
    """
    sums = _score_sums(trainer, selection) | _token_sums(trainer, batch) | _mismatch_sums(trainer, batch)
    return sums | _value_sums(batch)


def summarize(
    trainer: Trainer, queue: RolloutQueue, batch: Experience, sums: Sums, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The step's metrics over all ranks; also advances the KL controller and the token count. A collective call.

    Args:
        queue: whose seconds of generation are read and set to 0.
        batch: that the step trained on.
        sums: of `update` and `rollout_sums`.
        seconds: of the step's parts, by metric name.
    """
    s = trainer.sum_over_ranks(sums)
    metrics = dict(seconds) | _of_scores(trainer, s) | _of_policy(trainer, s) | _of_values(trainer, s)
    metrics |= _of_mismatch(trainer, batch, s)
    trainer.tokens += int(s["generated"])
    if "updates/policy" in s:  # while the critic warms up, the policy is the reference
        trainer.kl.update(s["kl"] / s["tokens"], int(s["completions"]))
    generation, peak = trainer.max_over_ranks([queue.seconds, _peak_gib(trainer.device)])
    queue.seconds = 0.0
    # A resumed step whose round comes from the checkpoint has generated nothing.
    ahead = trainer.config.rollout.max_staleness and generation
    return metrics | {
        "time/generation": generation,
        "tokens/rollout_per_s": s["generated"] / (generation if ahead else seconds["time/rollout"]),
        "tokens/update_per_s": _trained_tokens(trainer, s) / seconds["time/update"],
        "tokens/padding_fraction": 1 - (s["prompt_tokens"] + s["tokens"]) / s["positions"],
        "tokens/total": float(trainer.tokens),
        "memory/peak_gib": peak,
    }


def _score_sums(trainer: Trainer, selection: Selection) -> Sums:
    candidates = selection.candidates
    sums: Sums = {
        "candidates": len(candidates),
        "score": sum(each.score for each in candidates),
        "score_squared": sum(each.score**2 for each in candidates),
        "correct": sum(each.is_correct for each in candidates),
        "generated": selection.tokens,
        "varied": selection.varied,
        "truncated": sum(not each.completion.finished for each in candidates),
        "staleness": sum(trainer.step - 1 - each.completion.version for each in candidates),
    }
    names = candidates[0].scores_by_function
    return sums | {f"part/{name}": sum(each.scores_by_function[name] for each in candidates) for name in names}


def _of_scores(trainer: Trainer, s: Mapping[str, float]) -> dict[str, float]:
    config, mean = trainer.config, s["score"] / s["candidates"]
    groups = s["candidates"] / config.train.samples_per_prompt
    metrics = {
        "reward/mean": mean,
        "reward/std": max(0.0, s["score_squared"] / s["candidates"] - mean * mean) ** 0.5,
        "task/accuracy": s["correct"] / s["candidates"],
        "response/length_mean": s["tokens"] / s["completions"],
        "response/truncated_fraction": s["truncated"] / s["candidates"],
        "staleness/mean": s["staleness"] / s["candidates"],
        "groups/varied_fraction": s["varied"] / groups,
    }
    metrics |= {f"reward/{name}": s[f"part/{name}"] / s["candidates"] for name in config.reward.functions}
    if config.algorithm.filter_groups:
        metrics["groups/generated"] = groups
    if config.algorithm.normalize_rewards:
        running_mean, scale = trainer.reward_stats.shift_and_scale()
        metrics |= {"reward/running_mean": running_mean, "reward/running_std": 1 / scale}
    return metrics


def _token_sums(trainer: Trainer, batch: Experience) -> Sums:
    config, mask, count = trainer.config, batch.mask, trainer.config.train.num_minibatches
    # Where other entropies are exact, the one-sample estimates of a deferred first mini-batch do not count.
    estimated = trainer.defers_logprobs and config.algorithm.entropy_coef == 0 and count > 1
    exact = slice(len(mask) // count if estimated else 0, None)
    return {
        "completions": len(mask),
        "tokens": mask.sum(),
        "prompt_tokens": batch.prompt_lengths.sum(),
        "entropy": masking.masked_sum(batch.entropy[exact], mask[exact]),
        "exact": mask[exact].sum(),
    }


def _trained_tokens(trainer: Trainer, s: Mapping[str, float]) -> float:
    """Prompt and response tokens in all of a step's optimizer steps, over all ranks."""
    per_pass = s["prompt_tokens"] + s["tokens"]
    return per_pass * s["updates"] / trainer.mesh.dp_size / trainer.config.train.num_minibatches


def _of_policy(trainer: Trainer, s: Mapping[str, float]) -> dict[str, float]:
    metrics = {
        "policy/entropy": s["entropy"] / s["exact"],
        "policy/lr": trainer.models["policy"].optimizer.param_groups[0]["lr"],
    }
    if trainer.config.resolved_reference != "none":
        metrics |= {"kl/ref": s["kl"] / s["tokens"], "kl/coef": trainer.kl.coef}
    if "policy/loss" not in s:  # the critic is warming up
        return metrics
    updates, passes = s["updates/policy"], s["passes"] / trainer.mesh.dp_size
    per_token = ("clip_fraction", "approx_kl", "ratio")
    metrics |= {f"policy/{name}": s[f"policy/{name}"] / s["updated"] for name in per_token}
    metrics |= {name: s[name] / passes for name in ("policy/loss", "kl/loss", "ptx/loss") if name in s}
    return metrics | {
        "policy/grad_norm": s["grad_norm/policy"] / updates,
        "policy/updates": updates / trainer.mesh.dp_size,
    }


def _value_sums(batch: Experience) -> Sums:
    sums: Sums = {}
    for name, grid in (("residual", batch.returns - batch.values), ("returns", batch.returns)):
        sums |= {f"{name}/{i}": part for i, part in enumerate(masking.moments(grid, batch.mask))}
    return sums


def _of_values(trainer: Trainer, s: Mapping[str, float]) -> dict[str, float]:
    if trainer.config.resolved_critic == "none" or "value/loss" not in s:
        return {}
    residual, returns = (
        torch.tensor([s[f"{name}/{i}"] for i in range(3)], dtype=torch.float64) for name in ("residual", "returns")
    )
    metrics = {
        "value/loss": s["value/loss"] / (s["passes"] / trainer.mesh.dp_size),
        "value/clip_fraction": s["value/clip_fraction"] / s["updated"],
        "value/explained_variance": float(masking.explained_variance(residual, returns)),
    }
    if trainer.critic is not None:  # a head's gradient is part of the policy's
        metrics["value/grad_norm"] = s["grad_norm/critic"] / s["updates/critic"]
    return metrics


def _mismatch_sums(trainer: Trainer, batch: Experience) -> Sums:
    kind, settings = trainer.config.resolved_rollout_correction, trainer.config.algorithm
    mismatch = kl.log_ratio_kl(batch.rollout_logprobs, batch.logprobs, "k3")
    ratios = _ratios(settings.rollout_correction_level, batch)
    weights = rollout_correction(kind, settings, batch)
    return {
        "mismatch": masking.masked_sum(mismatch, batch.mask),
        "weight": masking.masked_sum(ratios, batch.mask),
        "weight_squared": masking.masked_sum(ratios.square(), batch.mask),
        "reweighted": (weights != ratios).sum() * (kind != "none"),
    }


def _of_mismatch(trainer: Trainer, batch: Experience, s: Mapping[str, float]) -> dict[str, float]:
    if trainer.config.algorithm.old_logprobs == "rollout":  # the first ratios are those of engine and trainer
        is_known = "first/policy/approx_kl" in s
        return {"mismatch/kl": s["first/policy/approx_kl"] / s["first/updated"]} if is_known else {}
    gap = ((batch.logprobs - batch.rollout_logprobs) * batch.mask).abs().max()
    weight = (_ratios(trainer.config.algorithm.rollout_correction_level, batch) * batch.mask).max()
    max_gap, max_weight = trainer.max_over_ranks([float(gap), float(weight)])
    return {
        "mismatch/kl": s["mismatch"] / s["tokens"],
        "mismatch/max_abs": max_gap,
        "mismatch/clipped_fraction": s["reweighted"] / s["tokens"],
        "mismatch/weight_max": max_weight,
        "mismatch/effective_fraction": s["weight"] ** 2 / (s["tokens"] * s["weight_squared"]),
    }


def _ratios(level: str, batch: Experience) -> Tensor:
    """The ratio of old policy to rollout policy, `[B, T]`, neither truncated nor masked."""
    return importance_weights(batch.logprobs, batch.rollout_logprobs, batch.mask, "tis", 0.0, math.inf, level)


def _peak_gib(device: torch.device) -> float:
    """The most memory that this process has held: on its GPU, or in main memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
