"""The metrics of a step: evaluation on held-out prompts, and the statistics of training over all ranks.

Each is stated once: its name, how it is aggregated over ranks, this rank's values; the last part has the kinds of
aggregation. Names and meanings are in rlx.tracking.metrics. A metric that does not apply to a run is left out.
"""

from __future__ import annotations

import functools
import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric

from rlx.algorithms import kl, masking
from rlx.algorithms.importance_sampling import importance_weights
from rlx.training.collector import RolloutCollector, Selection
from rlx.training.experience import Experience
from rlx.training.rollout_queue import RolloutQueue, reports_logprobs
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
    metrics = mean_over_ranks(trainer, scored, "eval")
    if trainer.ema:
        with trainer.ema_weights():
            collector.push_weights(trainer.step)
            metrics |= mean_over_ranks(trainer, collector.evaluate(trainer.step), "eval/ema")
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


def mean_over_ranks(trainer: Trainer, scored: Sequence[ScoredCompletion], prefix: str) -> dict[str, float]:
    """Accuracy, reward and length, mean over all ranks' answers; a collective call."""
    return over_ranks(
        trainer,
        {
            f"{prefix}/accuracy": (Mean, [each.is_correct for each in scored]),
            f"{prefix}/reward": (Mean, [each.score for each in scored]),
            f"{prefix}/length": (Mean, [len(each.completion.token_ids) for each in scored]),
        },
    )


