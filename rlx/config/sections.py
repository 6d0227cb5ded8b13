"""Every setting with its default, its meaning and the values it takes, in sections.

Importing this needs neither torch nor Ray. What goes together across sections, and how settings are read, is config.py.
Whether the model folder, the prompt file and the cluster are there is checked by the parts that use them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlx.config.errors import nearest

GENERATED = "reasoning_gym:"
"""what a data.source begins with that is no file"""
ALL_LAYERS = "all-linear"
"""peft's name for what adapters are beside when none are named"""
DEFAULT_SOURCE = f"{GENERATED}chain_sum"
_DEFAULT_PARAMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SCORERS = ("task", "exact_match", "numeric", "math_verify", "format", "length", "model", "url")
"""what reward.functions may name beside one's own module:function; the first four say whether an answer is right"""
CORRECTNESS = SCORERS[:4]
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
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from None
    return pattern


def _source_of_scores(name: str) -> str:
    if name not in SCORERS and not re.fullmatch(r"[\w.]+:\w+", name):
        expected = f"{', '.join(SCORERS)} or module:function"
        raise ValueError(f"no reward function {name!r}: expected {expected}{nearest(name, SCORERS)}")
    return name


def _not_empty(weights: dict[str, float]) -> dict[str, float]:
    if not any(weights.values()):
        raise ValueError("at least one reward function must have a weight other than 0")
    return weights


Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, pydantic.AfterValidator(_regular_expression)]
Resources = Annotated[dict[str, NonNegativeFloat], pydantic.AfterValidator(_not_nothing)]
Scorers = Annotated[
    dict[Annotated[str, pydantic.AfterValidator(_source_of_scores)], float], pydantic.AfterValidator(_not_empty)
]


class ModelConfig(Section):
    path: str = "tiny"
    """Hugging Face folder or name; "tiny" is the character-level model that rlx makes itself, once"""
    critic: Literal["auto", "separate", "head", "none"] = "auto"
    """a value model of its own, or a value head on the policy's last hidden state; auto: none but for gae, and there
    separate, or head with LoRA"""
    value_head_init: Literal["zero", "normal"] = "zero"
    """weights of a new value head: zero, so that the first values are 0, or normal of variance 1 / (hidden size + 1)"""
    reference: Literal["auto", "copy", "lora_off", "none"] = "auto"
    """what the KL is measured to: a frozen copy of the start, the policy without its LoRA weights, or nothing; auto:
    lora_off with LoRA, else copy"""
    lora_rank: NonNegativeInt = 0
    """train low-rank adapters of this rank instead of the weights; 0: train the weights"""
    lora_alpha: PositiveFloat = 32.0
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """names of the linear layers that get adapters, e.g. q_proj,v_proj; none given: all but the output layer"""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """send engines the weights with adapters merged in, or the adapters alone: less to send, slower to generate"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward passes and rollouts; the trained weights are always kept in float32"""
    offload: tuple[Literal["critic", "reference"], ...] = ()
    """models that are kept in host memory and brought to the GPU layer by layer when they are used; the critic's
    optimizer then runs on the CPU: less GPU memory, slower"""
    trust_remote_code: bool = False
    """run Python code that comes with the model folder"""


class DataConfig(Section):
    source: str = DEFAULT_SOURCE
    """training prompts: reasoning_gym:DATASET, or a .jsonl, .parquet or .csv file"""
    params: dict[str, Any] = Field(
        default_factory=lambda data: dict(_DEFAULT_PARAMS) if data.get("source", "") == DEFAULT_SOURCE else {}
    )
    """parameters of the reasoning-gym dataset, e.g. --data.params.max_digits 3"""
    num_prompts: PositiveInt = 4096
    """how many training prompts to generate (reasoning-gym only; held-out questions among them are left out)"""
    seed: NonNegativeInt = 0
    """first seed of the generated training prompts"""
    prompt_column: str = "question"
    """column of a prompt file that holds the question"""
    answer_column: str = "answer"
    """column of a prompt file that holds the expected answer"""
    system_prompt: str | None = None
    """system message put before each question"""
    max_prompt_tokens: PositiveInt = 128
    """longer prompts are left out, with a count"""
    ptx_source: str | None = None
    """prompt file whose answers are learnt beside the reward, cut at rollout.max_tokens; needs algorithm.ptx_coef"""
    ptx_batch: PositiveInt = 32
    """rows of data.ptx_source per optimizer step, over all workers"""

    @pydantic.field_validator("params")
    @classmethod
    def _with_numbers(cls, params: dict[str, Any]) -> dict[str, Any]:
        return {key: float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v for key, v in params.items()}


