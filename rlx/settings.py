"""Every setting with its default and its meaning, in sections; what values it takes and which go together.

Importing this needs neither torch nor Ray. Whether the model folder, the prompt file and the cluster are there is
checked by the parts that use them. Reading YAML files and command lines is config.py's work.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

GENERATED = "reasoning_gym:"
"""what a data.source begins with that is no file"""
DEFAULT_SOURCE = f"{GENERATED}chain_sum"
_DEFAULT_PARAMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # what YAML 1.1 takes for text: 1e-3


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _not_nothing(resources: dict[str, float]) -> dict[str, float]:
    if not any(resources.values()):
        raise ValueError("at least one resource must be more than 0")  # Ray refuses such a bundle
    return resources


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    return pattern


Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, pydantic.AfterValidator(_regular_expression)]
Resources = Annotated[dict[str, NonNegativeFloat], pydantic.AfterValidator(_not_nothing)]


class ModelConfig(Section):
    path: str = "tiny"
    """Hugging Face folder or name; "tiny" is the character-level model that rlx makes itself, once"""
    critic: Literal["separate", "head"] = "separate"
    """a value model of its own, or a value head on the policy's last hidden state"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward passes and rollouts; the trained weights are always kept in float32"""
    trust_remote_code: bool = False
    """run Python code that comes with the model folder"""


class DataConfig(Section):
    source: str = DEFAULT_SOURCE
    """training prompts: reasoning_gym:DATASET, or a .jsonl, .parquet or .csv file"""
    params: dict[str, Any] = Field(
        default_factory=lambda data: dict(_DEFAULT_PARAMS) if data.get("source", "") == DEFAULT_SOURCE else {}
    )
    """parameters of the reasoning-gym dataset, e.g. --data.params.max_digits 3"""
    size: PositiveInt = 4096
    """how many training prompts to generate (reasoning-gym only; held-out questions among them are left out)"""
    seed: NonNegativeInt = 0
    """first seed of the generated training prompts"""
    prompt_column: str = "question"
    """column of a prompt file that holds the question"""
    answer_column: str = "answer"
    """column of a prompt file that holds the expected answer"""
    system: str | None = None
    """system message put before each question"""
    max_prompt_tokens: PositiveInt = 128
    """longer prompts are left out, with a count"""

    @pydantic.field_validator("params")
    @classmethod
    def _with_numbers(cls, params: dict[str, Any]) -> dict[str, Any]:
        return {key: float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v for key, v in params.items()}


class RewardConfig(Section):
    function: Literal["task", "exact_match", "numeric"] = "task"
    """how a completion is scored; task: reasoning-gym's own scorer, or exact match for prompt files"""
    answer_pattern: Pattern | None = None
    """regular expression whose first group (or whole match) is the answer within a completion; last match counts"""


