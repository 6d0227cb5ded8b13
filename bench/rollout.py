"""How near rlx's rollouts are to bare vLLM: tokens per second on the same prompts with the same seeds.

    python bench/rollout.py [--gpu] [--steps N] [--SECTION.SETTING VALUE ...]

A real run, prompts and completions travelling between worker and engine and weights after each step; before it vLLM's
own `LLM.generate` (bare.py) on the prompts of the same steps, in each way of `WAYS`, and after it in the fastest one
once more, so that a machine that becomes slower meanwhile does not decide. rlx is compared with the fastest. The
learning rate is 0, so with the same seeds both draw the same completions; the table says whether they did.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bare
import table
import workload

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.data.stream import PromptStream, TableRows


@dataclass(frozen=True)
class Way:
    """How vLLM is set beside the settings that decide what is drawn."""

    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    seeds: bool = True
    """completions have seeds of their own, as rlx's; without, vLLM samples faster"""


OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
WAYS = {
    "as rlx": Way(),
    "async": Way({"async_scheduling": True}),
    "own process": Way({"async_scheduling": True}, OWN_PROCESS),
    "own process, no seeds": Way({"async_scheduling": True}, OWN_PROCESS, seeds=False),
    "16 k prefill, no seeds": Way({"async_scheduling": True, "max_num_batched_tokens": 16_384}, seeds=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(5, 5))
    options.add_argument("--ways", nargs="+", choices=list(WAYS), help="how vLLM is set; default: as rlx, on GPUs all")

    def script() -> int:
        args, config = workload.read(options, argv)
        check(config)
        load = os.getloadavg()[0]
        with workload.prepared(config) as (ready, path):
            from rlx.runs import preflight

            tables = preflight.prompt_tables(ready, path)
            ways = args.ways or (list(WAYS) if args.gpu else ["as rlx"])
            before = {way: alone(ready, path, tables, way) for way in ways}
            steps = workload.counted_steps(ready, tables)
            workload.processes().close()
            best = fastest(before)
            figures = rates(before) | compared(steps, before[best], alone(ready, path, tables, best))
            table.finish("rollout", figures, ready, args.out, load, described(ready))
        return 0

    return exit_code(script)


def check(config: RunConfig) -> None:
    """ConfigError for a config whose rollouts bare vLLM cannot repeat."""
    if config.rollout.num_engines > 1:
        raise ConfigError("rollout.num_engines: bare vLLM is one engine; measure one")
    if config.train.actor_lr > 0:
        raise ConfigError("train.actor_lr: a policy that changes draws other completions than bare vLLM; leave it 0")
    for key, given in (("max_staleness", config.rollout.max_staleness), ("num_chunks", config.rollout.num_chunks - 1)):
        if given:
            raise ConfigError(f"rollout.{key}: bare vLLM draws a step's completions at once; leave it out")
    if config.algorithm.filter_groups or config.algorithm.estimator.needs_greedy:
        raise ConfigError("algorithm: filter_groups and remax draw more than the step's prompts; leave them out")


def compared(
    steps: Sequence[Mapping[str, Any]], before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """The table: a run's counted steps, and the same steps by bare vLLM before and after the run."""
    ours = statistics.median(step["tokens/rollout_per_s"] for step in steps)
    first, last = workload.median_rates(before, after)
    total = sum(step["tokens/rollout_per_s"] * workload.drawing_s(step) for step in steps)
    return {
        "rollout tokens/s": ours,
        "bare vLLM tokens/s": (first + last) / 2,
        "bare vLLM, after / before": last / first,
        "rollout / bare vLLM": 2 * ours / (first + last),
        "tokens drawn / bare vLLM's": total / sum(tokens for tokens, _ in before),
        "mean response, tokens": workload.median(steps, "response/length_mean"),
    }


def rates(drawn: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, float]:
    """Tokens per second of vLLM by the way it is set."""
    return {f"vLLM, {way}, tokens/s": workload.median_rates(each)[0] for way, each in drawn.items()}


def fastest(drawn: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The way in which vLLM was fastest."""
    return max(drawn, key=lambda way: workload.median_rates(drawn[way])[0])


def alone(config: RunConfig, path: str, tables: Mapping[str, Any], name: str = "as rlx") -> list[tuple[int, float]]:
    """What bare vLLM, in a process with the resources of an engine, makes of a run's counted steps: tokens, seconds."""
    import ray

    from rlx.cluster.resources import plan_resources
    from rlx.rollout.vllm_engine import CPU_ENVIRONMENT, ENVIRONMENT

    way, resources = WAYS[name], plan_resources(config).engines[0]
    on_gpu = resources.get("GPU", 0) > 0
    variables = ENVIRONMENT | ({} if on_gpu else CPU_ENVIRONMENT) | dict(way.environment)
    process: Any = ray.remote(max_calls=1)(bare.rollout).options(  # what it leaves on a GPU goes with its process
        num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), runtime_env={"env_vars": variables}
    )
    options, sampling, rounds = requests(config, path, tables)
    if not way.seeds:
        rounds = [[(prompt, None) for prompt, _ in each] for each in rounds]
    drawn: list[tuple[int, float]] = ray.get(process.remote(path, {**options, **way.options}, sampling, rounds))
    workload.say_drawn(f"vLLM, {name}", drawn)
    return drawn[workload.WARM :]


def requests(
    config: RunConfig, path: str, tables: Mapping[str, Any]
) -> tuple[dict[str, Any], Any, list[list[bare.Request]]]:
    """What the run asked its engine for: vLLM's options, how to sample, each step's prompts and seeds."""
    import pyarrow as pa

    from rlx.cluster.resources import plan_resources
    from rlx.data import prompts
    from rlx.rollout.base import request_seed
    from rlx.runs.processes import engine_spec
    from rlx.types import Sampling

    chosen, train = config.rollout, config.train
    end = prompts.load_tokenizer(path, config.model.trust_remote_code).eos_token_id
    sampling = Sampling(
        chosen.temperature,
        chosen.top_p,
        chosen.top_k,
        chosen.max_tokens,
        (end,),
        logprobs=config.resolved_logprobs_every == 1,  # as in the run's counted steps, the third to the tenth
    )
    whole = pa.concat_tables(tables["train"].iter_batches(batch_size=None, batch_format="pyarrow"))
    stream = PromptStream(TableRows(whole), config.seed)
    rounds: list[list[bare.Request]] = [
        [
            (prompt.token_ids, request_seed(config.seed, step, prompt.id, sample))
            for prompt in stream.next(train.prompts_per_step)
            for sample in range(train.samples_per_prompt)
        ]
        for step in range(train.steps)
    ]
    return (
        engine_spec(
            config.rollout, config.model, config.data.max_prompt_tokens, path, plan_resources(config).engines[0]
        ).options,
        sampling,
        rounds,
    )


def described(config: RunConfig) -> dict[str, Any]:
    """How both were set."""
    from rlx.cluster.resources import plan_resources

    needed = plan_resources(config)
    train, chosen = config.train, config.rollout
    return {
        "precision": config.model.dtype,
        "completions": f"{train.prompts_per_step} prompts x {train.samples_per_prompt}",
        "tokens of one": f"at most {config.data.max_prompt_tokens} + {chosen.max_tokens}",
        "at once": chosen.max_num_seqs,
        "engine": f"{needed.engines[0]}, the trainer {needed.workers[0]}",
    }


if __name__ == "__main__":
    sys.exit(main())
