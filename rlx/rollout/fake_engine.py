"""Engines without a model, for tests and for training in a plain process: no Ray, no vLLM, no GPU.

`FakeEngine` has the methods of an engine's actor; `ray.remote(FakeEngine).remote()` is an actor like any other engine.
`FakeEngines` has the interface that training uses, in this process. Completions depend on (seed, prompt) alone; a
test can give a function that answers each request, and so knows every token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from rlx.rollout.base import Output, PendingRollout, Request
from rlx.rollout.weight_sync.base import DeviceLocation, EngineLocation
from rlx.rollout.weight_sync.buckets import Bucket, unpack
from rlx.types import Completion, Prompt, Sampling, WeightSyncError

Answer = Callable[[Request], Output]
"""completes one request"""


def uniform_output(request: Request, vocab_size: int = 32) -> Output:
    """A completion whose tokens are sampled uniformly from `vocab_size` ids, each with log-probability -ln(vocab_size).

    It ends with the first stop token, or at `max_tokens`. At temperature 0 it depends on the prompt alone.
    """
    seed = request.seed if request.sampling.temperature > 0 else 0
    draws = random.Random(repr((seed, request.prompt)))
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens.append(draws.randrange(vocab_size))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    finished = tokens[-1] in request.sampling.stop_token_ids
    logprobs = (-math.log(vocab_size),) * len(tokens) if request.sampling.logprobs else ()
    return Output(tuple(tokens), logprobs, finished)


class FakeEngine:
    """An engine that answers at once, and keeps the weights that it is sent in `weights`."""

    def __init__(self, answer: Answer = uniform_output) -> None:
        self.answer = answer
        self.version: int | None = None  # None: it holds no complete weights
        self.weights: dict[str, Any] = {}  # tensors by name
        self.is_asleep = False
        self._update = ""
        self._missing = 0  # tensors of the update that have not arrived

    def probe(self, run: str) -> EngineLocation:
        """A location that no trainer shares, so that weights arrive by `receive`."""
        return EngineLocation("fake", (DeviceLocation("fake", ""),))

    def lives(self) -> None:
        """Returns at once: a sync actor could do nothing else meanwhile."""

    def generate(self, requests: list[Request], version: int) -> tuple[list[Output], float]:
        """See `Engine.generate`; takes 0 seconds.

        Raises:
            WeightSyncError: the engine does not hold the weights of `version`.
        """
        if version != self.version:
            raise WeightSyncError(f"asked for weight version {version} but holds version {self.version}")
        return [self.answer(request) for request in requests], 0.0

    def start_update(self, update: str, tensors: int, timeout_s: float, keep: bool = False) -> None:
        """See `Engine.start_update`."""
        self.version, self._update, self._missing, self.weights = None, update, tensors, {}

    def receive(self, update: str, bucket: Bucket) -> None:
        """See `Engine.receive`; the tensors are copied.

        Raises:
            WeightSyncError: the bucket is not what was sent.
        """
        if update != self._update:
            return
        for name, tensor in unpack(bucket):
            self.weights[name] = tensor.clone()
            self._missing -= 1

    def finish_update(self, update: str, version: int) -> None:
        """See `Engine.finish_update`.

        Raises:
            WeightSyncError: it is not the newest update, or tensors are missing.
        """
        if update != self._update:
            raise WeightSyncError("another weight update was started")
        if self._missing:
            raise WeightSyncError(f"{self._missing} tensors missing")
        self.version, self.is_asleep = version, False

    def update(self, incoming: Any, version: int) -> None:
        """Refuses: a fake engine has no workers that could fetch weights.

        Raises:
            WeightSyncError: always.
        """
        raise WeightSyncError("a fake engine takes weights through the object store only")

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self.version, self.is_asleep = None, True


class FakeEngines:
    """`Engines` in this process. `finish` and `wait` generate the completions, with the version of their `begin`."""

    def __init__(self, answer: Answer = uniform_output, seed: int = 0) -> None:
        """Args: answer: completes one request; seed: the run's, from which each request's seed follows."""
        self.answer, self.seed = answer, seed
        self.pushed: list[int] = []  # the version of each push
        self.is_asleep = self.is_closed = False

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """See `Engines.begin`.

        Raises:
            WeightSyncError: `version` is not what was pushed last.
        """
        self._check(version)
        return PendingRollout.of(prompts, samplings, version)

    def finish(self, pending: PendingRollout, version: int) -> list[Completion]:
        """See `Engines.finish`.

        Raises:
            WeightSyncError: `version` is not what was pushed last.
        """
        self._check(version)
        for index in pending.unassigned:
            outputs = [self.answer(request) for request in pending.requests(index, self.seed)]
            pending.add(index, outputs, pending.step)
        pending.unassigned = []
        return pending.completions

    def wait(self, pending: PendingRollout, version: int) -> bool:
        """See `Engines.wait`."""
        self.finish(pending, version)
        return True

    def push(self, version: int, *, starting: bool = False, keep: bool = False) -> None:
        """Notes the version; no weights travel."""
        self.pushed.append(version)
        self.is_asleep = False

    def sleep(self) -> None:
        """Notes that the engines sleep; nothing is begun until the next push."""
        self.is_asleep = True

    def close(self) -> None:
        """Notes that the engines are closed."""
        self.is_closed = True

    def _check(self, version: int) -> None:
        newest = self.pushed[-1] if self.pushed and not self.is_asleep else None
        if version != newest:
            raise WeightSyncError(f"asked for weight version {version} but the engines hold version {newest}")
