"""The PPO loop: what runs on every FSDP rank, from prompts to a reported step.

It joins the parts and owns none of their work: generation is rollout's, arithmetic is algorithms', optimizer steps are
update's, files are checkpoint's. Starting processes and engines is launch's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlx.algorithms import masking
from rlx.algorithms.advantages import AdvantageInputs, AdvantageSettings, estimate_advantages
from rlx.algorithms.kl import log_ratio_kl
from rlx.training.collector import Selection
from rlx.training.experience import Experience, concat
from rlx.training.metrics import StepTimer, evaluate, rollout_sums, summarize
from rlx.training.setup import build_run
from rlx.training.trainer import Run
from rlx.training.update import update


def train_loop(setup: dict[str, Any]) -> None:
    """PPO from the newest checkpoint, or from the start, to the last step; the function that Ray Train runs.

    Args:
        setup: what launch made for all ranks; see `assembly.assemble`.
    """
    run = build_run(setup)
    config, late = run.config, run.scores_late
    run.push(starting=True)  # the engines may still be starting
    if run.step == 0:
        run.report(*evaluate(run))
    else:
        run.report(run.metrics, [])  # the driver may not have heard of the checkpoint's own step
    while not run.stopping:
        clock = StepTimer()
        selection, parts = run.selection(), []
        while run.wants_more(selection):  # once, unless groups whose scores are all equal are left out
            parts += collect(run, selection, clock)  # 1 to 5
        with clock("annotate"):
            run.rest()
            parts += [compute_logprobs(run, part, late) for part in run.experiences(selection.take(last=True))]
            batch, kl = compute_advantages(run, concat(parts))  # 6 advantages and returns
        with clock("update"):
            batch, sums = update(run, batch, late)  # 7 losses, backward, clip, step
        with clock("rollout"):
            run.settle()
        run.step += 1
        with clock("sync"):
            run.push()  # 8
        metrics, samples = evaluate(run) if run.is_due(config.eval.every) else ({}, [])
        sums |= {"kl": kl} | rollout_sums(run, batch, selection)
        run.report(metrics | summarize(run, batch, sums, clock.metrics()), samples)  # 9
    run.close()


def collect(run: Run, selection: Selection, clock: StepTimer) -> list[Experience]:
    """The next round of prompts, part by part: completions, their scores, and what policy and reference say of those
    that are to be trained on whatever the other parts bring."""
    parts: list[Experience] = []
    selection.rounds += 1
    for completions in clock.waiting("rollout", run.draw()):  # 1 this rank's prompts, 2 token ids, logprobs, version
        with clock("reward"):
            selection.add(run.penalized(run.judge(completions, run.scorers)))  # 3
        with clock("annotate"):  # 4 padded [B, T], masks; 5 old and reference logprobs, values
            parts += [compute_logprobs(run, part) for part in run.experiences(selection.take())]
    return parts


@torch.no_grad()
def compute_logprobs(run: Run, batch: Experience, late: bool = False) -> Experience:
    """Adds the old policy's logprobs and entropy, the reference's logprobs and the values.

    Without a reference its logprobs are the policy's own, and without a critic the values are 0. With `late` the first
    mini-batch is left to `update`, and all of it stays 0.
    """
    columns = {name: torch.zeros_like(batch.mask) for name in ("logprobs", "ref_logprobs", "values", "entropy")}
    rows = len(batch.scores)
    first = rows // run.config.train.num_minibatches if late else 0
    for micro in run.cut([batch.rows(slice(first, None))])[0] if first < rows else ():
        scored = run.before_update(micro)
        reference = run.reference_logprobs(micro)
        values = scored.values if run.critic is None else run.critic(*micro.inputs)
        grids = (scored.logprobs, scored.logprobs if reference is None else reference, values, scored.entropy)
        for column, grid in zip(columns.values(), grids, strict=True):
            if grid is not None:
                column[micro.place, : grid.shape[1]] = grid
    run.reshard()
    return replace(batch, **columns)


def compute_advantages(run: Run, batch: Experience) -> tuple[Experience, Tensor]:
    """Adds advantages and returns; also the summed KL to the reference."""
    settings, mask = run.config.algorithm, batch.mask
    scores, greedy = normalize_rewards(run, batch)
    kl = log_ratio_kl(batch.logprobs, batch.ref_logprobs, settings.kl_estimator)
    kl_coef = run.kl.coef if settings.kl_placement == "reward" else 0.0
    advantages, returns = estimate_advantages(
        settings.advantage,
        AdvantageInputs(scores, kl, batch.values, mask, batch.groups, greedy),
        AdvantageSettings(kl_coef, settings.gamma, settings.gae_lambda),
    )
    if settings.whiten_advantages:
        total = masking.moments(advantages, mask)
        run.grid.all_reduce_sum(total)
        advantages = masking.masked_whiten(advantages, mask, total=total)
    return replace(batch, advantages=advantages, returns=returns), masking.masked_sum(kl, mask)


def normalize_rewards(run: Run, batch: Experience) -> tuple[Tensor, Tensor]:
    """The scores, and those of the greedy completions, normalised by all scores so far and clipped, as configured."""
    settings, grids = run.config.algorithm, [batch.scores, batch.greedy]
    if settings.normalize_rewards:
        total = masking.moments(batch.scores, torch.ones_like(batch.scores))
        run.grid.all_reduce_sum(total)
        run.scores.update(*total.tolist())
        mean, scale = run.scores.shift_and_scale()
        grids = [(grid - mean) * scale for grid in grids]
    if settings.reward_clip is not None:
        grids = [grid.clamp(-settings.reward_clip, settings.reward_clip) for grid in grids]
    return grids[0], grids[1]
