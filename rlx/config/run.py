"""TODO rlx.config.run."""

from __future__ import annotations

import functools
import typing
from typing import Literal, Self

import pydantic
from pydantic import Field, NonNegativeInt
from pydantic.fields import FieldInfo

from rlx.config.rules import NEEDS, OFF
from rlx.config.sections import (
    GENERATED,
    GROUPED,
    AlgorithmConfig,
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

MOST_RANK = 512
"""of adapters that vLLM takes by themselves"""


class RunConfig(Section):
    """Everything that a run needs to know; also what is saved with it."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """the run's name, its folder under storage; unset: ppo-1, ppo-2, ..."""
    seed: NonNegativeInt = 0
    """seed of everything drawn at random: prompt order and sampling"""
    storage: str = "storage"
    """folder, NFS mount or s3:// address where runs are kept"""
    ray_address: str | None = None
    """Ray cluster to join, e.g. auto; unset: one is started in this process"""
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
    def _workers_share_evenly(self) -> Self:
        tp, workers, given = self.parallel.tp, self.scaling.num_workers, flatten(self)
        if workers % tp:
            raise ValueError(f"scaling.num_workers ({workers}) must be a multiple of parallel.tp ({tp})")
        for key in ("model.lora_rank", "model.offload", "train.compile"):
            if tp > 1 and given[key]:
                raise ValueError(f"parallel.tp ({tp}) does not go with {key}: set only one of them")
        train = self.train
        if train.prompts_per_step % (self.replicas * train.num_minibatches):
            raise ValueError(
                f"train.prompts_per_step ({train.prompts_per_step}) must be a multiple of scaling.num_workers / "
                f"parallel.tp x train.num_minibatches ({self.replicas} x {train.num_minibatches})"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _kl_is_steered_gently(self) -> Self:
        drawn = self.train.prompts_per_step * self.train.samples_per_prompt
        if self.algorithm.adaptive_kl_target is not None and drawn >= 5 * self.algorithm.adaptive_kl_horizon:
            raise ValueError(
                f"algorithm.adaptive_kl_horizon ({self.algorithm.adaptive_kl_horizon}) must be more than a fifth of the completions of a "
                f"step ({drawn}), or one step could end the KL penalty for good"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> Self:
        given, defaults = flatten(self), {name: field.default for name, field in settings().items()}
        given["algorithm.rollout_correction"] = self.rollout_correction
        for key, needed in NEEDS.items():
            if given[key] != defaults[key] and given[needed] in OFF:
                raise ValueError(f"{key} does nothing without {needed}")
        return self

    @pydantic.model_validator(mode="after")
    def _estimator_has_what_it_needs(self) -> Self:
        name, critic, samples = self.algorithm.advantage, self.model.critic, self.train.samples_per_prompt
        if name == "gae" and critic == "none":
            raise ValueError("algorithm.advantage gae needs a critic: set model.critic to separate or head")
        if name != "gae" and critic in ("separate", "head"):
            raise ValueError(f"algorithm.advantage {name} has no use for a critic: set model.critic to none or auto")
        for needed, what in ((name in GROUPED, f"advantage {name}"), (self.algorithm.filter_groups, "filter_groups")):
            if needed and samples < 2:
                raise ValueError(
                    f"algorithm.{what} compares the completions of a prompt: train.samples_per_prompt is {samples}, "
                    f"at least 2 are needed"
                )
        if self.algorithm.filter_groups and name not in GROUPED:
            raise ValueError(
                f"algorithm.filter_groups is for estimators to which a group of equal scores says nothing "
                f"({', '.join(GROUPED)}): algorithm.advantage is {name}"
            )
        if self.train.critic_warmup and self.critic != "separate":
            raise ValueError(
                "train.critic_warmup needs a critic with weights of its own: model.critic separate, with gae"
            )
        if self.train.critic_warmup >= self.train.steps:
            raise ValueError(
                f"train.critic_warmup ({self.train.critic_warmup}) leaves none of train.steps ({self.train.steps}) to "
                f"the policy"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _losses_fit_together(self) -> Self:
        chosen = self.algorithm
        if chosen.kl_placement == "loss" and chosen.kl_estimator == "k1":
            raise ValueError(
                "algorithm.kl_estimator k1 in the loss has a gradient that is zero on average: choose k1+, k2 or k3"
            )
        if chosen.kl_placement == "reward" and chosen.kl_estimator.endswith("+"):
            raise ValueError(
                f"algorithm.kl_estimator {chosen.kl_estimator}: a reward has no gradient to correct, choose {chosen.kl_estimator[:-1]}"
            )
        if chosen.policy_loss == "cispo" and chosen.dual_clip is not None:
            raise ValueError("algorithm.dual_clip bounds the clipped losses ppo and gspo; cispo has no use for it")
        if chosen.overlong_buffer > self.rollout.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer ({chosen.overlong_buffer}) is longer than rollout.max_tokens "
                f"({self.rollout.max_tokens})"
            )
        if (chosen.ptx_coef > 0) != (self.data.ptx_source is not None):
            raise ValueError("algorithm.ptx_coef and data.ptx_source go together: set both or none")
        if self.data.ptx_source and self.data.ptx_batch % self.replicas:
            raise ValueError(
                f"data.ptx_batch ({self.data.ptx_batch}) must be a multiple of scaling.num_workers / "
                f"parallel.tp ({self.replicas})"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _roles_fit_together(self) -> Self:
        model, kl = self.model, self.algorithm
        if model.reference == "none" and (kl.kl_coef > 0 or kl.adaptive_kl_target is not None):
            raise ValueError(
                "model.reference none leaves nothing to measure the KL to: "
                "set algorithm.kl_coef to 0, and no adaptive_kl_target"
            )
        if "critic" in model.offload and self.critic != "separate":
            raise ValueError(f"model.offload critic: it has no weights of its own here, model.critic is {self.critic}")
        if "reference" in model.offload and self.reference != "copy":
            raise ValueError(
                f"model.offload reference: it has no weights of its own here, model.reference is {self.reference}"
            )
        if not model.lora_rank:
            if model.reference == "lora_off":
                raise ValueError("model.reference lora_off needs adapters to switch off: set model.lora_rank")
            if model.lora_sync == "adapter":
                raise ValueError("model.lora_sync adapter needs adapters: set model.lora_rank")
        if model.lora_sync == "adapter" and model.dtype == "float32" and self.rollout.resources_per_engine.get("GPU"):
            raise ValueError(
                "model.lora_sync adapter: engines on GPUs take no float32 adapters: set model.dtype to bfloat16"
            )
        if model.lora_sync == "adapter" and self.rollout.transport != "auto":
            raise ValueError("rollout.transport does nothing with model.lora_sync adapter: leave it at auto")
        if model.lora_sync == "adapter" and model.lora_rank > MOST_RANK:
            raise ValueError(f"model.lora_rank {model.lora_rank}: engines take adapters of at most rank {MOST_RANK}")
        return self

    @pydantic.model_validator(mode="after")
    def _generation_fits_beside_training(self) -> Self:
        rollout, share = self.rollout, self.train.prompts_per_step // self.replicas
        if rollout.max_staleness > 1 and not rollout.partial_rollouts:
            raise ValueError(
                f"rollout.max_staleness {rollout.max_staleness} gains nothing over 1 without rollout.partial_rollouts: each "
                f"weight update waits for all that is being drawn"
            )
        if rollout.partial_rollouts and self.train.ema_decay is not None:
            raise ValueError(
                "rollout.partial_rollouts would go on with train.ema_decay's average while that is evaluated"
            )
        if rollout.num_chunks > share:
            raise ValueError(f"rollout.num_chunks ({rollout.num_chunks}): a worker has only {share} prompts per step")
        if rollout.num_chunks > 1 and (rollout.max_staleness or self.algorithm.filter_groups):
            other = "rollout.max_staleness" if rollout.max_staleness else "algorithm.filter_groups"
            raise ValueError(f"rollout.num_chunks does nothing with {other}: leave it at 1")
        return self

    @pydantic.model_validator(mode="after")
    def _engines_share_what_they_can(self) -> Self:
        rollout, scaling = self.rollout, self.scaling
        if rollout.placement == "separate":
            return self
        if not scaling.use_gpu or rollout.num_engines != scaling.num_workers:
            raise ValueError(
                f"rollout.placement colocated puts an engine on each worker's GPU: it needs scaling.use_gpu, and as many "
                f"rollout.num_engines ({rollout.num_engines}) as scaling.num_workers ({scaling.num_workers})"
            )
        refused = {
            "rollout.max_staleness": rollout.max_staleness,
            "rollout.num_chunks": rollout.num_chunks > 1,
            "rollout.tensor_parallel": rollout.tensor_parallel > 1,
            "rollout.resources_per_engine.GPU": rollout.resources_per_engine.get("GPU"),
            "scaling.resources_per_worker.GPU": scaling.resources_per_worker.get("GPU"),
            "model.lora_sync adapter": self.model.lora_sync == "adapter",
        }
        for key in (key for key, given in refused.items() if given):
            raise ValueError(
                f"{key} does not go with rollout.placement colocated: a worker and its engine have one GPU together, and "
                f"the engine gives up its weights while the worker trains"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _ratios_are_sound(self) -> Self:
        recomputed = self.algorithm.old_logprobs == "recomputed"
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncated and not (recomputed and self.rollout_correction != "none"):
            raise ValueError(
                "rollout.top_p/top_k draw from a truncated distribution, which biases PPO's ratio: "
                "set algorithm.rollout_correction to tis or mask, and leave algorithm.old_logprobs at recomputed"
            )
        if not recomputed and self.rollout_correction != "none":
            raise ValueError(
                "algorithm.rollout_correction corrects towards the trainer's own logprobs: "
                "set it to none, or algorithm.old_logprobs to recomputed"
            )
        if not recomputed and self.critic == "head":
            raise ValueError(
                "model.critic head, which LoRA has by default, takes its values from the pass that is to be spared: "
                "set it to separate, or algorithm.old_logprobs to recomputed"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _engines_have_their_gpus(self) -> Self:
        split, gpus = self.rollout.tensor_parallel, self.rollout.resources_per_engine.get("GPU", 0)
        if gpus != split and (gpus > 1 or (gpus and split > 1)):
            raise ValueError(
                f"rollout.tensor_parallel ({split}) is the number of GPUs that an engine's model is split over, but "
                f"rollout.resources_per_engine.GPU is {gpus:g}: set them to the same number"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _prompts_are_one_kind(self) -> Self:
        data, held_out = self.data, self.eval
        if not data.source.startswith(GENERATED):
            if data.params:
                raise ValueError(f"data.params are for {GENERATED}DATASET; with data.source {data.source} give {{}}")
            if data.prompt_column == data.answer_column:
                raise ValueError(f"data.prompt_column and data.answer_column are both {data.prompt_column!r}")
        elif held_out.source is not None:
            raise ValueError("eval.source is for prompt files; generated held-out prompts follow data.source")
        elif data.seed < held_out.seed + held_out.num_prompts and held_out.seed < data.seed + data.num_prompts:
            raise ValueError(
                f"eval.seed ({held_out.seed}) is too near to data.seed ({data.seed}): generated training and held-out "
                f"prompts would share seeds"
            )
        return self

    @property
    def replicas(self) -> int:
        """Training processes, or groups of them, that train on completions of their own."""
        return self.scaling.num_workers // self.parallel.tp

    @property
    def critic(self) -> Literal["separate", "head", "none"]:
        """What model.critic comes to."""
        if self.model.critic != "auto":
            return self.model.critic
        if self.algorithm.advantage != "gae":
            return "none"
        return "head" if self.model.lora_rank else "separate"

    @property
    def rollout_correction(self) -> Literal["none", "tis", "mask"]:
        """What algorithm.rollout_correction comes to."""
        if self.algorithm.rollout_correction != "auto":
            return self.algorithm.rollout_correction
        return "tis" if self.rollout.max_staleness and self.algorithm.old_logprobs == "recomputed" else "none"

    @property
    def reference(self) -> Literal["copy", "lora_off", "none"]:
        """What model.reference comes to."""
        if self.model.reference != "auto":
            return self.model.reference
        return "lora_off" if self.model.lora_rank else "copy"


def setting_keys() -> list[str]:
    """The dotted keys of all settings."""
    return list(settings())


def is_setting(key: str) -> bool:
    """Whether a dotted key is a setting, or an entry of a dict-valued one, e.g. data.params.max_digits."""
    parents = (name for name, field in settings().items() if is_dict(field))
    return key in settings() or any(key.startswith(f"{name}.") for name in parents)


def sections() -> dict[str, type[Section]]:
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {name: a for name, a in annotations.items() if isinstance(a, type) and issubclass(a, Section)}


@functools.cache
def settings() -> dict[str, FieldInfo]:
    """The fields of the settings by dotted key, those of the run itself first."""
    own = {name: field for name, field in RunConfig.model_fields.items() if name not in sections()}
    return own | {f"{name}.{k}": f for name, section in sections().items() for k, f in section.model_fields.items()}


def is_dict(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict
