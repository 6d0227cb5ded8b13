"""The error of a setting that cannot be used, helpers for one-line messages, and what others call rlx's settings.

Left out: what is checked and when; each package raises ConfigError for the settings that it uses.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Collection, Sequence
from typing import Any

EMPTY = "expected a value, found an empty one"  # as of a shell's variable that is not set
_SHOWN_CHARACTERS = 300
_CALLED = {
    # how much is trained, and on what at once
    "train.steps": "max_steps total_training_steps num_training_steps max_train_steps training_iteration",
    "train.steps (steps, not passes over the prompts)": "num_train_epochs total_epochs epochs num_episodes",
    "train.steps (steps, each of train.prompts_per_step prompts)": "total_episodes",
    "train.prompts_per_step": "batch_size rollout_batch_size gen_batch_size",
    "train.prompts_per_step (prompts; train.num_minibatches splits them)": "train_batch_size global_batch_size",
    "train.prompts_per_step (prompts, not completions)": "generation_batch_size",
    "train.samples_per_prompt": "num_generations n_samples_per_prompt num_return_sequences rollout.n "
    "rollout_n group_size",
    "train.ppo_epochs": "ppo_epochs num_ppo_epochs num_iterations num_sgd_iter train.epochs",
    "train.ppo_epochs (passes over the completions of a step)": "max_epochs",
    "train.num_minibatches": "num_mini_batches train.minibatches",
    "train.num_minibatches (their number, not their size)": "ppo_mini_batch_size mini_batch_size minibatch_size "
    "sgd_minibatch_size",
    "train.micro_batch_tokens": "ppo_max_token_len_per_gpu train_max_tokens_per_gpu rollout_max_tokens_per_gpu "
    "log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu",
    "train.micro_batch_tokens (tokens, not completions)": "per_device_train_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu micro_train_batch_size micro_batch_size micro_batch_size_per_gpu "
    "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu micro_rollout_batch_size",
    "train.micro_batch_tokens (as many passes as a mini-batch takes are accumulated)": "gradient_accumulation_steps",
    # optimizers
    "train.optimizer": "optim",
    "train.actor_lr": "lr learning_rate actor_learning_rate actor.optim.lr",
    "train.critic_lr": "critic_learning_rate critic.optim.lr",
    "train.lr_schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "train.warmup_steps": "lr_warmup_steps",
    "train.warmup_steps (a number of optimizer steps)": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "train.critic_warmup": "freezing_actor_steps trainer.critic_warmup",
    "train.weight_decay": "l2 optim.weight_decay",
    "train.adam_betas": "adam_beta1 adam_beta2",
    "train.adam_eps": "adam_epsilon",
    "train.max_grad_norm": "grad_clip max_norm clip_grad",
    "train.gradient_checkpointing": "enable_gradient_checkpointing",
    "train.compile": "torch_compile use_torch_compile",
    "train.packing": "packing_samples use_remove_padding",
    "train.ema_decay": "ema_beta enable_ema",
    "train.shuffle_minibatches": "actor.shuffle",
    # advantages and losses
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.advantage (grpo divides by the deviation of a prompt's rewards, dr_grpo does not)": "scale_rewards "
    "norm_adv_by_std_in_grpo no_advantage_std_norm",
    "algorithm.whiten_advantages": "algorithm.whiten",
    "algorithm.gae_lambda": "lam lambd lambda lambda_",
    "algorithm.policy_loss": "policy_loss_type loss_mode algorithm.loss",
    "algorithm.policy_loss (gspo has ratios of sequences)": "importance_sampling_level",
    "algorithm.aggregation": "loss_agg_mode",
    "algorithm.aggregation (cispo and sapo are values of algorithm.policy_loss)": "loss_type",
    "algorithm.clip_low": "clip_ratio_low",
    "algorithm.clip_low (and algorithm.clip_high)": "clip_ratio cliprange epsilon eps_clip eps_clip_low_high "
    "clip_param",
    "algorithm.clip_high": "clip_ratio_high epsilon_high",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.clip_cov_low": "clip_cov_lb",
    "algorithm.clip_cov_high": "clip_cov_ub",
    "algorithm.entropy_coef": "entropy_coeff ent_coef entropy_loss_coef",
    "algorithm.value_clip": "cliprange_value vf_clip_param",
    "algorithm.value_coef": "vf_coef vf_loss_coeff",
    "algorithm.reward_clip": "reward_clip_range score_clip",
    "algorithm.normalize_rewards": "normalize_reward normalize_scores",
    "algorithm.target_kl": "algorithm.stop_kl",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "algorithm.overlong_buffer": "overlong_buffer_len overlong_buffer.len",
    "algorithm.overlong_penalty": "overlong_penalty_factor overlong_buffer.penalty_factor",
    "algorithm.filter_groups": "dynamic_filtering filter_groups.enable",
    "algorithm.filter_by": "filter_groups.metric",
    "algorithm.filter_rounds": "max_num_gen_batches",
    # the KL to the reference, and the correction of the engines' log-probabilities
    "algorithm.kl_coef": "beta kl_coeff kl_loss_coef init_kl_coef kl_ctrl.kl_coef",
    "algorithm.kl_placement": "algorithm.kl_in",
    "algorithm.kl_placement (loss or reward)": "use_kl_loss use_kl_in_reward",
    "algorithm.kl_estimator": "kl_penalty kl_loss_type algorithm.kl_kind",
    "algorithm.adaptive_kl_target": "kl_target kl_ctrl.target_kl adap_kl_ctrl",
    "algorithm.adaptive_kl_horizon": "kl_horizon horizon",
    "algorithm.rollout_correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode "
    "enable_vllm_is_correction rollout_is algorithm.importance",
    "algorithm.rollout_correction_level": "algorithm.importance_level",
    "algorithm.rollout_correction_low": "algorithm.importance_low",
    "algorithm.rollout_correction_high": "vllm_importance_sampling_cap vllm_is_truncated_threshold "
    "rollout_is_threshold tis_imp_ratio_cap algorithm.importance_high",
    # generation
    "rollout.max_tokens": "max_new_tokens max_completion_length response_length max_response_length generate_max_len",
    "rollout.stop": "stop_string stop_strings stop_sequences",
    "rollout.sampling_options": "generation_kwargs sampling_params",
    "rollout.engine_options": "engine_kwargs vllm_kwargs",
    "rollout.num_engines": "vllm_num_engines rollout.engines",
    "rollout.tensor_parallel": "vllm_tensor_parallel_size tensor_model_parallel_size tensor_parallel_size",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.placement": "vllm_mode colocate_all_models hybrid_engine",
    "rollout.transport": "vllm_sync_backend",
    "rollout.max_staleness": "async_queue_size",
    "rollout.max_staleness (a number of steps)": "async_train",
    "rollout.num_chunks": "rollout.parts",
    "rollout.partial_rollouts": "partial_rollout rollout.partial",
    "environment.name": "agent_func_path",
    "environment.max_turns": "max_assistant_turns",
    # models
    "model.path": "model model_name model_path model_name_or_path pretrain sft_model_path",
    "model.critic_path": "critic_pretrain value_model_path critic.model.path",
    "model.reference_path": "ref_model ref_model_path reference_model ref.model.path teacher_model_name_or_path",
    "model.lora_rank": "lora_r lora use_lora use_peft",
    "model.lora_targets": "lora_target_modules target_modules",
    "model.dtype": "torch_dtype",
    "model.dtype (bfloat16)": "bf16",
    "model.offload (critic and reference)": "ref_reward_offload param_offload",
    # prompts and rewards
    "data.source": "dataset dataset_path prompt_data train_file train_files query_dataset",
    "data.source (of the Hugging Face hub: hf:ORGANIZATION/NAME)": "dataset_name",
    "data.source (hf:ORGANIZATION/NAME/CONFIG)": "dataset_config dataset_config_name",
    "data.source (hf:ORGANIZATION/NAME@SPLIT)": "dataset_split dataset_train_split prompt_split",
    "data.sources (with their weights)": "prompt_data_probs",
    "data.num_prompts": "data.size",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "data.max_prompt_tokens (and rollout.max_tokens)": "max_model_len vllm_max_model_length",
    "data.prompt_column": "prompt_key input_key",
    "data.answer_column": "label_key answer_key",
    "data.prompt_template": "input_template",
    "data.system_prompt": "data.system",
    "data.chat_template_args": "chat_template_kwargs apply_chat_template_kwargs",
    "reward.functions": "reward_funcs reward_function custom_reward_function.path custom_reward_function.name",
    "reward.functions (with their weights)": "reward_weights",
    "reward.model": "reward_model reward_model_path reward_pretrain reward_model.model.path",
    "reward.url": "remote_rm_url",
    "reward.url_key_env": "reward.url_key",
    # evaluation, checkpoints and records
    "eval.every": "eval_steps test_freq",
    "eval.num_prompts": "eval_prompts num_eval_prompts eval.size",
    "eval.source": "eval_dataset val_file val_files test_files",
    "eval.source (hf:ORGANIZATION/NAME@SPLIT)": "dataset_test_split eval_split",
    "eval.sets (samples of each)": "eval_n_samples_per_prompt num_generations_eval val_kwargs.n",
    "eval.sets (temperature of each)": "eval_temperature val_kwargs.temperature",
    "checkpoint.every": "save_steps save_freq checkpoint_frequency",
    "checkpoint.keep_last": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep num_to_keep checkpoint.keep",
    "checkpoint.best_by": "metric_for_best_model checkpoint_score_attribute",
    "checkpoint.best_mode": "greater_is_better checkpoint_score_order",
    "checkpoint.async_save": "checkpoint.beside",
    "checkpoint.init_from": "checkpoint.start_from",
    "checkpoint.init_state": "checkpoint.start_with",
    "tracking.backends": "report_to logger log_with use_wandb use_tensorboard wandb tensorboard",
    "tracking.experiment": "project_name wandb_project",
    "tracking.uri": "tracking_uri",
    "tracking.samples": "log_val_generations num_completions_to_print",
    "storage": "output_dir storage_path save_path ckpt_path default_local_dir",
    "name": "run_name exp_name wandb_run_name study_name trainer.experiment_name",
    "resume (a run's name)": "resume_from_checkpoint resume_from_path resume_mode load_checkpoint",
    # machines
    "scaling.num_workers": "num_gpus n_gpus gpus num_processes num_learners",
    "scaling.num_workers (FSDP over all workers that parallel.tp and parallel.sp leave)": "dp data_parallel_size",
    "scaling.num_workers (with FSDP; there is no pipeline and no expert parallelism)": "pp ep pipeline_parallel_size "
    "pipeline_model_parallel_size expert_parallel_size expert_model_parallel_size",
    "scaling.num_workers (workers of all nodes)": "n_gpus_per_node nproc_per_node actor_num_gpus_per_node nnodes "
    "num_nodes actor_num_nodes",
    "scaling.resources_per_worker": "resources_per_trial",
    "parallel.tp": "ds_tensor_parallel_size",
    "parallel.sp": "ulysses_sequence_parallel_size ring_attn_size cp context_parallel_size",
    # options of sweeps
    "trials": "num_samples num_trials",
    "max_concurrent": "max_concurrent_trials",
    "search": "search_alg sampler",
    "scheduler": "pruner",
    "mode": "direction",
    "optuna": "tpe tpesampler",
    "budget (in steps, tokens or GPU time)": "time_budget_s",
    "space": "param_space",
    "reuse": "reuse_actors",
}
"""settings, options and their choices, some with a note in parentheses: what TRL, veRL, OpenRLHF, Ray, Optuna and
earlier versions call them

