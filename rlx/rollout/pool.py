"""The pool of engines: started beside the trainers, and asked for completions by every rank.

Engines belong to whoever starts the run, not to rank 0, so they outlive a restart of the workers.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import state
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.rollout.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine, Output, Request
from rlx.rollout.routes import Whereabouts
from rlx.types import Completion, Prompt, Sampling

HUNG = "did not answer in time"
PATIENCE_S = 1.0
"""in which an engine that is up says so"""


class RolloutError(RuntimeError):
    """Completions could not be drawn; the text names the engine."""


class PromptRefusedError(RolloutError, ValueError):
    """An engine refuses a prompt, and would refuse it again."""


class EngineLostError(RolloutError):
    """An engine died, failed or did not answer: it cannot be asked again until it holds the weights again."""


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
    actor = ray.remote(Engine)
    return [actor.options(scheduling_strategy=place, **common).remote(model, options, adapter) for place in places]


def engine_options(
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    on_gpu: bool,
    kv_cache_mib: int,
    gpu_memory: float,
    eager: bool,
    tensor_parallel: int = 1,
    trust_remote_code: bool = False,
    lora_rank: int = 0,
) -> dict[str, Any]:
    """vLLM engine arguments for a run. On CPU: blocks short enough for the prefix cache to hit, and always eager.

    With `tensor_parallel` the model is split over as many processes on one node. With `lora_rank` the engine takes
    adapters of at most that rank.
    """
    common: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "trust_remote_code": trust_remote_code,
    }
    if tensor_parallel > 1:  # Ray's executor would want a placement group of its own
        common |= {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "mp"}
    if lora_rank:
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
        common |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in ranks if r >= lora_rank)}
    if on_gpu:
        return common | {"gpu_memory_utilization": gpu_memory, "enforce_eager": eager}
    # A prompt cut in two cannot be sampled with a seed on CPU (vLLM rewinds a generator offset that only GPUs have).
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
    memory = {"kv_cache_memory_bytes": kv_cache_mib << 20, "block_size": 32}
    return common | whole_prompts | memory | {"enforce_eager": True}


@dataclass
class Rollouts:
    """One rank's way to the engines.

    An engine that has failed gets no prompts until it holds the weights again; Ray meanwhile replaces its process.
    """

    engines: Sequence[Any]
    seed: int
    rank: int = 0
    timeout_s: float = 600.0
    silence_s: float = 120.0  # longest that an engine's process may be there and say nothing
    lost: dict[int, str] = field(default_factory=dict)  # engines that failed, and their last words
    there: dict[int, Whereabouts] = field(default_factory=dict, init=False)  # engines that were present last
    _silent: dict[int, float] = field(default_factory=dict, init=False)  # engines that do not answer, and since when

    def draw(
        self, prompts: Sequence[Prompt], sampling: Sampling, samples: int, version: int
    ) -> list[list[Completion] | None]:
        """`samples` completions of each prompt, drawn with the weights of `version`; None where no engine was left.

        The samples of a prompt go to one engine, which then computes its prefix once; prompts go to the least loaded.
        What is drawn depends on (run seed, version, prompt, sample), not on which engine draws it: when one fails, the
        others draw the same in its place.

        Raises:
            PromptRefusedError: an engine refused a prompt.
        """
        drawn: list[list[Completion] | None] = [None] * len(prompts)
        waiting = list(range(len(prompts)))
        calls: dict[Any, tuple[int, list[int], float]] = {}  # of each call: engine, prompts, when it is too late
        while True:
            live = [index for index in range(len(self.engines)) if index not in self.lost]
            if waiting and live:
                calls |= self._asked([prompts[i] for i in waiting], waiting, live, sampling, samples, version)
                waiting = []
            if not calls:
                return drawn
            for share, outputs in self._answered(calls):
                if outputs is None:
                    waiting += share
                    continue
                for place, i in enumerate(share):
                    group = outputs[place * samples : (place + 1) * samples]
                    drawn[i] = [_completion(prompts[i], k, output, version) for k, output in enumerate(group)]

    def present(self, patience_s: float) -> dict[int, Any]:
        """The engines that are up, by number: the others are lost. Those that are starting are waited for: until
        `patience_s`, and if there is none by then, until `timeout_s`."""
        calls = [engine.is_up.remote() for engine in self.engines]
        up = ray.wait(calls, num_returns=len(calls), timeout=patience_s)[0]
        self.there = {}
        up = up or ray.wait(calls, num_returns=1, timeout=self.timeout_s)[0]
        for index, call in enumerate(calls):
            if words := _last_words(call, index) if call in up else f"engine {index} is gone":
                self.lose(index, words)
                self._end_if_hung(index)
            else:
                self.there[index] = ray.get(call)
                self.lost.pop(index, None)
                self._silent.pop(index, None)
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

    def _answered(
        self, calls: dict[Any, tuple[int, list[int], float]]
    ) -> Iterator[tuple[list[int], list[Output] | None]]:
        """Waits for one of the calls at least and takes out those that are over: prompts and what was drawn; None if
        the engine is lost."""
        latest = min(deadline for _, _, deadline in calls.values())
        ray.wait(list(calls), timeout=max(0.0, latest - time.monotonic()))
        for call in [call for call, (_, _, deadline) in calls.items() if _is_over(call, deadline)]:
            index, share, deadline = calls.pop(call)
            try:
                yield share, answer(call, index, deadline)
            except EngineLostError as error:
                self.lose(index, str(error))
                yield share, None

    def _asked(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        live: Sequence[int],
        sampling: Sampling,
        samples: int,
        version: int,
    ) -> dict[Any, tuple[int, list[int], float]]:
        """The calls that ask the live engines for completions of these prompts."""
        deadline = time.monotonic() + self.timeout_s
        calls = {}
        for index, share in self._routed(prompts, live, samples * sampling.max_tokens).items():
            requests = self._requests([prompts[i] for i in share], samples, version)
            call = self.engines[index].generate.remote(requests, sampling, version)
            calls[call] = (index, [places[i] for i in share], deadline)
        return calls

    def _routed(self, prompts: Sequence[Prompt], live: Sequence[int], response_tokens: int) -> dict[int, list[int]]:
        """Indices of prompts for each live engine; every rank starts with another engine."""
        count = len(live)
        loads = [(0, (turn - self.rank) % count, index) for turn, index in enumerate(live)]
        heapq.heapify(loads)
        shares: dict[int, list[int]] = {index: [] for index in live}
        for i, prompt in enumerate(prompts):
            load, turn, index = heapq.heappop(loads)
            shares[index].append(i)
            heapq.heappush(loads, (load + len(prompt.token_ids) + response_tokens, turn, index))
        return {index: share for index, share in shares.items() if share}

    def _requests(self, prompts: Sequence[Prompt], samples: int, version: int) -> list[Request]:
        return [
            Request(prompt.token_ids, request_seed(self.seed, version, prompt.id, sample))
            for prompt in prompts
            for sample in range(samples)
        ]


def _last_words(call: Any, engine: int) -> str:
    """Why a call that is over failed; empty if it did not."""
    try:
        answer(call, engine, math.inf)
    except EngineLostError as error:
        return str(error)
    return ""


def is_alive(engine: Any) -> bool:
    """Whether Ray takes an engine for running, rather than for dead or starting again."""
    return bool(state.actors(engine._actor_id.hex()).get("State") == "ALIVE")


def is_dead(engine: Any) -> bool:
    """Whether an engine is gone for good: Ray does not replace one that could not start."""
    return bool(state.actors(engine._actor_id.hex()).get("State") == "DEAD")


def _is_over(call: Any, deadline: float) -> bool:
    return bool(ray.wait([call], timeout=0)[0]) or time.monotonic() >= deadline


def answer(call: Any, engine: int, deadline: float) -> Any:
    """What an engine answers to a call until `deadline`, a time of `time.monotonic()`.

    Raises:
        EngineLostError: it died, failed or did not answer in time; the text names it and has its last words.
        PromptRefusedError: it refused what it was asked.
    """
    try:
        return ray.get(call, timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise EngineLostError(f"engine {engine} {HUNG}") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise PromptRefusedError(f"engine {engine} refused a prompt: {error.cause}") from None
        raise EngineLostError(f"engine {engine} failed: {error.cause}") from None
    except ray.exceptions.RayError as error:
        # Of an engine that did not start, Ray gives a whole traceback, the cause in its last line.
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of one that was killed there are none but Ray's own, about its connection.
        said = (
            "its process ended" if "unavailable" in words[0] else f"{words[0]} {words[-1] if words[1:] else ''}".strip()
        )
        raise EngineLostError(f"engine {engine} died: {said}") from None


def request_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """The sampling seed of one completion: the same in every run that asks for the same thing."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # vLLM takes signed 64-bit seeds


def _completion(prompt: Prompt, sample: int, output: Output, version: int) -> Completion:
    return Completion(prompt, sample, output.token_ids, output.logprobs, output.finished, version)
