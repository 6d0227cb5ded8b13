"""vLLM's scheduler and rlx's side by side, without a model: what test_scheduler.py runs in a process of its own."""

import dataclasses
import os
import random
from collections import Counter
from typing import Any

from rlx.rollout.vllm_engine import CPU_ENVIRONMENT, ENVIRONMENT, build_llm_engine, sampling_params
from rlx.types import Sampling

BLOCK, LENGTH, EOS = 4, 96, 1


def begin() -> None:
    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"})


def settings(model: str, overlapped: bool = False, seqs: int = 8) -> Any:
    """vLLM's config; `overlapped` as on GPUs, which no CPU engine is."""
    from vllm import EngineArgs

    args = EngineArgs(
        model, max_model_len=LENGTH, max_num_seqs=seqs, max_num_batched_tokens=24, block_size=32, enforce_eager=True
    )
    config = args.create_engine_config()
    config.scheduler_config.async_scheduling = overlapped
    config.cache_config.block_size = BLOCK
    return config


def cache(config: Any, blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])


def scheduler(make: Any, config: Any, blocks: int) -> Any:
    from vllm.v1.structured_output import StructuredOutputManager

    return make(
        vllm_config=config,
        kv_cache_config=cache(config, blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


def new_request(name: str, prompt: list[int], params: Any) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(prompt), params.clone(), None, arrival_time=0.0, block_hasher=hasher)


class Side:
    """One scheduler, and all that has come out of it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.steps: list[Any] = []  # whose tokens are under way
        self.ended: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[tuple[float, int]]] = {}
        self.hits: dict[str, int] = {}

    def take(self, step: Any, drawn: Any) -> None:
        results = self.scheduler.update_from_output(step, drawn)
        for output in [output for result in results.values() for output in result.outputs]:
            name, rows = output.request_id, output.new_logprobs
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            if output.prefill_stats:
                self.hits[name] = output.prefill_stats.num_cached_tokens
            if rows:
                assert rows.logprob_token_ids[:, 0].tolist() == list(output.new_token_ids)
                kept = zip(rows.logprobs[:, 0].tolist(), rows.sampled_token_ranks.tolist(), strict=True)
                self.logprobs.setdefault(name, []).extend(kept)
            if output.finish_reason is not None:
                self.ended[name] = (output.finish_reason, output.stop_reason)

    def seen(self) -> dict[str, Any]:
        """Everything that is known about the requests that have ended."""
        return {
            name: (end, self.tokens[name], self.logprobs.get(name), self.hits.get(name))
            for name, end in self.ended.items()
        }


def described(step: Any) -> dict[str, Any]:
    """A step, so that two schedulers' steps can be compared."""
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    new = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in step.scheduled_new_reqs]
    counts = list(step.num_scheduled_tokens.items())
    return (
        fields
        | {"scheduled_new_reqs": new, "num_scheduled_tokens": counts, "preempted_req_ids": None}
        | {"preempted": set(step.preempted_req_ids or ())}
    )