def summarize(
    trainer: Trainer,
    queue: RolloutQueue,
    selection: Selection,
    batch: Experience,
    sums: Sums,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """The step's metrics over all ranks; also advances the KL controller and the token count. A collective call.

    Call it after the update: with deferred log-probabilities, the old ones exist only then.

    Args:
        queue: whose seconds of generation are read and set to 0.
        selection: whose completions the step has chosen from.
        batch: that the step trained on.
        sums: of `update`, and `kl`, the sum of the KL to the reference over this rank's tokens.
        seconds: of the step's parts, by metric name.
    """
    updates = _of_scores(trainer, selection) | _of_tokens(trainer, queue, batch, sums)
    updates |= _of_policy(trainer, batch, sums) | _of_values(trainer, batch, sums) | _of_mismatch(trainer, batch, sums)
    metrics = dict(seconds) | over_ranks(trainer, updates) | _known_here(trainer, sums)
    kl_ref, completions, generated, trained = (metrics.pop(name) for name in _NOT_REPORTED)
    if trainer.config.resolved_reference != "none":
        metrics["kl/ref"] = kl_ref
    if "policy/loss" in sums:  # while the critic warms up, the policy is the reference
        trainer.kl.update(kl_ref, int(completions))
    trainer.tokens += int(generated)
    queue.seconds = 0.0
    # A resumed step whose round comes from the checkpoint has generated nothing.
    ahead = trainer.config.rollout.max_staleness and metrics["time/generation"]
    return metrics | {
        "tokens/rollout_per_s": generated / metrics["time/generation" if ahead else "time/rollout"],
        "tokens/update_per_s": trained / metrics["time/update"],
        "tokens/total": float(trainer.tokens),
    }


_NOT_REPORTED = ("kl", "completions", "generated", "trained")
"""what `summarize` computes other metrics from: the mean KL to the reference per token, and three sums"""


def _of_scores(trainer: Trainer, selection: Selection) -> Updates:
    candidates = selection.candidates
    scores, groups = [each.score for each in candidates], len(candidates) / selection.samples
    updates: Updates = {
        "reward/mean": (Mean, scores),
        "reward/std": (Deviation, scores),
        "task/accuracy": (Mean, [each.is_correct for each in candidates]),
        "response/truncated_fraction": (Mean, [not each.completion.finished for each in candidates]),
        "staleness/mean": (Mean, [trainer.step - 1 - each.completion.version for each in candidates]),
        "groups/varied_fraction": (Ratio, selection.varied, groups),
        "generated": (Total, selection.tokens),
    }
    for name in trainer.config.reward.functions:
        updates[f"reward/{name}"] = (Mean, [each.scores_by_function[name] for each in candidates])
    return updates | ({"groups/generated": (Total, groups)} if selection.filtered else {})


def _of_tokens(trainer: Trainer, queue: RolloutQueue, batch: Experience, sums: Sums) -> Updates:
    tokens = batch.prompt_lengths.sum() + batch.mask.sum()
    return {
        "completions": (Total, len(batch.mask)),
        "trained": (Total, tokens * sums["updates"] / trainer.config.train.num_minibatches),  # in all optimizer steps
        "response/length_mean": (Mean, batch.mask.sum(1)),
        "tokens/padding_fraction": (Ratio, (sums["positions"] - tokens).clamp(min=0), sums["positions"]),
        "time/generation": (Maximum, queue.seconds),
        "memory/peak_gib": (Maximum, _peak_gib(trainer.device)),
    }


def _of_policy(trainer: Trainer, batch: Experience, sums: Sums) -> Updates:
    mask = batch.mask.bool()
    updates: Updates = {
        "policy/entropy": (Mean, batch.entropy[mask]),
        "kl": (Ratio, sums["kl"], mask.sum()),
    }
    if "policy/loss" not in sums:  # the critic is warming up
        return updates
    per_token = ("policy/clip_fraction", "policy/approx_kl", "policy/ratio")
    updates |= {name: (Ratio, sums[name], sums["updated"]) for name in per_token}
    updates |= {name: _per_pass(trainer, name, sums) for name in ("policy/loss", "kl/loss", "ptx/loss") if name in sums}
    return updates | {"policy/grad_norm": (Ratio, sums["grad_norm/policy"], sums["updates/policy"])}


def _of_values(trainer: Trainer, batch: Experience, sums: Sums) -> Updates:
    if trainer.config.resolved_critic == "none" or "value/loss" not in sums:
        return {}
    updates: Updates = {
        "value/loss": _per_pass(trainer, "value/loss", sums),
        "value/clip_fraction": (Ratio, sums["value/clip_fraction"], sums["updated"]),
        "value/explained_variance": (ExplainedVariance, batch.values, batch.returns, batch.mask),
    }
    if trainer.critic is not None:  # a head's gradient is part of the policy's
        updates["value/grad_norm"] = (Ratio, sums["grad_norm/critic"], sums["updates/critic"])
    return updates


def _per_pass(trainer: Trainer, name: str, sums: Sums) -> tuple[Any, ...]:
    """A loss, mean over the passes of a step: of each pass a rank has its share, and all ranks have the same passes."""
    return Ratio, sums[name], sums["passes"] / trainer.mesh.dp_size


def _of_mismatch(trainer: Trainer, batch: Experience, sums: Sums) -> Updates:
    settings, kind = trainer.config.algorithm, trainer.config.resolved_rollout_correction
    if settings.old_logprobs == "rollout":  # the first ratios are those of engine and trainer
        is_known = "first/policy/approx_kl" in sums
        return {"mismatch/kl": (Ratio, sums["first/policy/approx_kl"], sums["first/updated"])} if is_known else {}
    if not reports_logprobs(trainer.step - 1, trainer.config.resolved_logprobs_every):
        return {}
    mask, ratios = batch.mask.bool(), _ratios(settings.rollout_correction_level, batch)
    reweighted = (rollout_correction(kind, settings, batch) != ratios) & (kind != "none")
    return {
        "mismatch/kl": (Mean, kl.log_ratio_kl(batch.rollout_logprobs, batch.logprobs, "k3")[mask]),
        "mismatch/max_abs": (Maximum, (batch.logprobs - batch.rollout_logprobs)[mask].abs()),
        "mismatch/clipped_fraction": (Mean, reweighted[mask]),
        "mismatch/weight_max": (Maximum, ratios[mask]),
        "mismatch/effective_fraction": (EffectiveFraction, ratios[mask]),
    }


def _ratios(level: str, batch: Experience) -> Tensor:
    """The ratio of old policy to rollout policy, `[B, T]`, neither truncated nor masked."""
    return importance_weights(batch.logprobs, batch.rollout_logprobs, batch.mask, "tis", 0.0, math.inf, level)


def _known_here(trainer: Trainer, sums: Sums) -> dict[str, float]:
    """What every rank knows without the others; the KL controller still has the coefficient of the step."""
    metrics = {"policy/lr": trainer.models["policy"].optimizer.param_groups[0]["lr"]}
    if trainer.config.resolved_reference != "none":
        metrics["kl/coef"] = trainer.kl.coef
    if "policy/loss" in sums:
        metrics["policy/updates"] = float(sums["updates/policy"])
    if trainer.config.algorithm.normalize_rewards:
        running_mean, scale = trainer.reward_stats.shift_and_scale()
        metrics |= {"reward/running_mean": running_mean, "reward/running_std": 1 / scale}
    return metrics


def _peak_gib(device: torch.device) -> float:
    """The most memory that this process has held: on its GPU, or in main memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


# --- how the numbers of all ranks become one


Updates = dict[str, tuple[Any, ...]]
"""by name: how a metric is aggregated (Mean, Ratio, ...), and this rank's values, as its `update` takes them"""

# A nan stays visible: torchmetrics would remove it by default. Weights cannot be given (torchmetrics 1.9 ignores them
# when it does not look for nan): the mean over tokens gets the tokens alone, that of sums over other sums is a Ratio.
Mean = functools.partial(MeanMetric, nan_strategy="disable")
Total = functools.partial(SumMetric, nan_strategy="disable")
Maximum = functools.partial(MaxMetric, nan_strategy="disable")


class Ratio(Metric):
    """The sum of one quantity over the sum of another, of quantities that are summed already."""

    parts: Tensor  # [2]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("parts", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: float | Tensor, denominator: float | Tensor) -> None:
        """Adds to both; scalars."""
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self.device) for part in (numerator, denominator)]
        self.parts = self.parts + torch.stack(parts)

    def compute(self) -> Tensor:
        """A scalar."""
        return self.parts[0] / self.parts[1]


