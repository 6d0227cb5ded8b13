"""TODO rlx.config.rules."""

from __future__ import annotations

NEEDS = {
    "checkpoint.best_mode": "checkpoint.best_by",
    "checkpoint.init_state": "checkpoint.init_from",
    "model.lora_alpha": "model.lora_rank",
    "model.lora_targets": "model.lora_rank",
    "model.offload": "scaling.use_gpu",
    "data.ptx_batch": "data.ptx_source",
    "reward.url_key_env": "reward.url",
    "algorithm.adaptive_kl_target": "algorithm.kl_coef",
    "algorithm.adaptive_kl_horizon": "algorithm.adaptive_kl_target",
    "algorithm.overlong_penalty": "algorithm.overlong_buffer",
    "algorithm.filter_rounds": "algorithm.filter_groups",
    "algorithm.rollout_correction_level": "algorithm.rollout_correction",
    "algorithm.rollout_correction_low": "algorithm.rollout_correction",
    "algorithm.rollout_correction_high": "algorithm.rollout_correction",
    "rollout.partial_rollouts": "rollout.max_staleness",
}
"""settings that do nothing unless another one is on"""
OFF = (None, False, 0, "none")
"""values that stand for off"""
