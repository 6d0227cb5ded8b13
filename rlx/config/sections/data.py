"""The settings of the prompts, for training and for evaluation. Whether a file exists is checked by rlx.data."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlx.config.addresses import Address
from rlx.config.sections.base import Arguments, Fraction, NonEmptyText, Params, Pattern, Section
from rlx.config.sections.reward import RewardConfig
from rlx.config.sweep import metric_name

GENERATED = "reasoning_gym:"
"""prefix of a data.source that generates prompts instead of reading a file"""
DEFAULT_SOURCE = f"{GENERATED}chain_sum"
_DEFAULT_PARAMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
TEMPLATE_OWN = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "conversation",
    "tokenize",
)
"""arguments of a chat template that rlx sets"""


def template_parts(template: str) -> list[tuple[str, str]]:
    """Returns a prompt template as pairs (text, the column after it; empty: none is).

    Raises:
        ValueError: a brace that is neither doubled nor part of {COLUMN}.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; {_BRACES}") from None
    for _, column, form, conversion in parts:
        if column is not None and (not column.strip() or form or conversion or re.search(r"[{}\[\]]", column)):
            raise ValueError(f"{{{column}{':' if form else ''}{form}}} is no column; {_BRACES}")
    return [(text, column or "") for text, column, *_ in parts]


def _check_template(template: str) -> str:
    if not any(column for _, column in template_parts(template)):
        raise ValueError(f"it names no column; {_BRACES}")
    return template


Template = Annotated[str, pydantic.AfterValidator(_check_template)]
Probability = Annotated[float, Field(ge=0, le=1)]
_BRACES = "{COLUMN} stands for a cell, and braces that are text are doubled: {{ and }}"


class PromptSettings(Section):
    """What one of several sources of prompts may have of its own. What is not given is as for all others."""

    reward: dict[str, float] | None = None
    """which of reward.functions score these prompts, with their weights; unset: reward.functions"""
    answer_pattern: Pattern | None = None
    """as reward.answer_pattern"""
    params: Params | None = None
    num_prompts: PositiveInt | None = None
    seed: NonNegativeInt | None = None
    prompt_column: NonEmptyText | None = None
    answer_column: NonEmptyText | None = None
    expected_pattern: Pattern | None = None
    system_column: NonEmptyText | None = None
    prompt_template: Template | None = None
    system_prompt: str | None = None


class SourceConfig(PromptSettings):
    """One of several sources of training prompts. What is not given is as in the section `data`."""

    source: Address
    """address, as in data.source"""
    name: str | None = Field(default=None, pattern=_NAME, max_length=40)
    """name in metrics; unset: the last part of the address"""
    weight: PositiveFloat = 1.0
    """share of the prompts, relative to the other sources"""
    held_out: Address | None = None
    """stored prompts to evaluate on; unset: held out as with data.source"""

    @property
    def label(self) -> str:
        """The name, or what stands for it: the data set, file or folder in the address."""
        return self.name or label_of(self.source)

    @property
    def takes_params(self) -> bool:
        """Whether data.params are for it: it generates prompts and has no params of its own."""
        return self.source.startswith(GENERATED) and self.params is None


def label_of(source: str) -> str:
    """The data set, file or folder in the address of a source, as a name."""
    address = re.sub(r"@[^/@]*$", "", source).removesuffix("/").partition(":")
    last = (address[2] or address[0]).split("/")
    shown = last[1] if address[0] == "hf" and len(last) == 3 else last[-1]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", shown.partition(".")[0])[:40].lstrip("_.-") or "source"


def held_out_setting(setting: str) -> str:
    """The setting that names held-out prompts beside the training prompts of a setting (`DataConfig.setting_of`)."""
    is_one_of_several = setting.startswith("data.sources.")
    return f"{setting.removesuffix('source')}held_out" if is_one_of_several else "eval.source"


def _is_default(data: Mapping[str, Any]) -> bool:
    """Whether settings of the section `data` name the default source, and no other one."""
    return data.get("source", "") == DEFAULT_SOURCE and not data.get("sources")


