"""On policy, or generation one step ahead of training: does the staleness cost accuracy? For --search grid --seeds 5."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {"rollout.max_staleness": tune.choice([0, 1])}
