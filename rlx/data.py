"""Prompts through Ray Data: read, template, tokenize, filter, once; then each rank's share of every step, in an order
that depends on (seed, epoch) alone.

Ray Data's own split is not used: it drops a remainder, changes with the number of workers and has no position to
resume from (docs/decisions.md). Here every rank sees the whole prepared table, shared memory on its node, and takes
its rows of the global order; so the prompts of step s are the same on any number of ranks.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray.data
import ray.exceptions
import ray.train

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections import DataConfig
from rlx.types import Prompt

_LOG = logging.getLogger("rlx")


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
    _quiet()
    try:
        # Not Ray's own readers: they take texts that look like dates for dates, and hide which line is malformed.
        contents = ray.data.read_binary_files(str(Path(path).resolve()), num_cpus=0)
        rows = contents.map_batches(
            _parse, fn_kwargs=names | {"path": path}, batch_format="pyarrow", batch_size=None, num_cpus=0
        ).materialize()
        if not rows.count():
            raise ValueError("there are no rows in it")
    except Exception as error:  # Ray wraps whatever a parser raises
        reason = _reason(error)
        raise ConfigError(f"{setting} {reason if reason.startswith(path) else f'{path}: {reason}'}") from None
    return rows


def hold_out(rows: ray.data.Dataset, size: int) -> tuple[ray.data.Dataset, ray.data.Dataset]:
    """(training rows, held-out rows): the last `size` rows, at most a tenth but at least one, are held out."""
    rows = rows.materialize()
    count = rows.count()
    if count < 2:
        raise ConfigError(f"data.source: {count} rows are too few to hold one out; set eval.source")
    train, held_out = rows.split_at_indices([count - max(1, min(size, count // 10))])
    return train, held_out


def prepare(
    rows: ray.data.Dataset | Iterable[dict[str, Any]], config: DataConfig, model: str, trust_remote_code: bool = False
) -> ray.data.Dataset:
    """The prompt table: token ids with the model's chat template applied, over-long prompts left out with a warning.

    Args:
        rows: {question, answer[, entry]} each.
        model: folder or name of the model whose tokenizer is used.

    Raises:
        ConfigError: the tokenizer cannot be used, or no prompt is left.
    """
    _quiet()
    source = rows if isinstance(rows, ray.data.Dataset) else ray.data.from_items(list(rows), override_num_blocks=1)
    source = source.materialize()
    settings = {"model": model, "trust": trust_remote_code, "system": config.system, "limit": config.max_prompt_tokens}
    try:
        table = source.map_batches(
            _tokenize, fn_kwargs=settings, batch_format="pyarrow", batch_size=None, num_cpus=0
        ).materialize()
    except Exception as error:
        raise ConfigError(f"model.path {model}: its tokenizer: {_reason(error)}") from None
    count, left = source.count(), table.count()
    too_long = f"{count - left} of {count} prompts are longer than data.max_prompt_tokens ({config.max_prompt_tokens})"
    if not left:
        raise ConfigError(f"no prompt is left: {too_long}")
    if left < count:
        _LOG.warning("%s and left out", too_long)
    return table


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def read_shard(name: str) -> pa.Table:
    """On a Train worker: the prepared prompt table `name`, zero-copy from the node's object store."""
    shard = ray.train.get_dataset_shard(name)
    return pa.concat_tables(shard.iter_batches(batch_size=None, batch_format="pyarrow"))


def prompts(table: pa.Table, ids: Sequence[int]) -> list[Prompt]:
    """Rows of a prompt table as records; those of a later epoch have ids beyond the table's length."""
    picked = table.take(pa.array([i % len(table) for i in ids], type=pa.int64())).to_pydict()
    entries = picked.get("entry") or [None] * len(picked["question"])
    columns = zip(ids, picked["token_ids"], picked["question"], picked["answer"], entries, strict=True)
    return [Prompt(int(i), tuple(ids), question, answer, entry) for i, ids, question, answer, entry in columns]


