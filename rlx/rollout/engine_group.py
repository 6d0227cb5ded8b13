"""The engines as all ranks see them together: asked for completions, sent weights, done without when they fail.

What one rank asks of one engine is rollout's; here the ranks agree on which engines are in use. Ray replaces the
process of one that died; it is in use again once it has taken the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rlx.actors import RolloutError, get_result
from rlx.mesh import Mesh
from rlx.rollout.engine_pool import PATIENCE_S, EnginePool, PendingRollout
from rlx.rollout.weight_sync import push
from rlx.rollout.weight_sync.sender import WeightSender
from rlx.types import Completion, Prompt, Sampling, ShardedWeight, WeightSyncError


@dataclass
class EngineGroup:
    """Every rank holds one and makes the same calls in the same order."""

    rollouts: EnginePool
    grid: Mesh
    dtype: torch.dtype  # that the engines hold
    retries: int  # times that all engines may be lost in one round of generation
    notify: Callable[[str], None]  # tells the person who watches
    weights: Callable[[], Sequence[ShardedWeight]]  # the policy's, as they are when it is called on all ranks
    direct: WeightSender | None = None  # ways that weights may take; None: through Ray's object store alone
    _told: dict[int, str] = field(default_factory=dict, init=False)

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """Asks for a completion of each of these prompts, the replica's, by each sampling; does not wait."""
        return self.rollouts.begin(prompts if self.grid.leads else (), samplings, version)

    def finish(self, draw: PendingRollout, version: int) -> list[Completion]:
        """What was asked for, those of each prompt together, in order.

        When some rank has no engine left, the weights are pushed again to those that have been restarted.

        Args:
            version: of the weights that the engines hold.

        Raises:
            RolloutError: all engines failed, again and again; has their last words.
        """
        for attempt in range(self.retries + 1):
            if attempt:
                self.push(version, starting=True)
            self.rollouts.finish(draw, version)
            if not self._shared_losses(not draw.is_whole):
                completions, draw.seconds = self.grid.shared((draw.completions, draw.seconds))
                return completions
        words = "; ".join(self.rollouts.lost.values())
        raise RolloutError(f"all engines failed, {self.retries + 1} times in a row, at step {version}: {words}")

    def wait(self, draw: PendingRollout, version: int) -> bool:
        """Waits for what was asked for as long as engines are left; whether all ranks have all of theirs."""
        self.rollouts.finish(draw, version)
        return not self._shared_losses(not draw.is_whole)

    def push(self, version: int, *, starting: bool = False, keep: bool = False) -> None:
        """Sends the policy's weights to the engines that are there; returns on every rank once they have them.

        Args:
            version: what these weights are called.
            starting: engines may still be starting, and are waited for as long as for an answer.
            keep: completions that are being drawn go on with these weights; otherwise they are finished first.

        Raises:
            WeightSyncError: none took them; names each and says why.
        """
        sender = self.grid.rank == 0
        timeout_s = self.rollouts.timeout_s if starting else self.rollouts.silence_s
        weights = self.weights()
        engines = self.rollouts.present(timeout_s if starting else PATIENCE_S) if sender else {}
        failed = push.push(
            weights,
            engines,
            version,
            sender=sender,
            dtype=self.dtype,
            timeout_s=timeout_s,
            keep=keep,
            direct=self.direct,
            there=self.rollouts.there,
        )
        for index, words in failed.items():
            self.rollouts.lose(index, words)
        self.rollouts.lost = self._from_first(self.rollouts.lost)
        self._tell()
        if len(self.rollouts.lost) == len(self.rollouts.engines):
            raise WeightSyncError("; ".join(self.rollouts.lost.values()))

    def sleep(self) -> None:
        """Has the engines give back their GPU memory until they are sent weights again; a collective call."""
        if self.grid.rank == 0:
            calls = {i: e.sleep.remote() for i, e in enumerate(self.rollouts.engines) if i not in self.rollouts.lost}
            for index, call in calls.items():
                try:
                    get_result(call, index, time.monotonic() + self.rollouts.timeout_s)
                except RolloutError as error:
                    self.rollouts.lose(index, str(error))
        self.rollouts.lost = self._from_first(self.rollouts.lost)

    def close(self) -> None:
        """Frees what was kept for further pushes."""
        if self.direct:
            self.direct.close()

    def _from_first(self, lost: dict[int, str]) -> dict[int, str]:
        """What rank 0 has; the other ranks wait until it has it."""
        things = [lost]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def _shared_losses(self, missing: bool) -> bool:
        """Has every rank know the engines that any has lost; whether any rank misses completions."""
        own = (missing, dict(self.rollouts.lost))
        everyone = [own] * self.grid.ranks
        dist.all_gather_object(everyone, own)
        for _, lost in everyone:
            self.rollouts.lost = lost | self.rollouts.lost
        self._tell()
        return any(lacks for lacks, _ in everyone)

    def _tell(self) -> None:
        """Says which engines are lost and which are back, once for all ranks."""
        if self.grid.rank == 0:
            for index in self.rollouts.lost.keys() - self._told.keys():
                self.notify(f"{self.rollouts.lost[index]} - left out until it is back")
            for index in self._told.keys() - self.rollouts.lost.keys():
                self.notify(f"engine {index} is back")
        self._told = dict(self.rollouts.lost)
