"""The names of tensors in a checkpoint. No other module spells them.

Changing one means that earlier checkpoints can no longer be read: raise `checkpoint_manifest.FORMAT` with it.
"""

from __future__ import annotations

from collections.abc import Iterable


def model_weight(model: str, name: str) -> str:
    """The key of a trained weight of a model: "policy" or "critic"."""
    return f"{model}.model.{name}"


def is_of_value_head(name: str) -> bool:
    """Whether a weight of a model is of the layer that makes values, which a policy without a critic lacks."""
    return name.startswith("value_head.")


def optimizer_state(model: str, parameter: str, moment: str) -> str:
    """The key of one tensor (`exp_avg`, `step`, ...) that a model's optimizer keeps for a parameter."""
    return f"{model}.optimizer.{parameter}.{moment}"


def ema_weight(name: str) -> str:
    """The key of a weight in the moving average of the policy."""
    return f"average.{name}"


PROMPT_SUCCESS = "curriculum.success"
"""the key of a curriculum's estimates, one byte for each prompt"""


def queued_round(index: int, column: str) -> str:
    """The key of one column of the rollouts that were generated ahead; index 0 is the step that comes next."""
    return f"ahead.{index}.{column}"


def has_weights(keys: Iterable[str], model: str) -> bool:
    """Whether a checkpoint with these keys has weights of a model."""
    return any(key.startswith(model_weight(model, "")) for key in keys)


def has_values(keys: Iterable[str], model: str) -> bool:
    """Whether a checkpoint with these keys has the layer of a model that makes values."""
    prefix = model_weight(model, "")
    return any(key.startswith(prefix) and is_of_value_head(key.removeprefix(prefix)) for key in keys)


def has_optimizer_state(keys: Iterable[str], model: str) -> bool:
    """Whether a checkpoint with these keys has the state of a model's optimizer, which has then taken a step."""
    return any(key.startswith(f"{model}.optimizer.") for key in keys)
