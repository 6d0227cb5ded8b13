"""The doctor: a few steps at learning rate 0, in which trainer, engines and reference must agree; then changed weights,
which the engines must have after a sync.

`examine` runs on every FSDP rank in place of the PPO loop; `verdicts` judges its figures. Starting it all is launch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from rlx.algorithms import masking
from rlx.config.run import RunConfig
from rlx.runs import ray_train
from rlx.training.experience import Experience
from rlx.training.loop import compute_advantages, compute_logprobs
from rlx.training.setup import build_run
from rlx.training.trainer import Run
from rlx.training.update import update

ROUNDS = 2
_NUDGE = 0.1  # of a weight's own spread: far more than an optimizer step does
# Forward passes over other shapes round differently; engine and trainer use other kernels.
_ROUNDING = {"float32": 1e-5, "bfloat16": 0.05}
_MISMATCH = {"float32": 1e-3, "bfloat16": 0.02}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the doctor's report."""

    what: str
    figure: float
    demand: str  # what the figure should be
    passed: bool


def with_no_learning(config: RunConfig) -> RunConfig:
    """The config with all learning rates 0, so that a step changes nothing, and with the trainer's own logprobs."""
    train = config.train.model_copy(update={"actor_lr": 0.0, "critic_lr": 0.0, "critic_warmup": 0})
    algorithm = config.algorithm.model_copy(update={"old_logprobs": "recomputed"})
    return config.model_copy(update={"train": train, "algorithm": algorithm})


def examine(setup: dict[str, Any]) -> None:
    """Reports the figures that `verdicts` judges."""
    run = build_run(setup)
    run.push(starting=True)
    before = weights_fingerprint(run)
    figures = {"ratio": 0.0, "clipped": 0.0, "kl": 0.0, "gap": 0.0}
    for _ in range(ROUNDS):
        batch, kl = compute_advantages(run, drawn(run, run.scores_late))
        batch, sums = update(run, batch, run.scores_late)
        s = run.summed(sums | {"kl": kl, "tokens": batch.mask.sum()})
        worst = {
            "ratio": abs(s["policy/ratio"] / s["updated"] - 1),
            "clipped": s["policy/clip_fraction"] / s["updated"],
            "kl": abs(s["kl"]) / s["tokens"],
            "gap": gap(run, batch),
        }
        figures = {name: max(figures[name], value) for name, value in worst.items()}
        norms = {name: s[name] / s["updates"] for name in s if name.startswith("grad_norm/")}
        figures |= {name: max(figures.get(name, 0.0), norm) for name, norm in norms.items()}
        figures["signal"] = max(figures.get("signal", 0.0), *run.largest([float(batch.advantages.abs().max())]))
        run.push()
    figures["moved"] = run.largest([float(weights_fingerprint(run) != before)])[0]
    ray_train.report(run.box, figures | sync_figures(run), last=True)
    run.close()


def sync_figures(run: Run) -> dict[str, float]:
    """How far the engines are from changed weights after they were sent, and how far they would be without that."""
    with nudged(run):
        run.push()
        batch = drawn(run)
        sent = gap(run, batch)
    return {"sync_gap": sent, "stale_gap": gap(run, compute_logprobs(run, batch))}


def drawn(run: Run, late: bool = False) -> Experience:
    """Completions of the next prompts with the logprobs that the policy gives them, of this rank; `late`: see
    `annotate`."""
    selection = run.selection()
    for completions in run.rounds.next(run.step, run.step + 1):  # none ahead: the weights change in between
        selection.add(run.penalized(run.judge(completions, run.scorers)))
    run.rest()
    (batch,) = run.experiences(selection.take(last=True))
    return compute_logprobs(run, batch, late)


def gap(run: Run, batch: Experience) -> float:
    """Mean difference of a token's logprob between engine and trainer, over all ranks."""
    apart = masking.masked_sum((batch.logprobs - batch.rollout_logprobs).abs(), batch.mask)
    s = run.summed({"apart": apart, "tokens": batch.mask.sum()})
    return s["apart"] / s["tokens"]


def weights_fingerprint(run: Run) -> list[float]:
    """Sums that change when a weight does, of this rank's shards."""
    weights = [p.detach() for trained in run.trained.values() for p in trained.model.parameters()]
    return [float(cast(DTensor, p).to_local().double().abs().sum()) for p in weights]


@contextmanager
def nudged(run: Run) -> Iterator[None]:
    """Within it all trained weights of the policy are others."""
    shards = [cast(DTensor, p).to_local() for p in run.policy.parameters() if p.requires_grad]
    kept = [shard.clone() for shard in shards]
    with torch.no_grad():
        for shard in shards:
            spread = float(shard.square().mean().sqrt()) if shard.count_nonzero() else 0.5  # an adapter's B is 0
            wave = torch.cos(torch.arange(shard.numel(), device=shard.device, dtype=shard.dtype))
            shard.add_(_NUDGE * spread * wave.view_as(shard))
        yield
        for shard, old in zip(shards, kept, strict=True):
            shard.copy_(old)


def verdicts(figures: Mapping[str, float], config: RunConfig) -> list[Verdict]:
    """The figures judged, one line each."""
    rounding, apart = _ROUNDING[config.model.dtype], _MISMATCH[config.model.dtype]
    stale = figures["stale_gap"]

    def at_most(what: str, name: str, limit: float) -> Verdict:
        return Verdict(what, figures[name], f"at most {limit:g}", figures[name] <= limit)

    lines = [
        at_most("ratio of current to old policy, its distance from 1", "ratio", rounding),
        at_most("fraction of tokens that the ratio's clip decides", "clipped", 0.0),
        at_most("weights moved at learning rate 0", "moved", 0.0),
        at_most("engine against trainer, mean difference of logprobs", "gap", apart),
        at_most("the same after a sync of changed weights", "sync_gap", apart),
        Verdict("the same without the sync", stale, "more than twice that", stale > 2 * figures["sync_gap"]),
    ]
    if config.reference != "none":
        lines.insert(2, at_most("KL to the reference at the start, per token", "kl", rounding))
    for name in sorted(key for key in figures if key.startswith("grad_norm/")):
        norm, what = figures[name], f"gradient norm of the {name.partition('/')[2]}"
        # Where all scores of every prompt are equal there is nothing to learn from, which is no fault.
        signal = figures["signal"] > 0 and name == "grad_norm/policy"
        sound = math.isfinite(norm) and (norm > 0 or not signal)
        lines.append(Verdict(what, norm, "finite, not 0" if signal else "finite", sound))
    return lines