A name with dots stands for itself alone, another one for the last part of any name.
"""
OTHER_NAMES = {name: here for here, names in _CALLED.items() for name in names.split()}
"""a name elsewhere: the setting or option here, with its note"""


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line for the person who typed the setting."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # keys and paths may contain line breaks


def message_of(error: BaseException) -> str:
    """The message of an error, or the name of its type where making the message raises in turn."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The message of an error without line breaks, or its first `limit` characters."""
    return " ".join(message_of(error).split())[:limit]


def shortened(value: Any) -> str:
    """A value as text of limited length: a few lines of YAML aliases can expand to millions of numbers."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    try:
        return short.repr(value)[:_SHOWN_CHARACTERS]
    except ValueError:
        return "a number too long to show"


def printable(text: str) -> str:
    """A text in one line; what controls terminals is shown, not sent to one."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def nearest(word: str, choices: Sequence[str]) -> str:
    """A hint for a mistyped word: "; nearest: X", or an empty text when no choice is similar."""
    similar = most_similar(word, choices)
    return f"; nearest: {similar}" if similar else ""


def where_looked(path: str) -> str:
    """A hint for a path that leads nowhere: where it was looked for, if it is a relative one."""
    return "" if ":" in path or os.path.isabs(path) else f"; relative paths begin in the working folder, {os.getcwd()}"


