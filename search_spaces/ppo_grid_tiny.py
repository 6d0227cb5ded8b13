"""For the tiny model, a small grid over the policy's learning rate and the KL's weight, for --search grid."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "train.actor_lr": tune.choice([1e-4, 3e-4, 1e-3]),
        "algorithm.kl_coef": tune.choice([0.0, 0.01]),
    }