class DataConfig(Section):
    """The prompts of training, and the answers of the supervised loss."""

    source: Address = DEFAULT_SOURCE
    """training prompts; unset: sums of three digits, for any model. reasoning_gym:DATASET: generated; a .jsonl, .json,
    .csv or .parquet file, a folder of them or a glob (data/**/*.jsonl), on this machine or s3://BUCKET/PATH;
    hf:ORGANIZATION/NAME[/CONFIG][@SPLIT]: a Hugging Face data set (split train if none is named); a folder that
    Dataset.save_to_disk wrote, with a split hf:FOLDER@SPLIT"""
    sources: tuple[SourceConfig, ...] = ()
    """several sources instead of data.source, mixed by weight, e.g. [{source: "prompts.jsonl", weight: 2},
    {source: "reasoning_gym:chain_sum", reward: {task: 1}}]; see docs/data.md"""
    params: Params = Field(default_factory=lambda data: dict(_DEFAULT_PARAMS) if _is_default(data) else {})
    """parameters of the reasoning-gym dataset, e.g. --data.params.max_digits 3; with data.sources of those that have
    none of their own, if there are any"""
    num_prompts: PositiveInt = 4096
    """number of training prompts to generate (reasoning-gym only; held-out questions among them are removed)"""
    seed: NonNegativeInt = 0
    """first seed of the generated training prompts"""
    prompt_column: NonEmptyText = "question"
    """column of stored prompts that holds the question: text, or a conversation as a list of {role, content}; a.b is
    the entry b of the cells in column a"""
    answer_column: NonEmptyText = "answer"
    """column of stored prompts that holds the expected answer, e.g. reward_model.ground_truth"""
    expected_pattern: Pattern | None = None
    """regular expression whose first group (or full match) in that column is the expected answer, e.g. "#### (.+)" for
    GSM8K, whose answers begin with the way there; the last match counts; unset: the whole cell"""
    system_column: NonEmptyText | None = None
    """column of stored prompts with a system message for each; data.system_prompt where its cell is empty"""
    prompt_template: Template | None = None
    """question made of several columns, e.g. "{context}\\n\\nQuestion: {question}"; braces that are text are doubled,
    as in \\boxed{{}}"""
    system_prompt: str | None = None
    """system message before each question; a conversation's own stays"""
    chat_template_args: Arguments = Field(default_factory=dict)
    """arguments of the model's chat template, e.g. {enable_thinking: false}"""
    max_prompt_tokens: PositiveInt = 1024
    """longest prompt in tokens; longer prompts are removed, and their number is shown; unset: 1024, or less where the
    model's context is short: what rollout.max_tokens leaves, or half of it if that is unset too"""
    curriculum: Literal["none", "difficulty"] = "none"
    """difficulty: prompts whose completions are nearly always right, or nearly always wrong, come less often"""
    curriculum_range: tuple[Probability, Probability] = (0.1, 0.9)
    """shares of right completions between which prompts are always taken when their turn comes"""
    curriculum_period: int = Field(default=5, ge=1, le=100)
    """the others are taken in one of so many epochs, so that they are measured again"""
    ptx_source: Address | None = None
    """stored prompts, as in data.source, for the supervised loss on their answers, cut at rollout.max_tokens; held-out
    prompts are left out; needs algorithm.ptx_coef"""
    ptx_batch: PositiveInt = 32
    """rows of data.ptx_source per optimizer step, over all workers"""

    @property
    def parts(self) -> list[DataConfig]:
        """The settings of each source alone, in the order of data.sources; of data.source without any."""
        shared = {"params": self.params} if self.params else {}
        return [
            self.part((shared if each.takes_params else {}) | each.model_dump(exclude_none=True))
            for each in self.sources
        ] or [self]

    def setting_of(self, number: int) -> str:
        """The setting that has the address of one of `parts`, for errors."""
        return f"data.sources.{number}.source" if self.sources else "data.source"

    def part(self, own: Mapping[str, Any]) -> DataConfig:
        """The settings of one source, with those that it has of its own; what is no setting of this section is not."""
        common = self.model_dump(exclude={"sources", "source", "params"})
        names = {*common, "source", "params"}
        return DataConfig.model_validate(common | {name: value for name, value in own.items() if name in names})

    @property
    def labels(self) -> list[str]:
        """The names of data.sources; none without any."""
        return [each.label for each in self.sources]

    @pydantic.field_validator("params")
    @classmethod
    def _leave_default_out(cls, params: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
        """Earlier versions wrote the default of data.source into configs with data.sources, which did not read it."""
        return {} if info.data.get("sources") and params == _DEFAULT_PARAMS else params

    @pydantic.field_validator("curriculum_range")
    @classmethod
    def _check_range(cls, given: tuple[float, float]) -> tuple[float, float]:
        if given[0] > given[1]:
            raise ValueError("the smaller share comes first")
        return given

    @pydantic.field_validator("chat_template_args")
    @classmethod
    def _check_template_args(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in given if name in TEMPLATE_OWN]:
            raise ValueError(f"{taken[0]} is set by rlx itself")
        return given


class EvalSetConfig(PromptSettings):
    """Questions that are evaluated by themselves, with several sampled answers each."""

    name: str = Field(pattern=_NAME, max_length=40)
    """name in metrics: eval/NAME/avg_at_4, ..."""
    source: Address | None = None
    """address of its questions, as in data.source, with the columns of the section `data` where none are given here;
    unset: the held-out prompts, all or the first num_prompts"""
    samples: PositiveInt = 4
    """answers to each question"""
    temperature: NonNegativeFloat | None = None
    """sampling temperature; 0: the most likely token, for a single sample; unset: rollout.temperature, of a schedule
    that of the first step, so that evaluations can be compared"""
    top_p: Fraction | None = None
    """as rollout.top_p, which stands where it is unset"""
    top_k: int | None = Field(default=None, ge=-1)
    """as rollout.top_k, which stands where it is unset"""
    every: NonNegativeInt | None = None
    """as eval.every, which stands where it is unset"""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.name in _TAKEN:
            raise ValueError(f"the name {self.name} has another meaning in metrics: choose another one")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"{self.name}: at temperature 0 all samples are alike: set samples to 1")
        given = [key for key in _OF_SOURCE if getattr(self, key) is not None]
        if given and not self.source:
            raise ValueError(f"{self.name}: {given[0]} does nothing without a source of its own")
        return self

    def prompts(self, data: DataConfig) -> DataConfig:
        """The settings of its questions, if it has a source of its own."""
        own = self.model_dump(include={"source", *_OF_SOURCE} - {"seed"}, exclude_none=True)
        if str(self.source).startswith(GENERATED):  # what tells how to read data.source says nothing of it
            own = {key: DataConfig.model_fields[key].default for key in _OF_STORED} | own
        return data.part(own)

    @property
    def counts(self) -> list[int]:
        """The k of pass@k: 1, 2, 4, ... and the number of samples."""
        return [*(1 << i for i in range((self.samples - 1).bit_length())), self.samples]

    @property
    def metrics(self) -> list[str]:
        """The names of what it measures. Each has a standard error, `error_of(name)`."""
        voted = [f"maj@{self.samples}"] if self.samples > 1 else []
        names = [f"avg@{self.samples}", *(f"pass@{k}" for k in self.counts), *voted, "reward", "length"]
        return [metric_name(f"eval/{self.name}/{each}") for each in names]


