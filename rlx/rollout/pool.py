"""The pool of engines: started beside the trainers, and asked for completions by every rank.

Engines belong to whoever starts the run, not to rank 0, so they outlive a restart of the workers.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.rollout.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine, Output, Request
from rlx.types import Completion, Prompt, Sampling


class RolloutError(RuntimeError):
    """An engine failed or did not answer; the text names it."""


def start_engines(
    count: int,
    model: str,
    options: dict[str, Any],
    resources: dict[str, float],
    group: PlacementGroup,
    first_bundle: int,
    adapter: dict[str, Any] | None = None,
) -> list[Any]:
    """Engine actors in the bundles of a placement group from `first_bundle` on; does not wait for them.

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
        max_restarts=-1,  # it comes back with the model's own weights; a restarted worker group pushes its own again
        runtime_env={"env_vars": ENVIRONMENT if on_gpu else ENVIRONMENT | CPU_ENVIRONMENT},
    )
    places = [PlacementGroupSchedulingStrategy(group, first_bundle + index) for index in range(count)]
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
    trust_remote_code: bool = False,
    lora_rank: int = 0,
) -> dict[str, Any]:
    """vLLM engine arguments for a run. On CPU: blocks short enough for the prefix cache to hit, and always eager.

    With `lora_rank` the engine takes adapters of at most that rank.
    """
    common: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "trust_remote_code": trust_remote_code,
    }
    if lora_rank:
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
        common |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in ranks if r >= lora_rank)}
    if on_gpu:
        return common | {"gpu_memory_utilization": gpu_memory, "enforce_eager": eager}
    # A prompt cut in two cannot be sampled with a seed on CPU (vLLM rewinds a generator offset that only GPUs have).
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
    memory = {"kv_cache_memory_bytes": kv_cache_mib << 20, "block_size": 32}
    return common | whole_prompts | memory | {"enforce_eager": True}


@dataclass(frozen=True)
class Rollouts:
    """One rank's way to the engines."""

    engines: Sequence[Any]
    seed: int
    rank: int = 0
    timeout_s: float = 600.0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int, version: int) -> list[Completion]:
        """`samples` completions of each prompt, in order, drawn with the weights of `version`.

        The samples of a prompt go to one engine, which then computes its prefix once; prompts go to the least loaded.
        What is drawn depends on (run seed, version, prompt, sample), not on which engine draws it.

        Raises:
            RolloutError: an engine died, failed or did not answer in time.
        """
        shares = self._routed(prompts, samples * sampling.max_tokens)
        calls = [
            engine.generate.remote(self._requests([prompts[i] for i in share], samples, version), sampling, version)
            for engine, share in zip(self.engines, shares, strict=True)
        ]
        completions: list[list[Completion]] = [[] for _ in prompts]
        deadline = time.monotonic() + self.timeout_s
        for index, (call, share) in enumerate(zip(calls, shares, strict=True)):
            outputs = answer(call, index, deadline)
            for place, i in enumerate(share):
                drawn = outputs[place * samples : (place + 1) * samples]
                completions[i] = [_completion(prompts[i], k, output, version) for k, output in enumerate(drawn)]
        return [completion for group in completions for completion in group]

    def _routed(self, prompts: Sequence[Prompt], response_tokens: int) -> list[list[int]]:
        """Indices of prompts for each engine; every rank starts with another engine."""
        count = len(self.engines)
        loads = [(0, (index - self.rank) % count, index) for index in range(count)]
        heapq.heapify(loads)
        shares: list[list[int]] = [[] for _ in range(count)]
        for i, prompt in enumerate(prompts):
            load, turn, index = heapq.heappop(loads)
            shares[index].append(i)
            heapq.heappush(loads, (load + len(prompt.token_ids) + response_tokens, turn, index))
        return shares

    def _requests(self, prompts: Sequence[Prompt], samples: int, version: int) -> list[Request]:
        return [
            Request(prompt.token_ids, request_seed(self.seed, version, prompt.id, sample))
            for prompt in prompts
            for sample in range(samples)
        ]


def answer(call: Any, engine: int, deadline: float) -> Any:
    """What an engine answers to a call until `deadline`, a time of `time.monotonic()`.

    Raises:
        RolloutError: it died, failed or did not answer in time.
    """
    try:
        return ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise RolloutError(f"engine {engine} did not answer in time") from None
    except ray.exceptions.RayTaskError as error:
        raise RolloutError(f"engine {engine} failed: {error.cause}") from None
    except ray.exceptions.RayError as error:
        # Of an engine that did not start, Ray gives a whole traceback, the cause in its last line.
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RolloutError(f"engine {engine} died: {words[0]} {words[-1] if len(words) > 1 else ''}".strip()) from None


def request_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """The sampling seed of one completion: the same in every run that asks for the same thing."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # vLLM takes signed 64-bit seeds


def _completion(prompt: Prompt, sample: int, output: Output, version: int) -> Completion:
    return Completion(prompt, sample, output.token_ids, output.logprobs, output.finished, version)
