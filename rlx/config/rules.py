"""The rules between settings. Each is a condition that is refused, and a message that says what to change.

A function checks one topic. RunConfig calls the functions in turn, so a rule may rely on all rules before it. The
arguments `critic`, `reference` and `correction` are the settings with `auto` resolved. `warnings` has what works and is
known to learn badly, `idle` what does nothing. Left out: the values that one setting takes (rlx.config.sections).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.config import vllm_options
from rlx.config.sections.algorithm import GROUPED, AlgorithmConfig
from rlx.config.sections.data import DataConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import EnvironmentConfig, RolloutConfig
from rlx.config.sections.scaling import ParallelConfig, ScalingConfig
from rlx.config.sections.train import TrainConfig

MAX_ADAPTER_RANK = 512
"""largest rank of LoRA adapters that vLLM loads"""
TURNS = ("gae", "reinforce++")
"""advantage estimators that take rewards where turns end"""
_LEAST_SHARE = 0.1
"""of a response's score that should reach its first token"""
_OF_CRITICS = (
    *("algorithm.gae_lambda", "algorithm.value_clip", "algorithm.value_coef"),
    *("train.critic_lr", "model.value_head_init"),
)
"""settings of critics that are not refused without one"""


def refuse_if(condition: object, message: str) -> None:
    if condition:
        raise ValueError(message)