class AlgorithmConfig(Section):
    gamma: Fraction = 1.0
    """discount per token"""
    lam: float = Field(default=0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    kl_coef: NonNegativeFloat = 0.005
    """weight of the KL to the reference model, taken off the reward of each token"""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """estimator of that KL"""
    kl_target: PositiveFloat | None = None
    """adapt kl_coef towards this KL per token; unset: kl_coef is fixed"""
    kl_horizon: PositiveInt = 10_000
    """completions over which the adaptive kl_coef reacts"""
    clip_low: Fraction = 0.2
    """the probability ratio is clipped below 1 - clip_low"""
    clip_high: PositiveFloat = 0.2
    """the probability ratio is clipped above 1 + clip_high"""
    dual_clip: float | None = Field(default=None, gt=1)
    """bound of the loss of tokens with negative advantage, as a multiple of it (dual-clip PPO)"""
    value_clip: PositiveFloat | None = 0.2
    """value predictions may move this far from the old ones before their gradient stops"""
    value_coef: PositiveFloat = 0.5
    """weight of the value loss beside the policy loss when the critic is a head"""
    whiten: bool = True
    """advantages to mean 0 and variance 1 over the whole global batch"""
    score_clip: PositiveFloat | None = None
    """scores are clipped to within plus and minus this"""
    importance: Literal["none", "tis", "mask"] = "none"
    """correct for the gap between engine and trainer: truncate or mask their probability ratio"""
    importance_low: float = Field(default=0.5, ge=0, lt=1)
    """mask: tokens with a smaller ratio are left out"""
    importance_high: float = Field(default=2.0, gt=1)
    """tis: larger ratios are cut to this; mask: tokens with a larger ratio are left out"""


class TrainConfig(Section):
    steps: PositiveInt = 40
    """PPO steps: each is one round of rollouts and the updates on them"""
    prompts_per_step: PositiveInt = 64
    """prompts per step, over all workers"""
    samples_per_prompt: PositiveInt = 4
    """completions drawn for each prompt"""
    epochs: PositiveInt = 2
    """passes over a step's completions"""
    minibatches: PositiveInt = 2
    """optimizer steps per pass"""
    micro_batch_tokens: PositiveInt = 16_384
    """most tokens, padding included, in one forward and backward pass of a worker"""
    actor_lr: PositiveFloat = 1e-4
    """learning rate of the policy"""
    critic_lr: PositiveFloat = 1e-4
    """learning rate of the critic"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """what the learning rates do after the warm-up"""
    warmup_steps: NonNegativeInt = 4
    """optimizer steps over which the learning rates rise from zero"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay"""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's running-average coefficients"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are scaled down to this global norm"""


class RolloutConfig(Section):
    engines: PositiveInt = 1
    """vLLM engines, each an actor of its own"""
    resources_per_engine: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """what Ray reserves for an engine, e.g. {CPU: 1, GPU: 1}"""
    temperature: PositiveFloat = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    top_p: Fraction = 1.0
    """nucleus sampling; below 1 needs algorithm.importance"""
    top_k: int = Field(default=-1, ge=-1)
    """sample among the k likeliest tokens, -1 for all; needs algorithm.importance"""
    max_tokens: PositiveInt = 16
    """longest response in tokens"""
    max_num_seqs: PositiveInt = 256
    """completions that an engine works on at once"""
    kv_cache_mib: PositiveInt = 64
    """memory for the engine's KV cache on CPU"""
    gpu_memory_utilization: Fraction = 0.5
    """fraction of a GPU's memory that the engine takes"""
    enforce_eager: bool = False
    """no CUDA graphs on GPU: starts faster, runs slower (CPU engines are always eager)"""
    timeout_s: PositiveFloat = 600.0
    """an engine that takes longer to answer is an error"""
    sync_timeout_s: PositiveFloat = 120.0
    """a weight update that takes longer is an error"""


class ScalingConfig(Section):
    num_workers: PositiveInt = 1
    """training processes (FSDP ranks)"""
    use_gpu: bool = False
    """train on GPUs, one per worker unless resources_per_worker says otherwise"""
    resources_per_worker: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """what Ray reserves for each worker"""
    accelerator_type: str | None = None
    """GPU model to ask for, as Ray names it, e.g. H200"""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """how Ray spreads the workers over nodes"""
    max_failures: int = Field(default=0, ge=-1)
    """restarts of the workers from the newest checkpoint before the run fails, -1 for no limit"""


class EvalConfig(Section):
    every: NonNegativeInt = 10
    """evaluate on held-out prompts every so many steps, before the first and after the last; 0 for those two only"""
    size: PositiveInt = 256
    """held-out prompts: generated, or the first of `source`"""
    seed: NonNegativeInt = 10_000_000
    """first seed of the generated held-out prompts, far from data.seed"""
    source: str | None = None
    """held-out prompt file; unset with a prompt file for training: its last `size` rows, at most a tenth"""


class CheckpointConfig(Section):
    every: NonNegativeInt = 10
    """write a checkpoint every so many steps, and after the last; 0 for that one only"""
    keep: PositiveInt | None = 2
    """newest checkpoints to keep; unset: all"""


class TrackingConfig(Section):
    uri: str | None = None
    """MLflow tracking server or database; unset: SQLite in the storage folder"""
    experiment: str = "rlx"
    """MLflow experiment that runs and sweeps appear in"""
    samples: NonNegativeInt = 32
    """held-out completions per evaluation in the sample table"""


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
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _minibatches_are_even(self) -> Self:
        workers, train = self.scaling.num_workers, self.train
        if train.prompts_per_step % (workers * train.minibatches):
            raise ValueError(
                f"train.prompts_per_step ({train.prompts_per_step}) must be a multiple of scaling.num_workers x "
                f"train.minibatches ({workers} x {train.minibatches})"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _kl_is_steered_gently(self) -> Self:
        drawn = self.train.prompts_per_step * self.train.samples_per_prompt
        if self.algorithm.kl_target is not None and drawn >= 5 * self.algorithm.kl_horizon:
            raise ValueError(
                f"algorithm.kl_horizon ({self.algorithm.kl_horizon}) must be more than a fifth of the completions of a "
                f"step ({drawn}), or one step could end the KL penalty for good"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _truncated_sampling_is_corrected(self) -> Self:
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncated and self.algorithm.importance == "none":
            raise ValueError(
                "rollout.top_p/top_k draw from a truncated distribution, which biases PPO's ratio: "
                "set algorithm.importance to tis or mask"
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
        elif data.seed < held_out.seed + held_out.size and held_out.seed < data.seed + data.size:
            raise ValueError(
                f"eval.seed ({held_out.seed}) is too near to data.seed ({data.seed}): generated training and held-out "
                f"prompts would share seeds"
            )
        return self