def draw(step: Any, prompts: dict[str, int]) -> Any:
    """The tokens of a step: they depend on the request and the position alone; prompts read in part have none."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names, ends, known = list(step.num_scheduled_tokens), {}, {}
    for each in step.scheduled_new_reqs:
        ends[each.req_id] = each.num_computed_tokens
        known[each.req_id] = len(getattr(each, "prefill_token_ids", None) or each.prompt_token_ids)
    data = step.scheduled_cached_reqs
    for name, computed, outputs in zip(data.req_ids, data.num_computed_tokens, data.num_output_tokens, strict=True):
        ends[name], known[name] = computed, prompts[name] + outputs
    tokens: list[list[int]] = []
    for name in names:
        end = ends[name] + step.num_scheduled_tokens[name]
        tokens.append([random.Random(f"{name} {end}").randrange(60)] if end >= known[name] else [])
    column = np.array([[row[0] if row else 0] for row in tokens], dtype=np.int64)
    values = np.array([[len(name) + row[0] / 7 if row else 0] for name, row in zip(names, tokens, strict=True)])
    logprobs = LogprobsLists(column, values.astype(np.float32), column[:, 0] + 1)
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(names, places, sampled_token_ids=tokens, logprobs=logprobs, prompt_logprobs_dict={})


class World:
    """The same requests for both schedulers, at random."""

    def __init__(self, model: str, overlapped: bool, blocks: int, seed: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        from rlx.rollout.vllm_scheduler import make_scheduler

        init_none_hash(sha256)  # random in some versions
        config = settings(model, overlapped)
        self.depth = 2 if overlapped else 1  # steps that may be under way
        self.random = random.Random(seed)
        self.sides = [
            Side(scheduler(make, config, blocks))
            for make in (AsyncScheduler if overlapped else Scheduler, make_scheduler)
        ]
        for side in self.sides:
            side.scheduler.use_v2_model_runner = bool(seed % 2)  # the newer one, which GPUs have
        self.prompts: dict[str, int] = {}
        self.counts = Counter[str]()
        fill = self.sides[1].scheduler._fill
        self.sides[1].scheduler._fill = lambda *given: (self.counts.update(["fast"]), fill(*given))

    def add(self) -> None:
        from vllm import SamplingParams

        name = f"r{len(self.prompts)}"
        prompt = [5] * self.random.choice([0, 4, 8, 16]) + [
            self.random.randrange(5, 9) for _ in range(self.random.randint(1, 12))
        ]
        length = self.random.choice([1, 2, 7, 30, 60, 90])
        sampling = Sampling(
            1.0, 1.0, -1, min(length, LENGTH - len(prompt)), (EOS, 2), logprobs=self.random.random() < 0.6
        )
        params = sampling_params(sampling, len(self.prompts))
        if self.random.random() < 0.04:  # not for rlx's way
            params = SamplingParams(max_tokens=12, logprobs=0, detokenize=False)
        self.prompts[name] = len(prompt)
        for side in self.sides:
            side.scheduler.add_request(new_request(name, prompt, params))

    def disturb(self) -> None:
        """Now and then an abort, or what a weight update does to the cache."""
        from vllm.v1.request import RequestStatus

        alive, chance = list(self.sides[0].scheduler.requests), self.random.random()
        if chance < 0.02 and alive:
            name = self.random.choice(alive)
            for side in self.sides:
                side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.counts["aborts"] += 1
        elif chance < 0.03:
            done = [side.scheduler.reset_prefix_cache(reset_running_requests=True) for side in self.sides]
            assert done == [True, True]
            self.counts["resets"] += 1

    def step(self) -> None:
        steps = [side.scheduler.schedule() for side in self.sides]
        assert described(steps[0]) == described(steps[1])
        self.counts.update(["steps"], preempted=len(steps[0].preempted_req_ids or ()))
        pools = [side.scheduler.kv_cache_manager.block_pool for side in self.sides]
        assert pools[0].get_num_free_blocks() == pools[1].get_num_free_blocks()
        hashed = [[block.block_hash for block in pool.blocks] for pool in pools]
        assert hashed[0] == hashed[1]  # which tokens each block holds
        scheduled = bool(steps[0].num_scheduled_tokens)
        for side, step in zip(self.sides, steps, strict=True):
            if scheduled:
                side.steps.append(step)
            if side.steps and (len(side.steps) == self.depth or not scheduled):
                first = side.steps.pop(0)
                side.take(first, draw(first, self.prompts))


def lockstep(model: str, overlapped: bool, blocks: int, seed: int, requests: int = 60) -> Counter[str]:
    """Asserts that both schedulers do the same at each step; returns how often what happened."""
    world = World(model, overlapped, blocks, seed)
    while len(world.prompts) < requests or world.sides[0].scheduler.requests:
        if len(world.prompts) < requests and world.random.random() < 0.15:
            for _ in range(world.random.randint(1, 5)):
                world.add()
        world.disturb()
        world.step()
        assert world.counts["steps"] < 20_000
    assert world.sides[0].seen() == world.sides[1].seen()
    assert world.sides[1].scheduler._held == {}
    world.counts.update(str(end[0].name) for end in world.sides[0].ended.values())
    return world.counts


ALTERED: tuple[dict[str, Any], ...] = (
    {},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"min_tokens": 4},
    {"frequency_penalty": -0.3, "top_k": 20},
    {"stop": ("1", "23")},
)
"""what alters the distribution of a request's tokens or ends it"""


