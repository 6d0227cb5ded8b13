"""The vLLM engine: an actor around one in-process engine. Token ids in; token ids and log-probabilities out.

vllm is imported here and in vllm_scheduler.py alone, and only inside the actor's process. Left out: which engine gets
which prompt (engine_pool.py), and how weights arrive (weight_sync/).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlx.actors import BulkActor
from rlx.rollout.base import Output, Request
from rlx.rollout.engine_metrics import EngineMetrics
from rlx.rollout.engine_thread import DeviceTurn, EngineThread, Report
from rlx.rollout.weight_sync.base import DeviceLocation, EngineLocation, Incoming, UpdateInterruptedError
from rlx.types import Sampling, WeightSyncError

if TYPE_CHECKING:
    import torch

    from rlx.rollout.weight_sync.buckets import Bucket
    from rlx.rollout.weight_sync.object_store import BucketQueue

_SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

# vLLM reads these when it is imported.
# One thread: the waiting threads of two engines on the same cores make both engines 20 x slower.
# No compilation: vLLM compiles one function in eager mode, which takes seconds and gains nothing on CPU.
# No binding to cores: vLLM finds no cores for the processes of a split model, and the same core for two engines.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_RUNNER, _BY_NAME = "VLLM_USE_V2_MODEL_RUNNER", "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"


@dataclass(frozen=True)
class WeightUpdate:
    """A weight update that the engine has been asked to load."""

    name: str
    midway: bool  # running requests continue with the new weights
    buckets: BucketQueue
    incoming: Incoming | None  # how the workers fetch it; None: it arrives in `buckets`


class VLLMEngine(BulkActor):
    """An async Ray actor around one vLLM engine; see `Engine`.

    If the engine fails, the process ends, so that Ray starts it again: with the weights of the model folder, which have
    no version.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        model: str,
        options: dict[str, Any],
        adapter: dict[str, Any] | None = None,
        bring: Callable[[], None] | None = None,
        turn_s: float | None = None,
    ) -> None:
        """Starts the engine; returns when it can take weights.

        Args:
            model: Hugging Face folder or name.
            options: vLLM's engine arguments that depend on the run.
            adapter: peft's description of the adapters that updates bring; None: they bring the whole model.
            bring: called first: brings the model's folder to this node.
            turn_s: so long it waits while another engine on its GPU draws; None: it draws at the same time.
        """
        if bring:
            await asyncio.to_thread(bring)
        self.version: int | None = None  # None: the engine holds no complete weights of a step
        self._update: WeightUpdate | None = None
        self._process = uuid.uuid4().hex
        self._thread = EngineThread(partial(SteppedVLLM, model, options, adapter, turn_s))
        engine = await self._thread.started()
        self._gpus, self._metrics = engine.gpus, EngineMetrics(engine.cache_tokens)

    # An engine that Ray is restarting answers when it is up again; no other call is ever sent twice.
    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def probe(self, run: str) -> EngineLocation:
        """See `Engine.probe`."""
        self._metrics.begin(run)
        node = ray.get_runtime_context().get_node_id()
        return EngineLocation(self._process, tuple(DeviceLocation(node, gpu) for gpu in self._gpus))

    async def lives(self) -> None:
        """See `Engine.lives`."""
        await asyncio.Event().wait()

    async def steps(self) -> int:
        """See `Engine.steps`."""
        return self._thread.steps

    async def generate(self, requests: list[Request], version: int) -> tuple[list[Output], float]:
        """See `Engine.generate`.

        Raises:
            WeightSyncError: the engine holds another version, for example because it was restarted.
            ValueError: vLLM refuses a request.
        """
        if version != self.version:
            raise WeightSyncError(f"asked for weight version {version} but holds version {self.version}")
        started = time.monotonic()
        outputs: list[Output] = []
        self._metrics.asked(requests)
        try:
            outputs = await asyncio.gather(*(self._thread.submit(SteppedVLLM.add, request) for request in requests))
        finally:
            self._metrics.ended(requests, sum(len(output.token_ids) for output in outputs))
        return outputs, time.monotonic() - started

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self.version = None
        await self._thread.submit(SteppedVLLM.sleep)

    async def update(self, incoming: Incoming, version: int) -> str | None:
        """See `Engine.update`.

        Raises:
            WeightSyncError: see `finish_update`.
        """
        self._start(incoming.update, 0, incoming.timeout_s, incoming.midway, incoming)
        try:
            await self.finish_update(incoming.update, version)
        except UpdateInterruptedError as error:
            return str(error)
        return None

    async def start_update(self, update: str, tensors: int, timeout_s: float, midway: bool = False) -> None:
        """See `Engine.start_update`. No request is begun until the update has ended."""
        self._start(update, tensors, timeout_s, midway, None)

    async def receive(self, update: str, bucket: Bucket) -> None:
        """See `Engine.receive`. A late bucket of an earlier update is dropped."""
        if self._update and self._update.name == update:
            await self._update.buckets.put(bucket)

    async def finish_update(self, update: str, version: int) -> None:
        """See `Engine.finish_update`.

        Raises:
            WeightSyncError: the weights are not what was sent, or did not arrive; nothing is generated until an update
                succeeds.
        """
        if not self._update or self._update.name != update:
            raise WeightSyncError("it was restarted, or another weight update was started")
        assert self._update.buckets.loaded
        await self._update.buckets.loaded
        self.version = version

    def _start(self, name: str, tensors: int, timeout_s: float, midway: bool, incoming: Incoming | None) -> None:
        from rlx.rollout.weight_sync.object_store import BucketQueue

        if self._update:
            self._update.buckets.close()  # its sender died or ended the update
        self.version = None
        self._update = WeightUpdate(name, midway, BucketQueue(tensors, timeout_s), incoming)
        self._update.buckets.loaded = self._thread.submit(SteppedVLLM.load, self._update)


