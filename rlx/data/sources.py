"""The kinds of prompt sources that `data.source`, `eval.source` and `data.ptx_source` may name, in one table.

A new kind is a class with the methods of `PromptSource` and a row in `SOURCES`; a file format is a row in parsers.py.
Left out: chat templates and tokens (prompts.py), and which settings go together (rlx.config).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rlx.config.errors import ConfigError
from rlx.config.prompt_rules import share_seeds
from rlx.config.sections.data import GENERATED, DataConfig, EvalConfig, held_out_setting, prompt_addresses
from rlx.data import reasoning_gym
from rlx.data.reasoning_gym import ReasoningGymSource
from rlx.data.stored.columns import Row
from rlx.data.stored.files import FileSource, check_one_split
from rlx.data.stored.hub import HUB, HubSource, is_saved_folder
from rlx.data.stored.source import held_out_count
from rlx.types import AnswerCheck, Checker

if TYPE_CHECKING:
    import ray.data

Rows: TypeAlias = "ray.data.Dataset | list[dict[str, Any]]"
"""rows {question, answer}, generated ones with {entry}; all of them text but the entry, a number"""


class PromptSource(Protocol):
    """One kind of prompt source."""

    is_generated: bool  # rows are made from seeds; otherwise they are stored somewhere

    def check(self, address: str, data: DataConfig, setting: str) -> None:
        """Raises ConfigError if a quick check without Ray shows that the source cannot be used.

        Args:
            setting: the setting that has the address, for errors.
        """

    def requiring(self, check: AnswerCheck | None) -> PromptSource:
        """Returns the source that refuses stored rows whose answer does not pass a check; None: any answer will do."""

    def first_rows(self, data: DataConfig, count: int, setting: str) -> list[Row]:
        """Returns the first rows of data.source without Ray; raises ConfigError as `rows` does."""

    def resolve(self, address: str) -> str:
        """Returns an address that means the same in any working directory."""

    def rows(self, address: str, data: DataConfig, setting: str) -> ray.data.Dataset:
        """Returns all stored rows in their order; raises ConfigError if they cannot be used, or are generated."""

    def split(self, data: DataConfig, held_out: EvalConfig, setting: str) -> tuple[Rows, Rows]:
        """Returns rows of data.source to train on and others to evaluate on; raises ConfigError as `rows` does."""

    def answer_checker(self, data: DataConfig, seed: int, size: int) -> Checker:
        """Returns the function that scores an answer to a row of the source."""


SOURCES: dict[str, PromptSource] = {GENERATED: ReasoningGymSource(), HUB: HubSource()}
"""kinds of sources by what their addresses begin with; all other addresses are those of files"""
FILES = FileSource()


def find_source(address: str) -> PromptSource:
    """Returns the kind of source that an address names."""
    if is_saved_folder(address):
        return SOURCES[HUB]
    return next((source for prefix, source in SOURCES.items() if address.startswith(prefix)), FILES)


def resolve(address: str) -> str:
    """Returns an address that means the same in any working directory; prompts need not be there."""
    return find_source(address).resolve(address)


def check_source(address: str, data: DataConfig, setting: str) -> None:
    """Checks quickly and without Ray whether a source can be used.

    Args:
        setting: the setting that has the address, for errors.

    Raises:
        ConfigError: the source cannot be used.
    """
    find_source(address).check(address, data, setting)


def check_new_prompts(data: DataConfig, evaluation: EvalConfig) -> None:
    """Checks the prompts of a new run; one that has begun goes on with what it took.

    Raises:
        ConfigError: an address is a folder with files of several splits, or without any; generated questions of a set
            have seeds of training prompts of the same dataset.
    """
    for setting, address in prompt_addresses(data, evaluation).items():
        if find_source(address) is FILES:
            check_one_split(address, setting)
    _check_set_seeds(data, evaluation)


def _check_set_seeds(data: DataConfig, evaluation: EvalConfig) -> None:
    for each in evaluation.sets:
        own = evaluation.of(each)
        for number, part in enumerate(data.parts):
            if each.source == part.source and find_source(part.source).is_generated and share_seeds(part, own):
                raise ConfigError(
                    f"eval.sets {each.name}: its seed ({own.seed}) is too close to that of {data.setting_of(number)} "
                    f"({part.seed}): its questions and generated training prompts would share seeds"
                )


def first_rows(
    data: DataConfig, count: int, setting: str = "data.source", check: AnswerCheck | None = None
) -> list[Row]:
    """Returns the first rows of data.source, read or generated in this process.

    Args:
        setting: the setting that has the address, for errors.
        check: of each answer that is read on the way: of a file's first megabytes, whatever the count.

    Raises:
        ConfigError: the source or one of these rows cannot be used.
    """
    return find_source(data.source).requiring(check).first_rows(data, count, setting)


def check_enough(data: DataConfig, evaluation: EvalConfig, needed: int) -> None:
    """Reads no more rows than show that stored sources have enough to train on.

    Args:
        needed: prompts of a step.

    Raises:
        ConfigError: they have fewer, or none to hold out.
    """
    if any(find_source(part.source).is_generated for part in data.parts):
        return
    count = 0
    for number, part in enumerate(data.parts):
        held_out = evaluation.part(data, number)
        setting = data.setting_of(number)
        found = len(first_rows(part, needed + held_out.num_prompts, setting))
        count += found if held_out.source else found - held_out_count(found, held_out.num_prompts, setting)
        if count >= needed:
            return
    raise ConfigError(f"train.prompts_per_step ({needed}) is more than the {count} prompts to train on")


def table_names(data: DataConfig, use: str) -> list[str]:
    """Returns the names of the prompt tables for a use (train, held_out), one for each source."""
    return [f"{use}.{number}" for number in range(len(data.sources))] or [use]


def set_table(name: str) -> str:
    """Returns the name of the prompt table of one of eval.sets that has a source of its own."""
    return f"eval.{name}"


def table_places(data: DataConfig, evaluation: EvalConfig) -> dict[str, str]:
    """Returns the setting and the address that the prompts of each table of a run are from, by the table's name."""
    places, training, held_out = {}, table_names(data, "train"), table_names(data, "held_out")
    for number, part in enumerate(data.parts):
        setting, own = data.setting_of(number), evaluation.part(data, number).source
        places[training[number]] = f"{setting} {part.source}"
        places[held_out[number]] = f"{held_out_setting(setting)} {own}" if own else f"{setting} {part.source}"
    places |= {set_table(each.name): f"eval.sets {each.name} {each.source}" for each in evaluation.sets if each.source}
    return places | {"ptx": f"data.ptx_source {data.ptx_source}"}


