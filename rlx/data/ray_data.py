"""How rlx uses Ray Data: settings of its context, reading in parallel tasks, and errors from its tasks as one line.

Tasks take 0 CPUs, because the workers and engines of a run hold all of them; how many run at once is limited instead.
Left out: what is read with it (files.py, hub.py, prompts.py).
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rlx.data import stream

if TYPE_CHECKING:
    import ray.data

BLOCK_BYTES = 16 * 2**20
"""size up to which a task's rows become one block"""
Read = Callable[[Any], Iterable[pa.Table]]
"""(piece of a source) -> its rows; runs in a task"""
_NAMED = re.compile(r"^[A-Za-z_][\w.]*: ")  # how the line with an error begins


def configure() -> None:
    """Makes Ray Data keep the order of rows and print nothing: errors are raised."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = BLOCK_BYTES
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def tasks_at_once() -> int:
    """Returns how many tasks may run at once on the cluster: one for each CPU."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def read_pieces(pieces: Sequence[Any], read: Read, schema: pa.Schema, *, here: bool) -> ray.data.Dataset:
    """Returns the rows of all pieces in their order; each piece is read by one task.

    Args:
        here: whether only this process's node can read them, e.g. files on its disk.

    Raises:
        Exception: whatever `read` raises, for the first piece for which it raises.
    """
    import joblib  # type: ignore[import-untyped]  # takes a third of a second

    configure()
    count = joblib.cpu_count() if here else tasks_at_once()
    try:
        return _read(pieces, read, schema, here, count)
    except Exception:
        if min(count, len(pieces)) > 1:  # another piece may have failed earlier in the order of rows
            _read(pieces, read, schema, here, 1)
        raise


def _read(pieces: Sequence[Any], read: Read, schema: pa.Schema, here: bool, count: int) -> ray.data.Dataset:
    import ray.data

    this_node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    items = ray.data.from_items([{"piece": pickle.dumps(piece)} for piece in pieces], override_num_blocks=len(pieces))
    return items.map_batches(
        _read_block,
        fn_kwargs={"read": read, "schema": schema},
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=0,
        concurrency=min(count, len(pieces)),
        label_selector=this_node if here else None,
    ).materialize()


def from_rows(rows: Sequence[dict[str, Any]]) -> ray.data.Dataset:
    """Returns rows as one block."""
    import ray.data

    return ray.data.from_items(list(rows), override_num_blocks=1)


def map_tables(
    rows: ray.data.MaterializedDataset, function: Callable[..., pa.Table], **given: Any
) -> ray.data.MaterializedDataset:
    """Returns what the function makes of each block of rows, in their order; it runs in tasks."""
    return rows.map_batches(
        function,
        fn_kwargs=given,
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=0,
        concurrency=min(tasks_at_once(), rows.num_blocks()),
    ).materialize()


def _read_block(batch: pa.Table, read: Read, schema: pa.Schema) -> Iterator[pa.Table]:
    yield schema.empty_table()
    for piece in batch["piece"]:
        yield from read(pickle.loads(piece.as_py()))


def summarize_blocks(blocks: Sequence[Any]) -> list[tuple[int, stream.Digest]]:
    """Returns the (rows, checksums) of prompts in each of some blocks; runs in a task where they lie."""
    import ray

    return [(len(table), stream.digest_of(table)) for table in map(ray.get, blocks)]


def pick_rows(blocks: Sequence[Any], rows: Sequence[np.ndarray]) -> pa.Table:
    """Returns some rows `[N]` of each of some blocks, one block after the other; runs in a task where they lie."""
    import ray

    return pa.concat_tables(stream.picked_rows(ray.get(block), some) for block, some in zip(blocks, rows, strict=True))


def error_reason(error: Exception) -> str:
    """Returns an error as one line.

    An error in a Ray task arrives as the text of a chain of tracebacks; the first of them has the cause, before notes.
    """
    import ray.exceptions

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = str(error).partition("\n\nThe above exception")[0]
        lines = cause.strip().splitlines()
        named = [line for line in lines if _NAMED.match(line)]
        return _NAMED.sub("", (named or lines)[-1])
    return " ".join(str(error).split()) or type(error).__name__