class SteppedVLLM:
    """vLLM's engine as the thread steps it. Methods with a `name` are jobs, which end when they are reported."""

    def __init__(
        self, model: str, options: dict[str, Any], adapter: dict[str, Any] | None, turn_s: float | None, report: Report
    ) -> None:
        """Builds the engine; see `VLLMEngine`."""
        self._adapter, self._report = adapter, report
        self._lora: Any = None  # vLLM's request for the newest adapters
        self._running: set[str] = set()  # requests that vLLM works on
        self._asleep: bool = options.get("enable_sleep_mode", False)
        self._llm = _build(model, options)
        if self._asleep:  # an engine restarted during training would take the trainer's memory
            self._llm.sleep(level=2)
        self.gpus: list[str] = self._llm.collective_rpc("rlx_gpu")  # of each worker, empty on CPU
        self.turn = DeviceTurn(self.gpus[0] or "cpu", turn_s)
        cache = self._llm.vllm_config.cache_config
        self.cache_tokens: int = cache.num_gpu_blocks * cache.block_size  # that fit into the KV cache
        # Python's own collections look at all requests again and again: a tenth of a decode step of 512 requests.
        gc.disable()
        gc.freeze()

    @property
    def is_busy(self) -> bool:
        return bool(self._llm.has_unfinished_requests())

    def step(self) -> None:
        """Generates the next token of each request, and reports the finished ones."""
        if not self.is_busy:
            return
        ended = {result.request_id: _output(result) for result in self._llm.step() if result.finished}
        if ended:
            self._running -= ended.keys()
            self._report(ended)

    def add(self, name: str, request: Request) -> None:
        """Begins a request. One that vLLM refuses, such as too long a prompt, fails alone."""
        try:
            params = sampling_params(request.sampling, request.seed)
            self._llm.add_request(name, {"prompt_token_ids": list(request.prompt)}, params, lora_request=self._lora)
            self._running.add(name)
        except Exception as error:
            self._report({name: ValueError(f"{type(error).__name__}: {error}")})

    def sleep(self, name: str) -> None:
        """Finishes the running requests and frees the GPU memory of weights and cache."""
        self._finish_requests()
        if not self._asleep:
            self._llm.sleep(level=2)
        self._asleep = True
        self._report({name: None})

    def load(self, name: str, update: WeightUpdate) -> None:
        """Loads a weight update while it arrives.

        Raises:
            RuntimeError: vLLM keeps its prefix cache, or fails to load the weights: the engine's process ends.
        """
        if not update.midway:
            self._finish_requests()
        # The cached keys and values belong to the old weights; requests that continue compute theirs again.
        if not self._llm.reset_prefix_cache(reset_running_requests=update.midway):
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        error = self._receive(update)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if error:
            self._abort_requests(error)
        self._report({name: error})
        gc.collect()  # now that nobody waits

    def _receive(self, update: WeightUpdate) -> WeightSyncError | None:
        """Loads the weights of an update; returns why they are not what was sent."""
        if update.incoming:
            errors = filter(None, self._llm.collective_rpc("rlx_receive", args=(update.incoming,)))
            # If several workers failed, the error of one that was not interrupted by another.
            return min(errors, key=lambda error: isinstance(error, UpdateInterruptedError), default=None)
        if self._adapter is None:
            self._llm.collective_rpc("rlx_load_weights", args=(update.buckets.tensors(),))
            return update.buckets.error
        tensors = dict(update.buckets.tensors())
        if not update.buckets.error:
            self._load_adapters(tensors)
        return update.buckets.error

    def _load_adapters(self, tensors: dict[str, torch.Tensor]) -> None:
        """vLLM takes adapters from a folder only: one in shared memory, which is removed when they are loaded."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="rlx-adapter-", dir=_SHARED_MEMORY) as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(self._adapter))
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            self._lora = LoRARequest("policy", 1, folder, load_inplace=True)
            if not self._llm.add_lora(self._lora):
                raise RuntimeError("vLLM did not take the adapters")
        self._lora = LoRARequest("policy", 1, folder)  # requests name it: vLLM uses it as it is, and does not load it

    def _finish_requests(self) -> None:
        while self.is_busy:
            self.step()

    def _abort_requests(self, error: WeightSyncError) -> None:
        """Ends the requests that were to continue with weights that have arrived in part."""
        self._llm.abort_request(list(self._running))
        self._report(dict.fromkeys(self._running, error))
        self._running.clear()


def _build(model: str, options: dict[str, Any]) -> Any:
    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
    if 0 < share < 1 or options.get("enable_sleep_mode"):  # beside a worker, which holds the GPU for both
        cache = _cache_bytes(model, options["gpu_memory_utilization"])
        # Otherwise vLLM does not start unless its whole share is free, and other processes may use it for a moment.
        options = options | {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.01}
    return build_llm_engine(model, options)


def build_llm_engine(model: str, options: dict[str, Any]) -> Any:
    """vLLM's engine in this process, for a model folder and the engine arguments that depend on the run."""
    warnings.filterwarnings("ignore")
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    from rlx.rollout.vllm_scheduler import make_scheduler
    from rlx.rollout.weight_sync.receiver import WeightLoader

    gc.freeze()  # vLLM collects garbage five times as it starts; over all that was imported, that takes seconds
    fixed: dict[str, Any] = {
        "worker_extension_cls": f"{WeightLoader.__module__}.{WeightLoader.__qualname__}",
        "scheduler_cls": f"{make_scheduler.__module__}.{make_scheduler.__qualname__}",
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, temperature included
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    arguments = EngineArgs(model=model, **fixed | options)
    # With this context, vLLM reads 8192 or 16384 prompt tokens at a time, by the memory of the GPU; without it, 2048.
    return with_newer_runner(lambda: LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS))


