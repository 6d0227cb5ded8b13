"""The vLLM actor: one in-process engine, and a thread that steps it. Token ids in, token ids and logprobs out.

The only module that imports vllm, and only inside the actor's process. Who calls it and which engine gets which prompt
is pool.py's business; where new weights come from is sync.py's.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlx.rollout.base import Output, Request
from rlx.rollout.weight_sync.topology import DeviceLocation, EngineLocation
from rlx.types import Sampling, WeightSyncError

if TYPE_CHECKING:
    import torch

    from rlx.rollout.weight_sync.buckets import Bucket
    from rlx.rollout.weight_sync.channels import Incoming


_SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

# vLLM reads these when it is imported. One thread: two engines' spinning thread pools on the same cores are 20 x
# slower. No compile: the one function that vLLM compiles in eager mode costs seconds and gains nothing on CPU. No
# binding to cores: vLLM finds none for the processes of a split model, and two engines would get the same one.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_RUNNER, _BY_NAME = "VLLM_USE_V2_MODEL_RUNNER", "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"


def by_newer_runner(build: Callable[[], Any]) -> Any:
    """The engine that `build` makes, on a GPU by vLLM's newer model runner, unless vLLM refuses that for its settings.

    The older one draws each seeded sample by a call of its own, so that many at once take longer. A vLLM that knows
    some models by name for which it takes the newer, as 0.24 does, is told to take it for any; a later one chooses by
    itself. What VLLM_USE_V2_MODEL_RUNNER in the environment says is left as it is: 0 where the newer fails.
    """
    import torch
    from vllm.config import vllm as choice

    if _RUNNER in os.environ or not (torch.cuda.is_available() and hasattr(choice, _BY_NAME)):
        return build()
    os.environ[_RUNNER] = "1"
    try:
        return build()
    except ValueError as error:  # before anything was loaded
        if "Model Runner V2" not in str(error):
            raise
        del os.environ[_RUNNER]
        return build()


class _Update:
    """The weights of one update on their way from Ray's calls to the engine's thread."""

    loaded: asyncio.Future[None]  # done when the update is over

    def __init__(self, name: str, tensors: int, timeout_s: float, keep: bool, incoming: Incoming | None = None) -> None:
        self.name, self.keep, self.incoming = name, keep, incoming
        self.error: WeightSyncError | None = None
        self._missing = tensors
        self._timeout_s = timeout_s
        self._buckets: queue.SimpleQueue[tuple[Bucket, asyncio.Future[None]] | None] = queue.SimpleQueue()

    async def bring(self, bucket: Bucket) -> None:
        """Returns once the engine has come to this bucket, or the update is over."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buckets.put((bucket, taken))
        await asyncio.wait({taken, self.loaded}, return_when=asyncio.FIRST_COMPLETED)

    def abandon(self) -> None:
        """Ends it at once if it still waits for weights."""
        self._buckets.put(None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the buckets as they arrive, checked. Runs on the engine's thread.

        Ends early at an error and keeps it in `error`: vLLM cannot give up a load half-way, and the next one would
        silently fuse what this one has left behind with its own.
        """
        from rlx.rollout.weight_sync.buckets import unpack

        try:
            while self._missing > 0:
                bucket, taken = self._next()
                taken.get_loop().call_soon_threadsafe(taken.set_result, None)
                yield from unpack(bucket)
                self._missing -= len(bucket.layout)
        except WeightSyncError as error:
            self.error = error

    def _next(self) -> tuple[Bucket, asyncio.Future[None]]:
        try:
            arrived = self._buckets.get(timeout=self._timeout_s)
        except queue.Empty:
            waited = f"waited {self._timeout_s:.0f} s for the next weights"
            raise WeightSyncError(f"{waited}, {self._missing} tensors missing") from None
        if arrived is None:
            raise WeightSyncError("another weight update was started")
        return arrived


class VLLMEngine:
    """An async Ray actor around one vLLM engine; its weights carry a version, the step they belong to.

    If the engine fails its process ends, so that Ray starts it afresh: with the model's own weights, of no version.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str, options: dict[str, Any], adapter: dict[str, Any] | None = None
    ) -> None:
        """Starts the engine; returns once it can take weights.

        Args:
            model: Hugging Face folder or name.
            options: vLLM engine arguments that depend on the run.
            adapter: peft's description of the adapters that updates bring; None: they bring the whole model.
        """
        self._adapter = adapter
        self._lora: Any = None  # vLLM's request for the newest adapters
        self.version: int | None = None  # of no step yet, or in part of one version, in part of another
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._update: _Update | None = None
        self._asleep: bool = options.get("enable_sleep_mode", False)
        self._drawing: set[str] = set()  # requests that vLLM is at
        self._process = uuid.uuid4().hex
        self._count = 0
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, args=(model, options, ready), daemon=True, name="engine").start()
        await ready

    # An engine that Ray is restarting answers once it is up again; no other call is ever sent twice.
    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def probe(self) -> EngineLocation:
        """Returns where the engine computes, once it is up."""
        node = ray.get_runtime_context().get_node_id()
        return EngineLocation(self._process, tuple(DeviceLocation(node, gpu) for gpu in self._gpus))

    async def generate(self, requests: list[Request], version: int) -> tuple[list[Output], float]:
        """Completions in the order of the requests, begun with the weights of `version`, and the seconds they took.

        Raises:
            WeightSyncError: the engine holds another version, e.g. because it was restarted.
            ValueError: vLLM refuses a request.
        """
        if version != self.version:
            raise WeightSyncError(f"asked for weight version {version} but holds version {self.version}")
        started = time.monotonic()
        outputs = await asyncio.gather(*(self._submit(partial(self._add, request=request)) for request in requests))
        return list(outputs), time.monotonic() - started

    async def sleep(self) -> None:
        """Gives its GPU memory back, weights and cache, until the next update; what is being generated is finished."""
        self.version = None
        await self._submit(self._sleep)

    async def update(self, incoming: Incoming, version: int) -> str:
        """A whole weight update that the workers receive by themselves; why it was given up, empty if it was not.

        Raises:
            WeightSyncError: see `finish_update`.
        """
        from rlx.rollout.weight_sync.channels import GivenUpError

        await self.start_update(incoming.update, 0, incoming.timeout_s, incoming.keep, incoming)
        try:
            await self.finish_update(incoming.update, version)
        except GivenUpError as error:
            return str(error)
        return ""

    async def start_update(
        self, update: str, tensors: int, timeout_s: float, keep: bool = False, incoming: Incoming | None = None
    ) -> None:
        """Opens a weight update; the weights follow by `receive`, and `finish_update` waits until they are loaded.

        Nothing new is begun until the update is over.

        Args:
            update: a name that no other update has.
            tensors: how many are to come.
            timeout_s: longest wait for each bucket.
            keep: what is being generated goes on with the new weights; otherwise it is finished first, with the old.
            incoming: how the workers receive it by themselves; None: it comes by `receive`.
        """
        if self._update:
            self._update.abandon()  # its sender has died, or gave up
        self.version = None
        self._update = _Update(update, tensors, timeout_s, keep, incoming)
        self._update.loaded = self._submit(partial(self._load, update=self._update))

    async def receive(self, update: str, bucket: Bucket) -> None:
        """Takes one bucket; returns once it is being loaded, so that a sender knows when to send more."""
        if self._update and self._update.name == update:  # a late one of an earlier update is dropped
            await self._update.bring(bucket)

    async def finish_update(self, update: str, version: int) -> None:
        """Waits until all weights of an update are loaded; they are `version`.

        Raises:
            WeightSyncError: they are not what was sent, or did not come; nothing is generated until an update succeeds.
        """
        if not self._update or self._update.name != update:
            raise WeightSyncError("it was restarted, or another weight update was started")
        await self._update.loaded
        self.version = version

    def _submit(self, job: Callable[[str], None]) -> asyncio.Future[Any]:
        """Has the engine's thread call `job` with a name, under which it settles the future later."""
        if self._failure:
            raise self._failure
        self._count += 1
        name = str(self._count)
        future = self._waiting[name] = self._loop.create_future()
        self._jobs.put(partial(job, name))
        return future

    def _settle(self, name: str, result: Any) -> None:
        future = self._waiting.pop(name)
        if future.done():  # cancelled by its caller
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _stop(self) -> None:
        """Fails whatever is waiting, and ends the process once the callers have been told."""
        for name in list(self._waiting):
            self._settle(name, self._failure)
        self._loop.call_later(1.0, os._exit, 1)

    # Everything below runs on the engine's own thread.

    def _run(self, model: str, options: dict[str, Any], ready: asyncio.Future[None]) -> None:
        try:
            self._llm = _build(model, options)
            if self._asleep:  # one that is replaced would take the memory that the worker trains in
                self._llm.sleep(level=2)
            self._gpus: list[str] = self._llm.collective_rpc("rlx_gpu")
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
            self._loop.call_soon_threadsafe(self._stop)

    def _report(self, name: str, result: Any) -> None:
        self._loop.call_soon_threadsafe(self._settle, name, result)

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
                self._drawing.discard(result.request_id)
                self._report(result.request_id, _output(result))

    def _add(self, name: str, request: Request) -> None:
        try:
            params = _params(request.sampling, request.seed)
            self._llm.add_request(name, {"prompt_token_ids": list(request.prompt)}, params, lora_request=self._lora)
            self._drawing.add(name)
        except Exception as error:  # a request that vLLM refuses, e.g. too long a prompt: the others go on
            self._report(name, ValueError(f"{type(error).__name__}: {error}"))

    def _finish_requests(self) -> None:
        while self._llm.has_unfinished_requests():
            self._step()

    def _sleep(self, name: str) -> None:
        self._finish_requests()
        if not self._asleep:
            self._llm.sleep(level=2)
        self._asleep = True
        self._report(name, None)

    def _load(self, name: str, update: _Update) -> None:
        from rlx.rollout.weight_sync.channels import GivenUpError

        if not update.keep:
            self._finish_requests()
        # The cached keys and values belong to the old weights; requests that go on compute theirs again.
        if not self._llm.reset_prefix_cache(reset_running_requests=update.keep):
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        if update.incoming:
            errors = filter(None, self._llm.collective_rpc("rlx_receive", args=(update.incoming,)))
            # Of several workers, the one whose own fault it is.
            update.error = min(errors, key=lambda error: isinstance(error, GivenUpError), default=None)
        elif self._adapter is None:
            self._llm.collective_rpc("rlx_load_weights", args=(update.tensors(),))
        else:
            self._load_adapters(dict(update.tensors()), update)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if update.error:
            self._give_up(update.error)
        self._report(name, update.error)

    def _give_up(self, error: WeightSyncError) -> None:
        """Ends what was to go on with weights that have come in part."""
        self._llm.abort_request(list(self._drawing))
        for name in self._drawing:
            self._report(name, error)
        self._drawing.clear()

    def _load_adapters(self, tensors: dict[str, torch.Tensor], update: _Update) -> None:
        """vLLM takes adapters from a folder: one in shared memory, and gone as soon as they are in."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        if update.error:
            return
        with tempfile.TemporaryDirectory(prefix="rlx-adapter-", dir=_SHARED_MEMORY) as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(self._adapter))
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            self._lora = LoRARequest("policy", 1, folder, load_inplace=True)
            if not self._llm.add_lora(self._lora):
                raise RuntimeError("vLLM did not take the adapters")
        self._lora = LoRARequest("policy", 1, folder)  # what requests name: to be used as it is, not loaded again


def _build(model: str, options: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore")
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlx.rollout.weight_sync.receiver import WeightLoader

    if 0 < ray.get_runtime_context().get_assigned_resources().get("GPU", 0) < 1:
        cache = _cache_bytes(model, options["gpu_memory_utilization"])
        # vLLM would refuse to start unless all of that share was free, which others may use for a moment.
        options = options | {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.01}
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
    # As LLM's engine it reads prompts by 8192 or 16384 tokens at a time, as the GPU has memory; unnamed by 2048.
    return by_newer_runner(lambda: LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS))


def _cache_bytes(model: str, utilization: float) -> int:
    """What an engine's share of the GPU's memory leaves for its KV cache beside twice the weights and 2 GiB: where
    others share the GPU vLLM cannot measure it, and fails if one of them frees memory meanwhile."""
    import torch

    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    left = int(utilization * torch.cuda.mem_get_info()[1]) - 2 * weights - (2 << 30)
    return max(left, 64 << 20)


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


def _plain(error: BaseException) -> RuntimeError:
    """vLLM's errors may hold what cannot be pickled; their last words can."""
    return RuntimeError(f"{type(error).__name__}: {error}")
