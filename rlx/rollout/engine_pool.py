"""The engines as one rank uses them: which engine gets which prompts, and what happens to those of a lost engine.

Here each rank decides for itself. Left out: what all ranks agree on, and the weights (engine_group.py); how engines are
started (engine_actors.py).
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from rlx.actors import EngineLostError, EngineTimeoutError, Lifeline, RolloutError, get_result, is_done
from rlx.rollout.base import EngineCall, Output, PendingRollout
from rlx.rollout.weight_sync.base import EngineLocation
from rlx.types import Prompt, Sampling

PATIENCE_S = 1.0
"""the time in which an engine that is up answers a probe"""


@dataclass
class EnginePool:
    """One rank's access to the engines.

    A lost engine gets no prompts until it holds the weights again; meanwhile Ray replaces its process.
    """

    engines: Sequence[Any]  # actor handles, see `Engine`
    seed: int  # of the run
    rank: int = 0
    timeout_s: float = 600.0  # longest wait for an engine that does nothing
    hang_s: float = 120.0  # an engine whose process runs but answers no probe for longer is replaced
    run: str = ""  # whose work the engines do, a tag of their metrics
    lost: dict[int, str] = field(default_factory=dict)  # engines that failed, and the reason
    _unanswered: dict[int, float] = field(default_factory=dict, init=False)  # engines, and the first lost probe
    _lifelines: dict[int, Lifeline] = field(default_factory=dict, init=False)  # of engines that have answered
    _loads: Counter[int] = field(default_factory=Counter, init=False)  # tokens that each engine has been asked for

    @property
    def alive(self) -> list[int]:
        """The engines that are not lost."""
        return [index for index in range(len(self.engines)) if index not in self.lost]

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """Requests a completion of each prompt by each sampling, with the weights of `version`; does not wait.

        All completions of a prompt come from one engine, which then computes the prefix once; prompts go to the least
        loaded engine. A completion depends on (run seed, version, prompt, sample), not on the engine: when an engine
        fails, the others generate the same completions, unless the weights have changed meanwhile.
        """
        pending = PendingRollout.of(prompts, samplings, version)
        self._assign(pending, version)
        return pending

    def finish(self, pending: PendingRollout, version: int) -> None:
        """Waits for all completions. If no engine is left, the missing ones stay unassigned.

        Args:
            version: of the weights that engines hold now; requests of a failed engine are repeated with them.

        Raises:
            PromptRefusedError: an engine refused a prompt.
        """
        self._assign(pending, version)
        # The deadline counts from here: a prefetched rollout may have waited for an earlier one.
        deadline = time.monotonic() + self.timeout_s
        pending.calls = {reference: replace(call, deadline=deadline) for reference, call in pending.calls.items()}
        while pending.calls:
            for call, outputs in self._returned(pending, version):
                if outputs is None:
                    pending.unassigned += call.prompts
                    continue
                count = len(pending.samplings)
                for position, index in enumerate(call.prompts):
                    pending.add(index, outputs[position * count : (position + 1) * count], call.version)
            self._assign(pending, version)

    def ask(self) -> list[Any]:
        """Begins to ask all engines whether they are up; returns the calls, for `probe`."""
        return [engine.probe.remote(self.run) for engine in self.engines]

    def probe(self, patience_s: float, calls: Sequence[Any] = ()) -> dict[int, EngineLocation]:
        """Asks all engines whether they are up; those that do not answer are lost.

        Waits for starting engines: for all of them until `patience_s`, and if none is up then, for the first one until
        `timeout_s`.

        Args:
            calls: by which they have been asked, see `ask`; empty: they are asked now.

        Returns:
            The location of each engine that is up, by index.
        """
        calls = list(calls) or self.ask()
        returned = ray.wait(calls, num_returns=len(calls), timeout=patience_s)[0]
        returned = returned or ray.wait(calls, num_returns=1, timeout=self.timeout_s)[0]
        locations: dict[int, EngineLocation] = {}
        for index, call in enumerate(calls):
            if call not in returned:
                self._mark_unanswered(index)
                continue
            try:
                locations[index] = get_result(call, index, math.inf)
                self.lost.pop(index, None)
                self._unanswered.pop(index, None)
                if index not in self._lifelines or self._lifelines[index].is_broken:
                    self._lifelines[index] = Lifeline(self.engines[index])
            except EngineLostError as error:
                self.mark_lost(index, error)
                self._unanswered.pop(index, None)
        return locations

    def mark_lost(self, index: int, error: RolloutError) -> None:
        """Takes an engine out of use; Ray replaces its process if it did not answer in time."""
        if index in self.lost:
            return
        self.lost[index] = str(error)
        if isinstance(error, EngineTimeoutError):
            ray.kill(self.engines[index], no_restart=False)

    def _mark_unanswered(self, index: int) -> None:
        """Marks an engine as lost; Ray replaces its process if it has not answered for too long.

        One that has not answered since its process began may still be starting, and gets as long as for completions.
        """
        self.mark_lost(index, EngineLostError(f"engine {index} is gone"))
        if index in self._lifelines and self._lifelines[index].is_broken:
            del self._lifelines[index]
        since = self._unanswered.setdefault(index, time.monotonic())
        if time.monotonic() - since > (self.hang_s if index in self._lifelines else self.timeout_s):
            ray.kill(self.engines[index], no_restart=False)
            del self._unanswered[index]

    def _returned(self, pending: PendingRollout, version: int) -> Iterator[tuple[EngineCall, list[Output] | None]]:
        """Waits for at least one call; removes those that have ended and yields their outputs, None if a call failed.

        The engine of a failed call is lost, except if it received newer weights after the call and the call did not
        time out: its process may then be a new one, and its next call shows whether it works.
        """
        first = min(call.deadline for call in pending.calls.values())
        ray.wait(list(pending.calls), timeout=max(0.0, first - time.monotonic()))
        for reference in [each for each, call in pending.calls.items() if is_done(each, call.deadline)]:
            call = pending.calls.pop(reference)
            if later := self._put_off(reference, call):
                pending.calls[reference] = later
                continue
            self._loads[call.engine] -= call.tokens
            try:
                outputs, seconds = get_result(reference, call.engine, call.deadline)
                pending.seconds = max(pending.seconds, seconds)
                yield call, outputs
            except EngineLostError as error:
                if call.version == version or isinstance(error, EngineTimeoutError):
                    self.mark_lost(call.engine, error)
                yield call, None

    def _put_off(self, reference: Any, call: EngineCall) -> EngineCall | None:
        """The call with a later deadline if it is late, and its engine has stepped since the last time: it works."""
        steps = None if is_done(reference, math.inf) else self._steps(call.engine)
        if steps is None or steps == call.steps:
            return None
        return replace(call, deadline=time.monotonic() + self.timeout_s, steps=steps)

    def _steps(self, index: int) -> int | None:
        """The steps that an engine has made; None if it does not answer."""
        try:
            return int(get_result(self.engines[index].steps.remote(), index, time.monotonic() + PATIENCE_S))
        except EngineLostError:
            return None

    def _assign(self, pending: PendingRollout, version: int) -> None:
        """Sends the unassigned prompts to the engines that are alive; if there are none, they stay unassigned."""
        alive = self.alive
        if not pending.unassigned or not alive:
            return
        deadline = time.monotonic() + self.timeout_s
        most = sum(sampling.max_tokens for sampling in pending.samplings)
        count = len(pending.samplings)
        lengths = {i: count * len(pending.prompts[i].token_ids) + most for i in pending.unassigned}
        for engine, prompts in self.routes(lengths, alive).items():
            requests = [request for i in prompts for request in pending.requests(i, self.seed)]
            tokens = sum(lengths[i] for i in prompts)
            self._loads[engine] += tokens
            reference = self.engines[engine].generate.remote(requests, version)
            pending.calls[reference] = EngineCall(engine, prompts, version, deadline, tokens)
        pending.unassigned = []

    def routes(self, lengths: Mapping[int, int], alive: Sequence[int]) -> dict[int, list[int]]:
        """Which prompts go to which engine: the longest first, each to the engine with the fewest tokens.

        Engines that have equally many are taken in an order that differs from rank to rank.

        Args:
            lengths: the tokens of each prompt and its completions, by the prompt's index.
            alive: the engines to choose from.
        """
        count = len(alive)
        loads = [(self._loads[engine], (turn - self.rank) % count, engine) for turn, engine in enumerate(alive)]
        heapq.heapify(loads)
        shares: dict[int, list[int]] = {engine: [] for engine in alive}
        for i in sorted(lengths, key=lambda i: -lengths[i]):
            load, turn, engine = heapq.heappop(loads)
            shares[engine].append(i)
            heapq.heappush(loads, (load + lengths[i], turn, engine))
        return {engine: sorted(share) for engine, share in shares.items() if share}
