"""The PPO loop: what runs on every FSDP rank, from prompts to a reported step.

It joins the parts and owns none of their work: generation is rollout's, arithmetic is algorithms', files are
checkpoint's. Starting processes and engines is launch's.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import MeanMetric

from rlx import algorithms, experience
from rlx.rollout import sync
from rlx.types import Completion, Experience
from rlx.worker import Clock, Run, assemble

Sums = dict[str, float | Tensor]
"""Statistics of this rank, to be summed over ranks and then divided"""


def train_loop(setup: dict[str, Any]) -> None:
    """PPO from the newest checkpoint, or from the start, to the last step; the function that Ray Train runs.

    Args:
        setup: what launch made for all ranks; see `worker.assemble`.
    """
    run = assemble(setup)
    config = run.config
    run.push(run.step, config.rollout.timeout_s)  # the engines may still be starting
    if run.step == 0:
        run.report(*evaluate(run))
    while run.step < config.train.steps:
        clock = Clock()
        with clock("rollout"):
            prompts = run.prompts.next(config.train.prompts_per_step)  # 1 this rank's share
            completions = run.rollouts.generate(  # 2 token ids, logprobs, weight version
                prompts, run.sampling, config.train.samples_per_prompt, version=run.step
            )
        with clock("reward"):
            scores = run.score(completions, run.checker)  # 3
        with clock("annotate"):
            batch = run.experience(completions, scores)  # 4 padded [B, T], masks
            batch, entropy = annotate(run, batch)  # 5 old and reference logprobs, values
            batch, kl = estimate(run, batch)  # 6 advantages and returns
        with clock("update"):
            sums = update(run, batch)  # 7 losses, backward, clip, step
        run.step += 1
        with clock("sync"):
            run.push(run.step, config.rollout.sync_timeout_s)  # 8
        metrics, samples = evaluate(run) if run.is_due(config.eval.every) else ({}, [])
        sums |= {"entropy": entropy, "kl": kl} | rollout_sums(run, batch, completions)
        run.report(metrics | summarize(run, batch, sums, clock.metrics()), samples)  # 9


@torch.no_grad()
def annotate(run: Run, batch: Experience) -> tuple[Experience, Tensor]:
    """Adds the old policy's logprobs, the reference's and the values; also the policy's summed entropy."""
    width, temperature = batch.mask.shape[1], run.sampling.temperature
    columns: dict[str, list[Tensor]] = {"logprobs": [], "ref_logprobs": [], "values": []}
    entropy = torch.zeros((), device=run.device)
    for micro in run.cut([batch])[0]:
        inputs = (micro.ids, micro.prompt_lengths, micro.mask.shape[1])
        scored = run.policy(*inputs, temperature)
        reference = run.reference(*inputs, temperature)
        values = scored.values if run.critic is None else run.critic(*inputs)
        entropy += algorithms.masked_sum(scored.entropy, micro.mask)
        for name, grid in zip(columns, (scored.logprobs, reference.logprobs, values), strict=True):
            columns[name].append(pad(grid * micro.mask, (0, width - grid.shape[1])))
    return replace(batch, **{name: torch.cat(grids) for name, grids in columns.items()}), entropy


def estimate(run: Run, batch: Experience) -> tuple[Experience, Tensor]:
    """Adds advantages and returns; also the summed KL to the reference."""
    settings, mask = run.config.algorithm, batch.mask
    kl = algorithms.log_ratio_kl(batch.logprobs, batch.ref_logprobs, settings.kl_kind)
    token_rewards = algorithms.token_rewards(batch.scores, kl, mask, run.kl.coef, settings.score_clip)
    advantages, returns = algorithms.gae(token_rewards, batch.values, mask, settings.gamma, settings.lam)
    if settings.whiten:
        total = algorithms.moments(advantages, mask)
        dist.all_reduce(total)
        advantages = algorithms.masked_whiten(advantages, mask, total=total)
    return replace(batch, advantages=advantages, returns=returns), algorithms.masked_sum(kl, mask)


