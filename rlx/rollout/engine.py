"""The vLLM actor: one in-process engine, and a thread that steps it. Token ids in, token ids and logprobs out.

The only module that imports vllm, and only inside the actor's process. Who calls it and which engine gets which prompt
is pool.py's business; where new weights come from is sync.py's.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.types import Sampling, WeightSyncError

if TYPE_CHECKING:  # the process that only starts engines does without torch
    import torch

    from rlx.rollout.sync import Bucket

# vLLM reads these when it is imported. One thread: two engines' spinning thread pools on the same cores are 20 x
# slower. No compile: the one function that vLLM compiles in eager mode costs seconds and gains nothing on CPU.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to draw."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Output:
    """One completion drawn: its tokens, their logprobs, and whether it ended with a stop token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


class Engine:
    """An async Ray actor around one vLLM engine; its weights carry a version, the step they belong to."""

    async def __init__(self, model: str, options: dict[str, Any]) -> None:
        """Starts the engine; returns once it can generate.

        Args:
            model: Hugging Face folder or name.
            options: vLLM engine arguments that depend on the run.
        """
        self.version = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._buckets: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[Output]] = {}
        self._count = 0
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, args=(model, options, ready), daemon=True, name="engine").start()
        await ready

    async def generate(self, requests: list[Request], sampling: Sampling, version: int) -> list[Output]:
        """Completions in the order of the requests, drawn with the weights of `version`.

        Raises:
            WeightSyncError: the engine holds another version, e.g. because it was restarted.
        """
        if version != self.version:
            raise WeightSyncError(f"asked for weight version {version} but holds version {self.version}")
        futures = [self._submit(request, sampling) for request in requests]
        return list(await asyncio.gather(*futures))

    async def update_weights(self, version: int, tensors: int, timeout_s: float) -> None:
        """Loads the weights that the following calls of `receive` bring, after what is being generated is finished.

        Args:
            tensors: how many are to come.
            timeout_s: longest wait for each bucket.
        """
        self._buckets = queue.SimpleQueue()
        arriving = self._buckets
        await self._call(lambda: self._load(_stream(arriving, tensors, timeout_s)))
        self.version = version

    async def receive(self, bucket: Bucket) -> None:
        """Takes one bucket of the weight update that is under way."""
        self._buckets.put(bucket)

    async def ping(self) -> int:
        """The weight version, if the engine is alive."""
        if self._failure:
            raise self._failure
        return self.version

    def _submit(self, request: Request, sampling: Sampling) -> asyncio.Future[Output]:
        if self._failure:
            raise self._failure
        future: asyncio.Future[Output] = self._loop.create_future()
        self._count += 1
        name = str(self._count)
        self._waiting[name] = future
        self._jobs.put(lambda: self._add(name, request, sampling))
        return future

    async def _call(self, work: Callable[[], None]) -> None:
        """Runs `work` on the engine's thread, between two engine steps."""
        future: asyncio.Future[None] = self._loop.create_future()

        def job() -> None:
            try:
                work()
            except Exception as error:
                self._loop.call_soon_threadsafe(future.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(future.set_result, None)

        self._jobs.put(job)
        await future

    # Everything below runs on the engine's own thread.

    def _run(self, model: str, options: dict[str, Any], ready: asyncio.Future[None]) -> None:
        try:
            self._llm = _build(model, options)
        except BaseException as error:
            self._loop.call_soon_threadsafe(ready.set_exception, _plain(error))
            return
        self._loop.call_soon_threadsafe(ready.set_result, None)
        try:
            while True:
                self._do_jobs()
                self._step()
        except BaseException as error:
            self._failure = _plain(error)
            self._loop.call_soon_threadsafe(self._fail_waiting)

    def _do_jobs(self) -> None:
        """All jobs that have come in; waits for one when the engine has nothing else to do."""
        if not self._llm.has_unfinished_requests():
            self._jobs.get()()
        while not self._jobs.empty():
            self._jobs.get()()

    def _step(self) -> None:
        if not self._llm.has_unfinished_requests():
            return
        for result in self._llm.step():
            if result.finished:
                self._loop.call_soon_threadsafe(self._waiting.pop(result.request_id).set_result, _output(result))

    def _add(self, name: str, request: Request, sampling: Sampling) -> None:
        self._llm.add_request(name, {"prompt_token_ids": list(request.prompt)}, _params(sampling, request.seed))

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        while self._llm.has_unfinished_requests():
            self._step()
        self._llm.reset_prefix_cache()  # the cached keys and values belong to the old weights
        self._llm.collective_rpc("rlx_load_weights", args=(tensors,))

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._failure or RuntimeError("the engine stopped"))
        self._waiting.clear()


class WeightLoader:
    """Extends vLLM's worker (worker_extension_cls): loads Hugging Face tensors into the running model."""

    model_runner: Any

    def rlx_load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # One call per update: vLLM fuses q, k, v from what a single call brings.
        self.model_runner.reload_weights(weights_iterator=tensors)
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        tied = getattr(model.config, "tie_word_embeddings", False)
        if tied and head is not None and next(model.parameters()).device.type == "cpu":
            # On CPU the head's packed copy of the embedding is not refreshed by a reload: it stays silently stale.
            head.quant_method.process_weights_after_loading(head)


def _build(model: str, options: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore")
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=model,
        worker_extension_cls=f"{WeightLoader.__module__}.{WeightLoader.__qualname__}",
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, temperature included
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
        **options,
    )
    return LLMEngine.from_engine_args(arguments)


def _params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _output(result: Any) -> Output:
    drawn = result.outputs[0]
    return Output(tuple(drawn.token_ids), tuple(drawn.logprobs.logprobs), drawn.finish_reason == "stop")


def _stream(
    arriving: queue.SimpleQueue[Bucket], tensors: int, timeout_s: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the buckets as they arrive, checked."""
    from rlx.rollout.sync import unpack

    while tensors > 0:
        try:
            bucket = arriving.get(timeout=timeout_s)
        except queue.Empty:
            raise WeightSyncError(f"waited {timeout_s:.0f} s for the next weights, {tensors} tensors missing") from None
        yield from unpack(bucket)
        tensors -= len(bucket.layout)


def _plain(error: BaseException) -> RuntimeError:
    """vLLM's errors may hold what cannot be pickled; their last words can."""
    return RuntimeError(f"{type(error).__name__}: {error}")
