"""What PPO's ratio is to, for critic-free estimators one step ahead. For --search grid --seeds 5."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {"algorithm.old_logprobs": tune.choice(["recomputed", "rollout"])}
