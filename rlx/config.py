"""The one config tree: every setting with its default and its meaning, YAML files, and the typed command line.

Importing this needs neither torch nor Ray, so that a mistyped key is refused in a fraction of a second. Whether the
model folder, the prompt file and the cluster are there is checked by the parts that use them.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A setting that cannot be used; the text is one line for the person who typed it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Fraction = typing.Annotated[float, Field(gt=0, le=1)]
Resources = dict[str, float]


class ModelConfig(_Section):
    path: str = "tiny"
    """Hugging Face folder or name; "tiny" is the character-level model that rlx makes itself, once"""
    critic: Literal["separate", "head"] = "separate"
    """a value model of its own, or a value head on the policy's last hidden state"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward passes and rollouts; the trained weights are always kept in float32"""
    trust_remote_code: bool = False
    """run Python code that comes with the model folder"""


class DataConfig(_Section):
    source: str = "reasoning_gym:chain_sum"
    """training prompts: reasoning_gym:DATASET, or a .jsonl, .parquet or .csv file"""
    params: dict[str, Any] = Field(default_factory=lambda: {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1})
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


class RewardConfig(_Section):
    function: Literal["task", "exact_match", "numeric"] = "task"
    """how a completion is scored; task: reasoning-gym's own scorer, or exact match for prompt files"""
    answer_pattern: str | None = None
    """regular expression whose first group (or whole match) is the answer within a completion; last match counts"""


class AlgorithmConfig(_Section):
    gamma: Fraction = 1.0
    """discount per token"""
    lam: float = Field(0.95, ge=0, le=1)
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
    dual_clip: float | None = Field(None, gt=1)
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
    importance_low: float = Field(0.5, ge=0, lt=1)
    """mask: tokens with a smaller ratio are left out"""
    importance_high: float = Field(2.0, gt=1)
    """tis: larger ratios are cut to this; mask: tokens with a larger ratio are left out"""


class TrainConfig(_Section):
    steps: PositiveInt = 40
    """PPO steps: each is one round of rollouts and the updates on them"""
    prompts_per_step: PositiveInt = 64
    """prompts per step, over all workers"""
    samples_per_prompt: PositiveInt = 4
    """completions drawn for each prompt"""
    epochs: PositiveInt = 1
    """passes over a step's completions"""
    minibatches: PositiveInt = 2
    """optimizer steps per pass"""
    micro_batch_tokens: PositiveInt = 16_384
    """most tokens, padding included, in one forward and backward pass of a worker"""
    actor_lr: PositiveFloat = 3e-4
    """learning rate of the policy"""
    critic_lr: PositiveFloat = 1e-3
    """learning rate of the critic"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """what the learning rates do after the warm-up"""
    warmup_steps: NonNegativeInt = 4
    """optimizer steps over which the learning rates rise from zero"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay"""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's running-average coefficients"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are scaled down to this global norm"""


class RolloutConfig(_Section):
    engines: PositiveInt = 1
    """vLLM engines, each an actor of its own"""
    resources_per_engine: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """what Ray reserves for an engine, e.g. {CPU: 1, GPU: 1}"""
    temperature: PositiveFloat = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    top_p: Fraction = 1.0
    """nucleus sampling; below 1 needs algorithm.importance"""
    top_k: int = Field(-1, ge=-1)
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


class ScalingConfig(_Section):
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
    max_failures: int = Field(0, ge=-1)
    """restarts of the workers from the newest checkpoint before the run fails, -1 for no limit"""


class EvalConfig(_Section):
    every: NonNegativeInt = 10
    """evaluate on held-out prompts every so many steps, before the first and after the last; 0 for those two only"""
    size: PositiveInt = 256
    """held-out prompts: generated, or the first of `source`"""
    seed: NonNegativeInt = 10_000_000
    """first seed of the generated held-out prompts, far from data.seed"""
    source: str | None = None
    """held-out prompt file; unset with a prompt file for training: its last `size` rows, at most a tenth"""


class CheckpointConfig(_Section):
    every: NonNegativeInt = 10
    """write a checkpoint every so many steps, and after the last; 0 for that one only"""
    keep: PositiveInt | None = 2
    """newest checkpoints to keep; unset: all"""


class TrackingConfig(_Section):
    uri: str | None = None
    """MLflow tracking server or database; unset: SQLite in the storage folder"""
    experiment: str = "rlx"
    """MLflow experiment that runs and sweeps appear in"""
    samples: NonNegativeInt = 32
    """held-out completions per evaluation in the sample table"""


