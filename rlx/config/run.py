"""The settings of a run as one tree, the dotted keys of all settings, and what errors say of them.

Left out: the settings themselves (rlx.config.sections), the rules between them (rules), reading them (loading).
"""

from __future__ import annotations

import functools
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, Field, NonNegativeFloat, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlx.config import prompt_rules, rules
from rlx.config.addresses import Address, any_secret
from rlx.config.defaults import default_filter, following_defaults
from rlx.config.errors import ConfigError, called_here, nearest, shortened
from rlx.config.sections import needs, schedule
from rlx.config.sections.algorithm import AlgorithmConfig
from rlx.config.sections.base import Section, flatten
from rlx.config.sections.data import DataConfig, EvalConfig
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.records import CheckpointConfig, TrackingConfig
from rlx.config.sections.reward import RewardConfig
from rlx.config.sections.rollout import EnvironmentConfig, RolloutConfig
from rlx.config.sections.scaling import ParallelConfig, ScalingConfig
from rlx.config.sections.schedule import NumberSchedule
from rlx.config.sections.train import TrainConfig

_STEPS_TO_COMPILE = 100
_QUOTED = r"'([^']*)'"
_UNSPACED = re.compile(r"(.+:)[-+.\d]\S*")  # an entry such as numeric:1, which YAML takes for a name alone
_CHANGING = ("algorithm", "train", "rollout")
"""the sections that may have schedules"""

LONGEST_NAME = 128
"""characters of the name of a run or sweep"""


def valid_name(text: str) -> str:
    """The text if runs and sweeps, and with them their folders, may be called so; else the nearest that they may be."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) and len(text) <= LONGEST_NAME:
        return text
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST_NAME].rstrip("-") or "run"


def _check_name(name: str) -> str:
    if (near := valid_name(name)) != name:
        letters = "a name has only letters (A-Z, a-z), digits, . _ - and begins with a letter or digit"
        raise ValueError(f"{letters}; nearest: {near}")
    return name


class RunConfig(Section):
    """All settings of a run; a copy is saved in the run's folder.

    Raises:
        ConfigError: an unknown setting, a bad value, or settings that do not work together.
    """

    name: Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_check_name)] | None = None
    """name of the run and of its folder under storage; unset: ppo-1, ppo-2, ..."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """seed of the prompt order and of sampling"""
    storage: Address = "storage"
    """folder, NFS mount or s3:// address of the runs"""
    ray_address: Address | None = None
    """Ray cluster to join, e.g. auto; unset: that in RAY_ADDRESS, or start one on this machine"""
    wait_for_resources: NonNegativeFloat = 900.0
    """seconds to wait until a cluster that was joined has room, e.g. until its autoscaler has started nodes"""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    scaling: ScalingConfig = ScalingConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    if not TYPE_CHECKING:  # there, its arguments are the settings

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise ConfigError(f"RunConfig: {explained(first_mistake(error))}") from None

        __init__.__pydantic_base_init__ = True  # so `model_validate` does not call it, whose errors `from_tree` reads

    @pydantic.model_validator(mode="after")
    def _take_following_defaults(self) -> Self:
        for key, default in following_defaults(self.model, self.scaling, self.environment, self.rollout).items():
            name, _, setting = key.partition(".")
            self.__dict__[name] = getattr(self, name).with_default(setting, default)
        filter_by = default_filter(self.algorithm, self.reward_parts)
        self.__dict__["algorithm"] = self.algorithm.with_default("filter_by", filter_by)
        return self

    @pydantic.model_validator(mode="after")
    def _check_rules(self) -> Self:
        places = {(0, at) if each.by_tokens else (at, 0) for each in self.schedules.values() for at in each.places}
        for config in (self, *(self.at(*place) for place in sorted(places))):
            _check(config)
        return self

    @property
    def schedules(self) -> dict[str, NumberSchedule]:
        """The schedules of settings that change during the run, by dotted key."""
        by_section = {name: getattr(self, name).schedules for name in _CHANGING}
        return {f"{name}.{key}": each for name, schedules in by_section.items() for key, each in schedules.items()}

    def at(self, step: int, tokens: int) -> Self:
        """The settings of the step that follows so many steps and response tokens, with numbers for schedules."""
        return self.model_copy(update={name: getattr(self, name).at(step, tokens) for name in _CHANGING})

    @property
    def replicas(self) -> int:
        """Number of training processes, or of groups of neighbours, that train on different completions."""
        return self.scaling.num_workers // self.parallel.neighbours

    @property
    def reward_parts(self) -> list[RewardConfig]:
        """The rewards of each source of prompts, in the order of `data.parts`."""
        return [self.reward.part(each.reward, each.answer_pattern) for each in self.data.sources] or [self.reward]

    @property
    def resolved_compile(self) -> bool:
        """`train.compile`, or the default: where it saves more time than it takes, and is possible."""
        if self.train.compile is not None:
            return self.train.compile
        is_possible = self.parallel.tp == 1 and not self.model.offload
        return self.scaling.use_gpu and is_possible and self.train.steps >= _STEPS_TO_COMPILE

    @property
    def resolved_packing(self) -> bool:
        """`train.packing`, or the default: where torch has a kernel for it, or parallel.sp needs it."""
        is_possible = self.parallel.sp > 1 or (self.scaling.use_gpu and self.model.dtype != "float32")
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
        if not any(self.algorithm.values("kl_coef")):
            return "none"
        return "lora_off" if self.model.lora_rank and not self.model.reference_path else "copy"

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