@dataclass
class PromptStream:
    """An endless stream of prompts: epoch after epoch, each in its own order; every rank takes its share of it.

    `position` counts the prompts taken by all ranks together: with the seed it says exactly which are done.
    """

    table: pa.Table
    seed: int
    rank: int = 0
    ranks: int = 1
    position: int = 0

    def next(self, count: int) -> list[Prompt]:
        """This rank's share of the next `count` prompts: every ranks-th of them."""
        size = len(self.table)
        taken = range(self.position, self.position + count)
        mine = [divmod(i, size) for i in taken[self.rank :: self.ranks]]
        self.position += count
        return prompts(self.table, [epoch * size + int(self._order(epoch)[place]) for epoch, place in mine])

    def cursor(self, position: int | None = None) -> dict[str, int]:
        """What a checkpoint keeps of where the stream is, or was at `position`: epoch, how many of its prompts are
        done, the seed of its order, which prompts."""
        epoch, offset = divmod(self.position if position is None else position, len(self.table))
        return {"epoch": epoch, "offset": offset, "seed": self.seed, "size": len(self.table), "digest": self._digest}

    def seek(self, cursor: dict[str, int]) -> None:
        """Goes to a cursor; ConfigError if it belongs to other prompts or another seed."""
        if (cursor["seed"], cursor["size"]) != (self.seed, len(self.table)):
            raise ConfigError(
                f"the checkpoint's prompts (seed {cursor['seed']}, {cursor['size']} of them) are not this run's "
                f"(seed {self.seed}, {len(self.table)} of them)"
            )
        if cursor.get("digest") != self._digest:
            raise ConfigError("the checkpoint's prompts are not this run's: their texts, or their tokens, have changed")
        self.position = cursor["epoch"] * cursor["size"] + cursor["offset"]

    @functools.cached_property
    def _digest(self) -> int:
        """A checksum over the prompts."""
        ids = self.table["token_ids"].combine_chunks()
        return zlib.crc32(ids.flatten().to_numpy().tobytes(), zlib.crc32(ids.value_lengths().to_numpy().tobytes()))

    def _order(self, epoch: int) -> np.ndarray:
        return _permutation(self.seed, epoch, len(self.table))


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


# ---------------------------------------------------------------------------------------------------------------------
# Prompt files (in Ray tasks)


def _parse(batch: pa.Table, path: str, question: str, answer: str) -> pa.Table:
    """The contents of a prompt file -> its rows, as text; ValueError in one line if they cannot be used."""
    try:
        rows = _PARSERS[Path(path).suffix](batch["bytes"][0].as_py(), path, question, answer)
        return pa.Table.from_pylist(list(rows), pa.schema({"question": pa.string(), "answer": pa.string()}))
    except Exception as error:  # pyarrow's are of all kinds, and of many lines
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(kind + _reason(error)) from None


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


# ---------------------------------------------------------------------------------------------------------------------
# Tokens (in Ray tasks)


_cached_tokenizer = functools.cache(load_tokenizer)


def _tokenize(batch: pa.Table, model: str, trust: bool, system: str | None, limit: int) -> pa.Table:
    """One block of rows -> the same rows with token_ids, those longer than `limit` left out."""
    tokenizer = _cached_tokenizer(model, trust)
    token_ids = [encode(tokenizer, question, system) for question in batch["question"].to_pylist()]
    # Typed, so that an empty block fits to the others.
    table = batch.append_column("token_ids", pa.array(token_ids, pa.list_(pa.int32())))
    return table.filter(pa.array([len(ids) <= limit for ids in token_ids], pa.bool_()))


def encode(tokenizer: Any, question: str, system: str | None) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(f"{system}\n\n{question}" if system else question).input_ids)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _reason(error: Exception) -> str:
    """An error as one line; what was raised in a Ray task arrives as a chain of tracebacks in text, the cause first."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = str(error).partition("\n\nThe above exception")[0]
        return re.sub(r"^[\w.]+: ", "", cause.strip().splitlines()[-1])
    return " ".join(str(error).split()) or type(error).__name__


def _quiet() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # rows keep their place from run to run
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is raised
