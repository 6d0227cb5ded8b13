"""For --scheduler pbt: settings that may change while a run goes on; trials begin at random points of these ranges."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "train.actor_lr": tune.loguniform(1e-7, 1e-5),
        "train.critic_lr": tune.loguniform(1e-6, 1e-4),
        "algorithm.kl_coef": tune.loguniform(1e-4, 1e-1),
    }
