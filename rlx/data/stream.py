"""Each rank's share of the prompts of every step, in an order that depends on (seed, epoch) alone.

Ray Data's own split is not used: it drops a remainder, changes with the number of workers and has no position to
resume from (docs/decisions.md). Here every rank sees the full prompt table, in the shared memory of its node, and takes
its rows of the global order. So the prompts of a step are the same on any number of ranks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rlx.config.errors import ConfigError
from rlx.types import Prompt


def prompts(table: pa.Table, ids: Sequence[int]) -> list[Prompt]:
    """Returns the prompts with these ids: id = epoch x rows of the table + row."""
    picked = table.take(pa.array([i % len(table) for i in ids], type=pa.int64())).to_pydict()
    entries = picked.get("entry") or [None] * len(picked["question"])
    rows = zip(ids, picked["token_ids"], picked["question"], picked["answer"], entries, strict=True)
    return [
        Prompt(int(prompt_id), tuple(token_ids), question, answer, entry)
        for prompt_id, token_ids, question, answer, entry in rows
    ]


@dataclass
class PromptStream:
    """An endless stream of prompts: epoch after epoch, each in its own order. Every rank takes its share.

    `position` is the number of prompts that all ranks together have taken. With the seed, it determines the prompts.
    """

    table: pa.Table
    seed: int
    rank: int = 0
    ranks: int = 1
    position: int = 0

    def next(self, count: int) -> list[Prompt]:
        """Returns this rank's share of the next `count` prompts: of every `ranks` prompts, the one at `rank`."""
        size = len(self.table)
        positions = range(self.position, self.position + count)[self.rank :: self.ranks]
        self.position += count
        ids = [self._id(*divmod(position, size)) for position in positions]
        return prompts(self.table, ids)

    def cursor(self, position: int | None = None) -> dict[str, int]:
        """Returns what a checkpoint keeps of the stream at a position, the current one if None.

        epoch and offset are the position; seed, size and digest identify the prompts that it is a position of.
        """
        epoch, offset = divmod(self.position if position is None else position, len(self.table))
        return {"epoch": epoch, "offset": offset, "seed": self.seed, "size": len(self.table), "digest": self._digest}

    def seek(self, cursor: dict[str, int]) -> None:
        """Goes to the position of a cursor.

        Raises:
            ConfigError: the cursor belongs to other prompts or another seed.
        """
        if (cursor["seed"], cursor["size"]) != (self.seed, len(self.table)):
            raise ConfigError(
                f"the checkpoint's prompts (seed {cursor['seed']}, {cursor['size']} of them) are not those of this run "
                f"(seed {self.seed}, {len(self.table)} of them)"
            )
        if cursor.get("digest") != self._digest:
            raise ConfigError("the checkpoint's prompts are not those of this run: their texts or tokens differ")
        self.position = cursor["epoch"] * cursor["size"] + cursor["offset"]

    @functools.cached_property
    def _digest(self) -> int:
        """A checksum over the token ids of all prompts."""
        ids = self.table["token_ids"].combine_chunks()
        return zlib.crc32(ids.flatten().to_numpy().tobytes(), zlib.crc32(ids.value_lengths().to_numpy().tobytes()))

    def _id(self, epoch: int, index: int) -> int:
        """The id of the prompt at position `index` of an epoch."""
        size = len(self.table)
        return epoch * size + int(_permutation(self.seed, epoch, size)[index])


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of the rows in an epoch: shape `[size]`."""
    return np.random.default_rng((seed, epoch)).permutation(size)
