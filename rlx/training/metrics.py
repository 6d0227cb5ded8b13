"""How long the parts of a step take."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torchmetrics import MeanMetric

from rlx.algorithms import kl, masking
from rlx.training.collector import Selection
from rlx.training.experience import Experience
from rlx.training.trainer import Run, Sums
from rlx.types import ScoredCompletion

T = TypeVar("T")


class _End:
    pass


_END = _End()


class StepTimer:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self._seconds[f"time/{part}"] = self._seconds.get(f"time/{part}", 0.0) + spent

    def waiting(self, part: str, things: Iterable[T]) -> Iterator[T]:
        """Things as they come; the wait for each counts."""
        iterator = iter(things)
        while True:
            with self(part):
                thing = next(iterator, _END)
            if isinstance(thing, _End):
                return
            yield thing

    def metrics(self) -> dict[str, float]:
        """Seconds of each part by metric name, and of the whole so far."""
        return self._seconds | {"time/step": time.perf_counter() - self.started}


def evaluate(run: Run) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Greedy answers to the held-out prompts: their metrics over all ranks, and some of this rank's as sample rows.

    Where an average of the policy's weights is kept, it answers too.
    """
    started = time.perf_counter()
    judged = answer_held_out(run)
    metrics = mean_over_ranks(run, judged, "eval")
    if run.average:
        with run.averaged():
            metrics |= mean_over_ranks(run, answer_held_out(run), "eval/ema")
    metrics["time/eval"] = time.perf_counter() - started
    kept = judged[: run.config.tracking.samples]
    texts = run.tokenizer.batch_decode([one.completion.token_ids for one in kept], skip_special_tokens=True)
    return metrics, [
        {
            "score": one.score,
            "answer": one.completion.prompt.answer,
            "completion": text,
            "prompt": one.completion.prompt.question,
        }
        for one, text in zip(kept, texts, strict=True)
    ]


def answer_held_out(run: Run) -> list[ScoredCompletion]:
    return run.judge(run.answer_greedily(run.held_out), run.held_out_scorers)


def mean_over_ranks(run: Run, judged: Sequence[ScoredCompletion], prefix: str) -> dict[str, float]:
    """Accuracy, reward and length, mean over all ranks' answers."""
    columns = {
        "accuracy": [float(one.is_correct) for one in judged],
        "reward": [one.score for one in judged],
        "length": [float(len(one.completion.token_ids)) for one in judged],
    }
    metrics = {}
    for name, column in columns.items():
        mean = MeanMetric().to(run.device)
        mean.update(torch.tensor(column, device=run.device))
        metrics[f"{prefix}/{name}"] = float(mean.compute())
    return metrics


