"""What veRL 0.9.1 is given, by its own names, to do the work of a run of rlx.

Changed besides settings are how veRL waits for completions (verl_sampler.py), that it looks for TRL
(verl_without_trl.py), and its attention over packed rows (verl_varlen.py). Left out: starting it (against_verl.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import alike

from rlx.config.run import RunConfig

AGGREGATIONS = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
"""veRL's names of rlx's"""
FIXED: dict[str, Any] = {
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": True,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "+actor_rollout_ref.actor.optim.override_optimizer_config.fused": True,
    "actor_rollout_ref.model.use_fused_kernels": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 16_384,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
    "data.shuffle": False,
    "data.dataloader_num_workers": 0,
    "reward.custom_reward_function.name": "score",
    "trainer.logger": "[console]",
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.total_epochs": 1,
    "trainer.v1.sampler.custom_sampler.path": Path(__file__).parent / "verl_sampler.py",
    "trainer.v1.sampler.custom_sampler.name": "Attentive",
    "ray_kwargs.ray_init.num_cpus": 32,  # it reserves 20, more than some machines have
    "hydra.output_subdir": "null",
}
"""veRL's settings that no setting of rlx decides: for the same work, and for nothing but the work"""
ASLEEP: dict[str, Any] = {
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": True,
}
"""in their place with --asleep: engines leave the GPU to the trainer, which gathers weights for each pass"""
AHEAD: dict[str, Any] = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.num_warmup_batches": 1,
    "trainer.v1.sampler.custom_sampler.name": "AttentiveAhead",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "algorithm.rollout_correction.bypass_mode": True,
}
"""in their place one step ahead: its asynchronous trainer, engines on GPUs of their own, and their log-probabilities
taken for those of the policy, which spares a pass"""
_CRITIC: dict[str, Any] = {
    "critic.strategy": "fsdp2",
    "critic.fsdp.model_dtype": "fp32",
    "critic.fsdp.reshard_after_forward": False,
    "critic.fsdp.use_no_sync_for_gradient_accumulation": True,
    "critic.use_dynamic_bsz": True,
    "+critic.optim.override_optimizer_config.fused": True,
}
_PACKED = {"use_remove_padding": True, "+override_config.attn_implementation": "verl_varlen"}
_PADDED = {"use_remove_padding": False, "+override_config.attn_implementation": "sdpa"}
_TRITON, _TORCH = ({"fused_kernel_options.impl_backend": head} for head in ("triton", "torch"))
WAYS: dict[str, dict[str, Any]] = {
    "packed, liger": _PACKED | _TRITON | {"use_liger": True},
    "packed, liger, newer runner": _PACKED | _TRITON | {"use_liger": True},
    "packed": _PACKED | _TRITON,
    "packed, torch's head": _PACKED | _TORCH,
    "padded": _PADDED | _TORCH,  # Triton's head fails with padding
    # Its fused heads read an output layer of its own as float32 and in parts, and fail, so it has to hold all logits.
    "packed, liger, all logits": _PACKED | {"use_liger": True, "use_fused_kernels": False},
}
"""settings of veRL's models that no setting of rlx decides, and that cost or gain it speed"""
ENVIRONMENTS = {"packed, liger, newer runner": alike.NEWER_RUNNER}
"""what veRL's processes have besides in a way"""


def wider(way: str, gpu_gib: float) -> int:
    """How many times the tokens of a micro-batch veRL takes at once where no gradients are kept.

    With 4 it runs out of 80 GiB; and all logits of 128 k tokens alone are 40 GB, and twice that in float32.

    Args:
        gpu_gib: memory of a GPU.
    """
    return 4 if gpu_gib >= 120 and WAYS[way].get("use_fused_kernels", True) else 2


