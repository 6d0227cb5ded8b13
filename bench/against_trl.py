"""Whole steps of rlx beside those of TRL's GRPOTrainer: response tokens per second of the same work on one machine.

    python bench/against_trl.py [--gpu [--ahead]] [--steps N] [--ways WAY ...] [--SECTION.SETTING VALUE ...]

The same model, prompts, completions for each, sampling, optimizer steps, precision and number of micro-batches; the
learning rate is 0. TRL, pinned by the extra `bench`, runs in one process that has all that engine and worker of rlx
have together: on a GPU with vLLM in that process (`vllm_mode` colocate), on CPUs, where it takes no vLLM, with
transformers' generate. What it is given follows from rlx's settings in `arguments`. It runs in each way of `WAYS`, then
rlx, then the fastest way again; rlx is compared with the fastest. Its own habits stay: no seeds for requests,
log-probabilities of the engine, padding to the longest of a step. So the draws differ, and with them the lengths of a
model that ends its responses by itself (`--model.path qwen2-0.5b-ending`, on CPUs qwen2-30m-ending): tokens per second
are of each side's own mean length, which the table has. TRL and its vLLM end a response with the token that the model's
generation_config.json names, and so need no setting. Both are timed from the end of a step to the end of the next. The
way with bfloat16 weights is less exact than rlx, whose trained weights are float32: it has a row, and is
not what rlx is compared with.

With --ahead, on two GPUs, rlx generates one step ahead, and TRL's asynchronous trainer (AsyncGRPOTrainer) trains on one
GPU while vLLM's server draws on the other. It gets weights as often as rlx, and may be as stale as it is by default,
four weight updates; its first `FILLING` steps more are not counted, in which its queue fills. It has as many requests
under way as a step of rlx and as many completions in each micro-batch, or in one of its ways as many requests as it has
by default and micro-batches by tokens. How both of TRL's trainers are run is in trl_runs.py. Left out: TRL on more
GPUs.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import alike
import table
import trl_runs
import workload
from rollout import described
from trl_runs import Measured

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig

# Two cores, as TRL has: the engine takes turns with the worker on policy, and more than a thread gains it nothing. All
# completions at once, as TRL; micro-batches of which a mini-batch has two in both.
CPU = workload.CPU | {
    "scaling.resources_per_worker": {"CPU": 1.9},
    "rollout.resources_per_engine": {"CPU": 0.1},
    "rollout.max_num_seqs": 512,
    "rollout.kv_cache_mib": 256,
    "data.max_prompt_tokens": 32,
    "train.micro_batch_tokens": 20_480,
}
# With twice as much TRL 1.16 runs out of an H200's memory.
GPU = workload.GPU | {"train.micro_batch_tokens": 24_576}


class Way(NamedTuple):
    """Settings of TRL that no setting of rlx decides, and that cost or gain it speed."""

    given: dict[str, Any]
    environment: Mapping[str, str] = MappingProxyType({})


LIGER = {"use_liger_kernel": True}  # its kernels for norms, SwiGLU and rotary embeddings; its losses fit no GRPO of TRL
WAYS = {
    "plain": Way({}),
    "liger": Way(LIGER),
    "compiled": Way({"torch_compile": True}),
    "liger, newer runner": Way(LIGER, alike.NEWER_RUNNER),
    "liger, newer runner, compiled": Way(LIGER | {"torch_compile": True}, alike.NEWER_RUNNER),
    "liger, bfloat16 weights": Way(LIGER | {"model_init_kwargs": {"dtype": "bfloat16"}}),
}
"""of its trainer on policy"""


class Ahead(NamedTuple):
    """The same of its asynchronous trainer, which has no liger, and of vLLM's server beside it."""

    trainer: dict[str, Any]
    server: list[str]
    environment: Mapping[str, str]
    by_tokens: bool = False
    """see `token_budget`"""


