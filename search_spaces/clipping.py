"""How far one batch may move the policy: the clipping range, passes over the batch, and when a step's passes end."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "algorithm.clip_low": tune.choice([0.1, 0.2, 0.3]),
        "algorithm.clip_high": tune.choice([0.1, 0.2, 0.3]),
        "train.ppo_epochs": tune.choice([1, 2, 4]),
        "algorithm.target_kl": tune.choice([None, 0.05]),
    }
