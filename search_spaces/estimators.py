"""Four ways to estimate advantages on five seeds each: --search grid runs them all, rlx analyze --by compares them."""

from typing import Any

from ray import tune


def space() -> dict[str, Any]:
    return {
        "algorithm.advantage": tune.choice(["gae", "grpo", "rloo", "reinforce++"]),
        "seed": tune.choice([0, 1, 2, 3, 4]),
    }