class RunConfig(_Section):
    """Everything that a run needs to know; also what is saved with it."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """the run's name, its folder under storage; unset: ppo-1, ppo-2, ..."""
    seed: NonNegativeInt = 0
    """seed of everything drawn at random: prompt order, sampling, value head"""
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        workers, train = self.scaling.num_workers, self.train
        if train.prompts_per_step % (workers * train.minibatches):
            raise ValueError(
                f"train.prompts_per_step ({train.prompts_per_step}) must be a multiple of scaling.num_workers x "
                f"train.minibatches ({workers} x {train.minibatches})"
            )
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncated and self.algorithm.importance == "none":
            raise ValueError(
                "rollout.top_p/top_k draw from a truncated distribution, which biases PPO's ratio: "
                "set algorithm.importance to tis or mask"
            )
        return self


# ---------------------------------------------------------------------------------------------------------------------
# Trees of plain values: YAML, dotted keys


def from_tree(tree: dict[str, Any], where: str = "config") -> RunConfig:
    """The validated config of a nested dict; ConfigError names the key, its place and the nearest valid one."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The tree in a YAML file; ConfigError if it is missing or no mapping."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return tree or {}


def with_overrides(tree: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy of a tree with dotted keys set, e.g. {"train.steps": 12}."""
    merged = {key: with_overrides(value, {}) if isinstance(value, dict) else value for key, value in tree.items()}
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        node = merged
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{dotted}: {parent} is a single value, not a section")
        node[last] = value
    return merged


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted key; dict-valued settings stay whole."""
    flat: dict[str, Any] = {}
    for key in type(config).model_fields:
        value = getattr(config, key)
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, BaseModel) else {f"{prefix}{key}": value}
    return flat


def nearest(word: str, choices: Sequence[str]) -> str:
    """A hint: "; nearest: X", or nothing when no choice is close."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else ""


def setting_keys() -> list[str]:
    """The dotted keys of all settings."""
    return [key for key, _, _ in _settings(RunConfig)]


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        sections = [name for name, field in RunConfig.model_fields.items() if _is_section(field.annotation)]
        return f"unknown setting {key}{nearest(key, setting_keys() + sections)}"
    message = first["msg"].removeprefix("Value error, ")
    shown = f"{message[0].lower()}{message[1:]}" if key else message
    return f"{key} = {first['input']!r}: {shown}" if key else shown


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            yield from _settings(typing.cast(type[BaseModel], field.annotation), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, field.description or ""


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per setting, grouped by section, with its meaning and default: --train.steps, --algorithm.kl-coef."""
    groups = {"": parser.add_argument_group("run")}
    for key, field, meaning in _settings(RunConfig):
        section = key.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        groups[section].add_argument(
            f"--{key.replace('_', '-')}",
            dest=key,
            default=argparse.SUPPRESS,
            metavar=_metavar(field.annotation),
            help=f"{meaning} (default: {field.get_default(call_default_factory=True)})".replace("%", "%%"),
        )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Splits a command line into the parser's own options and the settings given, by dotted key.

    Underscores and hyphens are alike in option names. ConfigError on an unknown option, with the nearest.
    """
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    args, rest = parser.parse_known_args([_hyphened(word) for word in argv])
    fields = {key: field for key, field, _ in _settings(RunConfig)}
    given = {key: _value(text, fields[key].annotation) for key, text in vars(args).items() if key in fields}
    words = [piece for word in rest for piece in (word.split("=", 1) if word.startswith("--") else [word])]
    if words and not words[0].startswith("--"):
        raise ConfigError(f"unexpected argument {words[0]!r}")
    for option, text in zip(words[::2], [*words[1::2], ""][: len(words[::2])], strict=True):
        parent, _, leaf = option.removeprefix("--").replace("-", "_").rpartition(".")
        if parent not in fields or typing.get_origin(fields[parent].annotation) is not dict:
            raise ConfigError(f"unknown option {option}{nearest(option, known)}")
        given[f"{parent}.{leaf}"] = yaml.safe_load(text)
    return args, given


def _hyphened(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _value(text: str, annotation: Any) -> Any:
    """The text of an option as a plain value; pydantic judges it. Text stays text where a string is asked for."""
    choices = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    textual = any(choice is str or typing.get_origin(choice) is Literal for choice in choices)
    if textual:
        return None if types.NoneType in choices and text.lower() in ("none", "null") else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _metavar(annotation: Any) -> str:
    choices = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    first = choices[0]
    while typing.get_origin(first) is typing.Annotated:
        first = typing.get_args(first)[0]
    if typing.get_origin(first) is Literal:
        return "{" + ",".join(typing.get_args(first)) + "}"
    origin = typing.get_origin(first) or first
    return getattr(origin, "__name__", str(origin)).upper()
