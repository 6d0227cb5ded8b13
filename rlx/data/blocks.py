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
import ray.experimental
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.data import ray_data, stream
from rlx.data.stream import Digest, PromptRows, Share, TableRows, joined_digest

SMALL = 32 * 2**20
"""bytes of a table that ranks read where it lies"""
# 0 CPUs: the workers and engines of a run hold all of them.
_summarize, _pick = (ray.remote(num_cpus=0)(task) for task in (ray_data.summarize_blocks, ray_data.pick_rows))


def rows_of(dataset: ray.data.Dataset, small: int = SMALL) -> PromptRows:
    """Returns the rows of a materialized dataset of prompts, in its order; `small`: see `SMALL`."""
    blocks = tuple(dataset.to_arrow_refs())
    return SmallRows(blocks) if dataset.size_bytes() <= small else BlockRows.of(blocks)


@dataclass(frozen=True)
class SmallRows:
    """The rows of blocks that are read, all of them, in the shared memory of this node."""

    blocks: tuple[Any, ...]  # references to their tables

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def digest(self) -> Digest:
        return self._rows.digest

    def request(self, indices: np.ndarray) -> Callable[[], pa.Table]:
        return self._rows.request(indices)

    @functools.cached_property
    def _rows(self) -> TableRows:
        return TableRows(pa.concat_tables(ray.get(list(self.blocks))))


@dataclass(frozen=True)
class BlockRows:
    """The rows of blocks on any nodes; on each node that has some, a task picks those that are asked for."""

    blocks: tuple[Any, ...]  # references to their tables
    nodes: dict[str | None, list[int]]  # the numbers of the blocks that lie on each node; None: anywhere
    summaries: tuple[Any, ...]  # of each node a reference to its blocks' (rows, checksums)

    @classmethod
    def of(cls, blocks: tuple[Any, ...]) -> BlockRows:
        """Starts to count the rows of blocks and to compute their checksums, where they lie."""
        places = ray.experimental.get_object_locations(list(blocks))
        nodes: dict[str | None, list[int]] = {}
        for number, block in enumerate(blocks):
            nodes.setdefault(min(places[block]["node_ids"], default=None), []).append(number)
        summaries = [
            _summarize.options(**_on(node)).remote([blocks[number] for number in numbers])
            for node, numbers in nodes.items()
        ]
        return cls(blocks, nodes, tuple(summaries))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @functools.cached_property
    def digest(self) -> Digest:
        return joined_digest(self._known)

    def request(self, indices: np.ndarray) -> Callable[[], pa.Table]:
        owners = np.searchsorted(self._starts, indices, side="right") - 1  # [N], the block of each row
        places, picked = [], []
        for node, numbers in self.nodes.items():
            used = [(number, np.flatnonzero(owners == number)) for number in numbers if number in owners]
            if used:
                rows = [indices[at] - self._starts[number] for number, at in used]
                task = _pick.options(**_on(node))
                picked.append(task.remote([self.blocks[number] for number, _ in used], rows))
                places += [at for _, at in used]
        order = np.argsort(np.concatenate(places))
        return lambda: stream.picked_rows(pa.concat_tables(ray.get(picked)), order)

    @functools.cached_property
    def _known(self) -> list[tuple[int, Digest]]:
        """Each block's rows and checksums."""
        numbers = [number for numbers in self.nodes.values() for number in numbers]
        known = [each for summary in ray.get(list(self.summaries)) for each in summary]
        return [each for _, each in sorted(zip(numbers, known, strict=True))]

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each block, and the number of all rows: `[blocks + 1]`."""
        return np.cumsum([0, *(rows for rows, _ in self._known)])


def _on(node: str | None) -> dict[str, Any]:
    """Returns options of a task that runs on a node while that lives; outside the placement group of the caller."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"}


class RankShares(ray.train.DataConfig):
    """Gives each Train worker its `Share` of each dataset; `ray.train.get_dataset_shard(name)` returns it there.

    Ray's own splits drop a remainder, change with the number of workers and have no position to resume from.
    """

    def __init__(self, neighbours: int = 1, small: int = SMALL) -> None:
        """`neighbours`: successive workers that get the same rows; `small`: see `SMALL`."""
        super().__init__(datasets_to_split=[])  # no worker waits for another
        self._neighbours, self._small = neighbours, small

    def configure(
        self,
        datasets: dict[str, ray.data.Dataset],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        tables = {name: rows_of(dataset, self._small) for name, dataset in datasets.items()}
        ranks = world_size // self._neighbours
        return [
            {name: Share(rows, worker // self._neighbours, ranks) for name, rows in tables.items()}
            for worker in range(world_size)
        ]