_TAKEN = ("accuracy", "reward", "length", "ema", "held_out")
"""names in eval/NAME of other metrics, and of the evaluation that every run has"""
_OF_STORED = ("prompt_column", "answer_column", "expected_pattern", "system_column", "prompt_template")
_OF_SOURCE = ("params", "seed", *_OF_STORED, "system_prompt")


def error_of(metric: str) -> str:
    """The name of the standard error of a metric of eval.sets."""
    return f"{metric}_se"


def _is_of_set(metric: str) -> bool:
    """Whether a metric is one of eval.sets: eval/NAME/..., where NAME has no other meaning."""
    parts = metric.split("/")
    return len(parts) > 2 and parts[0] == "eval" and parts[1] not in _TAKEN


class EvalConfig(Section):
    """When the policy is evaluated, and on which held-out prompts."""

    every: NonNegativeInt = 10
    """steps between evaluations on held-out prompts, which also run before the first step and after the last; 0: only
    these two"""
    num_prompts: PositiveInt = 256
    """number of held-out prompts: generated, or the first of eval.source; data.sources share it evenly"""
    seed: NonNegativeInt = 10_000_000
    """first seed of the generated held-out prompts, far from data.seed"""
    source: Address | None = None
    """held-out prompts that are stored, as in data.source; unset with stored training prompts: their last
    eval.num_prompts rows, at most a tenth"""
    sets: tuple[EvalSetConfig, ...] = ()
    """further evaluations with several sampled answers to each question, e.g. [{name: held, samples: 8},
    {name: aime, source: "hf:math-ai/aime24@test", samples: 16, temperature: 0.6, every: 50}]; see docs/evaluation.md"""

    @pydantic.field_validator("sets")
    @classmethod
    def _check_names(cls, sets: tuple[EvalSetConfig, ...]) -> tuple[EvalSetConfig, ...]:
        names = [each.name for each in sets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two are called {name}: give each a name of its own")
        return sets

    def part(self, data: DataConfig, number: int) -> EvalConfig:
        """The settings for the source of `data` with this number."""
        if not data.sources:
            return self
        share, more = divmod(self.num_prompts, len(data.sources))
        own = {"num_prompts": max(1, share + (number < more)), "source": data.sources[number].held_out}
        return self.model_copy(update=own)

    def questions_of_sources(self, data: DataConfig) -> dict[str, int]:
        """How many held-out prompts each of data.sources has at most, by its name."""
        return {label: self.part(data, number).num_prompts for number, label in enumerate(data.labels)}

    def of(self, eval_set: EvalSetConfig) -> EvalConfig:
        """The settings for one of its sets."""
        own = eval_set.model_dump(include={"every", "num_prompts", "seed"}, exclude_none=True)
        return self.model_copy(update={"source": None, "sets": ()} | own)

    def own_parts(self, data: DataConfig, reward: RewardConfig) -> dict[str, tuple[DataConfig, RewardConfig]]:
        """The prompts and rewards of those sets that have sources of their own, by what errors call the set."""
        own = {f"eval.sets {each.name}": each for each in self.sets if each.source}
        return {name: (each.prompts(data), reward.part(each.reward, each.answer_pattern)) for name, each in own.items()}

    def still_measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics without those of sets, or of numbers of samples, that it does not have."""
        names = {name for each in self.sets for name in each.metrics}
        names |= {error_of(name) for name in names} | {f"eval/{each.name}/failed_fraction" for each in self.sets}
        return {name: value for name, value in metrics.items() if name in names or not _is_of_set(name)}

    def every_of(self, metric: str) -> int:
        """The steps between evaluations that measure a metric."""
        return next((self.of(each).every for each in self.sets if metric.startswith(f"eval/{each.name}/")), self.every)


def prompt_addresses(data: DataConfig, evaluation: EvalConfig) -> dict[str, str]:
    """The addresses of all prompts, by setting."""
    found = {"data.source": data.source, "data.ptx_source": data.ptx_source, "eval.source": evaluation.source}
    for number, each in enumerate(data.sources):
        found |= {f"data.sources {number}": each.source, f"data.sources {number}.held_out": each.held_out}
    found |= {f"eval.sets {each.name}": each.source for each in evaluation.sets}
    return {setting: address for setting, address in found.items() if address}
