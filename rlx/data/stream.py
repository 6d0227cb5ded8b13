"""Each rank's share of the prompts of every step, in an order that depends on the seed alone.

The position in the order is one number, so the prompts of a step are the same on any number of ranks, and a resumed run
continues where it stopped. A rank asks for its own rows only, a window ahead of the steps.
Left out: where the rows lie on a cluster (blocks.py), how they get their token ids (prompts.py), how several sources
are mixed (mixture.py), and an order that follows from scores (curriculum.py).
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from rlx.config.errors import ConfigError
from rlx.types import Prompt

WINDOW = 4096
"""prompts of a rank that are asked for at once, before the steps need them"""
_TOKENS, _ANSWERS = "token_digest", "answer_digest"  # of a cursor; cursors of earlier checkpoints do not have them
_PRIME, _BASE = 2**61 - 1, 1_610_612_741  # of the checksum


class Digest(NamedTuple):
    """The checksums of the rows of a table. They do not depend on how the table is cut into blocks."""

    tokens: int  # of the prompts' token ids
    answers: int  # of the expected answers, and of the entries of generated rows

    def difference(self, other: Digest) -> str | None:
        """What is not the same in another table, in words; None if all is."""
        if self.tokens != other.tokens:
            return "texts or tokens"
        return "expected answers" if self.answers != other.answers else None


class PromptRows(Protocol):
    """The rows of a prompt table {question, answer, token_ids[, entry][, source][, messages]}, wherever they lie."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> Digest:
        """`digest_of` of the whole table."""

    def request(self, indices: np.ndarray) -> Callable[[], pa.Table]:
        """Starts to fetch the rows at `indices` `[N]`; the returned function waits for them, in that order."""


@dataclass(frozen=True)
class TableRows:
    """Rows in the memory of this process."""

    table: pa.Table

    def __len__(self) -> int:
        return len(self.table)

    @functools.cached_property
    def digest(self) -> Digest:
        return digest_of(self.table)

    def request(self, indices: np.ndarray) -> Callable[[], pa.Table]:
        return functools.partial(picked_rows, self.table, indices)


def digest_of(table: pa.Table) -> Digest:
    """Returns the checksums of the rows of a table, in their order."""
    tokens = answers = 0
    for batch in table.to_batches():
        tokens = _folded(tokens, _token_checksums(batch["token_ids"]))
        answers = _folded(answers, _answer_checksums(batch))
    return Digest(tokens, answers)


def _folded(digest: int, checksums: Iterable[int]) -> int:
    for checksum in checksums:
        digest = (digest * _BASE + checksum + 1) % _PRIME
    return digest


def _token_checksums(token_ids: pa.ListArray) -> Iterator[int]:
    numbers = token_ids.flatten().to_numpy(zero_copy_only=False).astype(np.int32).tobytes()
    ends = 4 * np.cumsum(token_ids.value_lengths().to_numpy(zero_copy_only=False))
    return _checksums(numbers, [0, *ends.tolist()])


def _answer_checksums(batch: pa.RecordBatch) -> Iterator[int]:
    """The checksum of each row's expected answer, and of the entry of a generated one."""
    texts = batch["answer"].cast(pa.large_binary())
    _, offsets, characters = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    checksums = _checksums(characters.to_pybytes() if characters else b"", ends.tolist())
    if "entry" not in batch.schema.names:
        return checksums
    entries = batch["entry"].fill_null(0).to_pylist()
    return (checksum + (entry << 32) for checksum, entry in zip(checksums, entries, strict=True))


def _checksums(content: bytes, bounds: Sequence[int]) -> Iterator[int]:
    """The checksum of the bytes between each two neighbours of `bounds`."""
    return (zlib.crc32(content[start:end]) for start, end in itertools.pairwise(bounds))


