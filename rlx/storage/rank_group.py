"""All ranks of a run as a group of their own for work on the storage, apart from the groups that training uses.

Left out: what the ranks do there (checkpoint_writer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from rlx.mesh import COLLECTIVE_TIMEOUT, broadcast_object, gather_objects
from rlx.storage.filesystem import StorageError, retry

T = TypeVar("T")


class RankGroup:
    """Every rank makes the same calls in the same order: each method is a collective call.

    The group has its own gloo process group, so that a thread may use it while training communicates.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in the order of the ranks, on every rank."""
        return gather_objects(value, self._group)

    def on_first(self, action: Callable[[], T], what: str) -> T:
        """Runs an action on rank 0, with repeated attempts, and returns its result on every rank.

        Args:
            what: the action in words, for the error.

        Raises:
            StorageError: the action failed on rank 0; raised on every rank.
        """
        outcome: tuple[T | None, str] = None, ""
        if self.rank == 0:
            try:
                outcome = retry(action, what), ""
            except Exception as error:  # the other ranks wait, so they must learn of any failure
                outcome = None, error_text(error)
        result, failure = broadcast_object(outcome, self._group)
        if failure:
            raise StorageError(failure)
        return cast(T, result)

    def close(self) -> None:
        """Ends the process group."""
        dist.destroy_process_group(self._group)


def error_text(error: Exception) -> str:
    """Returns an error as text for other ranks; a StorageError says by itself what failed."""
    return str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
