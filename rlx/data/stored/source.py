"""What the sources that store their prompts have in common: reading them, holding some out, scoring by exact match.

Left out: where they are stored (files.py, hub.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from rlx.config.errors import ConfigError
from rlx.config.sections.data import DataConfig, EvalConfig, held_out_setting
from rlx.data import ray_data
from rlx.data.stored.columns import SCHEMA, Columns, Row
from rlx.types import AnswerCheck, Checker

if TYPE_CHECKING:
    import ray.data

NO_ROWS = "there are no rows in it"


@dataclass(frozen=True)
class Reading:
    """How the rows at an address are read, in parallel."""

    pieces: Sequence[Any]  # in the order of their rows; at least one
    read: ray_data.Read
    here: bool  # whether only this node can read them
    names_files: bool = False  # whether errors of `read` begin with the name of a file


@dataclass(frozen=True)
class StoredSource(ABC):
    """A source with stored rows; see `rlx.data.sources.PromptSource`."""

    answer_check: AnswerCheck | None = None  # of each row that is read

    is_generated = False

    def requiring(self, check: AnswerCheck | None) -> Self:
        """Returns the source with another check of answers."""
        return replace(self, answer_check=check)

    @abstractmethod
    def check(self, address: str, data: DataConfig, setting: str) -> None:
        """Raises ConfigError if a quick check without Ray shows that the source cannot be used."""

    @abstractmethod
    def resolve(self, address: str) -> str:
        """Returns an address that means the same in any working directory."""

    @abstractmethod
    def reading(self, address: str, columns: Columns, setting: str) -> Reading:
        """Returns how the rows are read; raises ConfigError if they cannot be found."""

    def first_rows(self, data: DataConfig, count: int, setting: str = "data.source") -> list[Row]:
        """Returns the first rows of data.source, which this process reads."""
        return self.read_first(data.source, data, setting, count)

    def read_first(self, address: str, data: DataConfig, setting: str, count: int) -> list[Row]:
        """Returns the first rows at an address, which this process reads; raises ConfigError as `rows` does."""
        reading = self.reading(address, Columns.of(data, setting, self.answer_check), setting)
        try:
            tables = (table for piece in reading.pieces for table in reading.read(piece))
            rows = (row for table in tables for row in table.slice(0, count).to_pylist())
            return list(itertools.islice(rows, count))
        except ValueError as error:
            prefix = "" if reading.names_files else f"{address}: "
            raise ConfigError(f"{setting} {prefix}{error}") from None

    def rows(self, address: str, data: DataConfig, setting: str) -> ray.data.Dataset:
        """Returns all rows in their order.

        Raises:
            ConfigError: the source or a row cannot be used; the text names the file, and the line of a .jsonl file.
        """
        reading = self.reading(address, Columns.of(data, setting, self.answer_check), setting)
        try:
            rows = ray_data.read_pieces(reading.pieces, reading.read, SCHEMA, here=reading.here)
        except Exception as error:  # Ray wraps whatever a parser raises
            prefix = "" if reading.names_files else f"{address}: "
            raise ConfigError(f"{setting} {prefix}{ray_data.error_reason(error)}") from None
        if not rows.count():
            raise ConfigError(f"{setting} {address}: {NO_ROWS}")
        return rows

    def split(
        self, data: DataConfig, held_out: EvalConfig, setting: str = "data.source"
    ) -> tuple[ray.data.Dataset, ray.data.Dataset]:
        """Returns the rows of data.source without the last ones, and the last ones.

        Raises:
            ConfigError: the source or a row cannot be used.
        """
        training, last = hold_out(self.rows(data.source, data, setting), held_out.num_prompts, setting)
        return training, ray_data.from_rows(last)

    def answer_checker(self, data: DataConfig, seed: int, size: int) -> Checker:
        """Returns exact match of the texts, without blanks around them."""
        return lambda answers: [float(answer.given.strip() == answer.expected.strip()) for answer in answers]


def hold_out(
    rows: ray.data.Dataset, count: int, setting: str = "data.source"
) -> tuple[ray.data.MaterializedDataset, list[dict[str, Any]]]:
    """Returns (training rows, held-out rows): the last `count` rows are held out, at most a tenth, at least one.

    Raises:
        ConfigError: there is only one row.
    """
    rows = rows.materialize()
    total = rows.count()
    count = held_out_count(total, count, setting)
    # Not Dataset.split_at_indices: its tasks take a CPU each, and there may be none.
    return rows.limit(total - count).materialize(), _last_rows(rows, count)


def held_out_count(total: int, wanted: int, setting: str) -> int:
    """Returns how many of the rows of a source are held out, if at most `wanted` shall be; raises ConfigError if there
    are too few.

    Args:
        setting: the setting that has the address of the source, for errors.
    """
    if total < 2:
        raise ConfigError(f"{setting}: {total} rows are too few to hold one out; set {held_out_setting(setting)}")
    return max(1, min(wanted, total // 10))


def _last_rows(rows: ray.data.Dataset, count: int) -> list[dict[str, Any]]:
    import ray

    last: list[dict[str, Any]] = []
    for block in reversed(rows.to_arrow_refs()):
        table = ray.get(block)
        last = table.slice(max(0, len(table) - count + len(last))).to_pylist() + last
        if len(last) == count:
            break
    return last
