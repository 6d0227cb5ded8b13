"""The settings in their sections, each with its default, its meaning and the values it takes.

The text under a setting is its --help text. Left out: the algorithm's settings (algorithm), rules between sections
(rules), reading files and options (loading). Whether a model folder, a prompt file or a GPU exists is checked by the
packages that use it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import pydantic
import regex  # type: ignore[import-untyped]  # what searches with a time limit, see rlx.rewards.patterns
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlx.config.addresses import holds_secret
from rlx.config.errors import nearest

GENERATED = "reasoning_gym:"
"""prefix of a data.source that generates prompts instead of reading a file"""
DEFAULT_SOURCE = f"{GENERATED}chain_sum"
_DEFAULT_PARAMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
ALL_LAYERS = "all-linear"
"""peft's name for the layers that get adapters when model.lora_targets names none"""
CORRECTNESS = ("task", "exact_match", "numeric", "math_verify")
"""reward functions that decide whether an answer is correct"""
SCORERS = (*CORRECTNESS, "format", "length", "model", "url")
"""all reward functions that rlx has; reward.functions also takes module:function"""
DEFAULT_METRIC = "eval/accuracy"
"""metric that ranks checkpoints, runs and trials when nothing else is chosen"""
Mode = Literal["max", "min"]
"""whether high or low values of a metric are good"""
SearchName = Literal["random", "grid", "optuna", "bayesopt", "hyperopt"]
SchedulerName = Literal["none", "asha", "hyperband", "median", "pbt"]
ReuseName = Literal["none", "engines", "workers"]
TransportName = Literal["auto", "object_store", "gloo"]
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-3 as text


class Section(pydantic.BaseModel):
    """Base class of all sections: frozen, and strict about unknown settings."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _check_resources(resources: dict[str, float]) -> dict[str, float]:
    if not any(resources.values()):
        raise ValueError("at least one resource must be more than 0")  # Ray refuses an empty bundle
    return resources


_FUZZY = re.compile(r"(?<!\\)(?:\\\\)*\{\s*[eids]")  # as regex reads it; Python's re takes that for text


def _check_pattern(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if _FUZZY.search(pattern):
        raise ValueError("write \\{ for a brace that is text: {e}, {i}, {d}, {s} allow errors in a match")
    return pattern


Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, pydantic.AfterValidator(_check_pattern)]
Resources = Annotated[dict[str, NonNegativeFloat], pydantic.AfterValidator(_check_resources)]


class ModelConfig(Section):
    """The models of a run: where they come from, their critic and reference, adapters and precision."""

    path: str = "tiny"
    """folder or Hugging Face name of the model; "tiny": a character-level model that rlx trains once by itself"""
    critic: Literal["auto", "separate", "head", "none"] = "auto"
    """separate: a value model with its own weights; head: a value head on the policy's last hidden state; none: no
    critic; auto: with algorithm.advantage gae separate, or head with LoRA, otherwise none"""
    value_head_init: Literal["zero", "normal"] = "zero"
    """weights of a new value head. zero: all first values are 0; normal: with variance 1 / (hidden size + 1)"""
    reference: Literal["auto", "copy", "lora_off", "none"] = "auto"
    """model that the KL is measured to. copy: a frozen copy of the initial policy; lora_off: the policy without its
    LoRA weights; none: no reference model; auto: lora_off with LoRA, otherwise copy"""
    lora_rank: NonNegativeInt = 0
    """rank of the LoRA adapters that are trained instead of the weights; 0: train the weights"""
    lora_alpha: PositiveFloat = 32.0
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """names of the linear layers that get adapters, e.g. q_proj,v_proj; empty: all except the output layer"""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """weights that engines receive. merged: full weights with the adapters merged in; adapter: only the adapters, which
    sends less and generates slower"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward passes and generation; the trained weights are always stored in float32"""
    offload: tuple[Literal["critic", "reference"], ...] = ()
    """models that stay in host memory and move to the GPU layer by layer when they run: less GPU memory, slower; the
    optimizer of an offloaded critic runs on the CPU"""
    trust_remote_code: bool = False
    """run Python code from the model folder"""


