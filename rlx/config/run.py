"""The settings of a run as one tree, and the dotted keys of all settings.

Left out: the settings themselves (sections, algorithm), the rules between them (rules), reading them (loading).
"""

from __future__ import annotations

import functools
import typing
from typing import Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from pydantic.fields import FieldInfo

from rlx.config import rules
from rlx.config.algorithm import AlgorithmConfig
from rlx.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    ScalingConfig,
    Section,
    TrackingConfig,
    TrainConfig,
    flatten,
)

_STEPS_TO_COMPILE = 100


class RunConfig(Section):
    """All settings of a run; a copy is saved in the run's folder."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """name of the run and of its folder under storage; unset: ppo-1, ppo-2, ..."""
    seed: NonNegativeInt = 0
    """seed of the prompt order and of sampling"""
    storage: str = "storage"
    """folder, NFS mount or s3:// address of the runs"""
    ray_address: str | None = None
    """Ray cluster to join, e.g. auto; unset: that in RAY_ADDRESS, or start one on this machine"""
    wait_for_resources: NonNegativeFloat = 900.0
    """seconds to wait until a cluster that was joined has room, e.g. until its autoscaler has started nodes"""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    scaling: ScalingConfig = ScalingConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check_rules(self) -> Self:
        rules.check_workers(self.scaling, self.parallel, self.train, self.model)
        rules.check_adaptive_kl(self.algorithm, self.train)
        rules.check_needs(
            flatten(self) | {"algorithm.rollout_correction": self.resolved_rollout_correction},
            {key: field.default for key, field in settings().items()},
        )
        rules.check_estimator(self.algorithm, self.model, self.train)
        rules.check_critic_warmup(self.train, self.resolved_critic)
        rules.check_losses(self.algorithm, self.rollout)
        rules.check_ptx(self.algorithm, self.data, self.replicas)
        rules.check_models(self.model, self.algorithm, self.resolved_critic, self.resolved_reference)
        rules.check_adapters(self.model, self.rollout)
        rules.check_overlap(self.rollout, self.train, self.algorithm, self.replicas)
        rules.check_packing(self.train, self.scaling, self.model)
        rules.check_colocated(self.rollout, self.scaling, self.model)
        rules.check_old_logprobs(self.algorithm, self.rollout, self.resolved_critic, self.resolved_rollout_correction)
        rules.check_engine_gpus(self.rollout)
        rules.check_prompts(self.data, self.eval)
        return self

    @property
    def replicas(self) -> int:
        """Number of training processes, or of tensor-parallel groups of them, that train on different completions."""
        return self.scaling.num_workers // self.parallel.tp

    @property
    def resolved_compile(self) -> bool:
        """`train.compile`, or the default: where it saves more time than it takes, and is possible."""
        if self.train.compile is not None:
            return self.train.compile
        is_possible = self.parallel.tp == 1 and not self.model.offload
        return self.scaling.use_gpu and is_possible and self.train.steps >= _STEPS_TO_COMPILE

    @property
    def resolved_packing(self) -> bool:
        """`train.packing`, or the default: where torch has a kernel for it."""
        is_possible = self.scaling.use_gpu and self.model.dtype != "float32"
        return is_possible if self.train.packing is None else self.train.packing

    @property
    def resolved_critic(self) -> Literal["separate", "head", "none"]:
        """`model.critic` with `auto` resolved."""
        if self.model.critic != "auto":
            return self.model.critic
        if not self.algorithm.estimator.needs_critic:
            return "none"
        return "head" if self.model.lora_rank else "separate"

    @property
    def resolved_reference(self) -> Literal["copy", "lora_off", "none"]:
        """`model.reference` with `auto` resolved."""
        if self.model.reference != "auto":
            return self.model.reference
        return "lora_off" if self.model.lora_rank else "copy"

    @property
    def resolved_logprobs_every(self) -> int:
        """`rollout.logprobs_every`; 1 where training needs the engines' log-probabilities."""
        settings, correction = self.algorithm, self.resolved_rollout_correction
        is_needed = settings.old_logprobs == "rollout" or correction != "none" or self.rollout.max_staleness > 0
        return 1 if is_needed else self.rollout.logprobs_every

    @property
    def resolved_rollout_correction(self) -> Literal["none", "tis", "mask"]:
        """`algorithm.rollout_correction` with `auto` resolved."""
        if self.algorithm.rollout_correction != "auto":
            return self.algorithm.rollout_correction
        return "tis" if self.rollout.max_staleness and self.algorithm.old_logprobs == "recomputed" else "none"


def sections() -> dict[str, type[Section]]:
    """The classes of the sections by name, e.g. `train`."""
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {name: a for name, a in annotations.items() if isinstance(a, type) and issubclass(a, Section)}


@functools.cache
def settings() -> dict[str, FieldInfo]:
    """The fields of all settings by dotted key; those outside the sections come first."""
    top_level = {name: field for name, field in RunConfig.model_fields.items() if name not in sections()}
    in_sections = {
        f"{name}.{key}": field for name, section in sections().items() for key, field in section.model_fields.items()
    }
    return top_level | in_sections


def setting_keys() -> list[str]:
    """The dotted keys of all settings."""
    return list(settings())


def is_setting(key: str) -> bool:
    """Whether a dotted key is a setting, or an entry of a setting that is a dict, e.g. data.params.max_digits."""
    dict_keys = (name for name, field in settings().items() if is_dict(field))
    return key in settings() or any(key.startswith(f"{name}.") for name in dict_keys)


def is_dict(field: FieldInfo) -> bool:
    """Whether the value of a setting is a dict."""
    return typing.get_origin(field.annotation) is dict