class RewardConfig(Section):
    functions: Scorers = Field(default_factory=lambda: {"task": 1.0})
    """what completions are scored by, each with its weight, e.g. {task: 1, format: 0.2}. task: reasoning-gym's own
    scorer, or exact match for prompt files; exact_match, numeric, math_verify: the answer against the expected one;
    format, length, model, url: see below; module:function: your own"""
    answer_pattern: Pattern | None = None
    """regular expression whose first group (or whole match) is the answer within a completion; last match counts"""
    format_pattern: Pattern | None = None
    """format: 1 for a completion that this regular expression matches as a whole, else 0"""
    length_target: PositiveInt | None = None
    """length: minus the distance to this many tokens, as a fraction of it, -1 at worst"""
    model: str | None = None
    """model: folder or name of a Hugging Face sequence classifier with one label, the reward model"""
    model_replicas: PositiveInt = 1
    """actors that hold the reward model"""
    resources_per_model: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """what Ray reserves for each of them, e.g. {GPU: 0.2}"""
    model_batch_tokens: PositiveInt = 16_384
    """most tokens, padding included, in one forward pass of a reward model"""
    url: str | None = None
    """url: http address that takes a JSON batch of completions and gives scores; see experiments/reward_server.py"""
    url_key_env: str | None = None
    """environment variable that holds the key for it, sent as a bearer token"""
    url_batch: PositiveInt = 64
    """completions per request"""
    url_retries: NonNegativeInt = 4
    """further attempts, each after twice the wait, when a request fails"""
    timeout_s: PositiveFloat = 60.0
    """a reward model or one request that takes longer is an error"""

    @pydantic.model_validator(mode="after")
    def _functions_have_what_they_need(self) -> Self:
        needs = {"format": "format_pattern", "length": "length_target", "model": "model", "url": "url"}
        for name, key in needs.items():
            if name in self.functions and getattr(self, key) is None:
                raise ValueError(f"reward.functions has {name}, which needs reward.{key}")
            if name not in self.functions and getattr(self, key) is not None:
                raise ValueError(f"reward.{key} is set, but reward.functions gives {name} no weight")
        if "@" in (self.url or "").partition("//")[2].partition("/")[0]:
            raise ValueError(
                "reward.url holds a user or password, and would be kept with the run: use reward.url_key_env"
            )
        return self


# What each estimator's own paper combines it with; a setting that is not given follows it.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "gae": {"whiten_advantages": True, "kl_placement": "reward", "kl_estimator": "k1", "aggregation": "token_mean"},
    "grpo": {"whiten_advantages": False, "kl_placement": "loss", "kl_estimator": "k3", "aggregation": "sequence_mean"},
    "dr_grpo": {"whiten_advantages": False, "kl_placement": "loss", "kl_estimator": "k3", "aggregation": "constant"},
    "rloo": {"whiten_advantages": False, "kl_placement": "reward", "kl_estimator": "k1", "aggregation": "constant"},
    "reinforce++": {
        "whiten_advantages": True,
        "kl_placement": "reward",
        "kl_estimator": "k1",
        "aggregation": "token_mean",
    },
    "reinforce++_baseline": {
        "whiten_advantages": True,
        "kl_placement": "loss",
        "kl_estimator": "k2",
        "aggregation": "token_mean",
    },
    "remax": {"whiten_advantages": False, "kl_placement": "reward", "kl_estimator": "k1", "aggregation": "constant"},
}
_CLIPS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
"""estimators that compare the completions of a prompt with one another"""


