"""Prompt files: .jsonl, .parquet and .csv files with a question and an answer in each row.

A new file format is a parser and a row in `PARSERS`. Left out: generated prompts (reasoning_gym.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import DataConfig, EvalConfig
from rlx.data import ray_data
from rlx.types import Checker

if TYPE_CHECKING:
    import ray.data

Row = dict[str, str]
"""{question, answer}"""
_NO_ROWS = "the file has no rows"


@dataclass(frozen=True)
class Columns:
    """Names of the two columns of a prompt file that are read."""

    question: str
    answer: str


Parser = Callable[[bytes, str, Columns], Iterator[Row]]
"""(content of a file, its path for errors, columns) -> its rows; raises ValueError if they cannot be used"""


# ---------------------------------------------------------------------------------------------------------------------
# The source


@dataclass(frozen=True)
class FileSource:
    """The source PATH.SUFFIX; see `rlx.data.sources.PromptSource`."""

    parse: Parser
    is_generated = False

    def check(self, address: str, setting: str) -> None:
        """Raises ConfigError if the file does not exist or is empty."""
        if not Path(address).is_file():
            raise ConfigError(f"{setting} {address}: no such file")
        if not Path(address).stat().st_size:
            raise ConfigError(f"{setting} {address}: {_NO_ROWS}")

    def rows(self, address: str, data: DataConfig, setting: str) -> ray.data.Dataset:
        """Returns the rows of the file, in its order.

        Raises:
            ConfigError: the file or a row cannot be used; for a .jsonl file the text names the line.
        """
        import ray.data

        self.check(address, setting)
        ray_data.configure()
        settings = {"parse": self.parse, "path": address, "columns": Columns(data.prompt_column, data.answer_column)}
        try:
            # Not Ray's own readers: they read text that looks like a date as a date, and hide which line is malformed.
            content = ray.data.read_binary_files(str(Path(address).resolve()), num_cpus=0)
            rows = content.map_batches(
                parse_block, fn_kwargs=settings, batch_format="pyarrow", batch_size=None, num_cpus=0
            ).materialize()
            if not rows.count():
                raise ValueError(_NO_ROWS)
        except Exception as error:  # Ray wraps whatever a parser raises
            reason = ray_data.error_reason(error)
            prefix = "" if reason.startswith(address) else f"{address}: "
            raise ConfigError(f"{setting} {prefix}{reason}") from None
        return rows

    def split(self, data: DataConfig, held_out: EvalConfig) -> tuple[ray.data.Dataset, ray.data.Dataset]:
        """Returns the rows of data.source without the last ones, and the last ones.

        Raises:
            ConfigError: the file or a row cannot be used.
        """
        return hold_out(self.rows(data.source, data, "data.source"), held_out.num_prompts)

    def answer_checker(self, data: DataConfig, seed: int, size: int) -> Checker:
        """Returns exact match of the texts, without blanks around them."""
        return lambda given, expected, entry: float(given.strip() == expected.strip())


def hold_out(rows: ray.data.Dataset, count: int) -> tuple[ray.data.Dataset, ray.data.Dataset]:
    """Returns (training rows, held-out rows): the last `count` rows are held out, at most a tenth, at least one.

    Raises:
        ConfigError: there is only one row.
    """
    rows = rows.materialize()
    total = rows.count()
    if total < 2:
        raise ConfigError(f"data.source: {total} rows are too few to hold one out; set eval.source")
    training, held_out = rows.split_at_indices([total - max(1, min(count, total // 10))])
    return training, held_out


# ---------------------------------------------------------------------------------------------------------------------
# Parsers (they run in Ray tasks)


def parse_block(batch: pa.Table, parse: Parser, path: str, columns: Columns) -> pa.Table:
    """Parses one file in a Ray task.

    Args:
        batch: one row with the content of the file in the column `bytes`.

    Returns:
        The columns `question` and `answer`, both text.

    Raises:
        ValueError: the content cannot be used; the text is one line.
    """
    try:
        rows = parse(batch["bytes"][0].as_py(), path, columns)
        return pa.Table.from_pylist(list(rows), pa.schema({"question": pa.string(), "answer": pa.string()}))
    except Exception as error:  # pyarrow raises errors of all kinds, with many lines
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(kind + ray_data.error_reason(error)) from None


def parse_jsonl(content: bytes, path: str, columns: Columns) -> Iterator[Row]:
    """Yields the rows of a file with a JSON object per line; blank lines are skipped."""
    is_first = True
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}: "
            row = _parse_object(line, where)
            if is_first:
                _check_columns(list(row), columns)
                is_first = False
            yield _clean_row(row.get(columns.question), row.get(columns.answer), where)


def parse_csv(content: bytes, path: str, columns: Columns) -> Iterator[Row]:
    """Yields the rows of a CSV file with a header line."""
    # All cells are read as text, because "007", "1e3" and "NA" are answers. Only an empty cell is missing.
    as_text = pa.csv.ConvertOptions(
        column_types={columns.question: pa.string(), columns.answer: pa.string()},
        strings_can_be_null=True,
        null_values=[""],
    )
    table = pa.csv.read_csv(
        pa.BufferReader(content),
        read_options=pa.csv.ReadOptions(use_threads=False),  # with threads an error names no row
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=as_text,
    )
    return _table_rows(table, columns)


def parse_parquet(content: bytes, path: str, columns: Columns) -> Iterator[Row]:
    """Yields the rows of a Parquet file."""
    return _table_rows(pa.parquet.ParquetFile(pa.BufferReader(content)).read(), columns)


PARSERS: dict[str, Parser] = {".jsonl": parse_jsonl, ".parquet": parse_parquet, ".csv": parse_csv}
"""the parser for each suffix of a prompt file"""


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}malformed JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}expected a JSON object per line, found {type(row).__name__}")
    return row


def _table_rows(table: pa.Table, columns: Columns) -> Iterator[Row]:
    _check_columns(table.column_names, columns)
    questions, answers = table[columns.question].to_pylist(), table[columns.answer].to_pylist()
    for question, answer in zip(questions, answers, strict=True):
        yield _clean_row(question, answer)


def _clean_row(question: Any, answer: Any, where: str = "") -> Row:
    """Returns a row as text; raises ValueError if it has no question or no answer."""
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}a question is {question!r:.80}, expected text (its answer is {answer!r:.80})")
    if answer is None or answer != answer or isinstance(answer, list | dict):
        raise ValueError(f"{where}the answer to {question!r:.80} is {answer!r:.80}, expected text or a number")
    try:
        f"{question}{answer}".encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}not valid Unicode: {question!r:.80} or its answer {answer!r:.80}") from None
    # pandas writes integers as floats when their column has a missing value.
    is_integer = isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53
    return {"question": question, "answer": str(int(answer) if is_integer else answer)}


def _check_columns(names: Sequence[str], columns: Columns) -> None:
    """Raises ValueError unless the file has each of the two columns once."""
    counts = Counter(names)
    for column in (columns.question, columns.answer):
        if column not in counts:
            raise ValueError(f"no column {column!r}, it has {', '.join(names)}{nearest(column, names)}")
        if counts[column] > 1:
            raise ValueError(f"{counts[column]} columns are called {column!r}")