def update(run: Run, batch: Experience) -> Sums:
    """All epochs of optimizer steps on a batch; the losses' statistics, summed over them."""
    batches = experience.minibatches(batch, run.config.train.minibatches)
    cut = run.cut(batches)
    tokens = run.summed({str(i): part.mask.sum() for i, part in enumerate(batches)})
    sums: Sums = {}
    for _ in range(run.config.train.epochs):
        for micros, denominator in zip(cut, tokens.values(), strict=True):
            for i, micro in enumerate(micros):
                run.reduce_gradients(i == len(micros) - 1)
                _add(sums, backward(run, micro, denominator))
            _add(sums, optimizer_step(run))
    return sums


def backward(run: Run, micro: Experience, denominator: float) -> Sums:
    """Losses and gradients of one micro-batch: its share of the optimizer step's, over all ranks."""
    settings, mask = run.config.algorithm, micro.mask
    inputs = (micro.ids, micro.prompt_lengths, mask.shape[1])
    scored = run.policy(*inputs, run.sampling.temperature)
    values = scored.values if run.critic is None else run.critic(*inputs)
    policy_loss, policy_stats = algorithms.policy_loss(
        scored.logprobs,
        micro.logprobs,
        micro.advantages,
        mask,
        denominator,
        settings.clip_low,
        settings.clip_high,
        settings.dual_clip,
        _importance(run, micro),
    )
    value_loss, value_stats = algorithms.value_loss(
        values, micro.values, micro.returns, mask, denominator, settings.value_clip
    )
    loss = policy_loss + (settings.value_coef if run.critic is None else 1.0) * value_loss
    (loss * run.ranks).backward()  # FSDP averages gradients over ranks; the denominator is global already
    return {
        "policy/loss": policy_loss.detach(),
        "policy/clip_fraction": policy_stats["clip_fraction"],
        "policy/approx_kl": policy_stats["approx_kl"],
        "value/loss": value_loss.detach(),
        "value/clip_fraction": value_stats["clip_fraction"],
        "updated": mask.sum(),
    }


def optimizer_step(run: Run) -> Sums:
    """Clips the gradients and applies them at the schedule's learning rate; gives their norms before clipping."""
    train = run.config.train
    total = train.steps * train.epochs * train.minibatches
    scale = algorithms.lr_scale(run.updates, train.warmup_steps, total, train.lr_schedule)
    for group, lr in run.base_lr:
        group["lr"] = lr * scale
    norms: Sums = {}
    for name, trained in run.trained.items():
        norm = torch.nn.utils.clip_grad_norm_(trained.model.parameters(), train.max_grad_norm)
        norms[f"grad_norm/{name}"] = sync.gathered(norm)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    run.updates += 1
    return norms | {"updates": 1.0}


def evaluate(run: Run) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Greedy answers to the held-out prompts: their metrics over all ranks, and some of this rank's as sample rows."""
    started = time.perf_counter()
    greedy = replace(run.sampling, temperature=0.0, top_p=1.0, top_k=-1)
    completions = run.rollouts.generate(run.held_out, greedy, 1, version=run.step)
    scores = run.score(completions, run.held_out_checker)
    columns = {
        "eval/accuracy": [float(score >= 1) for score in scores],
        "eval/reward": scores,
        "eval/length": [float(len(c.token_ids)) for c in completions],
    }
    metrics = {}
    for name, column in columns.items():
        mean = MeanMetric().to(run.device)
        mean.update(torch.tensor(column, device=run.device))
        metrics[name] = float(mean.compute())
    metrics["time/eval"] = time.perf_counter() - started
    kept = completions[: run.config.tracking.samples]
    texts = run.tokenizer.batch_decode([c.token_ids for c in kept], skip_special_tokens=True)
    return metrics, [
        {"step": run.step, "prompt": c.prompt.question, "completion": text, "answer": c.prompt.answer, "score": score}
        for c, text, score in zip(kept, texts, scores, strict=False)
    ]


