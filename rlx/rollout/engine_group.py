"""All engines together, as all ranks use them: completions from them, weights to them, and agreement on the lost ones.

A lost engine is used again when Ray has replaced its process and it has received the weights. Left out: the requests of
one rank to the engines (engine_pool.py), and the transport of weights (weight_sync/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlx.actors import RolloutError, get_result
from rlx.mesh import Mesh, broadcast_object, gather_objects
from rlx.rollout.base import PendingRollout
from rlx.rollout.engine_pool import PATIENCE_S, EnginePool
from rlx.rollout.episodes.draws import Episodes
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.types import Completion, Notify, Prompt, Sampling, ShardedWeight, WeightSyncError


@dataclass
class EngineGroup:
    """`Engines` over Ray actors. Every rank has one and makes the same calls in the same order."""

    pool: EnginePool
    mesh: Mesh
    sync: WeightSync
    weights: Callable[[], Sequence[ShardedWeight]]  # returns the policy's current weights; called on all ranks
    retries: int  # times that all engines may be lost in one rollout
    notify: Notify
    episodes: Episodes | None = None  # with an environment: what plays with these engines
    _notified: set[int] = field(default_factory=set, init=False)  # lost engines of which the user was told

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """Requests a completion of each of this replica's prompts by each sampling; does not wait."""
        own = prompts if self.mesh.is_leader else ()
        return (self.episodes or self.pool).begin(own, samplings, version)

    def finish(self, pending: PendingRollout, version: int) -> list[Completion]:
        """Waits for all completions of a rollout; returns those of each prompt together, in order.

        When some rank has no engine left, the weights are pushed again to the engines that have been restarted.

        Args:
            version: of the weights that the engines hold.

        Raises:
            RolloutError: all engines failed `retries` + 1 times in a row; the text has the reason of each.
        """
        for attempt in range(self.retries + 1):
            if attempt:
                self.push(version, starting=True)
            if self.wait(pending, version):
                completions, pending.seconds = self.mesh.broadcast_from_leader((pending.completions, pending.seconds))
                return completions
        reasons = "; ".join(self.pool.lost.values())
        raise RolloutError(f"all engines failed, {self.retries + 1} times in a row, at step {version}: {reasons}")

    def wait(self, pending: PendingRollout, version: int) -> bool:
        """Waits until all completions have come or no engine is left; returns whether every rank has all of its own."""
        (self.episodes or self.pool).finish(pending, version)
        return self._all_complete(pending.is_complete)

    def push(self, version: int, *, starting: bool = False, midway: bool = False) -> None:
        """Sends the policy's weights to the engines that are up; returns on every rank when they have them.

        Args:
            version: the version of these weights.
            starting: engines may still be starting: wait for them as long as for completions.
            midway: running requests continue with the new weights; otherwise they finish first, with the old ones.

        Raises:
            WeightSyncError: no engine took the weights; names each engine and the reason.
        """
        if self.episodes:
            self.episodes.hold()
        timeout_s = self.pool.timeout_s if starting else self.pool.hang_s
        calls = self.pool.ask() if self.mesh.rank == 0 else []
        weights = self.weights()  # while the engines answer
        locations = self.pool.probe(timeout_s if starting else PATIENCE_S, calls) if calls else {}
        for index, error in self.sync.push(weights, version, locations, timeout_s=timeout_s, midway=midway).items():
            self.pool.mark_lost(index, error)
        self._share_lost()
        self._notify_changes()
        if not self.pool.alive:
            raise WeightSyncError("; ".join(self.pool.lost.values()))
        if self.episodes:
            self.episodes.release(version)

    def sleep(self) -> None:
        """Makes the engines free their GPU memory until the next push; a collective call."""
        if self.mesh.rank == 0:
            calls = {index: self.pool.engines[index].sleep.remote() for index in self.pool.alive}
            for index, call in calls.items():
                try:
                    get_result(call, index, time.monotonic() + self.pool.timeout_s)
                except RolloutError as error:
                    self.pool.mark_lost(index, error)
        self._share_lost()

    def close(self) -> None:
        """Frees what is kept between pushes."""
        if self.episodes:
            self.episodes.close()
        self.sync.close()

    def _share_lost(self) -> None:
        """Gives every rank the lost engines of rank 0."""
        self.pool.lost = broadcast_object(self.pool.lost)

    def _all_complete(self, is_complete: bool) -> bool:
        """Returns whether every rank has all its completions; gives every rank the lost engines of all."""
        ranks = gather_objects((is_complete, dict(self.pool.lost)))
        for _, lost in ranks:
            self.pool.lost = lost | self.pool.lost
        self._notify_changes()
        return all(complete for complete, _ in ranks)

    def _notify_changes(self) -> None:
        """Tells the user, once for all ranks, which engines are lost and which are back."""
        lost = self.pool.lost
        if self.mesh.rank == 0:
            for index in lost.keys() - self._notified:
                self.notify(f"{lost[index]} - left out until it is back")
            for index in self._notified - lost.keys():
                self.notify(f"engine {index} is back")
        self._notified = set(lost)
