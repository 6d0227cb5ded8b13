"""Settings that do nothing while another one is off, by dotted key.

Left out: all other rules between settings (rlx.config.rules).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEEDS = {
    "checkpoint.best_mode": "checkpoint.best_by",
    "checkpoint.init_state": "checkpoint.init_from",
    "model.lora_alpha": "model.lora_rank",
    "model.lora_targets": "model.lora_rank",
    "model.offload": "scaling.use_gpu",
    "model.reference_weights": "checkpoint.init_from",
    "data.ptx_batch": "data.ptx_source",
    "data.curriculum_range": "data.curriculum",
    "data.curriculum_period": "data.curriculum",
    "reward.url_key_env": "reward.url",
    "reward.judge_url_key_env": "reward.judge_url",
    "reward.judge_rubric": "reward.judge_url",
    "reward.judge_mode": "reward.judge_url",
    "reward.judge_pattern": "reward.judge_url",
    "reward.judge_scale": "reward.judge_url",
    "reward.judge_default": "reward.judge_url",
    "reward.judge_max_tokens": "reward.judge_url",
    "reward.judge_seed": "reward.judge_url",
    "reward.judge_parallel": "reward.judge_url",
    "train.checkpointed_layers": "train.gradient_checkpointing",
    "algorithm.adaptive_kl_target": "algorithm.kl_coef",
    "algorithm.adaptive_kl_horizon": "algorithm.adaptive_kl_target",
    "algorithm.filter_rounds": "algorithm.filter_groups",
    "algorithm.rollout_correction_level": "algorithm.rollout_correction",
    "algorithm.rollout_correction_low": "algorithm.rollout_correction",
    "algorithm.rollout_correction_high": "algorithm.rollout_correction",
    "rollout.partial_rollouts": "rollout.max_staleness",
    **dict.fromkeys(
        (
            *("environment.params", "environment.max_turns", "environment.turn_tokens", "environment.rewards"),
            *("environment.history", "environment.num_actors", "environment.memory_mb", "environment.timeout_s"),
        ),
        "environment.name",
    ),
}
"""settings that have no effect while another setting is off"""
_OFF = (None, False, 0, "none")


def check_needs(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses settings that differ from their default and have no effect.

    Args:
        values: all settings by dotted key, `auto` resolved.
        defaults: their defaults, by the same keys.

    Raises:
        ValueError: there is such a setting.
    """
    for key, needed in NEEDS.items():
        if values[key] != defaults[key] and values[needed] in _OFF:
            raise ValueError(f"{key} does nothing without {needed}")