def with_newer_runner(build: Callable[[], Any]) -> Any:
    """The engine that `build` makes: on a GPU with vLLM's newer model runner, unless vLLM refuses it for its settings.

    The older runner samples each token with a seed in a call of its own, which is slow for many requests. Versions that
    use the newer one only for a list of models, such as 0.24, are told to use it for all. If VLLM_USE_V2_MODEL_RUNNER
    is set, it decides: 0 is for models with which the newer runner fails.
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


def _cache_bytes(model: str, utilization: float) -> int:
    """The bytes for the KV cache: an engine's share of the GPU minus twice the weights and 2 GiB.

    If other processes share the GPU, vLLM cannot measure this, and fails if one of them frees memory meanwhile.
    """
    import torch

    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    left = int(utilization * torch.cuda.mem_get_info()[1]) - 2 * weights - (2 << 30)
    return max(left, 64 << 20)


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """vLLM's description of how a completion is sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bad_words=list(sampling.bad_words),
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may be one
        seed=seed,
        logprobs=0 if sampling.logprobs else None,  # 0: of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **_further(sampling.options),
    )


def _further(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Further arguments; JSON, in which settings are kept, has made texts of token ids that are keys."""
    return {
        name: {int(token): bias for token, bias in value.items()} if name == "logit_bias" else value
        for name, value in options
    }


def _output(result: Any) -> Output:
    sampled = result.outputs[0]
    logprobs = () if sampled.logprobs is None else tuple(sampled.logprobs.logprobs)
    return Output(tuple(sampled.token_ids), logprobs, sampled.finish_reason == "stop")
