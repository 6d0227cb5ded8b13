"""What generation is for the rest of rlx: the records of a request, an engine, and a group of engines.

`Engine` is one inference engine, as its actor offers it. `Engines` is all of them together, as training sees them.
`EngineGroup` implements `Engines` over Ray actors, `FakeEngines` implements it in a plain process. Left out:
what an engine does with a request. This module imports neither ray nor an inference library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

from rlx.types import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from rlx.rollout.weight_sync.base import EngineLocation, Incoming
    from rlx.rollout.weight_sync.buckets import Bucket

T = TypeVar("T")
ActorResult: TypeAlias = T | Awaitable[T]
"""what a method of an actor returns: a value, or a coroutine where the method is `async`"""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that an engine is asked for."""

    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Output:
    """One completion of an engine."""

    token_ids: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T], see `Completion.logprobs`
    finished: bool  # ended with a stop token or string


class Engine(Protocol):
    """The methods of an engine's actor; its weights have a version, the training step that they belong to.

    An engine takes weights in one of two ways. Either the caller sends them: `start_update`, then `receive` for each
    bucket, then `finish_update`. Or the engine's worker processes fetch them: `update`.
    """

    def probe(self, run: str) -> ActorResult[EngineLocation]:
        """Returns where the engine computes, once it is up; its metrics are those of this run from then on."""
        ...

    def lives(self) -> ActorResult[None]:
        """Does not return while the process runs; the call fails when it ends. A sync actor may return at once."""
        ...

    def steps(self) -> ActorResult[int]:
        """Returns how many steps of generation the engine has made since its process began: more while it works."""
        ...

    def generate(self, requests: list[Request], version: int) -> ActorResult[tuple[list[Output], float]]:
        """Returns the completions in the order of the requests, and the seconds that they took.

        Raises:
            WeightSyncError: the engine does not hold the weights of `version`.
            ValueError: the engine refuses a request, and would refuse it again.
        """
        ...

    def start_update(self, update: str, tensors: int, timeout_s: float, midway: bool = False) -> ActorResult[None]:
        """Opens an update of this number of tensors, under a name that no other update has; ends an earlier one.

        Args:
            timeout_s: the longest wait for each bucket.
            midway: running requests continue with the new weights; otherwise they finish first, with the old ones.
        """
        ...

    def receive(self, update: str, bucket: Bucket) -> ActorResult[None]:
        """Takes one bucket of an update; returns when the engine begins to load it."""
        ...

    def finish_update(self, update: str, version: int) -> ActorResult[None]:
        """Waits until all weights of an update are loaded; from then on the engine holds `version`.

        Raises:
            WeightSyncError: the weights did not arrive as they were sent.
        """
        ...

    def update(self, incoming: Incoming, version: int) -> ActorResult[str | None]:
        """Receives a whole update in the engine's workers; returns why it was interrupted, None if it was not.

        Raises:
            WeightSyncError: the weights did not arrive as they were sent.
        """
        ...

    def sleep(self) -> ActorResult[None]:
        """Finishes the running requests and frees the GPU memory until the next weight update."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call of `Engine.generate` that has not returned yet."""

    engine: int
    prompts: list[int]  # indices into the prompts of the pending rollout
    version: int  # of the engine's weights at the time of the call
    deadline: float  # of `time.monotonic()`; later if the engine has worked until then
    tokens: int  # maximum number of tokens that it reads and generates: its load on the engine
    steps: int | None = None  # of the engine when the deadline was last put off


@dataclass
class PendingRollout:
    """Completions that engines have been asked for: the finished ones, and the calls that will return the others."""

    prompts: Sequence[Prompt]
    samplings: Sequence[Sampling]  # each prompt gets one completion by each
    step: int  # at which it was begun
    groups: list[list[Completion] | None]  # the completions of each prompt; None: not finished
    unassigned: list[int]  # prompts that were not sent to an engine yet, or whose engine was lost
    calls: dict[Any, EngineCall] = field(default_factory=dict)  # by the reference of the call
    seconds: float = 0.0  # of the slowest engine call

    @classmethod
    def of(cls, prompts: Sequence[Prompt], samplings: Sequence[Sampling], step: int) -> Self:
        """A rollout of which no prompt was sent to an engine yet."""
        return cls(prompts, samplings, step, [None] * len(prompts), list(range(len(prompts))))

    @property
    def is_complete(self) -> bool:
        return None not in self.groups

    @property
    def completions(self) -> list[Completion]:
        """The finished completions, those of each prompt together, in the order of the prompts."""
        return [completion for group in self.groups if group for completion in group]

    def requests(self, index: int, run_seed: int) -> list[Request]:
        """The requests for one prompt, by its index: one for each sampling."""
        prompt = self.prompts[index]
        return [
            Request(prompt.token_ids, request_seed(run_seed, self.step, prompt.id, sample), sampling)
            for sample, sampling in enumerate(self.samplings)
        ]

    def add(self, index: int, outputs: Sequence[Output], version: int) -> None:
        """Keeps the completions of one prompt, in the order of its requests."""
        prompt = self.prompts[index]
        self.groups[index] = [
            Completion(prompt, sample, output.token_ids, output.logprobs, output.finished, version)
            for sample, output in enumerate(outputs)
        ]


class Engines(Protocol):
    """All engines together, as training uses them. Every rank has one and makes the same calls in the same order."""

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        """Requests a completion of each of this replica's prompts by each sampling; does not wait.

        Args:
            version: of the weights that the engines hold.
        """
        ...

    def finish(self, pending: PendingRollout, version: int) -> list[Completion]:
        """Waits for all completions of a rollout; returns those of each prompt together, in order."""
        ...

    def wait(self, pending: PendingRollout, version: int) -> bool:
        """Waits until all completions have come or no engine is left; returns whether every rank has all of its own."""
        ...

    def push(self, version: int, *, starting: bool = False, midway: bool = False) -> None:
        """Sends the policy's weights to the engines; returns on every rank when they have them.

        Args:
            version: the version of these weights.
            starting: engines may still be starting: wait longer for them.
            midway: running requests continue with the new weights; otherwise they finish first, with the old ones.
        """
        ...

    def sleep(self) -> None:
        """Makes the engines free their GPU memory until the next push."""
        ...

    def close(self) -> None:
        """Frees what is kept between pushes."""
        ...


def request_seed(run_seed: int, step: int, prompt: int, sample: int, turn: int = 0) -> int:
    """The sampling seed of one turn: the same in every run that requests it. Most completions are one turn."""
    name = f"{run_seed}/{step}/{prompt}/{sample}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # vLLM takes signed 64-bit seeds
