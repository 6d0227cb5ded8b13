"""TODO rlx.data.stream."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray.train

from rlx.config.errors import ConfigError
from rlx.types import Prompt


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
