"""The pool of engines: started beside the trainers, and asked for completions by every rank.

Engines belong to whoever starts the run, not to rank 0, so they outlive a restart of the workers.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.actors import HUNG, EngineLostError, get_result, is_alive, is_done
from rlx.rollout.base import Output, Request
from rlx.rollout.vllm_engine import CPU_ENVIRONMENT, ENVIRONMENT, VLLMEngine
from rlx.rollout.weight_sync.topology import EngineLocation
from rlx.types import Completion, Prompt, Sampling

PATIENCE_S = 1.0
"""in which an engine that is up says so"""


def start_engines(
    model: str,
    options: dict[str, Any],
    resources: dict[str, float],
    group: PlacementGroup,
    bundles: Sequence[int],
    adapter: dict[str, Any] | None = None,
) -> list[Any]:
    """An engine actor in each of these bundles of a placement group; does not wait for them.

    Args:
        model: Hugging Face folder or name.
        options: vLLM engine arguments.
        resources: what each engine takes of its bundle, as Ray names it.
        adapter: peft's description of the adapters that are sent; None: whole models are.
    """
    on_gpu = resources.get("GPU", 0) > 0
    common = dict(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        max_concurrency=1000,
        max_restarts=-1,  # it comes back with the model's own weights, and works again after the next push
        runtime_env={"env_vars": ENVIRONMENT if on_gpu else ENVIRONMENT | CPU_ENVIRONMENT},
    )
    places = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]
    actor = ray.remote(VLLMEngine)
    return [actor.options(scheduling_strategy=place, **common).remote(model, options, adapter) for place in places]


@dataclass
class PendingRollout:
    """Completions that were asked for: those that are there, and the calls that bring the others."""

    prompts: Sequence[Prompt]
    samplings: Sequence[Sampling]  # of each prompt one completion by each of these
    step: int  # that it was begun in
    groups: list[list[Completion] | None]  # of each prompt
    waiting: list[int]  # prompts that no engine has been asked for, or whose engine was lost
    calls: dict[Any, EngineCall] = field(default_factory=dict)
    seconds: float = 0.0  # that the engines took, those of the slowest

    @property
    def is_whole(self) -> bool:
        return None not in self.groups

    @property
    def completions(self) -> list[Completion]:
        """Those of each prompt together, in the order of the prompts."""
        return [completion for group in self.groups if group for completion in group]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What one engine was asked for."""

    engine: int
    prompts: list[int]  # indices of the draw's
    version: int  # of its weights then
    deadline: float  # of `time.monotonic()`
    tokens: int  # at most, prompts included: the load it puts on the engine


