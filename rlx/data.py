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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from rlx.config import ConfigError, DataConfig
from rlx.types import Prompt

_READERS = {".jsonl": ray.data.read_json, ".parquet": ray.data.read_parquet, ".csv": ray.data.read_csv}
# Tasks that ask for a CPU would wait for ever while trainers hold them all.
_NO_CPU = {"num_cpus": 0}


def read_file(path: str, config: DataConfig) -> ray.data.Dataset:
    """The rows {question, answer} of a prompt file, in file order; ConfigError names what is wrong and where."""
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise ConfigError(f"data.source {path}: expected reasoning_gym:DATASET or a file ending in {', '.join(_READERS)}")
    if not file.is_file():
        raise ConfigError(f"data.source {path}: no such file")
    if file.stat().st_size == 0:
        raise ConfigError(f"data.source {path}: the file is empty")
    _quiet()
    try:
        rows = reader(str(file.resolve()), ray_remote_args=_NO_CPU).materialize()
    except Exception as error:  # Ray wraps whatever its reader raised; the cause is found in the file itself
        raise ConfigError(f"data.source {path}{_bad_line(file) or ': ' + _last_line(error)}") from None
    columns = rows.columns() or []
    for column in (config.prompt_column, config.answer_column):
        if column not in columns:
            raise ConfigError(f"data.source {path}: no column {column!r}; it has {', '.join(columns) or 'no rows'}")
    named = {config.prompt_column: "question", config.answer_column: "answer"}
    return rows.select_columns(list(named)).rename_columns(named)


def hold_out(rows: ray.data.Dataset, size: int) -> tuple[ray.data.Dataset, ray.data.Dataset]:
    """(training rows, held-out rows): the last `size` rows, at most a tenth but at least one, are held out."""
    rows = rows.materialize()
    count = rows.count()
    train, held_out = rows.split_at_indices([count - max(1, min(size, count // 10))])
    return train, held_out


def prepare(rows: ray.data.Dataset | Iterable[dict[str, Any]], config: DataConfig, model: str) -> ray.data.Dataset:
    """The prompt table: token ids with the model's chat template applied, over-long prompts left out.

    Args:
        rows: {question, answer[, entry]} each.
        model: folder or name of the model whose tokenizer is used.

    Raises:
        ConfigError: a question or answer that is no text, or no prompt left.
    """
    _quiet()
    source = rows if isinstance(rows, ray.data.Dataset) else ray.data.from_items(list(rows), override_num_blocks=1)
    tokenize = functools.partial(_tokenize, model=model, system=config.system, limit=config.max_prompt_tokens)
    try:
        table = source.map_batches(tokenize, batch_format="pandas", batch_size=None, **_NO_CPU).materialize()
    except Exception as error:
        raise ConfigError(f"data.source {config.source}: {_last_line(error)}") from None
    if not table.count():
        raise ConfigError(
            f"data.source {config.source}: no prompt is left, all are longer than data.max_prompt_tokens "
            f"({config.max_prompt_tokens})"
        )
    return table


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def read_shard(name: str) -> pa.Table:
    """On a Train worker: the prepared prompt table `name`, zero-copy from the node's object store."""
    shard = ray.train.get_dataset_shard(name)
    return pa.concat_tables(shard.iter_batches(batch_size=None, batch_format="pyarrow"))


def prompts(table: pa.Table, positions: Iterable[int]) -> list[Prompt]:
    """Rows of a prompt table as records."""
    picked = table.take(pa.array(positions, type=pa.int64())).to_pydict()
    entries = picked.get("entry") or [None] * len(picked["question"])
    columns = zip(positions, picked["token_ids"], picked["question"], picked["answer"], entries, strict=True)
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
        rows = [int(self._order(i // size)[i % size]) for i in taken[self.rank :: self.ranks]]
        self.position += count
        return prompts(self.table, rows)

    def cursor(self) -> dict[str, int]:
        """What a checkpoint keeps: the epoch, how many of its prompts are done, and the seed of its order."""
        epoch, offset = divmod(self.position, len(self.table))
        return {"epoch": epoch, "offset": offset, "seed": self.seed, "size": len(self.table)}

    def seek(self, cursor: dict[str, int]) -> None:
        """Goes to a cursor; ConfigError if it belongs to other prompts or another seed."""
        if (cursor["seed"], cursor["size"]) != (self.seed, len(self.table)):
            raise ConfigError(
                f"the checkpoint's prompts (seed {cursor['seed']}, {cursor['size']} of them) are not this run's "
                f"(seed {self.seed}, {len(self.table)} of them)"
            )
        self.position = cursor["epoch"] * cursor["size"] + cursor["offset"]

    def _order(self, epoch: int) -> np.ndarray:
        return _permutation(self.seed, epoch, len(self.table))


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


@functools.cache
def _cached_tokenizer(model: str) -> Any:
    return load_tokenizer(model)


def _tokenize(batch: Any, model: str, system: str | None, limit: int) -> Any:
    """One block of rows -> the same rows with token_ids, those longer than `limit` left out (runs in a Ray task)."""
    tokenizer = _cached_tokenizer(model)
    before = [{"role": "system", "content": system}] if system else []
    token_ids = []
    for question, answer in zip(batch["question"], batch["answer"], strict=True):
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"a question is {question!r}, expected text (its answer is {answer!r})")
        if answer is None or answer != answer:
            raise ValueError(f"the answer to {question!r} is missing")
        if tokenizer.chat_template:
            messages = [*before, {"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(question).input_ids
        token_ids.append(list(ids))
    fits = [len(ids) <= limit for ids in token_ids]
    return batch.assign(answer=batch["answer"].astype(str), token_ids=token_ids)[fits]


def _bad_line(file: Path) -> str | None:
    """Where a .jsonl file is malformed: ":LINE: what"; None if it is not, or is no .jsonl file."""
    if file.suffix != ".jsonl":
        return None
    with file.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                return f":{number}: malformed JSON: {error}"
            if not isinstance(row, dict):
                return f":{number}: expected an object per line, found {type(row).__name__}"
    return None


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _quiet() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # rows keep their place from run to run
    logging.getLogger("ray.data").setLevel(logging.ERROR)