def rollout_sums(run: Run, batch: Experience, selection: Selection) -> Sums:
    """What a step's metrics need to know of all that was drawn and of what was trained on, as it was before the update,
    which has to be done: some of it is known by then only."""
    drawn, mask, count = selection.drawn, batch.mask, run.config.train.num_minibatches
    estimated = run.scores_late and run.config.algorithm.entropy_coef == 0 and count > 1
    exact = slice(len(mask) // count if estimated else 0, None)  # whose entropies are, or all that there are
    mismatch = kl.log_ratio_kl(batch.rollout_logprobs, batch.logprobs, "k3")
    weights = run.importance(batch, cut=False)
    sums: Sums = {
        "drawn": len(drawn),
        "score": sum(one.score for one in drawn),
        "score_squared": sum(one.score**2 for one in drawn),
        "right": sum(one.is_correct for one in drawn),
        "generated": selection.tokens,
        "varied": selection.varied,
        "completions": len(mask),
        "tokens": mask.sum(),
        "prompt_tokens": batch.prompt_lengths.sum(),
        "truncated": sum(not one.completion.finished for one in drawn),
        "age": sum(run.step - 1 - one.completion.version for one in drawn),
        "entropy": masking.masked_sum(batch.entropy[exact], mask[exact]),
        "exact": mask[exact].sum(),
        "mismatch": masking.masked_sum(mismatch, mask),
        "weight": masking.masked_sum(weights, mask),
        "weight_squared": masking.masked_sum(weights.square(), mask),
        "reweighted": (run.importance(batch) != weights).sum() * (run.config.rollout_correction != "none"),
    }
    sums |= {f"part/{name}": sum(one.scores_by_function[name] for one in drawn) for name in drawn[0].scores_by_function}
    for name, grid in (("residual", batch.returns - batch.values), ("returns", batch.returns)):
        sums |= {f"{name}/{i}": part for i, part in enumerate(masking.moments(grid, mask))}
    return sums


def summarize(run: Run, batch: Experience, sums: Sums, seconds: Mapping[str, float]) -> dict[str, float]:
    """The step's metrics over all ranks; moves the KL controller and the token count on."""
    s = run.summed(sums)
    metrics = dict(seconds) | _of_scores(run, s) | _of_policy(run, s) | _of_values(run, s) | _of_mismatch(run, batch, s)
    run.tokens += int(s["generated"])
    if "updates/policy" in s:  # while the critic warms up, the policy is the reference
        run.kl.update(s["kl"] / s["tokens"], int(s["completions"]))
    generation, peak = run.largest([run.rounds.seconds, _peak_gib(run.device)])
    run.rounds.seconds = 0.0
    # Nothing was drawn in this step if it goes on with a round from a checkpoint.
    drawing = generation if run.config.rollout.max_staleness and generation else seconds["time/rollout"]
    trained = (s["prompt_tokens"] + s["tokens"]) * s["updates"] / run.grid.dp_size / run.config.train.num_minibatches
    return metrics | {
        "time/generation": generation,
        "response/length_mean": s["tokens"] / s["completions"],
        "response/truncated_fraction": s["truncated"] / s["drawn"],
        "tokens/rollout_per_s": s["generated"] / drawing,
        "tokens/update_per_s": trained / seconds["time/update"],
        "tokens/padding_fraction": 1 - (s["prompt_tokens"] + s["tokens"]) / s["positions"],
        "tokens/total": float(run.tokens),
        "staleness/mean": s["age"] / s["drawn"],
        "memory/peak_gib": peak,
    }


def _of_scores(run: Run, s: Mapping[str, float]) -> dict[str, float]:
    mean = s["score"] / s["drawn"]
    metrics = {
        "reward/mean": mean,
        "reward/std": max(0.0, s["score_squared"] / s["drawn"] - mean * mean) ** 0.5,
        "task/accuracy": s["right"] / s["drawn"],
    }
    metrics |= {f"reward/{name}": s[f"part/{name}"] / s["drawn"] for name in run.config.reward.functions}
    groups = s["drawn"] / run.config.train.samples_per_prompt
    metrics["groups/varied_fraction"] = s["varied"] / groups
    if run.config.algorithm.filter_groups:
        metrics["groups/drawn"] = groups
    if run.config.algorithm.normalize_rewards:
        mean, scale = run.scores.shift_and_scale()
        metrics |= {"reward/running_mean": mean, "reward/running_std": 1 / scale}
    return metrics


def _of_policy(run: Run, s: Mapping[str, float]) -> dict[str, float]:
    metrics = {
        "policy/entropy": s["entropy"] / s["exact"],
        "policy/lr": run.trained["policy"].optimizer.param_groups[0]["lr"],
    }
    if run.config.reference != "none":
        metrics |= {"kl/ref": s["kl"] / s["tokens"], "kl/coef": run.kl.coef}
    if "policy/loss" not in s:  # the critic is warming up
        return metrics
    updates, passes = s["updates/policy"], s["passes"] / run.grid.dp_size
    per_token = ("clip_fraction", "approx_kl", "ratio")
    metrics |= {f"policy/{name}": s[f"policy/{name}"] / s["updated"] for name in per_token}
    metrics |= {name: s[name] / passes for name in ("policy/loss", "kl/loss", "ptx/loss") if name in s}
    return metrics | {"policy/grad_norm": s["grad_norm/policy"] / updates, "policy/updates": updates / run.grid.dp_size}


def _of_values(run: Run, s: Mapping[str, float]) -> dict[str, float]:
    if run.config.critic == "none" or "value/loss" not in s:
        return {}
    residual, returns = (
        torch.tensor([s[f"{name}/{i}"] for i in range(3)], dtype=torch.float64) for name in ("residual", "returns")
    )
    metrics = {
        "value/loss": s["value/loss"] / (s["passes"] / run.grid.dp_size),
        "value/clip_fraction": s["value/clip_fraction"] / s["updated"],
        "value/explained_variance": float(masking.explained_variance(residual, returns)),
    }
    if run.critic is not None:  # a head's gradient is part of the policy's
        metrics["value/grad_norm"] = s["grad_norm/critic"] / s["updates/critic"]
    return metrics


def _of_mismatch(run: Run, batch: Experience, s: Mapping[str, float]) -> dict[str, float]:
    if run.config.algorithm.old_logprobs == "rollout":  # the first ratios are those of engine and trainer
        known = "first/policy/approx_kl" in s
        return {"mismatch/kl": s["first/policy/approx_kl"] / s["first/updated"]} if known else {}
    gap = ((batch.logprobs - batch.rollout_logprobs) * batch.mask).abs().max()
    heaviest = (run.importance(batch, cut=False) * batch.mask).max()
    widest_gap, heaviest_weight = run.largest([float(gap), float(heaviest)])
    return {
        "mismatch/kl": s["mismatch"] / s["tokens"],
        "mismatch/max_abs": widest_gap,
        "mismatch/clipped_fraction": s["reweighted"] / s["tokens"],
        "mismatch/weight_max": heaviest_weight,
        "mismatch/effective_fraction": s["weight"] ** 2 / (s["tokens"] * s["weight_squared"]),
    }


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
