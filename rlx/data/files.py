"""TODO rlx.data.files."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray.data
import ray.exceptions
import ray.train

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import DataConfig


def check_file(path: str, setting: str) -> None:
    """ConfigError for what can be no prompt file, as far as that can be told without reading it; `setting` is what the
    error names as the origin of the path."""
    file = Path(path)
    if file.suffix not in _PARSERS:
        raise ConfigError(f"{setting} {path}: expected reasoning_gym:DATASET or a file ending in {', '.join(_PARSERS)}")
    if not file.is_file():
        raise ConfigError(f"{setting} {path}: no such file")
    if not file.stat().st_size:
        raise ConfigError(f"{setting} {path}: there are no rows in it")


def read_file(path: str, config: DataConfig, setting: str = "data.source") -> ray.data.Dataset:
    """The rows {question, answer} of a prompt file, all of them text, in file order.

    Args:
        setting: what an error names as the origin of the path.

    Raises:
        ConfigError: the file or a row cannot be used; of a .jsonl file it names the line.
    """
    check_file(path, setting)
    names = {"question": config.prompt_column, "answer": config.answer_column}
    quiet_ray_data()
    try:
        # Not Ray's own readers: they take texts that look like dates for dates, and hide which line is malformed.
        contents = ray.data.read_binary_files(str(Path(path).resolve()), num_cpus=0)
        rows = contents.map_batches(
            _parse, fn_kwargs=names | {"path": path}, batch_format="pyarrow", batch_size=None, num_cpus=0
        ).materialize()
        if not rows.count():
            raise ValueError("there are no rows in it")
    except Exception as error:  # Ray wraps whatever a parser raises
        reason = error_reason(error)
        raise ConfigError(f"{setting} {reason if reason.startswith(path) else f'{path}: {reason}'}") from None
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Prompt files (in Ray tasks)


def _parse(batch: pa.Table, path: str, question: str, answer: str) -> pa.Table:
    """The contents of a prompt file -> its rows, as text; ValueError in one line if they cannot be used."""
    try:
        rows = _PARSERS[Path(path).suffix](batch["bytes"][0].as_py(), path, question, answer)
        return pa.Table.from_pylist(list(rows), pa.schema({"question": pa.string(), "answer": pa.string()}))
    except Exception as error:  # pyarrow's are of all kinds, and of many lines
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(kind + error_reason(error)) from None


def _json_rows(contents: bytes, path: str, question: str, answer: str) -> Iterator[dict[str, str]]:
    checked = False
    for number, line in enumerate(contents.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}: "
            row = _json_object(line, where)
            if not checked:
                _check_columns(list(row), question, answer)
                checked = True
            yield _row(row.get(question), row.get(answer), where)


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}malformed JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}expected a JSON object per line, found {type(row).__name__}")
    return row


def _csv_rows(contents: bytes, path: str, question: str, answer: str) -> Iterator[dict[str, str]]:
    # As text, since "007", "1e3" and "NA" are answers; only an empty cell is missing.
    as_text = pa.csv.ConvertOptions(
        column_types={question: pa.string(), answer: pa.string()}, strings_can_be_null=True, null_values=[""]
    )
    table = pa.csv.read_csv(
        pa.BufferReader(contents),
        read_options=pa.csv.ReadOptions(use_threads=False),  # with threads an error names no row
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=as_text,
    )
    return _table_rows(table, question, answer)


def _parquet_rows(contents: bytes, path: str, question: str, answer: str) -> Iterator[dict[str, str]]:
    return _table_rows(pa.parquet.ParquetFile(pa.BufferReader(contents)).read(), question, answer)


_PARSERS: dict[str, Callable[[bytes, str, str, str], Iterator[dict[str, str]]]] = {
    ".jsonl": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}


def _table_rows(table: pa.Table, question: str, answer: str) -> Iterator[dict[str, str]]:
    _check_columns(table.column_names, question, answer)
    for row in zip(table[question].to_pylist(), table[answer].to_pylist(), strict=True):
        yield _row(*row)


def _row(question: Any, answer: Any, where: str = "") -> dict[str, str]:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}a question is {question!r:.80}, expected text (its answer is {answer!r:.80})")
    if answer is None or answer != answer or isinstance(answer, list | dict):
        raise ValueError(f"{where}the answer to {question!r:.80} is {answer!r:.80}, expected text or a number")
    try:
        f"{question}{answer}".encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}half a character in {question!r:.80} or its answer {answer!r:.80}") from None
    # pandas writes whole numbers as floats when one is missing in their column.
    whole = isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53
    return {"question": question, "answer": str(int(answer) if whole else answer)}


def _check_columns(names: Sequence[str], *wanted: str) -> None:
    counts = Counter(names)
    for column in wanted:
        if column not in counts:
            raise ValueError(f"no column {column!r}, it has {', '.join(names)}{nearest(column, names)}")
        if counts[column] > 1:
            raise ValueError(f"{counts[column]} columns are called {column!r}")


def error_reason(error: Exception) -> str:
    """An error as one line; what was raised in a Ray task arrives as a chain of tracebacks in text, the cause first."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = str(error).partition("\n\nThe above exception")[0]
        return re.sub(r"^[\w.]+: ", "", cause.strip().splitlines()[-1])
    return " ".join(str(error).split()) or type(error).__name__


def quiet_ray_data() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # rows keep their place from run to run
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is raised