def _published(key: str) -> Any:
    """The default of a setting that follows algorithm.advantage."""

    def default(data: dict[str, Any]) -> Any:
        if key == "aggregation" and data.get("policy_loss") == "gspo":
            return "sequence_mean"
        if (
            key == "kl_estimator"
            and data.get("kl_placement") == "loss"
            and _PUBLISHED[data.get("advantage", "gae")][key] == "k1"
        ):
            return "k3"  # k1 has no gradient to speak of
        return _PUBLISHED[data.get("advantage", "gae")][key]

    return Field(default_factory=default)


class AlgorithmConfig(Section):
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "remax"] = "gae"
    """how advantages are estimated: with a critic (gae), against the other completions of the prompt (grpo, dr_grpo,
    rloo, reinforce++_baseline), against the batch (reinforce++) or against the greedy completion (remax)"""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """policy loss: each token's ratio clipped (ppo), the whole response's (gspo), clipped ratios as weights (cispo)"""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = _published("aggregation")
    """tokens count alike over the global batch, or responses do, or tokens over a constant length, rollout.max_tokens;
    unset: as published with algorithm.advantage, sequence_mean with gspo"""
    gamma: Fraction = 1.0
    """discount per token"""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    kl_coef: NonNegativeFloat = 0.005
    """weight of the KL to the reference model"""
    kl_placement: Literal["reward", "loss"] = _published("kl_placement")
    """take the KL off each token's reward, or add it to the loss; unset: as published with algorithm.advantage"""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = _published("kl_estimator")
    """estimator of that KL; +: straight through, its gradient that of k2, which is unbiased; unset: as published with
    algorithm.advantage, k3 where that has none for the loss"""
    adaptive_kl_target: PositiveFloat | None = None
    """adapt kl_coef towards this KL per token; unset: kl_coef is fixed"""
    adaptive_kl_horizon: PositiveInt = 10_000
    """completions over which the adaptive kl_coef reacts"""
    clip_low: Fraction = Field(default_factory=lambda data: _CLIPS[data.get("policy_loss", "ppo")][0])
    """the probability ratio is clipped below 1 - clip_low; unset: 0.2, with gspo 0.0003, with cispo 1"""
    clip_high: PositiveFloat = Field(default_factory=lambda data: _CLIPS[data.get("policy_loss", "ppo")][1])
    """the probability ratio is clipped above 1 + clip_high; unset: 0.2, with gspo 0.0004, with cispo 4"""
    dual_clip: float | None = Field(default=None, gt=1)
    """bound of the loss of tokens with negative advantage, as a multiple of it (dual-clip PPO)"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of an entropy bonus in the loss"""
    value_clip: PositiveFloat | None = 0.2
    """value predictions may move this far from the old ones before their gradient stops"""
    value_coef: PositiveFloat = 0.5
    """weight of the value loss beside the policy loss when the critic is a head"""
    whiten_advantages: bool = _published("whiten_advantages")
    """advantages to mean 0 and variance 1 over the whole global batch; unset: as published with algorithm.advantage"""
    reward_clip: PositiveFloat | None = None
    """scores are clipped to within plus and minus this"""
    normalize_rewards: bool = False
    """subtract the running mean of all scores trained on so far, divide by their standard deviation, before clipping"""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """taken off the score of a response that ran into rollout.max_tokens"""
    overlong_buffer: NonNegativeInt = 0
    """the last tokens before rollout.max_tokens in which the soft overlong penalty rises from 0; 0: no penalty"""
    overlong_penalty: PositiveFloat = 1.0
    """what the soft overlong penalty takes off the score at rollout.max_tokens"""
    filter_groups: bool = False
    """leave out prompts whose completions all score the same and draw others instead (DAPO's dynamic sampling)"""
    filter_rounds: PositiveInt = 8
    """rounds of generation at most per step to find others; then the step is filled up with those left out"""
    target_kl: PositiveFloat | None = None
    """a step's epochs end early, the critic's too, once a mini-batch's mean KL(old || current) exceeds this"""
    ptx_coef: NonNegativeFloat = 0.0
    """weight of the supervised loss on data.ptx_source, per answer token"""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """what ratios are to and KLs are from: the trainer's logprobs before the update, or the engines', a pass less"""
    rollout_correction: Literal["auto", "none", "tis", "mask"] = "auto"
    """correct for the gap between the policy that drew a token and the one before the update: truncate or mask their
    probability ratio; auto: none, but tis with rollout.max_staleness unless old_logprobs is rollout"""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """whose ratio that is: each token's, or the whole response's"""
    rollout_correction_low: float = Field(default=0.5, ge=0, lt=1)
    """mask: tokens (or responses) with a smaller ratio are left out"""
    rollout_correction_high: float = Field(default=2.0, gt=1)
    """tis: larger ratios are cut to this; mask: tokens (or responses) with a larger ratio are left out"""