def most_similar(word: str, choices: Sequence[str]) -> str:
    """The choice that a mistyped word is most like; empty when none is similar."""
    return next(iter(difflib.get_close_matches(word, choices, n=1, cutoff=0.6)), "")


def meant(name: str, known: Sequence[str]) -> str:
    """A hint for a name that is not known: what is called so elsewhere, or the nearest one."""
    here, note = called_here(name, known)
    return f"; here it is {here}{note}" if here else nearest(name, known)


def called_here(name: str, known: Collection[str]) -> tuple[str, str]:
    """What is called so elsewhere, if it is one of the known names, and a note that begins with a space.

    Both are empty for a name that nobody has. `actor_rollout_ref.rollout.n` is looked for as `rollout.n`, too.

    Args:
        name: a setting or option, with underscores or hyphens.
        known: settings and options with underscores.
    """
    parts = name.replace("-", "_").split(".")
    for start in range(len(parts)):
        word = ".".join(parts[start:])
        here, space, note = OTHER_NAMES.get(word, "").partition(" ")
        if here in known:
            return here, space + note
        if start and "." in word and word in known:  # the same name below another section
            return word, ""
        if "_" in word and (dotted := word.replace("_", ".", 1)) in known:  # eval_every for eval.every
            return dotted, ""
    return "", ""