def rollout_sums(run: Run, batch: Experience, completions: Sequence[Completion]) -> Sums:
    """What a step's metrics need to know of its completions, before the update."""
    mask, scores = batch.mask, batch.scores.double()
    mismatch = algorithms.log_ratio_kl(batch.rollout_logprobs, batch.logprobs, "k3")
    sums: Sums = {
        "completions": len(completions),
        "score": scores.sum(),
        "score_squared": scores.square().sum(),
        "right": (scores >= 1).sum(),
        "tokens": mask.sum(),
        "trained": (batch.prompt_lengths.sum() + mask.sum()) * run.config.train.epochs,
        "truncated": sum(not c.finished for c in completions),
        "age": sum(run.step - 1 - c.version for c in completions),
        "mismatch": algorithms.masked_sum(mismatch, mask),
        "reweighted": _reweighted(run, batch),
    }
    for name, grid in (("residual", batch.returns - batch.values), ("returns", batch.returns)):
        sums |= {f"{name}/{i}": part for i, part in enumerate(algorithms.moments(grid, mask))}
    return sums


def summarize(run: Run, batch: Experience, sums: Sums, seconds: Mapping[str, float]) -> dict[str, float]:
    """The step's metrics over all ranks; moves the KL controller and the token count on."""
    s = run.summed(sums)
    gap = ((batch.logprobs - batch.rollout_logprobs) * batch.mask).abs().max()
    widest_gap, memory = run.largest([float(gap), _peak_gib(run.device)])
    count, tokens, updated = s["completions"], s["tokens"], s["updated"]
    updates = s["updates"] / run.ranks
    mean = s["score"] / count
    coef = run.kl.coef
    run.kl.update(s["kl"] / tokens, int(count))
    run.tokens += int(tokens)
    residual, returns = (
        torch.tensor([s[f"{name}/{i}"] for i in range(3)], dtype=torch.float64) for name in ("residual", "returns")
    )
    metrics = dict(seconds)
    if run.critic is not None:  # a head's gradient is part of the policy's
        metrics["value/grad_norm"] = s["grad_norm/critic"] / s["updates"]
    return metrics | {
        "reward/mean": mean,
        "reward/std": max(0.0, s["score_squared"] / count - mean * mean) ** 0.5,
        "task/accuracy": s["right"] / count,
        "kl/ref": s["kl"] / tokens,
        "kl/coef": coef,
        "policy/loss": s["policy/loss"] / updates,
        "policy/entropy": s["entropy"] / tokens,
        "policy/clip_fraction": s["policy/clip_fraction"] / updated,
        "policy/approx_kl": s["policy/approx_kl"] / updated,
        "policy/grad_norm": s["grad_norm/policy"] / s["updates"],
        "policy/lr": run.base_lr[0][0]["lr"],
        "value/loss": s["value/loss"] / updates,
        "value/clip_fraction": s["value/clip_fraction"] / updated,
        "value/explained_variance": float(algorithms.explained_variance(residual, returns)),
        "mismatch/kl": s["mismatch"] / tokens,
        "mismatch/max_abs": widest_gap,
        "mismatch/clipped_fraction": s["reweighted"] / tokens,
        "response/length_mean": tokens / count,
        "response/truncated_fraction": s["truncated"] / count,
        "tokens/rollout_per_s": tokens / seconds["time/rollout"],
        "tokens/update_per_s": s["trained"] / seconds["time/update"],
        "tokens/total": float(run.tokens),
        "staleness/mean": s["age"] / count,
        "memory/peak_gib": memory,
    }


def _importance(run: Run, batch: Experience) -> Tensor:
    settings = run.config.algorithm
    return algorithms.importance_weights(
        batch.logprobs,
        batch.rollout_logprobs,
        batch.mask,
        settings.importance,
        settings.importance_low,
        settings.importance_high,
    )


def _reweighted(run: Run, batch: Experience) -> Tensor:
    """How many tokens' importance weights were cut or masked."""
    uncut = algorithms.importance_weights(batch.logprobs, batch.rollout_logprobs, batch.mask, "tis", 0.0, math.inf)
    applied = run.config.algorithm.importance != "none"
    return (_importance(run, batch) != uncut).sum() * applied


def _add(sums: Sums, more: Mapping[str, float | Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
