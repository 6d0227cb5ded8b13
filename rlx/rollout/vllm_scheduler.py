"""vLLM's scheduler with less work per request and step where running requests only draw their next token.

With hundreds of requests the host spends longer on a step than the GPU. Two things are done here instead of in vLLM:

- In a step in which each running request needs one token, blocks are allocated for the requests that begin or fill one,
  as vLLM would do it, and no other request is looked at. vLLM makes the rest of the step, as that of a pause.
- A token that does not end its request is held back here. vLLM gets a request's tokens together when it ends: with
  FINAL_ONLY nobody sees an output before.

Left out: all else, which vLLM does, step by step and request by request. `refusal` says which engines cannot have this
scheduler.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

_LOG = logging.getLogger("rlx")

VLLM_VERSIONS = ("0.24.", "0.32.")
"""versions whose schedulers were compared with this one, step by step"""
_COUNTS_IN_FLIGHT = vllm.__version__.startswith("0.32.")  # whether requests count the tokens that are under way
# A count of tokens under way that belong to the time before a request was preempted.
_STALE = "num_stale_output_tokens" if _COUNTS_IN_FLIGHT else "async_tokens_to_discard"


def make_scheduler(**given: Any) -> Any:
    """The scheduler of an engine (`scheduler_cls`), from the arguments that vLLM gives to its own."""
    config = given["vllm_config"]
    overlapped = config.scheduler_config.async_scheduling  # a step is scheduled before the last one's tokens are there
    reason = refusal(config, given["kv_cache_config"], given["log_stats"])
    if reason:
        _LOG.warning("vLLM's own scheduler is used, which is slower with many requests: %s", reason)
        return (AsyncScheduler if overlapped else Scheduler)(**given)
    return (AsyncDecodeScheduler if overlapped else DecodeScheduler)(**given)


def refusal(config: Any, cache: Any, log_stats: bool) -> str:
    """The reason why an engine must have vLLM's own scheduler; empty if it need not.

    Args:
        config: vLLM's, of everything.
        cache: vLLM's, of the KV cache.
        log_stats: vLLM counts the tokens of each step.
    """
    parallel, model = config.parallel_config, config.model_config
    specs = [type(group.kv_cache_spec) for group in cache.kv_cache_groups]
    # Each has rules of its own for the blocks of a request or the outputs of a step.
    reasons = {
        f"vLLM {vllm.__version__} was not tried": not vllm.__version__.startswith(VLLM_VERSIONS),
        "the KV cache is not that of full attention alone": specs != [FullAttentionSpec],
        "speculative decoding": config.speculative_config,
        "a transferred KV cache": config.kv_transfer_config or config.ec_transfer_config,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "returned experts": getattr(model, "enable_return_routed_experts", False),  # 0.24
        "returned sampling masks": getattr(model, "return_sampling_mask", False),  # 0.32
        "further outputs": getattr(getattr(config, "aux_output_config", None), "enabled", False),  # 0.32
        "statistics of each step": log_stats,
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


@dataclass(slots=True)
class HeldTokens:
    """A request whose outputs are held back until it ends."""

    request: Any  # vLLM's; it has the tokens
    stops: set[int]  # tokens that may end it
    limit: int  # how many tokens it has, prompt included, when its length ends it
    has_logprobs: bool
    first: Any = None  # vLLM's output of the first token
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def continues_with(self, token: int) -> bool:
        """Whether the request draws on after this token, as far as one can tell without vLLM."""
        request = self.request
        return (
            self.first is not None
            and request.status is RequestStatus.RUNNING
            and not getattr(request, _STALE)
            and token not in self.stops
            and len(request._all_token_ids) + 1 < self.limit
        )

    def hold(self, output: Any) -> None:
        """Holds an output of vLLM back."""
        self.first = self.first or output
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            self.ranks += output.new_logprobs.sampled_token_ranks.tolist()

    def whole(self, last: Any) -> Any:
        """The one output of the request: vLLM's last one with everything that was held back."""
        self.hold(last)
        last.new_token_ids = self.request.output_token_ids[:]
        last.prefill_stats = self.first.prefill_stats
        if self.logprobs:
            tokens, logprobs = np.array(last.new_token_ids), np.array(self.logprobs, dtype=np.float32)
            last.new_logprobs = LogprobsLists(tokens[:, None], logprobs[:, None], np.array(self.ranks))
        return last