class TrainConfig(Section):
    steps: PositiveInt = 40
    """PPO steps: each is one round of rollouts and the updates on them"""
    prompts_per_step: PositiveInt = 64
    """prompts per step, over all workers"""
    samples_per_prompt: PositiveInt = 4
    """completions drawn for each prompt"""
    ppo_epochs: PositiveInt = 2
    """passes over a step's completions"""
    num_minibatches: PositiveInt = 2
    """optimizer steps per pass"""
    micro_batch_tokens: PositiveInt = 16_384
    """most tokens, padding included, in one forward and backward pass of a worker"""
    actor_lr: NonNegativeFloat = 1e-4
    """learning rate of the policy"""
    critic_lr: NonNegativeFloat = 1e-4
    """learning rate of the critic"""
    critic_warmup: NonNegativeInt = 0
    """first steps in which only a separate critic learns and the policy stays as it is"""
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
    gradient_checkpointing: bool = False
    """forget activations within decoder layers and compute them again: less memory, about a third more time"""
    compile: bool = False
    """compile decoder layers with torch.compile: the first steps take minutes, later ones less time; a resumed run then
    equals one that was not stopped up to rounding only"""
    ema_decay: Decay | None = None
    """keep an average of the policy's weights, this much of it kept at each optimizer step; it is evaluated too"""


class RolloutConfig(Section):
    num_engines: PositiveInt = 1
    """vLLM engines, each an actor of its own"""
    resources_per_engine: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """what Ray reserves for an engine, e.g. {CPU: 1, GPU: 1}"""
    tensor_parallel: PositiveInt = 1
    """GPUs that each engine's model is split over; resources_per_engine.GPU must be the same number"""
    transport: Literal["auto", "object_store", "gloo"] = "auto"
    """how weights travel to engines: auto for memory that both share on the same GPU (CUDA IPC) or CPU, NCCL to other
    GPUs, Ray's object store for all else; the others for all engines, where NCCL or CUDA IPC do not work"""
    temperature: PositiveFloat = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    top_p: Fraction = 1.0
    """nucleus sampling; below 1 needs algorithm.rollout_correction"""
    top_k: int = Field(default=-1, ge=-1)
    """sample among the k likeliest tokens, -1 for all; needs algorithm.rollout_correction"""
    max_tokens: PositiveInt = 16
    """longest response in tokens"""
    max_staleness: NonNegativeInt = 0
    """generate this many steps ahead, while earlier steps train, with weights as much older; 0: strictly on-policy"""
    partial_rollouts: bool = False
    """completions that are being drawn ahead go on when new weights arrive, with these; otherwise they are finished
    first"""
    num_chunks: PositiveInt = 1
    """a step's prompts are drawn in so many parts; one is scored, also by policy and reference, while later ones are
    drawn"""
    placement: Literal["separate", "colocated"] = "separate"
    """engines have GPUs, or parts of GPUs, of their own, or each shares the GPU of a worker: it sleeps while that
    trains"""
    max_num_seqs: PositiveInt = 256
    """completions that an engine works on at once"""
    kv_cache_mib: PositiveInt = 64
    """memory for the engine's KV cache on CPU"""
    gpu_memory_utilization: Fraction = 0.5
    """fraction of a GPU's memory that the engine takes"""
    enforce_eager: bool = False
    """no CUDA graphs on GPU: starts faster, runs slower (CPU engines are always eager)"""
    timeout_s: PositiveFloat = 600.0
    """an engine that takes longer to answer is replaced, and its prompts go to another one"""
    sync_timeout_s: PositiveFloat = 120.0
    """an engine that takes longer for a weight update is replaced"""
    retries: NonNegativeInt = 2
    """how often, in one round of generation, engines are waited for again when all of them have failed"""


