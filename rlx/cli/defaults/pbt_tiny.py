"""For --scheduler pbt with the tiny model: settings that may change while a run goes on."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "train.actor_lr": tune.loguniform(2e-5, 1e-3),
        "train.critic_lr": tune.loguniform(3e-5, 1e-3),
        "algorithm.kl_coef": tune.loguniform(1e-3, 1e-1),
    }