def overrides(config: RunConfig, times: int = 2) -> dict[str, Any]:
    """veRL's settings that follow from rlx's, for the same work.

    Args:
        times: see `wider`.
    """
    train, chosen, tokens = config.train, config.rollout, config.train.micro_batch_tokens
    forward = times * tokens
    actor = {
        "fsdp_config.use_torch_compile": config.resolved_compile,
        "use_torch_compile": config.resolved_compile,
        "optim.lr": train.actor_lr,
        "optim.weight_decay": train.weight_decay,
        "optim.betas": json.dumps(train.adam_betas),
        "grad_clip": train.max_grad_norm,
        "ppo_mini_batch_size": train.prompts_per_step // train.num_minibatches,
        "ppo_epochs": train.ppo_epochs,
        "ppo_max_token_len_per_gpu": tokens,
        "loss_agg_mode": AGGREGATIONS[config.algorithm.aggregation],
    }
    rollout = {
        "n": train.samples_per_prompt,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "dtype": config.model.dtype,
        "gpu_memory_utilization": chosen.gpu_memory_utilization,
        "max_num_seqs": chosen.max_num_seqs,
        "enforce_eager": chosen.enforce_eager,
        "max_model_len": config.data.max_prompt_tokens + chosen.max_tokens,
        "log_prob_max_token_len_per_gpu": forward,
    }
    return (
        {f"actor_rollout_ref.actor.{key}": value for key, value in actor.items()}
        | {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}
        | {
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": forward,
            "data.train_batch_size": train.prompts_per_step,
            "data.max_prompt_length": config.data.max_prompt_tokens,
            "data.max_response_length": chosen.max_tokens,
            "trainer.total_training_steps": train.steps,
        }
        | gpus(config)
        | algorithm(config, forward)
    )


def gpus(config: RunConfig) -> dict[str, Any]:
    """As many as rlx has: those of workers and engines together, or one step ahead each with its own."""
    if not config.rollout.max_staleness:
        return {"trainer.n_gpus_per_node": math.ceil(alike.gpus(config))}
    return AHEAD | {
        "trainer.n_gpus_per_node": config.scaling.num_workers,
        "actor_rollout_ref.rollout.n_gpus_per_node": config.rollout.num_engines,
        "trainer.v1.separate_async.parameter_sync_step": config.train.num_minibatches,
    }


def algorithm(config: RunConfig, forward: int) -> dict[str, Any]:
    """GRPO without KL, or PPO with the KL in the reward and a critic, which values `forward` tokens at once."""
    chosen, train = config.algorithm, config.train
    if chosen.advantage == "grpo":
        return {"algorithm.adv_estimator": "grpo"}
    critic = {
        "optim.lr": train.critic_lr,
        "optim.weight_decay": train.weight_decay,
        "optim.betas": json.dumps(train.adam_betas),
        "grad_clip": train.max_grad_norm,
        "ppo_max_token_len_per_gpu": train.micro_batch_tokens,
        "forward_max_token_len_per_gpu": forward,
    }
    kl = {"use_kl_in_reward": True, "kl_ctrl.kl_coef": chosen.kl_coef}
    gae = {"adv_estimator": "gae", "gamma": chosen.gamma, "lam": chosen.gae_lambda}
    return (
        _CRITIC
        | {f"critic.{key}": value for key, value in critic.items()}
        | {f"algorithm.{key}": value for key, value in (gae | kl).items()}
    )


def models(config: RunConfig, way: str) -> dict[str, Any]:
    """How policy, reference and critic are computed. Fused heads are for logits, which a critic has none of."""
    shared = WAYS[way] | {"enable_gradient_checkpointing": config.train.gradient_checkpointing}
    critic = {key: value for key, value in shared.items() if "fused" not in key}
    return {_below("actor_rollout_ref.model", key): value for key, value in shared.items()} | {
        _below("critic.model", key): value for key, value in critic.items()
    }


def _below(section: str, key: str) -> str:
    """Hydra's name of a setting; a plus in front means that its defaults lack it."""
    return f"+{section}.{key[1:]}" if key.startswith("+") else f"{section}.{key}"
