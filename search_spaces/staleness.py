"""On policy, or generating one step ahead of training: what staleness costs. For --search grid --seeds 5."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {"rollout.max_staleness": tune.choice([0, 1])}