class ScalingConfig(Section):
    num_workers: PositiveInt = 1
    """training processes (FSDP ranks)"""
    use_gpu: bool = False
    """train on GPUs, one per worker unless resources_per_worker says otherwise"""
    resources_per_worker: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """what Ray reserves for each worker; on CPUs it computes with as many threads, rounded, one at least"""
    accelerator_type: str | None = None
    """GPU model to ask for, as Ray names it, e.g. H200"""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """how Ray spreads the workers over nodes"""
    max_failures: int = Field(default=3, ge=-1)
    """restarts of the workers from the newest checkpoint, in all, before the run fails and waits for --resume; -1 for
    no limit. An error that would only come again is none of them"""


class ParallelConfig(Section):
    tp: PositiveInt = 1
    """neighbouring workers that share each layer's matrices and train on the same completions (tensor parallelism);
    scaling.num_workers / tp replicas each train on completions of their own"""


class EvalConfig(Section):
    every: NonNegativeInt = 10
    """evaluate on held-out prompts every so many steps, before the first and after the last; 0 for those two only"""
    num_prompts: PositiveInt = 256
    """held-out prompts: generated, or the first of `source`"""
    seed: NonNegativeInt = 10_000_000
    """first seed of the generated held-out prompts, far from data.seed"""
    source: str | None = None
    """held-out prompt file; unset with a prompt file for training: its last `size` rows, at most a tenth"""


class CheckpointConfig(Section):
    every: NonNegativeInt = 10
    """write a checkpoint every so many steps, and after the last; 0 for that one only"""
    keep_last: PositiveInt | None = 2
    """newest checkpoints to keep; unset: all"""
    best_by: str | None = "eval/accuracy"
    """metric whose best checkpoint is kept too, of those whose step has measured it; unset: none"""
    best_mode: Literal["max", "min"] = "max"
    """whether more or less of it is better"""
    async_save: bool = True
    """written beside training; otherwise training waits until a checkpoint is whole"""
    grace_s: NonNegativeFloat = 25.0
    """after Ctrl-C or SIGTERM: longest wait for the step to end and a last checkpoint to be written"""
    init_from: str | None = None
    """checkpoint of another run that a new run starts from: its folder or address; see also ppo.py --from"""
    init_state: Literal["weights", "all"] = "weights"
    """what of it: the models' weights, or all of its state, and so its next step"""


class TrackingConfig(Section):
    uri: str | None = None
    """MLflow tracking server or database; unset: SQLite in the storage folder"""
    experiment: str = "rlx"
    """MLflow experiment that runs and sweeps appear in"""
    samples: NonNegativeInt = 32
    """held-out completions per evaluation in the sample table"""

    @pydantic.field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        user = (uri or "").partition("//")[2].partition("/")[0].rpartition("@")[0]
        if ":" in user:
            raise ValueError(
                "it holds a password, and would be kept with the run: use MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or a database's own way, such as PGPASSWORD"
            )
        return uri


def flatten(config: Section, prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted key; dict-valued settings stay whole."""
    flat: dict[str, Any] = {}
    for key in type(config).model_fields:
        value = getattr(config, key)
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Section) else {f"{prefix}{key}": value}
    return flat
