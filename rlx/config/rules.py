"""TODO rlx.config.rules."""

from __future__ import annotations

NEEDS = {
    "checkpoint.best_mode": "checkpoint.best_by",
    "checkpoint.start_with": "checkpoint.start_from",
    "model.lora_alpha": "model.lora_rank",
    "model.lora_targets": "model.lora_rank",
    "model.offload": "scaling.use_gpu",
    "data.ptx_batch": "data.ptx_source",
    "reward.url_key": "reward.url",
    "algorithm.kl_target": "algorithm.kl_coef",
    "algorithm.kl_horizon": "algorithm.kl_target",
    "algorithm.overlong_penalty": "algorithm.overlong_buffer",
    "algorithm.filter_rounds": "algorithm.filter_groups",
    "algorithm.importance_level": "algorithm.importance",
    "algorithm.importance_low": "algorithm.importance",
    "algorithm.importance_high": "algorithm.importance",
    "rollout.partial": "rollout.max_staleness",
}
"""settings that do nothing unless another one is on"""
OFF = (None, False, 0, "none")
"""values that stand for off"""