_NEWER = Ahead({}, ["--api-server-count", "4"], alike.NEWER_RUNNER)
AHEAD = {
    "plain": Ahead({}, [], {}),
    "four front ends": _NEWER._replace(environment={}),
    "newer runner": _NEWER,
    "newer runner, compiled": _NEWER._replace(trainer={"torch_compile": True}),
    "newer runner, own requests, token budget": _NEWER._replace(by_tokens=True),
}
"""the newer runner has four front ends, too"""
Trl = Callable[[RunConfig, str, alike.Prompts, str], Measured]
"""runs one of TRL's trainers in a way; returns its counted steps"""
FILLING = 2
"""steps of the asynchronous trainer that are not counted, besides those that are never"""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(6, 6))
    options.add_argument(
        "--ways", nargs="+", choices=list(WAYS | AHEAD), help="how TRL is set; default: plain, on GPUs all"
    )
    options.add_argument("--ahead", action="store_true", help="one step ahead, on two GPUs; else on policy")
    words = sys.argv[1:] if argv is None else argv

    def script() -> int:
        is_ahead = "--ahead" in words
        args, config = workload.read(options, words, CPU, GPU | (alike.AHEAD if is_ahead else {}))
        own = list(AHEAD if is_ahead else WAYS)
        ways = args.ways or (own if args.gpu else ["plain"])
        check(config, is_ahead)
        if unknown := sorted(set(ways) - set(own)):
            raise ConfigError(f"--ways {unknown[0]}: {'with' if is_ahead else 'without'} --ahead: {', '.join(own)}")
        load, name = os.getloadavg()[0], "against_trl" + ("_ahead" if is_ahead else "")
        with workload.prepared(config) as (ready, path):
            figures = measure(ready, path, ways, by_trl_ahead(Path(args.out)) if is_ahead else by_trl)
            table.finish(name, figures, ready, args.out, load, described(ready) | alike.DRAWS)
        return 0

    return exit_code(script)


def check(config: RunConfig, is_ahead: bool = False) -> None:
    """ConfigError for a config that TRL cannot run alike, and where TRL is not installed."""
    if is_ahead and not (config.scaling.use_gpu and alike.gpus(config) == 2 == 1 + config.rollout.num_engines):
        raise ConfigError("--ahead: TRL trains on one GPU and draws on another; add --gpu, and show rlx two of them")
    alike.check(config, "TRL", has_gpus=is_ahead, is_ahead=is_ahead)
    if not find_spec("trl"):
        raise ConfigError("TRL is not installed here: pip install -e '.[bench]'")


def measure(config: RunConfig, path: str, ways: Sequence[str], run: Trl) -> dict[str, float]:
    """The table: rlx's figures, and TRL's in each way."""
    from rlx.runs import preflight

    tables = preflight.prompt_tables(config, path)
    prompts = alike.prompts(config, path, tables)
    drawn = in_each_way(config, path, prompts, ways, run)
    found = {way: workload.median_rates(each)[0] for way, each in drawn.items()}
    best = max((way for way in found if "bfloat16" not in way), key=found.__getitem__, default=next(iter(found)))
    ours = alike.by_rlx(config, tables)
    (again,) = workload.median_rates(run(config, path, prompts, best))
    return (
        ours
        | {f"TRL, {way}, tokens/s": rate for way, rate in found.items()}
        | {f"TRL, {best}, after / before": again / found[best]}
        | alike.ratios(ours, f"TRL, {best}", (found[best] + again) / 2)
        | {
            "mean response of TRL, tokens": statistics.mean(tokens for tokens, _ in drawn[best])
            / alike.completions(config)
        }
    )


def in_each_way(
    config: RunConfig, path: str, prompts: alike.Prompts, ways: Sequence[str], run: Trl
) -> dict[str, Measured]:
    """TRL's counted steps in each way that it can run.

    Raises:
        RuntimeError: it ended early in all.
    """
    from ray.exceptions import RayError

    drawn = {}
    for way in ways:
        try:
            drawn[way] = run(config, path, prompts, way)
        except (RayError, RuntimeError) as error:
            workload.say(f"TRL, {way}, ended early: {error}")
    if not drawn:
        raise RuntimeError("TRL ended early in every way")
    return drawn


def by_trl(config: RunConfig, path: str, prompts: alike.Prompts, way: str) -> Measured:
    """TRL's counted steps on policy, in a process with the resources of an engine and a worker."""
    own = WAYS[way]
    words = path, arguments(config) | own.given, prompts
    measured: Measured = _alone(config, trl_runs.on_policy, *words, environment=own.environment)
    workload.say_drawn(f"TRL, {way}", measured)
    return measured[workload.WARM :]


def by_trl_ahead(out: Path) -> Trl:
    """The same of its asynchronous trainer; its own metrics go to OUT/trl-WAY.json, the server's words beside them."""

    def run(config: RunConfig, path: str, prompts: alike.Prompts, way: str) -> Measured:
        out.mkdir(parents=True, exist_ok=True)
        file, own = out / f"trl-{re.sub('[^a-z]+', '-', way)}.json", AHEAD[way]
        with (
            open(file.with_suffix(".log"), "w") as log,
            trl_runs.server(path, serving(config) + own.server, own.environment, log) as address,
        ):
            words = asynchronous(config) | (token_budget(config) if own.by_tokens else {}) | own.trainer
            words |= {"vllm_server_base_url": address}
            measured, metrics = _alone(config, trl_runs.ahead, path, words, prompts)
        file.write_text(json.dumps(metrics, indent=1) + "\n")
        workload.say_drawn(f"TRL, {way}, one step ahead", measured)
        return list(measured[workload.WARM + FILLING :])

    return run