@dataclass
class EnginePool:
    """One rank's way to the engines.

    An engine that is lost gets no prompts until it holds the weights again; Ray meanwhile replaces its process.
    """

    engines: Sequence[Any]
    seed: int
    rank: int = 0
    timeout_s: float = 600.0
    silence_s: float = 120.0  # longest that an engine's process may be there and say nothing
    lost: dict[int, str] = field(default_factory=dict)  # engines that failed, and their last words
    there: dict[int, EngineLocation] = field(default_factory=dict, init=False)  # engines that were present last
    _silent: dict[int, float] = field(default_factory=dict, init=False)  # engines that do not answer, and since when
    _loads: Counter[int] = field(default_factory=Counter, init=False)  # tokens that each engine was asked for

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """Asks for a completion of each prompt by each sampling, with the weights of `version`, and does not wait.

        The completions of a prompt go to one engine, which then computes its prefix once; prompts go to the least
        loaded. What is drawn depends on (run seed, version, prompt, sample), not on which engine draws it: when one
        fails, the others draw the same in its place, unless weights have changed meanwhile.
        """
        draw = PendingRollout(prompts, samplings, version, [None] * len(prompts), list(range(len(prompts))))
        self._ask(draw, version)
        return draw

    def finish(self, draw: PendingRollout, version: int) -> None:
        """Waits for all that was asked for; what no engine was left for is missing.

        Args:
            version: of the weights that engines hold now: what an engine that failed was asked for is drawn with them.

        Raises:
            PromptRefusedError: an engine refused a prompt.
        """
        self._ask(draw, version)
        # Patience begins here: what was asked for in advance may have waited for what was asked for before.
        deadline = time.monotonic() + self.timeout_s
        draw.calls = {pending: replace(call, deadline=deadline) for pending, call in draw.calls.items()}
        while draw.calls:
            for call, outputs in self._answered(draw, version):
                if outputs is None:
                    draw.waiting += call.prompts
                    continue
                count = len(draw.samplings)
                for place, i in enumerate(call.prompts):
                    group = outputs[place * count : (place + 1) * count]
                    draw.groups[i] = [
                        _completion(draw.prompts[i], k, output, call.version) for k, output in enumerate(group)
                    ]
            self._ask(draw, version)

    def present(self, patience_s: float) -> dict[int, Any]:
        """The engines that are up, by number: the others are lost. Those that are starting are waited for: until
        `patience_s`, and if there is none by then, until `timeout_s`."""
        calls = [engine.is_up.remote() for engine in self.engines]
        up = ray.wait(calls, num_returns=len(calls), timeout=patience_s)[0]
        self.there = {}
        up = up or ray.wait(calls, num_returns=1, timeout=self.timeout_s)[0]
        for index, call in enumerate(calls):
            try:
                if call not in up:
                    raise EngineLostError(f"engine {index} is gone")
                self.there[index] = get_result(call, index, math.inf)
                self.lost.pop(index, None)
                self._silent.pop(index, None)
            except EngineLostError as error:
                self.lose(index, str(error))
                self._end_if_hung(index)
        return {index: engine for index, engine in enumerate(self.engines) if index not in self.lost}

    def _end_if_hung(self, index: int) -> None:
        """Has Ray replace an engine whose process is there, but has said nothing for too long."""
        since = self._silent.setdefault(index, time.monotonic())
        if time.monotonic() - since > self.silence_s and is_alive(self.engines[index]):
            ray.kill(self.engines[index], no_restart=False)
            del self._silent[index]

    def lose(self, index: int, words: str) -> None:
        """Takes an engine out of use, and has Ray replace it if it is hung."""
        if index not in self.lost:
            self.lost[index] = words
            if words.endswith(HUNG):
                ray.kill(self.engines[index], no_restart=False)

    def _answered(self, draw: PendingRollout, version: int) -> Iterator[tuple[EngineCall, list[Output] | None]]:
        """Waits for one of the calls at least and takes out those that are over, with what was drawn; None if the call
        failed. The engine is lost then, unless it has been sent weights since and did not hang: it may have been
        replaced, and what it is asked for next tells."""
        first = min(call.deadline for call in draw.calls.values())
        ray.wait(list(draw.calls), timeout=max(0.0, first - time.monotonic()))
        for pending in [pending for pending, call in draw.calls.items() if is_done(pending, call.deadline)]:
            call = draw.calls.pop(pending)
            self._loads[call.engine] -= call.tokens
            try:
                outputs, seconds = get_result(pending, call.engine, call.deadline)
                draw.seconds = max(draw.seconds, seconds)
                yield call, outputs
            except EngineLostError as error:
                if call.version == version or str(error).endswith(HUNG):
                    self.lose(call.engine, str(error))
                yield call, None

    def _ask(self, draw: PendingRollout, version: int) -> None:
        """Asks the live engines for what is waiting; if there are none, it goes on waiting."""
        live = [index for index in range(len(self.engines)) if index not in self.lost]
        if not draw.waiting or not live:
            return
        deadline = time.monotonic() + self.timeout_s
        lengths = {
            i: sum(len(draw.prompts[i].token_ids) + sampling.max_tokens for sampling in draw.samplings)
            for i in draw.waiting
        }
        for index, share in self._routed(lengths, live).items():
            requests = [request for i in share for request in self._requests(draw, draw.prompts[i])]
            tokens = sum(lengths[i] for i in share)
            self._loads[index] += tokens
            pending = self.engines[index].generate.remote(requests, version)
            draw.calls[pending] = EngineCall(index, share, version, deadline, tokens)
        draw.waiting = []

    def _routed(self, lengths: Mapping[int, int], live: Sequence[int]) -> dict[int, list[int]]:
        """Which prompts go to which live engine, the longest first to the least loaded; every rank starts with another
        engine."""
        count = len(live)
        loads = [(self._loads[index], (turn - self.rank) % count, index) for turn, index in enumerate(live)]
        heapq.heapify(loads)
        shares: dict[int, list[int]] = {index: [] for index in live}
        for i in sorted(lengths, key=lambda i: -lengths[i]):
            load, turn, index = heapq.heappop(loads)
            shares[index].append(i)
            heapq.heappush(loads, (load + lengths[i], turn, index))
        return {index: sorted(share) for index, share in shares.items() if share}

    def _requests(self, draw: PendingRollout, prompt: Prompt) -> list[Request]:
        return [
            Request(prompt.token_ids, request_seed(self.seed, draw.step, prompt.id, k), sampling)
            for k, sampling in enumerate(draw.samplings)
        ]


def request_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """The sampling seed of one completion: the same in every run that asks for the same thing."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # vLLM takes signed 64-bit seeds


def _completion(prompt: Prompt, sample: int, output: Output, version: int) -> Completion:
    return Completion(prompt, sample, output.token_ids, output.logprobs, output.finished, version)
