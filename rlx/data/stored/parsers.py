"""The formats of prompt files: the rows of a file, or of a part of one, as text.

A new format is a function that yields rows and a row in `FORMATS`. Columns are never converted by guesses: what looks
like a date or a number with leading zeros stays as it is written.
Left out: where files lie and how they are read in parallel (files.py).
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from rlx.config.errors import one_line
from rlx.data.stored.columns import SCHEMA, ColumnError, Columns, Row

_TABLE_ROWS = 16_384  # of the tables in which rows are handed on
_TABLE_BYTES = 1 << 30  # of such a table: a small file may hold much that is repeated
_LONGEST_ROW = 1 << 26  # bytes of a row of a CSV file; as much of the file is parsed at once
_NEXT_BYTES = 65_536  # read at a time to find the end of a line


@dataclass(frozen=True)
class Part:
    """A part of a file: the one number `index` of `count` parts of about the same size."""

    name: str  # of the file in errors
    path: str  # of the file on its filesystem
    index: int = 0
    count: int = 1

    def slice_of(self, size: int) -> tuple[int, int]:
        """Returns the first and the last + 1 of `size` successive things that belong to the part."""
        return size * self.index // self.count, size * (self.index + 1) // self.count


Parser = Callable[[pa.NativeFile, Part, Columns], Iterator[Row]]
"""(file, part of it, columns) -> the rows of the part; raises ValueError if they cannot be used"""


def read_part(file: pa.NativeFile, part: Part, columns: Columns) -> Iterator[pa.Table]:
    """Yields the rows of a part of a file in tables with the columns of `SCHEMA`.

    Raises:
        ValueError: the file cannot be used; the text is one line and begins with the file's name.
    """
    try:
        _check_encoding(file, part)
        yield from as_tables(format_of(part.path).parse(file, part, columns))
    except Exception as error:  # pyarrow raises errors of all kinds, with many lines
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = one_line(error, 700)
        raise ValueError(reason if reason.startswith(part.name) else f"{part.name}: {kind}{reason}") from None


def _check_encoding(file: pa.NativeFile, part: Part) -> None:
    """Raises ValueError if a file is UTF-16, as spreadsheets save it: read as UTF-8 it has other rows and columns."""
    head = file.read(2)
    file.seek(0)
    if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in head:
        kind = "UTF-16" if b"\0" not in head else "UTF-16BE" if head.startswith(b"\0") else "UTF-16LE"
        command = f"iconv -f {kind} -t UTF-8 {shlex.quote(part.name)} > utf8{suffix_of(part.path)}"
        raise ValueError(f"{part.name}: it is {kind}, not UTF-8: {command}")


def as_tables(rows: Iterable[Row]) -> Iterator[pa.Table]:
    """Yields rows in tables with the columns of `SCHEMA`."""
    rows = iter(rows)
    while some := list(itertools.islice(rows, _TABLE_ROWS)):
        yield pa.Table.from_pylist(some, SCHEMA)


# ---------------------------------------------------------------------------------------------------------------------
# Formats


def parse_jsonl(file: pa.NativeFile, part: Part, columns: Columns) -> Iterator[Row]:
    """Yields the rows of the lines that begin in the part, a JSON object per line; blank lines are skipped."""
    start, stop = part.slice_of(file.size())
    number, has_named_columns = 0, part.index > 0  # the first row of a file has to name the columns
    try:
        for line in _lines(file, start, stop):
            number += 1
            if line.strip():
                row = _object(_loaded(line), "per line")
                if not has_named_columns:
                    columns.roots(list(row))
                    has_named_columns = True
                yield columns.row(row)
    except ColumnError:
        raise
    except ValueError as error:
        raise ValueError(f"{part.name}:{_lines_before(file, start) + number}: {error}") from None


def parse_json(file: pa.NativeFile, part: Part, columns: Columns) -> Iterator[Row]:
    """Yields the rows of a file with a JSON list of objects, or with an object per line."""
    content = file.read().removeprefix(codecs.BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from parse_jsonl(pa.BufferReader(content), part, columns)
        return
    values, number = _loaded(content), 0
    try:
        for number, value in enumerate(values, 1):
            row = _object(value, "per row")
            if number == 1:
                columns.roots(list(row))
            yield columns.row(row)
    except ColumnError:
        raise
    except ValueError as error:
        raise ValueError(f"{part.name}: row {number}: {error}") from None


def parse_csv(file: pa.NativeFile, part: Part, columns: Columns) -> Iterator[Row]:
    """Yields the rows of a CSV file with a header line."""
    # All cells are read as text, because "007", "1e3" and "NA" are answers. Only an empty cell is missing.
    as_text = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(columns.settings, pa.string()),
        strings_can_be_null=True,
        null_values=[""],
    )
    content = file.read_buffer()  # once, since a file may lie far away
    block = max(_NEXT_BYTES, min(content.size, _LONGEST_ROW))  # a row has to fit in one
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(content),
            # With threads an error names no row.
            read_options=pa.csv.ReadOptions(use_threads=False, block_size=block),
            parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            convert_options=as_text,
        )
    except pa.ArrowInvalid as error:
        if "block size" not in str(error):
            raise
        too_long = f"a row is longer than {_LONGEST_ROW >> 20} MiB: a cell is that large, or its quote is never closed"
        raise ValueError(f"{part.name}: {too_long}") from None
    _check_quotes(content, part)
    yield from table_rows(table, columns, 1)  # below the header, which is a row of the file, too


def _check_quotes(content: pa.Buffer, part: Part) -> None:
    """Raises ValueError for a quote that is not closed where its cell ends.

    pyarrow takes the rows that follow for a part of this cell, up to the next quote or the end of the file.
    """
    text, begins = io.TextIOWrapper(pa.BufferReader(content), "utf-8", "replace", newline=""), 1
    csv.field_size_limit(_LONGEST_ROW)
    try:
        for _ in (rows := csv.reader(text, strict=True)):
            begins = rows.line_num + 1
    except csv.Error as error:
        problem = "a quote is not closed where its cell ends; within a cell a quote is written twice"
        raise ValueError(f"{part.name}:{begins}: {problem}: {error}") from None


def parse_parquet(file: pa.NativeFile, part: Part, columns: Columns) -> Iterator[Row]:
    """Yields the rows of the part's row groups of a Parquet file."""
    content = pa.parquet.ParquetFile(file)
    wanted = columns.roots(content.schema_arrow.names)
    groups = list(range(*part.slice_of(content.num_row_groups)))
    before = sum(content.metadata.row_group(group).num_rows for group in range(groups[0])) if groups else 0
    for batch in content.iter_batches(_TABLE_ROWS, row_groups=groups, columns=wanted, use_threads=False):
        if batch.nbytes > _TABLE_BYTES:
            raise ValueError(f"{part.name}: {len(batch)} rows unpack to {batch.nbytes >> 20} MiB")
        yield from table_rows(pa.Table.from_batches([batch]), columns, before)
        before += len(batch)


