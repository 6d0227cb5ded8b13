"""PPO with a critic against GRPO without one. For --search grid --seeds 3."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {"algorithm.advantage": tune.choice(["gae", "grpo"])}