class DataConfig(Section):
    """The prompts of training, and the answers of the supervised loss."""

    source: str = DEFAULT_SOURCE
    """training prompts. reasoning_gym:DATASET: generated; a .jsonl, .json, .csv or .parquet file, a folder of them or a
    glob (data/**/*.jsonl), on this machine or s3://BUCKET/PATH; hf:ORGANIZATION/NAME[/CONFIG][@SPLIT]: a Hugging Face
    data set (split train if none is named); a folder that Dataset.save_to_disk wrote, with a split hf:FOLDER@SPLIT"""
    params: dict[str, Any] = Field(
        default_factory=lambda data: dict(_DEFAULT_PARAMS) if data.get("source", "") == DEFAULT_SOURCE else {}
    )
    """parameters of the reasoning-gym dataset, e.g. --data.params.max_digits 3"""
    num_prompts: PositiveInt = 4096
    """number of training prompts to generate (reasoning-gym only; held-out questions among them are removed)"""
    seed: NonNegativeInt = 0
    """first seed of the generated training prompts"""
    prompt_column: str = "question"
    """column of stored prompts that holds the question"""
    answer_column: str = "answer"
    """column of stored prompts that holds the expected answer"""
    system_prompt: str | None = None
    """system message before each question"""
    max_prompt_tokens: PositiveInt = 128
    """longest prompt in tokens; longer prompts are removed, and their number is shown"""
    ptx_source: str | None = None
    """stored prompts, as in data.source, for the supervised loss on their answers, cut at rollout.max_tokens; needs
    algorithm.ptx_coef"""
    ptx_batch: PositiveInt = 32
    """rows of data.ptx_source per optimizer step, over all workers"""

    @pydantic.field_validator("params")
    @classmethod
    def _parse_exponents(cls, params: dict[str, Any]) -> dict[str, Any]:
        return {key: float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v for key, v in params.items()}


class RewardConfig(Section):
    """The functions that score completions, and their parameters."""

    functions: dict[str, float] = Field(default_factory=lambda: {"task": 1.0})
    """reward functions with their weights, e.g. {task: 1, format: 0.2}. task: the scorer of reasoning-gym, or exact
    match for prompt files; exact_match, numeric, math_verify: compare the answer with the expected one; format, length,
    model, url: see the settings below; module:function: a function of your own"""
    answer_pattern: Pattern | None = None
    """regular expression whose first group (or full match) is the answer in a completion; the last match counts"""
    format_pattern: Pattern | None = None
    """for format: a completion that matches this regular expression from start to end scores 1, any other 0"""
    length_target: PositiveInt | None = None
    """for length: the score is minus the distance to this many tokens, as a fraction of it, at least -1"""
    model: str | None = None
    """for model: folder or name of the reward model, a Hugging Face sequence classifier with one label"""
    model_replicas: PositiveInt = 1
    """number of actors that run the reward model"""
    resources_per_model: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """resources that Ray reserves for each of these actors, e.g. {GPU: 0.2}"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that the nodes of these actors must have; see scaling.label_selector"""
    model_batch_tokens: PositiveInt = 16_384
    """maximum number of tokens, padding included, in one forward pass of a reward model"""
    url: str | None = None
    """for url: http address that takes a JSON batch of completions and returns scores; see
    docs/rewards.md of the repository"""
    url_key_env: str | None = None
    """environment variable that holds the key of that server, sent as a bearer token"""
    url_batch: PositiveInt = 64
    """completions per request"""
    url_retries: NonNegativeInt = 4
    """further attempts when a request fails; the wait doubles after each"""
    timeout_s: PositiveFloat = 60.0
    """longest wait for a reward model, for one request, or for your own function with a batch, before the run fails"""
    on_timeout: Literal["fail", "zero"] = "fail"
    """what a function of your own that takes longer does: end the run, or score 0 for that batch"""

    @pydantic.field_validator("functions")
    @classmethod
    def _check_functions(cls, functions: dict[str, float]) -> dict[str, float]:
        for name in functions:
            if name not in SCORERS and not re.fullmatch(r"[\w.]+:\w+", name):
                expected = f"{', '.join(SCORERS)} or module:function"
                raise ValueError(f"no reward function {name!r}: expected {expected}{nearest(name, SCORERS)}")
        if not any(functions.values()):
            raise ValueError("at least one reward function must have a weight other than 0")
        return functions

    @pydantic.model_validator(mode="after")
    def _check_function_settings(self) -> Self:
        needs = {"format": "format_pattern", "length": "length_target", "model": "model", "url": "url"}
        for name, key in needs.items():
            if name in self.functions and getattr(self, key) is None:
                raise ValueError(f"reward.functions has {name}, which needs reward.{key}")
            if name not in self.functions and getattr(self, key) is not None:
                raise ValueError(f"reward.{key} is set, but reward.functions gives {name} no weight")
        if holds_secret(self.url or ""):
            raise ValueError(
                "reward.url contains a user, password or key, which would be saved with the run: use reward.url_key_env"
            )
        return self


