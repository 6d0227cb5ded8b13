"""Prompt tables in the blocks of Ray Data, and the `DataConfig` by which each Train worker gets its own rows of them.

A small table is read where it lies. Of a larger one, tasks pick the rows that a rank asks for on the nodes where its
blocks lie, so that only those rows travel and no rank holds all.
Left out: which rows a rank asks for (stream.py). rlx.training never imports this module: it is handed `Share`s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import ray.train

from rlx.data.stream import Share, digest_of, joined_digest

SMALL = 32 * 2**20
"""bytes of a table that ranks read where it lies"""


@dataclass(frozen=True)
class BlockRows:
    """The rows of a materialized dataset; see `rlx.data.stream.PromptRows`."""

    blocks: tuple[Any, ...]  # references to their tables
    summaries: tuple[Any, ...]  # references to (rows, bytes, checksum) of each

    @classmethod
    def of(cls, dataset: ray.data.Dataset) -> BlockRows:
        """Returns the rows of a dataset of prompts, in its order; does not wait for their checksums."""
        blocks = tuple(dataset.to_arrow_refs())
        return cls(blocks, tuple(_summarize.remote(block) for block in blocks))

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.blocks else 0

    @functools.cached_property
    def digest(self) -> int:
        return joined_digest((rows, digest) for rows, _, digest in self._known)

    def request(self, indices: np.ndarray) -> Callable[[], pa.Table]:
        if self._is_small:
            return functools.partial(self._local.take, pa.array(indices, pa.int64()))
        owners = np.searchsorted(self._ends, indices, side="right")  # [N], the block of each row
        order = np.argsort(owners, kind="stable")
        first_rows = np.concatenate([[0], self._ends])
        picked = [
            _pick.remote(self.blocks[owner], indices[owners == owner] - first_rows[owner])
            for owner in np.unique(owners)
        ]

        def wait() -> pa.Table:
            if not picked:
                return ray.get(self.blocks[0]).slice(0, 0)
            return pa.concat_tables(ray.get(picked)).take(pa.array(np.argsort(order), pa.int64()))

        return wait

    @functools.cached_property
    def _known(self) -> list[tuple[int, int, int]]:
        return ray.get(list(self.summaries))

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """The number of rows up to the end of each block, `[blocks]`."""
        return np.cumsum([rows for rows, _, _ in self._known])

    @functools.cached_property
    def _is_small(self) -> bool:
        return sum(size for _, size, _ in self._known) <= SMALL

    @functools.cached_property
    def _local(self) -> pa.Table:
        """All rows, in the shared memory of this node."""
        return pa.concat_tables(ray.get(list(self.blocks)))


def _summary(block: pa.Table) -> tuple[int, int, int]:
    """Returns the rows of a block, their bytes and their checksum."""
    return len(block), block.nbytes, digest_of(block)


def _rows_of(block: pa.Table, rows: np.ndarray) -> pa.Table:
    """Returns some rows of a block."""
    return block.take(pa.array(rows, pa.int64())).combine_chunks()


# 0 CPUs: the workers and engines of a run hold all of them. DEFAULT: outside the placement group of the caller.
_TASK = {"num_cpus": 0, "scheduling_strategy": "DEFAULT"}
_summarize, _pick = ray.remote(**_TASK)(_summary), ray.remote(**_TASK)(_rows_of)


class RankShares(ray.train.DataConfig):
    """Gives each Train worker its `Share` of each dataset; `ray.train.get_dataset_shard(name)` returns it there.

    Ray's own splits drop a remainder, change with the number of workers and have no position to resume from.
    """

    def __init__(self, tp: int = 1) -> None:
        """`tp`: workers that share a model; they get the same rows."""
        super().__init__(datasets_to_split=[])  # no worker waits for another
        self._tp = tp

    def configure(
        self,
        datasets: dict[str, ray.data.Dataset],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        tables = {name: BlockRows.of(dataset) for name, dataset in datasets.items()}
        ranks = world_size // self._tp
        return [
            {name: Share(rows, worker // self._tp, ranks) for name, rows in tables.items()}
            for worker in range(world_size)
        ]
