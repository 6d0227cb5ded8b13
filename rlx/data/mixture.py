"""Several prompt tables as one, and an order that mixes them by weight.

Draw number d is of source s(d), and the next of that source's own order, epoch after epoch. Draws are in blocks: in
each, a source has its share of the draws, and one more or not so that shares add up over blocks; the seed and the block
say in which order. So the prompts follow from (seed, draw) alone, on any number of ranks, and shares are kept from the
first block on. Left out: which draws are a rank's (stream.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rlx.data.stream import Digest, PromptRows, joined_digest, permutation

BLOCK = 64
"""draws of a block"""
_GOLDEN = (5**0.5 - 1) / 2
_GROWTH = 4096  # blocks that are counted at a time


@dataclass(frozen=True)
class JoinedRows:
    """The rows of several prompt tables, one table after the other; each gets a column `source`, its table's number."""

    parts: tuple[PromptRows, ...]

    def __len__(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each table."""
        return [len(part) for part in self.parts]

    @functools.cached_property
    def digest(self) -> Digest:
        return joined_digest([(len(part), part.digest) for part in self.parts])

    def request(self, indices: np.ndarray) -> Callable[[], pa.Table]:
        starts = np.cumsum([0, *self.sizes])
        owners = np.searchsorted(starts, indices, side="right") - 1  # [N], the table of each row
        places = [np.flatnonzero(owners == number) for number in range(len(self.parts))]
        fetches = [
            (number, part.request(indices[at] - starts[number]))
            for number, (part, at) in enumerate(zip(self.parts, places, strict=True))
            if len(at)
        ]

        def fetched() -> pa.Table:
            tables = [_of_source(fetch(), number) for number, fetch in fetches]
            order = np.argsort(np.concatenate(places))
            return pa.concat_tables(tables, promote_options="default").take(pa.array(order)).combine_chunks()

        return fetched


def _of_source(table: pa.Table, number: int) -> pa.Table:
    return table.append_column("source", pa.array(np.full(len(table), number), pa.int32()))


@dataclass(frozen=True)
class MixedOrder:
    """The order of draws from several tables; see the module."""

    seed: int
    sizes: Sequence[int]
    weights: Sequence[float]

    def ids(self, positions: Sequence[int]) -> list[int]:
        """Returns the id of the prompt at each position: epoch of its table x rows of all tables + row."""
        starts, total = np.cumsum([0, *self.sizes]), sum(self.sizes)
        ids = []
        for position in positions:
            number = self.source(position)
            epoch, index = divmod(int(self.drawn(position)[number]), self.sizes[number])
            row = permutation(self.seed, epoch, self.sizes[number], number)[index]
            ids.append(int(epoch * total + starts[number] + row))
        return ids

    def source(self, position: int) -> int:
        """Returns the number of the source that is drawn from at a position."""
        block, place = divmod(position, BLOCK)
        return int(self._block(block)[place])

    def drawn(self, position: int) -> np.ndarray:
        """Returns how often each source was drawn before a position, `[S]`."""
        block, place = divmod(position, BLOCK)
        return self._counted(block) + np.bincount(self._block(block)[:place], minlength=len(self.sizes))

    def _block(self, block: int) -> np.ndarray:
        """The source of each draw in a block, `[BLOCK]`."""
        return _shuffled(self.seed, block, tuple((self._counted(block + 1) - self._counted(block)).tolist()))

    def _counted(self, block: int) -> np.ndarray:
        """How often each source was drawn before a block, `[S]`."""
        while len(self._totals) <= block // _GROWTH:
            first = (len(self._totals) - 1) * _GROWTH
            self._totals.append(self._totals[-1] + self._counts(first, first + _GROWTH).sum(0))
        return self._totals[block // _GROWTH] + self._within(block // _GROWTH)[block % _GROWTH]

    def _within(self, stretch: int) -> np.ndarray:
        """How often each source was drawn before each block of a stretch of `_GROWTH`, since its first, `[., S]`."""
        if stretch not in self._stretches:
            counts = self._counts(stretch * _GROWTH, (stretch + 1) * _GROWTH)
            if len(self._stretches) > 2:
                self._stretches.clear()
            self._stretches[stretch] = np.cumsum(counts, 0) - counts
        return self._stretches[stretch]

    def _counts(self, first: int, last: int) -> np.ndarray:
        """The draws of each source in some blocks, `[blocks, S]`; each row adds up to `BLOCK`.

        A source has the whole part of its share. The draws that are left are points at distance 1 on a line on which
        each source has a stretch as long as its share's fraction; the points start elsewhere in each block.
        """
        shares = BLOCK * np.array(self.weights) / sum(self.weights)
        whole = np.floor(shares + 1e-9).astype(np.int64)
        left = BLOCK - int(whole.sum())
        ends = np.cumsum(np.maximum(shares - whole, 0.0))
        ends[-1] = left
        begins = (self._first + np.arange(first, last) * _GOLDEN) % 1.0  # [blocks]
        points = begins[:, None] + np.arange(left)  # [blocks, left]
        owners = np.searchsorted(ends, points, side="right")
        return whole + (owners[:, :, None] == np.arange(len(shares))).sum(1)

    @functools.cached_property
    def _first(self) -> float:
        return float(np.random.default_rng((self.seed, len(self.sizes))).random())

    @functools.cached_property
    def _totals(self) -> list[np.ndarray]:
        return [np.zeros(len(self.sizes), np.int64)]

    @functools.cached_property
    def _stretches(self) -> dict[int, np.ndarray]:
        return {}


@functools.lru_cache(maxsize=1024)
def _shuffled(seed: int, block: int, counts: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng((seed, block, 1)).permutation(np.repeat(np.arange(len(counts)), counts))