def _check(config: RunConfig) -> None:
    """Raises ValueError if settings do not work together."""
    rules.check_workers(config.scaling, config.parallel, config.train, config.model)
    rules.check_accelerator(config.scaling)
    rules.check_adaptive_kl(config.algorithm, config.train)
    resolved = {"algorithm.rollout_correction": config.resolved_rollout_correction}
    needs.check_needs(
        flatten(config) | resolved,
        {key: field.default for key, field in settings().items()},
    )
    rules.check_estimator(config.algorithm, config.model, config.train)
    rules.check_critic_warmup(config.train, config.resolved_critic)
    rules.check_losses(config.algorithm, config.rollout)
    rules.check_ptx(config.algorithm, config.data, config.replicas)
    rules.check_models(config.model, config.algorithm, config.resolved_critic, config.resolved_reference)
    rules.check_adapters(config.model, config.rollout)
    rules.check_overlap(config.rollout, config.train, config.algorithm, config.replicas)
    rules.check_packing(config.train, config.scaling, config.model, config.parallel.sp)
    rules.check_colocated(config.rollout, config.scaling, config.model)
    rules.check_options(config.rollout, config.resolved_rollout_correction)
    rules.check_old_logprobs(
        config.algorithm, config.rollout, config.resolved_critic, config.resolved_rollout_correction
    )
    rules.check_engine_gpus(config.rollout)
    prompt_rules.check_sources(config.data, config.eval, config.reward)
    places = [f"data.sources {label}" for label in config.data.labels] or ["reward.functions"]
    parts = dict(zip(places, config.reward_parts, strict=True))
    rules.check_environment(config.environment, config.algorithm, config.reward, parts)
    prompt_rules.check_reward_use(config.data, config.eval, config.reward)
    prompt_rules.check_ranking(config.reward_parts, config.algorithm, config.train.samples_per_prompt)
    rules.check_signal(config.reward_parts, config.model)
    prompt_rules.check_curriculum(config.data, config.rollout, config.algorithm)
    prompt_rules.check_correctness(config.data, config.algorithm, config.reward_parts)
    prompt_rules.check_sets(config.eval, config.data, config.reward)
    prompt_rules.check_parts(config.data, config.eval)
    problem = schedule.conflict(
        config.schedules,
        adapts_kl=config.algorithm.adaptive_kl_target is not None,
        exact_entropy=config.algorithm.exact_entropy,
        filters=config.algorithm.filter_groups,
        is_ahead=config.rollout.max_staleness > 0,
    )
    if problem:
        raise ValueError(problem)


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


def dotted_keys(section: str, value: object = None) -> str:
    """What to say of a section that is given where a setting is expected, with a value that may hold its settings."""
    inside = [f"{section}.{name}" for name in value] if isinstance(value, Mapping) else []
    first = next(name for name in [*inside, *setting_keys()] if is_setting(name) and name.startswith(f"{section}."))
    return f"{section}: settings have dotted keys here, such as {first}"


def is_default_storage(storage: str) -> bool:
    """Whether runs are kept where they are if nobody says otherwise."""
    default = RunConfig().storage
    return storage in (default, os.path.abspath(default))