def completions(model: str, ours: bool) -> tuple[dict[str, Any], str, int]:
    """What an engine makes of requests for which its cache has no room; its scheduler's name; how many it preempted.

    Requests join in the middle, one is aborted, the cache is emptied under the running ones.
    """
    from rlx.config.sections.model import ModelConfig
    from rlx.config.sections.rollout import RolloutConfig
    from rlx.rollout.engine_args import engine_args

    rollout, dtype = RolloutConfig(max_tokens=96, max_num_seqs=16, kv_cache_mib=1), ModelConfig(dtype="float32")
    options = engine_args(rollout, dtype, max_prompt_tokens=64, on_gpu=False) | {"skip_tokenizer_init": False}
    engine = build_llm_engine(model, options if ours else options | {"scheduler_cls": None})
    scheduler, preempted = engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *given, **named: (preempted.append(given), preempt(*given, **named))
    ended: dict[str, Any] = {}
    before: list[int] = []

    def add(first: int, count: int) -> None:
        for number in range(first, first + count):
            prompt = [6 + (number * place) % 80 for place in range(3 + 5 * (number % 12))]
            length = [96, 5, 90, 80][number % 4]
            sampling = Sampling(2.0, 1.0, -1, length, () if number % 5 else (1, 7), logprobs=number % 3 > 0)
            params = sampling_params(dataclasses.replace(sampling, **ALTERED[number % 6]), number)
            params.ignore_eos = True
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def step() -> None:
        for result in engine.step():
            drawn = result.outputs[0]
            logprobs = drawn.logprobs and drawn.logprobs.logprobs
            ended[result.request_id] = (
                list(drawn.token_ids),
                logprobs,
                drawn.finish_reason,
                drawn.stop_reason,
                result.num_cached_tokens,
            )

    add(0, 20)
    for number in range(60):
        step()
        if number == 9:
            add(20, 20)
        if number == 20:
            engine.abort_request(["4"])
        if number == 30:
            before.append(len(preempted))
            assert engine.reset_prefix_cache(reset_running_requests=True)
    while engine.has_unfinished_requests():
        step()
    return ended, type(scheduler).__name__, before[0]


def refusals(model: str) -> dict[str, str]:
    """The reasons against rlx's scheduler for settings that it cannot serve."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from rlx.rollout.vllm_scheduler import make_scheduler, refusal

    config = settings(model)
    plain, parallel = cache(config, 40), config.parallel_config
    window = cache(config, 40)
    window.kv_cache_groups[0].kv_cache_spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8
    )
    reasons = {"": refusal(config, plain, False), "log": refusal(config, plain, True)}
    reasons["window"] = refusal(config, window, False)
    parallel.pipeline_parallel_size = 2
    reasons["pipeline"] = refusal(config, plain, False)
    reasons["made"] = type(scheduler(make_scheduler, config, 40)).__name__
    return reasons


def relied_on() -> list[str]:
    """What rlx's scheduler uses of vLLM and this version does not have."""
    import inspect

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import async_scheduler, output, scheduler
    from vllm.v1.request import Request

    text = {
        Request: "num_computed_tokens num_output_placeholders is_prefill_chunk _output_token_ids _all_token_ids "
        "num_in_flight_tokens num_stale_output_tokens update_block_hashes resumable",
        scheduler.Scheduler: "prev_step_scheduled_req_ids max_num_running_reqs set_pause_state pause_state "
        "get_request_counts use_v2_model_runner max_num_scheduled_tokens update_from_output",
        KVCacheManager: "allocate_slots cache_blocks block_pool",
        async_scheduler.AsyncScheduler: "num_output_placeholders",
    }
    lacking = [name for owner, names in text.items() for name in names.split() if name not in inspect.getsource(owner)]
    fields = [field.name for field in dataclasses.fields(output.CachedRequestData)]
    expected = "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens"
    return lacking + sorted(set(fields) ^ set(expected.split()))