def picked_rows(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Returns some rows `[N]` of a part of a table, in a copy that keeps nothing else of it in memory."""
    return table.take(pa.array(rows, pa.int64())).combine_chunks()


def joined_digest(parts: Iterable[tuple[int, Digest]]) -> Digest:
    """Returns the checksums of successive parts of a table, each given as (its rows, its checksums)."""
    tokens = answers = 0
    for rows, part in parts:
        power = pow(_BASE, rows, _PRIME)
        tokens, answers = (tokens * power + part.tokens) % _PRIME, (answers * power + part.answers) % _PRIME
    return Digest(tokens, answers)


def prompts(rows: PromptRows, ids: Sequence[int]) -> list[Prompt]:
    """Returns the prompts with these ids: id = epoch x rows of the table + row."""
    return _as_prompts(ids, rows.request(np.array(ids, dtype=np.int64) % len(rows))()) if len(ids) else []


def _as_prompts(ids: Iterable[int], table: pa.Table) -> list[Prompt]:
    picked = table.to_pydict()
    entries, sources = picked.get("entry") or [None] * len(table), picked.get("source") or [0] * len(table)
    chats = [tuple(chat) for chat in picked["messages"]] if "messages" in picked else [()] * len(table)
    rows = zip(ids, picked["token_ids"], picked["question"], picked["answer"], entries, sources, chats, strict=True)
    return [Prompt(int(prompt_id), tuple(token_ids), *cells) for prompt_id, token_ids, *cells in rows]


class Order(Protocol):
    """The order in which prompts come."""

    def ids(self, positions: Sequence[int]) -> list[int]:
        """Returns the id of the prompt at each position, from which its row follows; no id occurs twice."""


@dataclass(frozen=True)
class Shuffled:
    """All rows, epoch after epoch, each in an order of its own."""

    seed: int
    size: int  # rows of the table

    def ids(self, positions: Sequence[int]) -> list[int]:
        """Returns the id of the prompt at each position: epoch x rows of the table + row."""
        places = (divmod(position, self.size) for position in positions)
        return [epoch * self.size + int(permutation(self.seed, epoch, self.size)[index]) for epoch, index in places]


@dataclass(frozen=True)
class Share:
    """One rank's part of a prompt table."""

    rows: PromptRows
    rank: int = 0
    ranks: int = 1  # that share the table; neighbours count as one

    def stream(self, seed: int, order: Order | None = None) -> PromptStream:
        """Returns the rank's part of the prompts of training; `order`: None: the shuffled rows."""
        return PromptStream(self.rows, seed, self.rank, self.ranks, order=order)

    def in_order(self) -> list[Prompt]:
        """Returns the rank's part of the table, in its order: of every `ranks` rows, the one at `rank`."""
        return prompts(self.rows, range(self.rank, len(self.rows), self.ranks))


@dataclass
class PromptStream:
    """An endless stream of prompts in an order. Every rank takes its share.

    `position` is the number of prompts that all ranks together have taken. With the seed, it determines the prompts.
    """

    rows: PromptRows
    seed: int
    rank: int = 0
    ranks: int = 1
    position: int = 0
    order: Order | None = field(default=None, kw_only=True)  # None: the shuffled rows
    success: np.ndarray | None = field(default=None, init=False)  # [rows], estimates of a curriculum; None without one
    _windows: list[_Window] = field(default_factory=list, init=False, repr=False)  # the current one and the next

    def __post_init__(self) -> None:
        self._order = self.order or Shuffled(self.seed, len(self.rows))

    def next(self, count: int) -> list[Prompt]:
        """Returns this rank's share of the next `count` prompts: of every `ranks` prompts, the one at `rank`."""
        wanted = range(self.position, self.position + count)[self.rank :: self.ranks]
        self.position += count
        taken: list[Prompt] = []
        while len(taken) < len(wanted):
            rest = wanted[len(taken) :]
            taken += self._window(rest[0]).take(rest)
        return taken

    def observe(self, correct: Sequence[float]) -> dict[str, float]:
        """Learns how often the prompts that `next` gave last were answered correctly, by all ranks; returns metrics."""
        return {}

    def with_ids(self, ids: Sequence[int]) -> list[Prompt]:
        """Returns the prompts with these ids, whatever the position."""
        return prompts(self.rows, ids)

    def cursor(self, position: int | None = None) -> dict[str, int]:
        """Returns what a checkpoint keeps of the stream at a position, the current one if None.

        epoch and offset are the position; the others identify the prompts that it is a position of.
        """
        digest = self.rows.digest
        epoch, offset = divmod(self.position if position is None else position, len(self.rows))
        return {
            "epoch": epoch,
            "offset": offset,
            "seed": self.seed,
            "size": len(self.rows),
            _TOKENS: digest.tokens,
            _ANSWERS: digest.answers,
        }

    def seek(self, cursor: Mapping[str, int]) -> None:
        """Goes to the position of a cursor.

        Raises:
            ConfigError: the cursor belongs to other prompts or another seed.
        """
        check_cursor(cursor, self.rows, self.seed)
        self.position = cursor["epoch"] * cursor["size"] + cursor["offset"]

    def _window(self, start: int) -> _Window:
        """The window with the prompt at position `start` of this rank; the one after it is being fetched."""
        if self._windows and start in self._windows[0].positions:
            return self._windows[0]
        following = self._windows[1:]
        current = following[0] if following and start in following[0].positions else self._begin_window(start)
        self._windows = [current, self._begin_window(current.positions[-1] + self.ranks)]
        return current

    def _begin_window(self, start: int) -> _Window:
        size = len(self.rows)
        count = min(WINDOW, -(-size // self.ranks))  # of a small table an epoch
        positions = range(start, start + count * self.ranks, self.ranks)
        ids = self._order.ids(positions)
        return _Window(positions, ids, self.rows.request(np.array(ids, dtype=np.int64) % size))


def check_cursor(cursor: Mapping[str, int], rows: PromptRows, seed: int) -> None:
    """Raises ConfigError if the cursor of a checkpoint belongs to other prompts than these or to another seed."""
    if (cursor["seed"], cursor["size"]) != (seed, len(rows)):
        raise ConfigError(
            f"the checkpoint's prompts (seed {cursor['seed']}, {cursor['size']} of them) are not those of this run "
            f"(seed {seed}, {len(rows)} of them)"
        )
    own = rows.digest
    if what := own.difference(Digest(cursor.get(_TOKENS, own.tokens), cursor.get(_ANSWERS, own.answers))):
        raise ConfigError(f"the checkpoint's prompts are not those of this run: their {what} differ")


@dataclass
class _Window:
    """Successive prompts of a rank that are fetched together."""

    positions: range
    ids: list[int]
    fetch: Callable[[], pa.Table]

    def take(self, wanted: range) -> list[Prompt]:
        """Returns the prompts at the first of the `wanted` positions, as many as the window has."""
        start = self.positions.index(wanted[0])
        ids = self.ids[start : start + len(wanted)]
        return _as_prompts(ids, self._table.slice(start, len(ids)))

    @functools.cached_property
    def _table(self) -> pa.Table:
        return self.fetch()


@functools.lru_cache(maxsize=32)  # of each source, the present epoch and the next
def permutation(seed: int, epoch: int, size: int, number: int = 0) -> np.ndarray:
    """The order of the rows in an epoch of the source with this number: shape `[size]`."""
    return np.random.default_rng((seed, epoch, number)).permutation(size)