def check_workers(scaling: ScalingConfig, parallel: ParallelConfig, train: TrainConfig, model: ModelConfig) -> None:
    """Raises ValueError if the workers cannot share the prompts evenly, or parallel does not work with a setting."""
    workers, tp, sp = scaling.num_workers, parallel.tp, parallel.sp
    refuse_if(tp > 1 and sp > 1, f"parallel.tp ({tp}) does not work with parallel.sp ({sp}): set only one of them")
    neighbours, name = parallel.neighbours, "parallel.sp" if sp > 1 else "parallel.tp"
    refuse_if(workers % neighbours, f"scaling.num_workers ({workers}) must be a multiple of {name} ({neighbours})")
    refuse_if(sp > 1 and train.packing is False, f"parallel.sp ({sp}) shares packed rows: it needs train.packing")
    unsplit = {"model.lora_rank": model.lora_rank, "model.offload": model.offload, "train.compile": train.compile}
    other = train.optimizer != "adamw"
    unsplit[f"train.optimizer {train.optimizer}"] = other
    for key in ("lora_rank", "offload"):
        refuse_if(
            other and getattr(model, key),
            f"train.optimizer {train.optimizer} does not work with model.{key}: use adamw",
        )
    for key, value in unsplit.items():
        refuse_if(tp > 1 and value, f"parallel.tp ({tp}) does not work with {key}: set only one of them")
    refuse_if(
        train.prompts_per_step % (workers // neighbours * train.num_minibatches),
        f"train.prompts_per_step ({train.prompts_per_step}) must be a multiple of scaling.num_workers / {name} x "
        f"train.num_minibatches ({workers // neighbours} x {train.num_minibatches})",
    )


def check_packing(train: TrainConfig, scaling: ScalingConfig, model: ModelConfig, sp: int) -> None:
    """Raises ValueError if torch has no kernel for packed rows, which train.packing or parallel.`sp` asks for."""
    has_kernel = not scaling.use_gpu or model.dtype != "float32"
    refuse_if(train.packing and not has_kernel, "train.packing: GPUs need model.dtype bfloat16 for it")
    refuse_if(sp > 1 and not has_kernel, f"parallel.sp ({sp}): GPUs need model.dtype bfloat16 for packed rows")


def check_adaptive_kl(algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    """Raises ValueError if one step could set an adaptive kl_coef to 0 forever."""
    completions = train.prompts_per_step * train.samples_per_prompt
    refuse_if(
        algorithm.adaptive_kl_target is not None and completions >= 5 * algorithm.adaptive_kl_horizon,
        f"algorithm.adaptive_kl_horizon ({algorithm.adaptive_kl_horizon}) must be more than a fifth of the completions "
        f"per step ({completions}): otherwise one step can set kl_coef to 0 forever",
    )


def check_estimator(algorithm: AlgorithmConfig, model: ModelConfig, train: TrainConfig) -> None:
    """Raises ValueError if the critic or the completions per prompt do not fit the advantage estimator."""
    name, estimator, samples = algorithm.advantage, algorithm.estimator, train.samples_per_prompt
    too_few = f"train.samples_per_prompt is {samples}, at least 2 are needed"
    refuse_if(
        estimator.needs_critic and model.critic == "none",
        f"algorithm.advantage {name} needs a critic: set model.critic to separate or head",
    )
    refuse_if(
        not estimator.needs_critic and model.critic in ("separate", "head"),
        f"algorithm.advantage {name} does not use a critic: set model.critic to none or auto",
    )
    refuse_if(
        estimator.needs_groups and samples < 2,
        f"algorithm.advantage {name} compares the completions of a prompt: {too_few}",
    )
    refuse_if(
        algorithm.filter_groups and samples < 2,
        f"algorithm.filter_groups compares the completions of a prompt: {too_few}",
    )
    refuse_if(
        algorithm.filter_by != estimator.filter_by and not algorithm.filter_groups,
        "algorithm.filter_by does nothing without algorithm.filter_groups",
    )
    has_buffer = estimator.overlong_share if algorithm.overlong_buffer is None else algorithm.overlong_buffer
    refuse_if(
        algorithm.overlong_penalty != estimator.overlong_penalty and not has_buffer,
        "algorithm.overlong_penalty does nothing without algorithm.overlong_buffer",
    )
    refuse_if(
        algorithm.filter_groups and not estimator.needs_groups,
        f"algorithm.filter_groups is for estimators that learn nothing from completions with equal rewards "
        f"({', '.join(GROUPED)}): algorithm.advantage is {name}",
    )


def check_accelerator(scaling: ScalingConfig) -> None:
    """Raises ValueError for a kind of GPU where workers use none: Ray would look for it for ever."""
    refuse_if(
        scaling.accelerator_type is not None and not scaling.use_gpu,
        f"scaling.accelerator_type {scaling.accelerator_type} is a kind of GPU: it needs scaling.use_gpu",
    )


def check_critic_warmup(train: TrainConfig, critic: str) -> None:
    """Raises ValueError if a warm-up has no separate critic, or leaves no step for the policy."""
    refuse_if(
        train.critic_warmup and critic != "separate",
        "train.critic_warmup needs a critic with its own weights: model.critic separate, with algorithm.advantage gae",
    )
    refuse_if(
        train.critic_warmup >= train.steps,
        f"train.critic_warmup ({train.critic_warmup}) leaves no step of train.steps ({train.steps}) for the policy",
    )


def check_losses(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError if the KL estimator, the dual clip or the overlong buffer does not fit its loss."""
    placement, estimator = algorithm.kl_placement, algorithm.kl_estimator
    refuse_if(
        placement == "loss" and estimator == "k1",
        "algorithm.kl_estimator k1 in the loss has a gradient that is zero on average: choose k1+, k2 or k3",
    )
    refuse_if(
        placement == "reward" and estimator.endswith("+"),
        f"algorithm.kl_estimator {estimator} corrects the gradient, and a reward has none: choose {estimator[:-1]}",
    )
    refuse_if(
        algorithm.policy_loss in ("cispo", "sapo") and algorithm.dual_clip is not None,
        f"algorithm.dual_clip is for clipped losses such as ppo: leave it unset with {algorithm.policy_loss}",
    )
    refuse_if(
        (algorithm.overlong_buffer or 0) > rollout.max_tokens,
        f"algorithm.overlong_buffer ({algorithm.overlong_buffer}) is longer than rollout.max_tokens "
        f"({rollout.max_tokens})",
    )


def check_ptx(algorithm: AlgorithmConfig, data: DataConfig, replicas: int) -> None:
    """Raises ValueError if the supervised loss lacks its weight or its prompts, or its rows do not divide evenly."""
    refuse_if(
        any(algorithm.values("ptx_coef")) != (data.ptx_source is not None),
        "algorithm.ptx_coef and data.ptx_source need each other: set both or neither",
    )
    refuse_if(
        data.ptx_source and data.ptx_batch % replicas,
        f"data.ptx_batch ({data.ptx_batch}) must be a multiple of scaling.num_workers / parallel.tp / "
        f"parallel.sp ({replicas})",
    )


def check_models(model: ModelConfig, algorithm: AlgorithmConfig, critic: str, reference: str) -> None:
    """Raises ValueError if the KL has no reference model, or a model to offload has no weights of its own."""
    refuse_if(
        model.reference == "none" and (algorithm.kl_coef > 0 or algorithm.adaptive_kl_target is not None),
        "model.reference none leaves no model to measure the KL to: set algorithm.kl_coef to 0, and leave "
        "algorithm.adaptive_kl_target unset",
    )
    refuse_if(
        model.critic_path and critic != "separate",
        f"model.critic_path is for a critic with its own weights: model.critic is {critic}",
    )
    refuse_if(
        model.reference_path and reference != "copy",
        f"model.reference_path is for a reference with its own weights: model.reference is {reference}",
    )
    refuse_if(
        model.reference_path and model.reference_weights != "start",
        "model.reference_weights does nothing with model.reference_path, which has its own",
    )
    refuse_if(
        "critic" in model.offload and critic != "separate",
        f"model.offload critic needs a critic with its own weights: model.critic is {critic}",
    )
    refuse_if(
        "reference" in model.offload and reference != "copy",
        f"model.offload reference needs a reference with its own weights: model.reference is {reference}",
    )


def check_adapters(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError if a setting needs LoRA adapters and there are none, or the engines cannot use the adapters."""
    adapters_only = model.lora_sync == "adapter"
    refuse_if(
        not model.lora_rank and model.reference == "lora_off",
        "model.reference lora_off needs adapters to switch off: set model.lora_rank",
    )
    refuse_if(
        not model.lora_rank and adapters_only,
        "model.lora_sync adapter needs adapters: set model.lora_rank",
    )
    refuse_if(
        adapters_only and model.dtype == "float32" and rollout.resources_per_engine.get("GPU"),
        "model.lora_sync adapter: engines on GPUs do not accept float32 adapters: set model.dtype to bfloat16",
    )
    refuse_if(
        adapters_only and rollout.transport != "auto",
        "rollout.transport does nothing with model.lora_sync adapter: leave it at auto",
    )
    refuse_if(
        adapters_only and model.lora_rank > MAX_ADAPTER_RANK,
        f"model.lora_rank {model.lora_rank}: engines accept adapters of rank {MAX_ADAPTER_RANK} or less",
    )


def check_overlap(rollout: RolloutConfig, train: TrainConfig, algorithm: AlgorithmConfig, replicas: int) -> None:
    """Raises ValueError if generation cannot run at the same time as training and scoring as the settings ask."""
    prompts = train.prompts_per_step // replicas
    other = "rollout.max_staleness" if rollout.max_staleness else "algorithm.filter_groups"
    refuse_if(
        rollout.max_staleness > 1 and not rollout.partial_rollouts,
        f"rollout.max_staleness {rollout.max_staleness} gains nothing over 1 without rollout.partial_rollouts: each "
        f"weight update waits until all completions are finished",
    )
    refuse_if(
        rollout.partial_rollouts and train.ema_decay is not None,
        "rollout.partial_rollouts does not work with train.ema_decay: completions would continue with the averaged "
        "weights while these are evaluated",
    )
    refuse_if(
        rollout.num_chunks > prompts,
        f"rollout.num_chunks ({rollout.num_chunks}): a worker has only {prompts} prompts per step",
    )
    refuse_if(
        rollout.num_chunks > 1 and (rollout.max_staleness or algorithm.filter_groups),
        f"rollout.num_chunks does nothing with {other}: leave it at 1",
    )


def check_colocated(rollout: RolloutConfig, scaling: ScalingConfig, model: ModelConfig) -> None:
    """Raises ValueError if rollout.placement is colocated and a setting does not work with it."""
    if rollout.placement != "colocated":
        return
    refuse_if(
        not scaling.use_gpu or rollout.num_engines != scaling.num_workers,
        f"rollout.placement colocated runs one engine on the GPU of each worker: it needs scaling.use_gpu, and as many "
        f"rollout.num_engines ({rollout.num_engines}) as scaling.num_workers ({scaling.num_workers})",
    )
    incompatible = {
        "rollout.max_staleness": rollout.max_staleness,
        "rollout.num_chunks": rollout.num_chunks > 1,
        "rollout.tensor_parallel": rollout.tensor_parallel > 1,
        "rollout.resources_per_engine.GPU": rollout.resources_per_engine.get("GPU"),
        "scaling.resources_per_worker.GPU": scaling.resources_per_worker.get("GPU"),
        "model.lora_sync adapter": model.lora_sync == "adapter",
    }
    for key, given in incompatible.items():
        refuse_if(
            given,
            f"{key} does not work with rollout.placement colocated: a worker and its engine share one GPU, and the "
            f"engine frees its weights while the worker trains",
        )


def check_old_logprobs(algorithm: AlgorithmConfig, rollout: RolloutConfig, critic: str, correction: str) -> None:
    """Raises ValueError if the ratio to the old policy would be biased, or needs a forward pass that is not done."""
    recomputed = algorithm.old_logprobs == "recomputed"
    if rollout.altering and not (recomputed and correction != "none"):
        vllm_options.check_option_names(rollout)  # a mistyped option alters nothing
        raise ValueError(
            f"{', '.join(rollout.altering)}: engines then draw from another distribution than the trainer's, which "
            f"biases PPO's ratio: set algorithm.rollout_correction to tis or mask, and leave algorithm.old_logprobs at "
            f"recomputed"
        )
    refuse_if(
        not recomputed and correction != "none",
        "algorithm.rollout_correction needs log-probabilities from the trainer: set it to none, or "
        "algorithm.old_logprobs to recomputed",
    )
    refuse_if(
        not recomputed and critic == "head",
        "model.critic head, the default with LoRA, computes its values in the forward pass that algorithm.old_logprobs "
        "rollout saves: set model.critic to separate, or algorithm.old_logprobs to recomputed",
    )


def check_options(rollout: RolloutConfig, correction: str) -> None:
    """Raises ValueError if options of vLLM cannot be used, or responses would have to be longer than they may be."""
    problem = vllm_options.problem(rollout, correction)
    refuse_if(problem, str(problem))
    refuse_if(
        rollout.min_tokens > rollout.max_tokens,
        f"rollout.min_tokens ({rollout.min_tokens}) is more than rollout.max_tokens ({rollout.max_tokens})",
    )


def check_engine_gpus(rollout: RolloutConfig) -> None:
    """Raises ValueError if an engine has another number of GPUs than its model is split over."""
    tp, gpus = rollout.tensor_parallel, rollout.resources_per_engine.get("GPU", 0)
    refuse_if(
        gpus != tp and (gpus > 1 or (gpus and tp > 1)),
        f"rollout.tensor_parallel ({tp}) is the number of GPUs that an engine's model is split over, but "
        f"rollout.resources_per_engine.GPU is {gpus:g}: set them to the same number",
    )


def warnings(algorithm: AlgorithmConfig, model: ModelConfig, train: TrainConfig, rollout: RolloutConfig) -> list[str]:
    """Returns a line for each combination that works and is known to learn badly. The run starts from a model."""
    share = algorithm.gae_lambda**rollout.max_tokens
    says_0 = model.value_head_init == "zero" and model.critic_path is None and not train.critic_warmup
    if not (algorithm.estimator.needs_critic and says_0 and share < _LEAST_SHARE):
        return []
    return [
        f"algorithm.gae_lambda {algorithm.gae_lambda} with rollout.max_tokens {rollout.max_tokens}: while the critic "
        f"says 0, the first tokens of a response that long get {share:.1g} of its score, and most tokens of right "
        f"answers become less likely at first; set algorithm.gae_lambda to 1, or train.critic_warmup"
    ]


def idle(values: Mapping[str, Any], critic: str, correction: str) -> dict[str, str]:
    """The settings that do nothing with the others, and which others these are; a sweep may vary them.

    Args:
        values: all settings by dotted key, schedules as mappings.
    """
    name, fixed_bonus = values["algorithm.advantage"], not isinstance(values["algorithm.entropy_coef"], Mapping)
    by_engines = values["algorithm.old_logprobs"] == "rollout" and fixed_bonus  # a schedule asks for exact_entropy
    one_update = values["train.ppo_epochs"] * values["train.num_minibatches"] == 1
    reasons: dict[str, tuple[bool, Sequence[str]]] = {
        f"algorithm.advantage {name}": (critic == "none", _OF_CRITICS),
        "a critic with its own weights": (critic == "separate", ["algorithm.value_coef"]),
        "algorithm.policy_loss sapo": (
            values["algorithm.policy_loss"] == "sapo",
            ["algorithm.clip_low", "algorithm.clip_high"],
        ),
        "algorithm.kl_coef 0": (values["algorithm.kl_coef"] == 0, ["algorithm.kl_placement"]),
        "algorithm.old_logprobs rollout": (by_engines, ["algorithm.exact_entropy"]),
        "algorithm.rollout_correction tis": (correction == "tis", ["algorithm.rollout_correction_low"]),
        "train.ppo_epochs 1 and train.num_minibatches 1": (one_update, ["algorithm.target_kl"]),
    }
    return {key: reason for reason, (holds, keys) in reasons.items() if holds for key in keys}


def check_signal(parts: Sequence[RewardConfig], model: ModelConfig) -> None:
    """Raises ValueError if nothing is rewarded; `parts`: the rewards of each source of prompts."""
    refuse_if(
        not any(weight for part in parts for weight in part.functions.values()) and not model.reference_path,
        "reward.functions: at least one must have a weight other than 0, unless model.reference_path names a teacher",
    )


def check_environment(
    environment: EnvironmentConfig, algorithm: AlgorithmConfig, reward: RewardConfig, parts: Mapping[str, RewardConfig]
) -> None:
    """Raises ValueError if rewards of an environment have none, or the advantage estimator cannot tell them apart.

    Args:
        parts: the rewards of each source, by what names them.
    """
    refuse_if(
        "environment" in reward.functions and environment.name is None,
        "reward.functions has environment, which needs environment.name",
    )
    if environment.rewards != "turn":
        return
    refuse_if(
        algorithm.advantage not in TURNS,
        f"environment.rewards turn: algorithm.advantage {algorithm.advantage} gives a whole response one number; "
        f"choose one of {', '.join(TURNS)}",
    )
    for key, value in {"normalize_rewards": algorithm.normalize_rewards, "reward_clip": algorithm.reward_clip}.items():
        refuse_if(value, f"environment.rewards turn does not work with algorithm.{key}, which is for whole responses")
    for where, part in parts.items():
        weight = part.functions.get("environment", 0.0)
        refuse_if(weight != 1, f"environment.rewards turn: {where} gives environment the weight {weight:g}, not 1")