def _alone(
    config: RunConfig, run: Callable[..., Any], *words: Any, environment: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """What a function returns in a process of its own, with the resources of an engine and a worker."""
    import ray

    from rlx.cluster.resources import plan_resources

    cpus = max(1, round(plan_resources(config).total().get("CPU", 1.0)))
    own = {"env_vars": {"OMP_NUM_THREADS": str(cpus), **environment}}
    process: Any = ray.remote(max_calls=1)(run).options(num_cpus=cpus, num_gpus=alike.gpus(config), runtime_env=own)
    return ray.get(process.remote(*words))


def arguments(config: RunConfig) -> dict[str, Any]:
    """TRL's GRPOConfig for the same work.

    As many completions at a time as fit rlx's micro-batches if all were as long as may be, and divide a mini-batch.
    """
    train, rollout, on_gpu = config.train, config.rollout, config.scaling.use_gpu
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    completions = alike.completions(config) // train.num_minibatches
    fitting = max(1, train.micro_batch_tokens // longest)
    at_once = max(count for count in range(1, min(fitting, completions) + 1) if completions % count == 0)
    given = {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": completions // at_once,
        "steps_per_generation": train.num_minibatches * completions // at_once,
        "num_iterations": train.ppo_epochs,
        "num_generations": train.samples_per_prompt,
        "max_steps": train.steps * train.num_minibatches * train.ppo_epochs,
        "max_completion_length": rollout.max_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),
        "learning_rate": train.actor_lr,
        "max_grad_norm": train.max_grad_norm,
        "beta": 0.0,
        "loss_type": "grpo",
        "gradient_checkpointing": train.gradient_checkpointing,
        "optim": "adamw_torch_fused",
        "use_cpu": not on_gpu,
        "bf16": config.model.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": "float32"},  # the weights that are trained; bf16 computes in bfloat16
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.seed,
    }
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": rollout.gpu_memory_utilization,
        "vllm_enable_sleep_mode": rollout.placement == "colocated",
        "vllm_max_model_length": longest,
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"detokenize": False},  # the reward looks at tokens
    }
    return given | (engine if on_gpu else {})


def asynchronous(config: RunConfig) -> dict[str, Any]:
    """TRL's AsyncGRPOConfig for the same work: a step of rlx is as many optimizer steps, after which weights travel."""
    given, updates = arguments(config), config.train.num_minibatches * config.train.ppo_epochs
    left_out = {"steps_per_generation", "num_iterations", "beta", "loss_type", "shuffle_dataset", "generation_kwargs"}
    kept = {name: value for name, value in given.items() if name not in left_out and "vllm" not in name}
    return kept | {
        "max_steps": (config.train.steps + FILLING) * updates,
        "weight_sync_steps": updates,
        "token_budget": 0,  # as many completions in each micro-batch
        "max_inflight_tasks": alike.completions(config),
    }


def token_budget(config: RunConfig) -> dict[str, Any]:
    """What differs with micro-batches by tokens and TRL's default number of requests, four mini-batches under way.

    An optimizer step of TRL is a number of micro-batches, however many completions they hold. So a mini-batch of rlx,
    each prompt once, is dealt evenly to as few of them as train.micro_batch_tokens asks for; a step is then about as
    many completions as rlx's, and its tokens are counted. TRL takes the default of requests from the first two.
    """
    train = config.train
    prompts = train.prompts_per_step / train.num_minibatches
    completions = prompts * train.samples_per_prompt
    tokens = prompts * config.data.max_prompt_tokens + completions * workload.mean_response(config)
    count = math.ceil(tokens / train.micro_batch_tokens)
    return {
        "gradient_accumulation_steps": count,
        "per_device_train_batch_size": math.ceil(completions / count),
        "token_budget": math.ceil(tokens / count),
        "max_inflight_tasks": -1,
    }


def serving(config: RunConfig) -> list[str]:
    """The arguments of vLLM's server for the same work, as TRL's documentation has them."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    words = {
        "--dtype": config.model.dtype,
        "--max-model-len": longest,
        "--max-num-seqs": config.rollout.max_num_seqs,
        "--gpu-memory-utilization": config.rollout.gpu_memory_utilization,
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "nccl"}',
    }
    return [str(each) for pair in words.items() for each in pair]


if __name__ == "__main__":
    sys.exit(main())
