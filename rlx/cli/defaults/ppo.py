"""The settings that matter most to PPO on a model that people bring: learning rates, the KL's weight, passes."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "train.actor_lr": tune.loguniform(1e-7, 1e-5),
        "train.critic_lr": tune.loguniform(1e-6, 1e-4),
        "algorithm.kl_coef": tune.loguniform(1e-4, 1e-1),
        "train.ppo_epochs": tune.choice([1, 2]),
    }
