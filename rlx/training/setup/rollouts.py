"""Builds what collects a rank's rollouts: prompts, sampling, engines, rewards, questions, and kept completions.

Left out: the connection to engines and reward models, which is part of the inputs, and the objects' work (collector).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlx.config.sections.data import EvalSetConfig, label_of
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.data import sources
from rlx.data.stream import PromptStream
from rlx.mesh import Mesh
from rlx.models import loading, lora
from rlx.rewards.completions import CompletionScorer
from rlx.rollout.base import Engines
from rlx.samples.columns import made_with
from rlx.samples.evaluations import HELD_OUT, OutcomeWriter
from rlx.samples.writer import CompletionWriter, Keeping
from rlx.training.collector import RolloutCollector
from rlx.training.evaluation.sets import QuestionSet, ScoredSource, make_scorer, set_sampling
from rlx.training.rollout_queue import RolloutQueue
from rlx.training.setup.inputs import TrainingInputs
from rlx.training.setup.tables import share_of, training_prompts
from rlx.training.trainer import Trainer
from rlx.types import Sampling, ShardedWeight

_MakeScorer = Callable[[Iterable[ScoredSource]], CompletionScorer]


def build_collector(inputs: TrainingInputs, trainer: Trainer, tokenizer: Any) -> RolloutCollector:
    """What gets a rank its rollouts, from engines and reward models that are connected here; a collective call."""
    config, mesh = inputs.config, trainer.mesh
    engines = inputs.connect_engines(mesh, partial(weights_for_engines, config.rollout, config.model, trainer.policy))
    remote = inputs.connect_scorers(mesh)
    ends = loading.end_tokens(inputs.model_path, tokenizer, config.model.trust_remote_code)
    sampling = sampling_of(config.rollout, ends)
    scorer = partial(make_scorer, remote=remote, tokenizer=tokenizer, mesh=mesh)
    parts = zip(config.data.parts, config.reward_parts, strict=True)
    return RolloutCollector(
        trainer=trainer,
        engines=engines,
        queue=_queue(trainer, engines, ends, training_prompts(inputs, mesh)),
        sampling=sampling,
        score=scorer([ScoredSource(part, reward, part.seed, part.num_prompts) for part, reward in parts]),
        evaluations=_evaluations(inputs, mesh, sampling, scorer),
        completions=_completion_writer(inputs, mesh, tokenizer),
        outcomes=OutcomeWriter(inputs.folder, inputs.reporter.notify) if mesh.rank == 0 else None,
    )


def _evaluations(inputs: TrainingInputs, mesh: Mesh, training: Sampling, scorer: _MakeScorer) -> list[QuestionSet]:
    """The questions of evaluations: the held-out prompts with a greedy answer each, then eval.sets."""
    config = inputs.config
    share = share_of(inputs, mesh, sources.table_names(config.data, "held_out"))
    held_out = QuestionSet(
        name=HELD_OUT,
        prompts=share.in_order(),
        size=len(share.rows),
        samplings=[training.greedy],
        score=scorer(_held_out_parts(inputs, config.reward_parts)),
        every=config.eval.every,
        labels=config.data.labels or [label_of(config.eval.source or config.data.source)],
    )
    return [held_out, *(_own_set(inputs, mesh, each, training, scorer, held_out) for each in config.eval.sets)]


def _own_set(
    inputs: TrainingInputs,
    mesh: Mesh,
    eval_set: EvalSetConfig,
    training: Sampling,
    scorer: _MakeScorer,
    held_out: QuestionSet,
) -> QuestionSet:
    """One of eval.sets; without a source of its own it has the prompts of `held_out`."""
    config, own = inputs.config, inputs.config.eval.of(eval_set)
    samplings = [set_sampling(eval_set, training)] * eval_set.samples
    common = replace(held_out, name=eval_set.name, samplings=samplings, every=own.every, settings=eval_set)
    if not eval_set.source:
        rewards = [shared.part(eval_set.reward, eval_set.answer_pattern) for shared in config.reward_parts]
        size = eval_set.num_prompts or held_out.size
        prompts = [prompt for prompt in held_out.prompts if prompt.id < size]
        score = scorer(_held_out_parts(inputs, rewards))
        return replace(common, prompts=prompts, size=min(size, held_out.size), score=score)
    share = share_of(inputs, mesh, [sources.set_table(eval_set.name)])
    reward = config.reward.part(eval_set.reward, eval_set.answer_pattern)
    part = ScoredSource(eval_set.prompts(config.data), reward, own.seed, own.num_prompts)
    labels, score = [label_of(eval_set.source)], scorer([part])
    return replace(common, prompts=share.in_order(), size=len(share.rows), score=score, labels=labels)


def _held_out_parts(inputs: TrainingInputs, rewards: Sequence[RewardConfig]) -> list[ScoredSource]:
    data, evaluation = inputs.config.data, inputs.config.eval
    evaluations = [evaluation.part(data, number) for number in range(len(rewards))]
    rows = zip(data.parts, rewards, evaluations, strict=True)
    return [ScoredSource(part, reward, each.seed, each.num_prompts) for part, reward, each in rows]


def _completion_writer(inputs: TrainingInputs, mesh: Mesh, tokenizer: Any) -> CompletionWriter | None:
    """What keeps this replica's completions; None with tracking.completions 0, and on all but its first process."""
    share = inputs.config.tracking.completions
    if share == 0 or not mesh.is_leader:
        return None
    own = inputs.config
    metadata = made_with(own.environment, own.data.chat_template_args, own.seed)
    keeping = Keeping(share, own.seed, mesh.dp_rank, mesh.dp_size, metadata)
    return CompletionWriter(inputs.folder, keeping, tokenizer, inputs.reporter.notify)


def _queue(trainer: Trainer, engines: Engines, ends: tuple[int, ...], prompts: PromptStream) -> RolloutQueue:
    """Each prompt gets `samples_per_prompt` completions, and a greedy one where the estimator needs it."""
    config = trainer.config
    train, rollout = config.train, config.rollout

    def samplings(step: int) -> list[Sampling]:
        """The sampling of each completion of a prompt that is trained on after so many steps."""
        sampling = sampling_of(config.at(step, trainer.tokens).rollout, ends)
        greedy = [sampling.greedy] if config.algorithm.estimator.needs_greedy else []
        return [sampling] * train.samples_per_prompt + greedy

    return RolloutQueue(
        engines,
        prompts,
        samplings,
        train.prompts_per_step,
        rollout.num_chunks,
        rollout.max_staleness,
        config.resolved_logprobs_every,
        config.environment.identity,
    )


def sampling_of(rollout: RolloutConfig, ends: tuple[int, ...]) -> Sampling:
    """How training completions are sampled; `ends`: the tokens that end one, see `loading.end_tokens`."""
    return Sampling(
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        rollout.max_tokens,
        ends,
        min_p=rollout.min_p,
        min_tokens=rollout.min_tokens,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        bad_words=rollout.bad_words,
        stop=rollout.stop,
        options=tuple(rollout.sampling_options.items()),
    )


def weights_for_engines(rollout: RolloutConfig, model: ModelConfig, policy: Any) -> list[ShardedWeight]:
    """The policy's weights for the engines: all of them, or the adapters alone."""
    if rollout.placement == "colocated":
        torch.cuda.empty_cache()
        dist.barrier()  # all engines on these GPUs wake up once the first rank says so
    adapters_only = model.lora_sync == "adapter"
    return lora.adapter_weights(policy) if adapters_only else lora.engine_weights(policy)