class TrainConfig(Section):
    """Size and number of PPO steps, and the optimizers."""

    steps: PositiveInt = 40
    """PPO steps; each step generates completions and updates the models on them"""
    prompts_per_step: PositiveInt = 64
    """prompts per step, over all workers"""
    samples_per_prompt: PositiveInt = 4
    """completions per prompt"""
    ppo_epochs: PositiveInt = 2
    """passes over a step's completions"""
    num_minibatches: PositiveInt = 2
    """optimizer steps per pass"""
    micro_batch_tokens: PositiveInt = 16_384
    """maximum number of tokens, padding included, in one forward and backward pass of a worker"""
    packing: bool | None = None
    """completions of a pass stand in one row without padding, and those of a prompt share it; unset: on GPUs in half
    precision, for models that can"""
    actor_lr: NonNegativeFloat = 1e-4
    """learning rate of the policy"""
    critic_lr: NonNegativeFloat = 1e-4
    """learning rate of the critic"""
    critic_warmup: NonNegativeInt = 0
    """number of first steps that train only a separate critic and leave the policy unchanged"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rates after the warm-up: constant, or linear or cosine decay to zero"""
    warmup_steps: NonNegativeInt = 4
    """optimizer steps over which the learning rates rise from zero"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled weight decay of AdamW"""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    """beta1 and beta2 of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients with a larger global norm are scaled down to it"""
    gradient_checkpointing: bool = False
    """recompute the activations of decoder layers in the backward pass: less memory, about a third more time"""
    compile: bool | None = None
    """compile decoder layers with torch.compile: the first steps take a minute or two more, later ones a third less; a
    resumed run then equals an uninterrupted one only up to rounding; unset: on GPUs, for runs of 100 steps or more"""
    ema_decay: Decay | None = None
    """keep an exponential moving average of the policy's weights with this decay per optimizer step, and evaluate it
    too; unset: no average"""


class RolloutConfig(Section):
    """Generation: the engines, sampling, and the transport of weights to the engines."""

    num_engines: PositiveInt = 1
    """number of vLLM engines, each in its own actor"""
    resources_per_engine: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """resources that Ray reserves for each engine, e.g. {CPU: 1, GPU: 1}"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that the nodes of the engines must have; see scaling.label_selector"""
    tensor_parallel: PositiveInt = 1
    """GPUs that each engine's model is split over; resources_per_engine.GPU must be the same number"""
    transport: TransportName = "auto"
    """how weights reach the engines. auto: CUDA IPC on the same GPU, shared memory on the same CPU node, NCCL to other
    GPUs, otherwise Ray's object store; object_store, gloo: for all engines, where NCCL or CUDA IPC do not work"""
    temperature: PositiveFloat = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    top_p: Fraction = 1.0
    """nucleus sampling; a value below 1 needs algorithm.rollout_correction"""
    top_k: int = Field(default=-1, ge=-1)
    """sample among the k most probable tokens, -1 for all; needs algorithm.rollout_correction"""
    logprobs_every: PositiveInt = 10
    """steps between those in which engines report log-probabilities for mismatch/* alone, which takes up to a third of
    a decode step; every step where training needs them (rollout_correction, old_logprobs rollout, max_staleness)"""
    max_tokens: PositiveInt = 16
    """longest response in tokens"""
    max_staleness: NonNegativeInt = 0
    """number of steps that generation runs ahead of training, and so the largest age of its weights in steps; 0:
    strictly on-policy"""
    partial_rollouts: bool = False
    """unfinished completions continue with new weights when a weight update arrives; otherwise they finish first with
    the old weights"""
    num_chunks: PositiveInt = 1
    """number of chunks that a step's prompts are generated in; the trainer scores one chunk while the engines generate
    the next"""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: engines have their own GPUs, or fractions of GPUs; colocated: each engine shares the GPU of a worker,
    and sleeps while the worker trains"""
    max_num_seqs: PositiveInt = 256
    """completions that an engine generates at the same time"""
    kv_cache_mib: PositiveInt = 64
    """size of the engine's KV cache on CPU, in MiB"""
    gpu_memory_utilization: Fraction = 0.5
    """fraction of a GPU's memory that the engine uses"""
    enforce_eager: bool = False
    """no CUDA graphs on GPU: starts faster, runs slower (CPU engines are always eager)"""
    timeout_s: PositiveFloat = 600.0
    """an engine that takes longer to answer is replaced, and its prompts go to another engine"""
    sync_timeout_s: PositiveFloat = 120.0
    """an engine that takes longer for a weight update is replaced"""
    retries: NonNegativeInt = 2
    """how often one round of generation waits for the engines to restart after all of them have failed"""


