"""The settings that matter most to PPO with LoRA, whose learning rates are larger than those of full weights."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "train.actor_lr": tune.loguniform(1e-5, 1e-3),
        "train.critic_lr": tune.loguniform(1e-5, 1e-3),
        "algorithm.kl_coef": tune.loguniform(1e-4, 1e-1),
        "train.ppo_epochs": tune.choice([1, 2]),
    }
