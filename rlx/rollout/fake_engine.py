"""Engines without a model, for tests and for training in a plain process: no Ray, no vLLM, no GPU.

`FakeEngine` has the methods of an engine's actor; `ray.remote(FakeEngine).remote()` is an actor like any other engine.
`FakeEngines` has the interface that training uses, in this process. Completions depend on (seed, prompt) alone; a
test can give a function that answers each request, and so knows every token. Left out: sampling options that
cut or penalize tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from rlx.rollout.base import Output, PendingRollout, Request
from rlx.rollout.episodes.episode import GeneratedTurn
from rlx.rollout.episodes.player import Draw, Player
from rlx.rollout.weight_sync.base import DeviceLocation, EngineLocation
from rlx.rollout.weight_sync.buckets import Bucket, unpack
from rlx.types import Completion, Prompt, Sampling, WeightSyncError

Answer = Callable[[Request], Output]
"""the completion of one request"""


Decode = Callable[[Sequence[int]], str]
"""the text of tokens"""


def uniform_output(request: Request, vocab_size: int = 32, decode: Decode | None = None) -> Output:
    """A completion whose tokens are sampled uniformly from `vocab_size` ids, each with log-probability -ln(vocab_size).

    It ends with the first stop token or the token that completes a stop string, or at `max_tokens`. No stop token is
    among the first `min_tokens`. At temperature 0 it depends on the prompt alone. Of the other sampling options, those
    that cut or penalize tokens are ignored.

    Raises:
        ValueError: there are stop strings, and no `decode`.
    """
    sampling = request.sampling
    seed = request.seed if sampling.temperature > 0 else 0
    draws = random.Random(repr((seed, request.prompt)))
    stops = [token for token in sampling.stop_token_ids if token < vocab_size]
    tokens: list[int] = []
    logprobs: list[float] = []
    finished = False
    while len(tokens) < sampling.max_tokens and not finished:
        excluded = stops if len(tokens) < sampling.min_tokens else []
        tokens.append(draws.randrange(vocab_size))
        while tokens[-1] in excluded:
            tokens[-1] = draws.randrange(vocab_size)
        logprobs.append(-math.log(vocab_size - len(excluded)))
        finished = tokens[-1] in stops or completes_stop(tokens, sampling, decode)
    return Output(tuple(tokens), tuple(logprobs) if sampling.logprobs else (), finished)


def completes_stop(tokens: Sequence[int], sampling: Sampling, decode: Decode | None) -> bool:
    """Whether the last of a completion's tokens completes a stop string; none is looked for in the first `min_tokens`.

    Raises:
        ValueError: there are stop strings, and no `decode`.
    """
    if not sampling.stop or len(tokens) <= sampling.min_tokens:
        return False
    if decode is None:
        raise ValueError("stop strings need the argument `decode`, which makes text of tokens")
    text, before = decode(tokens), len(decode(tokens[:-1]))
    return any(stop in text[max(0, before - len(stop) + 1) :] for stop in sampling.stop)


class FakeEngine:
    """An engine that answers at once, and keeps the weights that it is sent in `weights`."""

    def __init__(self, answer: Answer = uniform_output) -> None:
        self.answer = answer
        self.version: int | None = None  # None: it holds no complete weights
        self.weights: dict[str, Any] = {}  # tensors by name
        self.is_asleep = False
        self._calls = 0  # of `generate`
        self._update = ""
        self._missing = 0  # tensors of the update that have not arrived

    def probe(self, run: str) -> EngineLocation:
        """A location that no trainer shares, so that weights arrive by `receive`."""
        return EngineLocation("fake", (DeviceLocation("fake", ""),))

    def lives(self) -> None:
        """Returns at once: a sync actor could do nothing else meanwhile."""

    def steps(self) -> int:
        """How many calls it has answered."""
        return self._calls

    def generate(self, requests: list[Request], version: int) -> tuple[list[Output], float]:
        """See `Engine.generate`; takes 0 seconds.

        Raises:
            WeightSyncError: the engine does not hold the weights of `version`.
        """
        if version != self.version:
            raise WeightSyncError(f"asked for weight version {version} but holds version {self.version}")
        self._calls += 1
        return [self.answer(request) for request in requests], 0.0

    def start_update(self, update: str, tensors: int, timeout_s: float, midway: bool = False) -> None:
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

    def __init__(
        self, answer: Answer = uniform_output, seed: int = 0, play: Callable[[Draw], Player] | None = None
    ) -> None:
        """
        Args:
            answer: completes one request.
            seed: the run's, from which each request's seed follows.
            play: makes what plays episodes with these engines; None: completions are of one turn.
        """
        self.answer, self.seed = answer, seed
        self.player = play(self._draw) if play else None
        self.pushed: list[int] = []  # the version of each push
        self.is_asleep = self.is_closed = False

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """See `Engines.begin`.

        Raises:
            WeightSyncError: `version` is not what was pushed last.
        """
        self._check(version)
        if self.player:
            return self.player.begin(prompts, samplings, version)
        return PendingRollout.of(prompts, samplings, version)

    def finish(self, pending: PendingRollout, version: int) -> list[Completion]:
        """See `Engines.finish`.

        Raises:
            WeightSyncError: `version` is not what was pushed last.
        """
        self._check(version)
        if self.player:
            self.player.finish(pending)
        for index in pending.unassigned:
            outputs = [self.answer(request) for request in pending.requests(index, self.seed)]
            pending.add(index, outputs, pending.step)
        pending.unassigned = []
        return pending.completions

    def wait(self, pending: PendingRollout, version: int) -> bool:
        """See `Engines.wait`."""
        self.finish(pending, version)
        return True

    def push(self, version: int, *, starting: bool = False, midway: bool = False) -> None:
        """Notes the version; no weights travel."""
        self.pushed.append(version)
        self.is_asleep = False

    def sleep(self) -> None:
        """Notes that the engines sleep; nothing is begun until the next push."""
        self.is_asleep = True

    def close(self) -> None:
        """Notes that the engines are closed."""
        self.is_closed = True

    async def _draw(self, request: Request, engine: int | None) -> GeneratedTurn:
        """A turn of an episode, by the weights that were pushed last."""
        return GeneratedTurn(self.answer(request), self.pushed[-1], 0, 0.0)

    def _check(self, version: int) -> None:
        newest = self.pushed[-1] if self.pushed and not self.is_asleep else None
        if version != newest:
            raise WeightSyncError(f"asked for weight version {version} but the engines hold version {newest}")
