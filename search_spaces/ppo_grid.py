"""A small grid over the policy's learning rate and the KL's weight, for --search grid."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "train.actor_lr": tune.choice([3e-7, 1e-6, 3e-6]),
        "algorithm.kl_coef": tune.choice([0.0, 0.01]),
    }
