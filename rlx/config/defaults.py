"""Defaults that are no constants: they follow settings of other sections, or the model's longest text.

Left out: defaults that follow a setting of the same section, which stand beside it, and whose defaults they are
(docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.config.sections.algorithm import AlgorithmConfig, FilterBy
from rlx.config.sections.data import DataConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import EnvironmentConfig, RolloutConfig
from rlx.config.sections.scaling import ScalingConfig

ADAPTER_LR = 1e-4
"""of LoRA's adapters, which take larger ones than full weights: QLoRA (arXiv 2305.14314) has 1e-4 to 2e-4"""


ENGINES = ("rollout.num_engines", "rollout.resources_per_engine")
"""the settings that follow the GPUs of the workers"""
FOLLOWING = ("model.dtype", "train.actor_lr", "train.critic_lr", "reward.functions", *ENGINES)
"""the settings that `following_defaults` may have"""


def following_defaults(
    model: ModelConfig, scaling: ScalingConfig, environment: EnvironmentConfig, rollout: RolloutConfig
) -> dict[str, Any]:
    """The defaults that other sections change, by dotted key."""
    precision = {"model.dtype": "bfloat16"} if scaling.use_gpu else {}
    rates = {"train.actor_lr": ADAPTER_LR} if model.lora_rank else {}
    if model.lora_rank and model.critic != "separate":  # which has no adapters
        rates["train.critic_lr"] = ADAPTER_LR
    rewards = {"reward.functions": {"environment": 1.0}} if environment.name else {}
    engines = _engines_on_gpus(scaling, rollout) if scaling.use_gpu else {}
    return precision | rates | rewards | engines


def _engines_on_gpus(scaling: ScalingConfig, rollout: RolloutConfig) -> dict[str, Any]:
    """As many GPUs for engines as there are workers, and one engine on each, or on those that it is split over.

    Two engines that share what one would have take 1.09 times as long to draw a step, three 1.32 times
    (docs/performance.md).
    """
    if rollout.placement == "colocated":
        return {"rollout.num_engines": scaling.num_workers}
    gpus = rollout.tensor_parallel
    return {
        "rollout.num_engines": max(1, scaling.num_workers // gpus),
        "rollout.resources_per_engine": {"CPU": 1.0, "GPU": float(gpus)},
    }


def default_filter(algorithm: AlgorithmConfig, rewards: Sequence[RewardConfig]) -> FilterBy:
    """What algorithm.filter_by is if it was not given: right episodes are rare where only a perfect one has reward 1.

    Args:
        rewards: those of each source.
    """
    has_episodes = algorithm.filter_groups and any(each.judging == "environment" for each in rewards)
    return "reward" if has_episodes else algorithm.estimator.filter_by


def fitting_lengths(data: DataConfig, rollout: RolloutConfig, positions: int | None) -> dict[str, int]:
    """The longest prompt and the longest response in tokens, by dotted key.

    A length that was given stays. One that was not is cut to what the model's context leaves: prompts to half of it if
    neither was given, then responses to the rest. At least 1 each, so their sum may be more than `positions`.

    Args:
        positions: the longest text that the model takes, in tokens; None: unknown, and nothing is cut.
    """
    prompt, response = data.max_prompt_tokens, rollout.max_tokens
    is_given = "max_tokens" in rollout.model_fields_set
    if positions and "max_prompt_tokens" not in data.model_fields_set:
        prompt = max(1, min(prompt, positions - response if is_given else positions // 2))
    if positions and not is_given:
        response = max(1, min(response, positions - prompt))
    return {"data.max_prompt_tokens": prompt, "rollout.max_tokens": response}
