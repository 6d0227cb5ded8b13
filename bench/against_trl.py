"""Whole steps of rlx beside those of TRL's GRPOTrainer: response tokens per second of the same work on one machine.

    python bench/against_trl.py [--gpu] [--steps N] [--SECTION.SETTING VALUE ...]

The same model, prompts, completions for each, sampling, optimizer steps, precision and number of micro-batches; the
learning rate is 0. TRL, pinned by the extra `bench`, runs in one process that has all that engine and worker of rlx
have together: on a GPU with vLLM in that process (`vllm_mode` colocate), on CPUs, where it takes no vLLM, with
transformers' generate. What it is given follows from rlx's settings in `arguments`. It runs in each way of `WAYS`, then
rlx, then the fastest way again; rlx is compared with the fastest. Its own habits stay: no seeds for requests,
log-probabilities of the engine, padding to the longest of a step. Both are timed from the end of a step to the end of
the next. The way with bfloat16 weights is less exact than rlx, whose trained weights are float32: it has a row, and is
not what rlx is compared with. Left out: TRL on several GPUs.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import alike
import table
import workload
from rollout import described

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

LIGER = {"use_liger_kernel": True}  # its kernels for norms, SwiGLU and rotary embeddings; its losses fit no GRPO of TRL
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "liger": LIGER,
    "compiled": {"torch_compile": True},
    "liger, bfloat16 weights": LIGER | {"model_init_kwargs": {"dtype": "bfloat16"}},
}
"""settings of TRL that no setting of rlx decides, and that cost or gain it speed"""

Measured = list[tuple[int, float]]
"""response tokens and seconds of each step"""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(6, 6))
    options.add_argument("--ways", nargs="+", choices=list(WAYS), help="how TRL is set; default: plain, on GPUs all")

    def script() -> int:
        args, config = workload.read(options, argv, CPU, GPU)
        check(config)
        load = os.getloadavg()[0]
        with workload.prepared(config) as (ready, path):
            figures = measure(ready, path, args.ways or (list(WAYS) if args.gpu else ["plain"]))
            table.finish("against_trl", figures, ready, args.out, load, described(ready))
        return 0

    return exit_code(script)


def check(config: RunConfig) -> None:
    """ConfigError for a config that TRL cannot run alike, and where TRL is not installed."""
    alike.check(config, "TRL")
    if not find_spec("trl"):
        raise ConfigError("TRL is not installed here: pip install -e '.[bench]'")


def measure(config: RunConfig, path: str, ways: Sequence[str]) -> dict[str, float]:
    """The table: rlx's figures, and TRL's in each way."""
    from rlx.runs import preflight

    tables = preflight.prompt_tables(config, path)
    prompts = alike.prompts(config, path, tables)
    drawn = {way: by_trl(config, path, prompts, way) for way in ways}
    found = {way: workload.median_rates(each)[0] for way, each in drawn.items()}
    best = max((way for way in found if "bfloat16" not in way), key=found.__getitem__, default=ways[0])
    ours = alike.by_rlx(config, tables)
    (again,) = workload.median_rates(by_trl(config, path, prompts, best))
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


def by_trl(config: RunConfig, path: str, prompts: alike.Prompts, way: str) -> Measured:
    """TRL's counted steps, in a process with the resources of an engine and a worker."""
    import ray

    from rlx.cluster.resources import plan_resources

    cpus = max(1, round(plan_resources(config).total().get("CPU", 1.0)))
    process: Any = ray.remote(max_calls=1)(trained).options(
        num_cpus=cpus, num_gpus=alike.gpus(config), runtime_env={"env_vars": {"OMP_NUM_THREADS": str(cpus)}}
    )
    measured: Measured = ray.get(process.remote(path, arguments(config) | WAYS[way], prompts))
    workload.say_drawn(f"TRL, {way}", measured)
    return measured[workload.WARM :]


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


def trained(path: str, given: Mapping[str, Any], prompts: alike.Prompts) -> Measured:
    """Runs TRL in this process on each step's prompts."""
    import tempfile
    import time
    import warnings

    warnings.filterwarnings("ignore")
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokens: list[int] = []
    ends = [0.0]
    updates = given["max_steps"] // len(prompts)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(len(ids)) for ids in completion_ids]

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(output_dir=folder, **given)
        tokenizer = AutoTokenizer.from_pretrained(path)
        rows = Dataset.from_dict({"prompt": alike.texts(tokenizer, prompts)})
        trainer = GRPOTrainer(path, reward, config, rows, processing_class=tokenizer, callbacks=[Watch()])
        trainer.train()
    return [(count, after - before) for count, before, after in zip(tokens, ends, ends[1:], strict=False)]


if __name__ == "__main__":
    sys.exit(main())