def set_rows(data: DataConfig, evaluation: EvalConfig, name: str, check: AnswerCheck | None = None) -> Rows:
    """Returns the rows of one of eval.sets: the first of data.source, or those of its seeds.

    Args:
        data, evaluation: the settings of the set, see `EvalSetConfig.prompts` and `EvalConfig.of`.
        check: of the answer of each stored row.

    Raises:
        ConfigError: the source or a row of it cannot be used.
    """
    setting = f"eval.sets {name}"
    if find_source(data.source).is_generated:
        return list(reasoning_gym.generated_questions(data, evaluation.seed, evaluation.num_prompts, setting))
    return read_rows(data.source, data, setting, check).limit(evaluation.num_prompts)


def read_rows(address: str, data: DataConfig, setting: str, check: AnswerCheck | None = None) -> ray.data.Dataset:
    """Returns all rows of a source that stores them, in their order.

    Args:
        setting: the setting that has the address, for errors.
        check: of the answer of each row.

    Raises:
        ConfigError: the source or a row of it cannot be used.
    """
    return find_source(address).requiring(check).rows(address, data, setting)


def training_and_held_out_rows(
    data: DataConfig, held_out: EvalConfig, check: AnswerCheck | None = None, setting: str = "data.source"
) -> tuple[Rows, Rows]:
    """Returns the rows to train on, from data.source, and the rows to evaluate on, from eval.source or data.source.

    Args:
        data, held_out: the settings of one source.
        check: of the answer of each stored row.
        setting: the setting that has the address of that source, for errors.

    Raises:
        ConfigError: the sources or their rows cannot be used.
    """
    source = find_source(data.source).requiring(check)
    if not held_out.source:
        return source.split(data, held_out, setting)
    training = source.rows(data.source, data, setting)
    last = read_rows(held_out.source, data, held_out_setting(setting), check)
    return training, last.limit(held_out.num_prompts)


def answer_checker(data: DataConfig, seed: int, size: int) -> Checker:
    """Returns the function that scores an answer: reasoning-gym's scorer for generated rows, exact match for files.

    Args:
        seed, size: of the generated rows that are to be scored.
    """
    return find_source(data.source).answer_checker(data, seed, size)


def sample_questions(data: DataConfig, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yields generated rows for a trial of a model.

    They come from the first source that generates rows, and otherwise from the default source: a prompt file may not be
    on this machine.
    """
    used = next((part for part in data.parts if find_source(part.source).is_generated), DataConfig())
    return reasoning_gym.generated_questions(used, seed, size)