class Deviation(Metric):
    """The standard deviation of all values: of all there are, not of a sample (n, not n - 1)."""

    moments: Tensor  # [3]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("moments", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor | Iterable[float]) -> None:
        """Adds values, of any shape."""
        x = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        self.moments = self.moments + masking.moments(x, torch.ones_like(x))

    def compute(self) -> Tensor:
        """A scalar."""
        count, total, squares = self.moments.unbind()
        mean = total / count
        return (squares / count - mean * mean).clamp(min=0).sqrt()


class EffectiveFraction(Deviation):
    """The effective share of n importance weights w: (sum w)^2 / (n sum w^2)."""

    def compute(self) -> Tensor:
        """A scalar."""
        count, total, squares = self.moments.unbind()
        return total * total / (count * squares)


class ExplainedVariance(Metric):
    """What a critic explains of the returns. That of torchmetrics gives 1 where all returns are equal; here it is 0."""

    residual: Tensor  # [3], moments
    returns: Tensor  # [3], moments

    def __init__(self) -> None:
        super().__init__()
        self.add_state("residual", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("returns", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        """Adds the tokens where the mask is 1, `[B, T]` each."""
        self.residual = self.residual + masking.moments(returns - values, mask)
        self.returns = self.returns + masking.moments(returns, mask)

    def compute(self) -> Tensor:
        """A scalar."""
        return masking.explained_variance(self.residual, self.returns)


def over_ranks(trainer: Trainer, updates: Updates) -> dict[str, float]:
    """The value of each metric over all ranks, the same bits on every rank; every rank calls it, with equal names.

    Of tensor-parallel neighbours, which have the same completions, only the first counts, but for a `Maximum`.
    """
    for name, (kind, *values) in updates.items():
        if name not in trainer.aggregates:
            trainer.aggregates[name] = kind().to(trainer.device)
            trainer.aggregates[name].set_dtype(torch.float64)
        trainer.aggregates[name].update(*values)
    metrics = {name: trainer.aggregates[name] for name in updates}
    states, result = reduced_states(trainer, metrics.values()), {}
    for name, metric in metrics.items():
        # torchmetrics asks for the states of all ranks; the reduction of the only one in the list is itself.
        metric.dist_sync_fn = lambda state, group: [states[id(state)]]
        result[name] = float(metric.compute())
        metric.reset()
    return result


def reduced_states(trainer: Trainer, metrics: Iterable[Metric]) -> dict[int, Tensor]:
    """By id of each state of the metrics, of any shape: its sum or maximum over ranks, on the CPU.

    torchmetrics by itself makes two or three calls for each state. Here all sums travel in one call and all maxima in
    another, so a step can afford dozens of metrics.
    """
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for metric in metrics:
        (maxima if isinstance(metric, MaxMetric) else sums).extend(metric.metric_state.values())
    reduced: dict[int, Tensor] = {}
    for states, reduce in ((sums, trainer.mesh.all_reduce_sum), (maxima, trainer.mesh.all_reduce_max)):
        if states:
            flat = reduce(torch.cat([state.flatten() for state in states])).cpu()
            parts = flat.split([state.numel() for state in states])
            reduced |= {id(state): part.view(state.shape) for state, part in zip(states, parts, strict=True)}
    return reduced