def storage_words(storage: str) -> list[str]:
    """The option that a printed command needs to find what lies elsewhere than in the default storage."""
    return [] if is_default_storage(storage) else ["--storage", storage]


def is_setting(key: str) -> bool:
    """Whether a dotted key is a setting, or an entry of a setting that is a dict, e.g. data.params.max_digits."""
    dict_keys = (name for name, field in settings().items() if is_dict(field))
    return key in settings() or any(key.startswith(f"{name}.") for name in dict_keys)


def may_change(key: str) -> bool:
    """Whether a setting can have a schedule."""
    section, _, name = key.partition(".")
    kind = sections().get(section, Section)
    return issubclass(kind, schedule.ScheduledSection) and name in kind.CHANGING


def is_dict(field: FieldInfo) -> bool:
    """Whether the value of a setting is a dict."""
    return typing.get_origin(field.annotation) is dict


# ---------------------------------------------------------------------------------------------------------------------
# What errors say of settings


def first_mistake(error: ValidationError) -> ErrorDetails:
    """The error to show of those that pydantic found.

    A name that is not known says more than the one that is missing for it.
    """
    return min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")


def explained(mistake: ErrorDetails, problem: str | None = None) -> str:
    """The message for one error of pydantic, with the dotted key and the value where these are safe to show.

    Args:
        problem: what is wrong with the value, if that is known.
    """
    key = ".".join(str(part) for part in mistake["loc"])
    value = mistake["input"]
    if mistake["type"] == "extra_forbidden":
        return f"unknown setting {key}{_meant(key, mistake['loc'])}"
    if mistake["type"] == "missing":
        return f"{key} is missing"
    if problem:
        message = problem
    elif value is None and (entry := _UNSPACED.fullmatch(str(mistake["loc"][-1]))):
        message = f"a space is missing after {entry[1]}"
    elif mistake["type"] == "model_type":
        inside = next((name for name in settings() if name.startswith(f"{key}.")), f"{key}.source")
        message = f"expected a section of settings, such as {inside}"
    elif mistake["type"] == "dict_type":
        message = f"expected entries, such as {key}.NAME 1"
    elif mistake["type"] == "tuple_type":
        message = "expected a list, such as [a, b]"
    elif mistake["type"] == "too_long":
        message = f"expected at most {mistake['ctx']['max_length']} values, found {mistake['ctx']['actual_length']}"
    elif mistake["type"] == "literal_error":
        expected = mistake["ctx"]["expected"]
        message = f"expected {expected}{nearest(str(value).lower(), re.findall(_QUOTED, expected))}"
    elif mistake["type"] == "int_parsing":
        message = f"expected a whole number{_in_digits(value)}"
    else:
        message = mistake["msg"].removeprefix("Value error, ")
    if not key or (isinstance(value, dict) and key in sections()):  # a section may hold an address with a password
        return message
    shown = "" if any_secret(value) else f" = {shortened(value)}"
    return f"{key}{shown}: {message[0].lower()}{message[1:]}"


def _meant(key: str, location: Sequence[int | str]) -> str:
    """What an unknown setting may mean: one that other libraries call so, or the nearest one."""
    if key in settings():  # as one word with dots
        section, _, name = key.rpartition(".")
        return f": write it below its section, {section}: {{{name}: ...}}"
    name, colon, _ = str(location[-1]).partition(":")
    if colon:
        return f": YAML wants a space after {name}:"
    here, note = called_here(key, settings())
    if here:
        return f"; here it is {here}{note}"
    return nearest(key, [*_item_keys(location), *setting_keys(), *sections()])


def _item_keys(location: Sequence[int | str]) -> list[str]:
    """The keys of an item of a setting that is a list, such as data.sources.0.weight, if a location is within one."""
    section, setting, *item = [*location, "", ""][:3]
    field = settings().get(f"{section}.{setting}")
    if field is None or not item or not isinstance(item[0], int):
        return []
    kind = typing.get_args(field.annotation)[0]
    return [f"{section}.{setting}.{item[0]}.{name}" for name in getattr(kind, "model_fields", ())]


def _in_digits(value: Any) -> str:
    """A hint for a number that is written like 1e3, which YAML takes for text."""
    try:
        return f"; write {int(float(value))}" if float(value).is_integer() else ""
    except (ValueError, TypeError, OverflowError):
        return ""