def _is_plain(request: Any) -> bool:
    """Whether nobody can see the outputs of a request before it ends, and vLLM does nothing more with its tokens."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.detokenize  # it would look for stop strings
        and params.num_logprobs in (None, 0)
        and not params.logprob_token_ids
        and params.prompt_logprobs is None
        and params.repetition_detection is None
        and not (request.use_structured_output or request.has_encoder_inputs or request.resumable)
    )


_EITHER: Any = object  # one of vLLM's schedulers stands behind it in the bases of a class


class _Decode(_EITHER):  # type: ignore[misc]
    _overlaps = False

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._held: dict[str, HeldTokens] = {}
        most = self.max_num_running_reqs
        self._most_running = min(most, getattr(self, "max_num_active_reqs", most))  # 0.32 has both

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if _is_plain(request):
            params = request.sampling_params
            limit = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
            self._held[request.request_id] = HeldTokens(
                request, params.all_stop_token_ids, limit, params.num_logprobs == 0
            )

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return finished

    def schedule(self, throttle_prefills: bool = False) -> Any:
        requests = [] if throttle_prefills else self._decoding()
        size, edges = self.block_size, {}
        for place, request in enumerate(requests):
            # At other places vLLM would find that the request has its block and that no block of it became full.
            if not (request.num_computed_tokens % size and request.num_tokens % size):
                edges[place] = request
        begun = sum(request.num_computed_tokens % size == 0 for request in edges.values())
        if not requests or begun > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return super().schedule(throttle_prefills)  # which may preempt requests
        blocks: list[Any] = [None] * len(requests)
        for place, request in edges.items():
            blocks[place] = self.kv_cache_manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
        self.set_pause_state(PauseState.PAUSED_ALL)
        step = super().schedule()
        self.set_pause_state(PauseState.UNPAUSED)
        self._fill(step, requests, blocks)
        return step

    def _decoding(self) -> list[Any]:
        """The requests that this step continues; none unless all that it does is to draw one token of each."""
        running, waiting = self.get_request_counts()
        if (waiting and running < self._most_running) or running > self.max_num_scheduled_tokens:
            return []
        if self.pause_state is not PauseState.UNPAUSED:
            return []
        requests = []
        for request in self.running:
            pending, known = request.num_output_placeholders, request.num_tokens
            held = self._held.get(request.request_id)
            if held is None or request.is_prefill_chunk or pending > 1:
                return []
            if known + pending - request.num_computed_tokens != 1:
                return []
            if not pending or known + 1 < held.limit:  # otherwise its last token is under way
                requests.append(request)
        if not self.use_v2_model_runner:  # the older runner is told all tokens of a request that it has not just seen
            seen = self.prev_step_scheduled_req_ids
            requests = requests if all(request.request_id in seen for request in requests) else []
        return requests

    def _fill(self, step: Any, requests: Sequence[Any], blocks: list[Any]) -> None:
        """Makes a step without requests continue these, which get these blocks."""
        names = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        drawn = [request.num_computed_tokens + 1 - request.num_prompt_tokens for request in requests]
        step.scheduled_cached_reqs = CachedRequestData(names, set(), [], {}, blocks, computed, drawn)
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(names)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(names)
        for request in requests:
            request.num_computed_tokens += 1
            if self._overlaps:
                request.num_output_placeholders += 1
            if _COUNTS_IN_FLIGHT:
                request.num_in_flight_tokens += 1

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        left = copy.copy(scheduler_output)
        left.num_scheduled_tokens = self._hold_tokens(scheduler_output.num_scheduled_tokens, model_runner_output)
        results = super().update_from_output(left, model_runner_output)
        for result in results.values():
            result.outputs = self._ended(result.outputs)
        return results

    def _hold_tokens(self, scheduled: dict[str, int], drawn: Any) -> dict[str, int]:
        """Holds back the tokens that do not end their requests; returns what is left of the scheduled ones for vLLM."""
        if not drawn.sampled_token_ids or drawn.num_nans_in_logits:
            return scheduled
        logprobs = drawn.logprobs.logprobs[:, 0].tolist() if drawn.logprobs else []
        ranks = drawn.logprobs.sampled_token_ranks.tolist() if drawn.logprobs else []
        left, settled = {}, []
        for name, count in scheduled.items():
            held, row = self._held.get(name), drawn.req_id_to_index[name]
            tokens = drawn.sampled_token_ids[row]
            if held is None or count != 1 or len(tokens) != 1 or not held.continues_with(tokens[0]):
                left[name] = count
                continue
            request = held.request
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            if held.has_logprobs:
                held.logprobs.append(logprobs[row])
                held.ranks.append(ranks[row])
            settled.append(request)
        self._settle(settled)
        return left

    def _settle(self, requests: Sequence[Any]) -> None:
        """Counts a token of each request that has arrived, as vLLM does it.

        vLLM would also look for blocks that became full, which the next step does again in either way.
        """
        for request in requests:
            if len(request._all_token_ids) % self.block_size == 0:
                request.update_block_hashes()
            if _COUNTS_IN_FLIGHT:
                request.num_in_flight_tokens -= 1
            if self._overlaps:
                request.num_output_placeholders -= 1

    def _ended(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs of vLLM that it may see now: whole ones, and those that are not held back."""
        seen = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                seen.append(output)
            elif output.finish_reason is None:
                held.hold(output)
            else:
                seen.append(self._held.pop(output.request_id).whole(output))
        return seen


class DecodeScheduler(_Decode, Scheduler):  # type: ignore[misc]
    """The scheduler for steps one after the other."""


class AsyncDecodeScheduler(_Decode, AsyncScheduler):  # type: ignore[misc]
    """The scheduler for steps that are scheduled before the tokens of the step before are there."""

    _overlaps = True