class ScalingConfig(Section):
    """Number and resources of the workers, the processes that train."""

    num_workers: PositiveInt = 1
    """number of training processes (FSDP ranks)"""
    use_gpu: bool = False
    """train on GPUs, one per worker unless resources_per_worker has another number"""
    resources_per_worker: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """resources that Ray reserves for each worker; a worker on CPU uses one thread per CPU, rounded, at least one"""
    accelerator_type: str | None = None
    """required GPU model of workers and engines by its name in Ray, e.g. H200"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that the nodes of the workers must have, e.g. {market-type: "!spot"}, as Ray writes them"""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """how Ray distributes the workers over nodes"""
    max_failures: int = Field(default=3, ge=-1)
    """restarts of the workers from the newest checkpoint before the run fails and waits for --resume; -1: no limit. An
    error that would repeat, such as a bad setting, fails at once. A trial whose own process is lost starts again as
    often"""
    max_preemption_failures: int = Field(default=-1, ge=-1)
    """restarts because the cloud took a node away, which do not count as failures; -1: no limit"""
    preemption_grace_s: NonNegativeFloat = 0.0
    """how long workers on other nodes may go on after a node was taken away, e.g. to finish a checkpoint"""


class ParallelConfig(Section):
    """How the workers split a model, in addition to FSDP."""

    tp: PositiveInt = 1
    """tensor parallelism: number of neighbouring workers that split each layer's matrices and train on the same
    completions; scaling.num_workers / tp replicas train on different completions"""


class EvalConfig(Section):
    """When the policy is evaluated, and on which held-out prompts."""

    every: NonNegativeInt = 10
    """steps between evaluations on held-out prompts, which also run before the first step and after the last; 0: only
    these two"""
    num_prompts: PositiveInt = 256
    """number of held-out prompts: generated, or the first of eval.source"""
    seed: NonNegativeInt = 10_000_000
    """first seed of the generated held-out prompts, far from data.seed"""
    source: str | None = None
    """held-out prompts that are stored, as in data.source; unset with stored training prompts: their last
    eval.num_prompts rows, at most a tenth"""


class CheckpointConfig(Section):
    """When checkpoints are written, which of them stay, and from which one a new run starts."""

    every: NonNegativeInt = 10
    """steps between checkpoints; the last step always has one; 0: only that one"""
    keep_last: PositiveInt | None = 2
    """number of newest checkpoints to keep; unset: all"""
    best_by: str | None = DEFAULT_METRIC
    """metric that decides which checkpoint is the best, among steps that measured it; the best one is kept too; unset:
    none"""
    best_mode: Literal["max", "min"] = "max"
    """whether a larger or a smaller value of that metric is better"""
    async_save: bool = True
    """write checkpoints while training continues; otherwise training waits until a checkpoint is complete"""
    grace_s: NonNegativeFloat = 25.0
    """after Ctrl-C or SIGTERM: longest wait for the step to end and for a last checkpoint"""
    init_from: str | None = None
    """folder or address of a checkpoint that a new run starts from; see also rlx train --from"""
    init_state: Literal["weights", "all"] = "weights"
    """weights: take only the models' weights from that checkpoint; all: take its complete state, the next step
    included"""


class TrackingConfig(Section):
    """Where a run's metrics and samples are recorded."""

    uri: str | None = None
    """MLflow tracking server or database; unset: SQLite in the storage folder"""
    experiment: str = "rlx"
    """MLflow experiment of the runs and sweeps"""
    samples: NonNegativeInt = 32
    """held-out completions per evaluation in the sample table"""
    system_metrics: bool = True
    """log CPUs, memory, disk, network and GPUs of rank 0's machine with each step, by MLflow's names"""

    @pydantic.field_validator("uri")
    @classmethod
    def _refuse_password(cls, uri: str | None) -> str | None:
        if holds_secret(uri or ""):
            raise ValueError(
                "contains a password or key, which would be saved with the run: use MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or the database's own variable, such as PGPASSWORD"
            )
        return uri


def flatten(config: Section, prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted key; a setting whose value is a dict stays one entry."""
    flat: dict[str, Any] = {}
    for key in type(config).model_fields:
        value = getattr(config, key)
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Section) else {f"{prefix}{key}": value}
    return flat
