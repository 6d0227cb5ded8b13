"""What rlx makes of work that another library does too: which configs are alike for both, and rlx's whole steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import workload
from rollout import requests

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig

Prompts = list[list[tuple[int, ...]]]
"""the token ids of each step's prompts"""

_RATE = ", tokens/s"
RLX = f"rlx{_RATE}"
"""the name of rlx's figure"""
_GRPO: dict[str, Any] = {"algorithm.advantage": "grpo", "algorithm.kl_coef": 0.0, "model.reference": "none"}
_PPO: dict[str, Any] = {
    "algorithm.advantage": "gae",
    "algorithm.kl_placement": "reward",
    "model.critic": "separate",
    "model.reference": "copy",
}
_ALIKE: dict[str, Any] = {
    "algorithm.policy_loss": "ppo",
    "algorithm.filter_groups": False,
    "algorithm.entropy_coef": 0.0,
    "train.actor_lr": 0.0,
    "train.ema_decay": None,
    "model.lora_rank": 0,
    "rollout.num_chunks": 1,
    "reward.model": None,
}
_ON_POLICY: dict[str, Any] = {"rollout.max_staleness": 0, "algorithm.old_logprobs": "recomputed"}
AHEAD: dict[str, Any] = {"rollout.max_staleness": 1, "algorithm.old_logprobs": "rollout"}
"""rlx's settings one step ahead, with the engines' log-probabilities taken for those of the policy"""
DRAWS = {"draws": "each side's own; its tokens/s are of its own mean length"}
"""a fact for the table: nothing gives two libraries the same completions"""
NEWER_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""has any vLLM take its newer model runner, for which rlx asks itself. The older one of 0.24 samples requests with
seeds, which TRL's asynchronous ones are, one by one"""


def check(config: RunConfig, other: str, has_ppo: bool = False, has_gpus: bool = False, is_ahead: bool = False) -> None:
    """ConfigError for a config of which another library would not do the same work.

    Args:
        has_ppo: whether it does PPO with a critic and a reference, too, and not GRPO alone.
        has_gpus: whether it is measured on several GPUs, too.
        is_ahead: whether both generate one step ahead.
    """
    if not has_gpus:
        _check_one(config, other)
    estimator = _PPO if has_ppo and config.algorithm.advantage == "gae" else _GRPO
    for key, wanted in (estimator | _ALIKE | (AHEAD if is_ahead else _ON_POLICY)).items():
        section, name = key.split(".")
        if (given := getattr(getattr(config, section), name)) != wanted:
            raise ConfigError(f"{key} {given}: {other} does the same work only with {wanted}")


def _check_one(config: RunConfig, other: str) -> None:
    """ConfigError for a config with more than one GPU, or more than one process of a kind."""
    from rlx.cluster.resources import plan_resources

    if config.rollout.num_engines > 1 or config.scaling.num_workers > 1 or gpus(config) > 1:
        one_each = config.rollout.num_engines == config.scaling.num_workers == 1
        hint = "; CUDA_VISIBLE_DEVICES=0 shows rlx one of them" if one_each else ""
        raise ConfigError(f"{other} is measured on one GPU at most: {plan_resources(config)} is more{hint}")


def gpus(config: RunConfig) -> float:
    """That engine and worker have together."""
    from rlx.cluster.resources import plan_resources

    return plan_resources(config).total().get("GPU", 0.0)


def prompts(config: RunConfig, path: str, tables: Mapping[str, Any]) -> Prompts:
    """Those that a run draws completions of."""
    drawn = requests(config, path, tables)[2]
    return [[prompt for prompt, _ in each[:: config.train.samples_per_prompt]] for each in drawn]


def texts(tokenizer: Any, prompts: Prompts) -> list[str]:
    """The text of all prompts, for a library that wants text.

    Raises:
        RuntimeError: its tokenizer makes other tokens of it.
    """
    whole = [list(ids) for each in prompts for ids in each]
    found = [tokenizer.decode(ids) for ids in whole]
    if [tokenizer(text).input_ids for text in found] != whole:
        raise RuntimeError("the tokenizer makes other tokens of its own text: the work would not be the same")
    return found


def by_rlx(config: RunConfig, tables: Mapping[str, Any], name: str = "k0") -> dict[str, float]:
    """Response tokens per second of whole steps; `name` is of the run, one of its own for each."""
    now = workload.whole_steps(config, tables, name)
    workload.processes().close()
    figures = {
        RLX: tokens_per_s(config, now),
        "mean response, tokens": workload.median(now, "response/length_mean"),
    }
    workload.say(", ".join(f"{name} {value:,.0f}" for name, value in figures.items()))
    return figures


def tokens_per_s(config: RunConfig, steps: Sequence[Mapping[str, Any]]) -> float:
    """Response tokens per second of rlx's whole steps, from report to report."""
    count = completions(config)
    return statistics.median(each["response/length_mean"] * count / each[workload.WALL] for each in steps)


def completions(config: RunConfig) -> int:
    """Of a step."""
    return config.train.prompts_per_step * config.train.samples_per_prompt


def ratios(figures: Mapping[str, float], other: str, rate: float) -> dict[str, float]:
    """rlx's tokens per second by another library's."""
    rates = {name.removesuffix(_RATE): value for name, value in figures.items() if name.endswith(_RATE)}
    return {f"{name} / {other}": value / rate for name, value in rates.items()}
