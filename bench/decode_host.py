"""The host's part of a decode step: seconds a step with vLLM's own scheduler and with rlx's.

    python bench/decode_host.py [--gpu] [--model NAME] [--sequences N] [--tokens N] [--rounds N] [--only SCHEDULER]

Without Ray: vLLM's engine with the arguments of a run, in this process, one engine after the other. Each line is the
median of the rounds: the wall time of a whole step, and the processor's time of the scheduler's two calls in it and of
what vLLM makes of its outputs. On a GPU each line also has the time of its kernels in one more round of 128 tokens, by
torch's profiler, as a share of a step's time in that part of a round without it. A small model is made on the spot;
with --gpu one of Qwen2 0.5B's shape in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import random_models
import workload

from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.rollout.vllm_engine import CPU_ENVIRONMENT, ENVIRONMENT, build_llm_engine, sampling_params
from rlx.types import Sampling

PROMPT = 64
SCHEDULERS = ("vllm", "rlx")
PROFILED = 128  # tokens of each completion
PARTS = ("schedule", "update_from_output", "process_outputs")


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gpu", action="store_true", help="Qwen2 0.5B's shape in bfloat16 on a GPU")
    options.add_argument("--model", help="a model of bench/workload.py, or a folder")
    options.add_argument("--memory", type=float, default=0.4, help="share of the GPU; one engine may have 0.9")
    options.add_argument("--only", choices=SCHEDULERS, help="one scheduler, without log-probabilities")
    options.add_argument("--sequences", type=int, default=512)
    options.add_argument("--tokens", type=int, default=256, help="of each completion")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args(argv)
    os.environ.update(ENVIRONMENT | ({} if args.gpu else CPU_ENVIRONMENT))
    with tempfile.TemporaryDirectory() as folder:
        kind = {
            "path": args.model or ("qwen2-0.5b" if args.gpu else random_models.UNTRAINED),
            "dtype": "bfloat16" if args.gpu else "float32",
        }
        limits: dict[str, Any] = {"max_num_seqs": args.sequences, "max_tokens": args.tokens, "kv_cache_mib": 1024}
        limits["gpu_memory_utilization"] = args.memory  # the first engine may not have left when the second starts
        config = from_tree({"storage": folder, "model": kind, "rollout": limits})
        for name in [args.only] if args.only else SCHEDULERS:
            measure(name, config, args)
    return 0


def measure(name: str, config: RunConfig, args: argparse.Namespace) -> None:
    """Prints the times of one scheduler, with and without log-probabilities."""
    from rlx.rollout.engine_args import engine_args

    given = engine_args(config.rollout, config.model, max_prompt_tokens=PROMPT, on_gpu=args.gpu)
    own = {"scheduler_cls": None} if name == "vllm" else {}
    engine = build_llm_engine(workload.model_folder(config), given | own)
    core = engine.engine_core.engine_core
    print(f"{name}'s scheduler: {type(core.scheduler).__qualname__}", flush=True)
    seconds = timed((core.scheduler, core.scheduler, engine.output_processor))
    gc.disable()
    for logprobs in (False,) if args.only else (True, False):
        draw(engine, args.sequences, 16, logprobs)  # warm
        rounds = []
        for _ in range(args.rounds):
            seconds.update(dict.fromkeys(PARTS, 0.0))
            steps, whole = draw(engine, args.sequences, args.tokens, logprobs)
            rounds.append([1e3 * part / steps for part in (whole, *seconds.values())])
        step, *parts = map(statistics.median, zip(*rounds, strict=True))
        told = ", ".join(f"{part} {value:.2f}" for part, value in zip(PARTS, parts, strict=True))
        print(f"  {'with' if logprobs else 'without'} log-probabilities: a step {step:.2f} ms; {told}", flush=True)
        if args.gpu:
            print(f"    {kernels(engine, args.sequences, logprobs)}", flush=True)
    del engine, core
    gc.enable()
    gc.collect()
    if args.gpu:
        import torch

        torch.cuda.empty_cache()


def kernels(engine: Any, sequences: int, logprobs: bool) -> str:
    """The GPU's part of a step, as text."""
    import torch
    from torch.profiler import ProfilerActivity

    steps, seconds = draw(engine, sequences, PROFILED, logprobs)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        draw(engine, sequences, PROFILED, logprobs)
        torch.cuda.synchronize()
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    return f"kernels {1e3 * busy / steps:.2f} of {1e3 * seconds / steps:.2f} ms a step: {busy / seconds:.3f}"


def timed(owners: Sequence[Any]) -> dict[str, float]:
    """The seconds spent in each part, from now on."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def wrapped(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            started = time.thread_time()  # without the time that other processes take
            try:
                return call(*given, **named)
            finally:
                seconds[part] += time.thread_time() - started

        return run

    for part, owner in zip(PARTS, owners, strict=True):
        setattr(owner, part, wrapped(part, getattr(owner, part)))
    return seconds


def draw(engine: Any, sequences: int, tokens: int, logprobs: bool) -> tuple[int, float]:
    """The steps and seconds of drawing completions of the same length."""
    sampling = Sampling(1.0, 1.0, -1, tokens, (), logprobs=logprobs)
    engine.reset_prefix_cache()
    for number in range(sequences):
        prompt = [6 + (number * 31 + place * 7) % 80 for place in range(PROMPT)]
        params = sampling_params(sampling, number)
        params.ignore_eos = True
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params)
    steps, started = 0, time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return steps, time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