@dataclass(frozen=True)
class Format:
    """A format of prompt files."""

    parse: Parser
    has_parts: bool = False  # a part of a file can be read without the rest


FORMATS: dict[str, Format] = {
    ".jsonl": Format(parse_jsonl, has_parts=True),
    ".json": Format(parse_json),
    ".csv": Format(parse_csv),
    ".parquet": Format(parse_parquet, has_parts=True),
}
"""the formats of prompt files by suffix"""


def suffix_of(path: str) -> str | None:
    """Returns the suffix of a path if it is that of a format."""
    return next((suffix for suffix in FORMATS if path.lower().endswith(suffix)), None)


def format_of(path: str) -> Format:
    """Returns the format of a file with a known suffix."""
    suffix = suffix_of(path)
    assert suffix, path
    return FORMATS[suffix]


# ---------------------------------------------------------------------------------------------------------------------
# Lines and rows


def _lines(file: pa.NativeFile, start: int, stop: int) -> list[bytes]:
    """Returns the lines that begin at the bytes from `start` up to `stop`; there may be an empty one after them."""
    begin = max(0, start - 1)  # whether a line begins at `start` is in the byte before
    content = file.read_at(stop - begin, begin)
    if content and not content.endswith(b"\n"):
        content += _line_end(file, stop)
    lines = content.split(b"\n")
    return lines[1:] if start else lines


def _line_end(file: pa.NativeFile, position: int) -> bytes:
    """Returns the bytes from a position up to the end of the line."""
    found = b""
    while (more := file.read_at(_NEXT_BYTES, position)) and b"\n" not in more:
        found, position = found + more, position + len(more)
    return found + more.partition(b"\n")[0]


def _lines_before(file: pa.NativeFile, start: int) -> int:
    """Returns how many lines begin before the byte `start`."""
    count, position = int(start > 0), 0
    while position < start - 1:  # a line begins after each line break
        content = file.read_at(min(2**20, start - 1 - position), position)
        count, position = count + content.count(b"\n"), position + len(content)
    return count


def _loaded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from None


def _object(value: Any, each: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object {each}, found {type(value).__name__}")
    return value


def table_rows(table: pa.Table, columns: Columns, before: int) -> Iterator[Row]:
    """Yields the rows of a table; raises ValueError if they cannot be used.

    Args:
        before: rows of the source before the table, for errors.
    """
    number = before
    try:
        for record in _in_full(table.select(columns.roots(table.column_names))).to_pylist():
            number += 1
            yield columns.row(record)
    except ColumnError:
        raise
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def _in_full(table: pa.Table) -> pa.Table:
    """A table in which numbers of single precision are those that their texts say: 0.1, not 0.10000000149011612."""
    for index, field in enumerate(table.schema):
        if (texts := _singles_as(pa.string(), field.type)) != field.type:
            column = table.column(index).cast(texts).cast(_singles_as(pa.float64(), field.type))
            table = table.set_column(index, field.name, column)
    return table


def _singles_as(other: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """A type with another one in place of single precision, also in the entries of its cells."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_singles_as(other, field.type)) for field in kind])
    return other if pa.types.is_float32(kind) else kind
