"""How near rlx's update is to a bare training loop: tokens per second and memory, on made-up completions.

    python bench/update.py [--gpu] [--steps N] [--SECTION.SETTING VALUE ...]

A Ray Train worker builds what a run's worker has, FSDP and all, and no engine is started. Its update and the bare loop
(bare.py), which waits in a process of its own on the same device, take turns on the same sequences with the same
micro-batch budget. Tokens are prompts' and responses'; padding never counts. Responses have all lengths from an eighth
of rollout.max_tokens to all of it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bare
import table
import workload
from measure import PEAK_FLOPS

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(8, 6))
    options.add_argument("--profile", help="file for a table of where the time of one more round goes")

    def script() -> int:
        args, config = workload.read(options, argv, engines=False)
        if config.scaling.num_workers > 1:
            raise ConfigError("scaling.num_workers: the bare loop is one process; bench/scaling.py takes more")
        if config.resolved_critic == "head" or config.model.lora_rank:
            raise ConfigError("model: the bare loop knows no value head on the policy, and no LoRA")
        load = os.getloadavg()[0]
        with workload.prepared(config) as (ready, path):
            figures = measure(ready, path, args.profile)
            table.finish("update", figures, ready, args.out, load, described(config))
        return 0

    return exit_code(script)


def measure(config: RunConfig, path: str, profile: str | None = None) -> dict[str, float]:
    """The table: medians over the counted rounds."""
    import ray

    options: Any = {"num_cpus": config.scaling.resources_per_worker.get("CPU", 0), "num_gpus": 0}
    if config.scaling.use_gpu:
        # Both sides hold what they have taken while the other works: with fewer fragments here they fit on an H200.
        options["runtime_env"] = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    loop = ray.remote(bare.Loop).options(**options).remote(config, path)
    result = on_ranks(config, path, loop, bool(profile))
    if profile:
        Path(profile).write_text(result["profile"])
    ours, bares = (statistics.median(result[name][workload.WARM :]) for name in ("seconds", "bare"))
    figures = {
        "update tokens/s": result["tokens"] / ours,
        "bare loop tokens/s": result["bare tokens"] / bares,
        "update / bare loop": (result["tokens"] / ours) / (result["bare tokens"] / bares),
        "experience and log-probabilities, s": statistics.median(result["logprobs"][workload.WARM :]),
        "update, s": ours,
        "bare loop, s": bares,
        "update memory, MiB": result["memory"] / 2**20,
        "bare loop memory, MiB": result["bare memory"] / 2**20,
        "update memory / bare loop memory": result["memory"] / result["bare memory"],
    }
    flops = ray.get(loop.flops.remote())
    figures["bare loop TFLOP/s"] = flops / bares / 1e12
    if config.scaling.use_gpu:
        figures["bare loop FLOPs utilisation"] = flops / bares / PEAK_FLOPS
    return figures


def described(config: RunConfig) -> dict[str, Any]:
    """How rlx and the bare loop were set, alike."""
    train = config.train
    return {
        "precision": f"{config.model.dtype}, weights and AdamW in float32",
        "torch.compile": config.resolved_compile,
        "gradient checkpointing": train.gradient_checkpointing,
        "models": "policy and critic" if config.resolved_critic == "separate" else "policy",
        "reference held": config.resolved_reference == "copy",
        "completions x optimizer steps": f"{train.prompts_per_step * train.samples_per_prompt} x "
        f"{train.ppo_epochs * train.num_minibatches}",
        "micro-batch tokens": train.micro_batch_tokens,
    }


def on_ranks(config: RunConfig, path: str, loop: Any = None, profile: bool = False) -> dict[str, Any]:
    """What the first rank of a group of Train workers says of its updates, see `rank`; `loop` takes turns with it.

    Raises:
        RunError: a worker failed.
    """
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from rlx.data.blocks import RankShares
    from rlx.runs import mailbox, preflight, train_run
    from rlx.runs.mailbox import Box
    from rlx.storage.addresses import open_storage

    scaling = config.scaling
    folder = open_storage(config.storage) / "update"
    spec = mailbox.JobSpec(config, path, folder, examine=True)
    job = {"spec": spec, "box": Box.new(mailbox.start_mailbox()), "loop": loop, "profile": profile}
    trainer = TorchTrainer(
        rank,
        train_loop_config=job,
        torch_config=TorchConfig(backend="nccl" if scaling.use_gpu else "gloo"),
        datasets=preflight.prompt_tables(config, path),
        dataset_config=RankShares(config.parallel.neighbours),
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=dict(scaling.resources_per_worker),
        ),
        run_config=ray.train.RunConfig(name=f"update-{scaling.num_workers}", storage_path=config.storage),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise train_run.RunError(train_run.error_message(error)) from None
    return dict(json.loads(_result(config).read_text()))


def _result(config: RunConfig) -> Path:
    """Where the first rank leaves its figures: all ranks are on this machine."""
    return Path(config.storage) / f"update-{config.scaling.num_workers}.json"


def rank(job: dict[str, Any]) -> None:
    """On a worker: leaves the seconds of log-probabilities and update of each round, those of the slowest rank, and the
    rank's tokens of a round and peak memory in the update; and the same of the bare loop, first in each round."""
    import ray
    import ray.train
    from measure import Memory, now, profiled

    from rlx.runs import worker
    from rlx.training.loop import compute_advantages, compute_logprobs
    from rlx.training.setup.rank import build_rank, close_rank
    from rlx.training.update import update

    inputs = worker.inputs_of(worker.Job(job["spec"], job["box"], 1, job["spec"].folder))
    run, collector, checkpointer = build_rank(inputs)
    mesh = run.mesh
    memory = Memory(run.device)
    judged = made_up(run.config, collector.score.tokenizer)
    sequences = [(len(c.prompt.token_ids), [*c.prompt.token_ids, *c.token_ids]) for c in (j.completion for j in judged)]
    drawn = run.sum_over_ranks({"tokens": sum(len(all_) for _, all_ in sequences)})[
        "tokens"
    ]  # ranks train on each other's
    tokens = run.config.train.ppo_epochs * drawn / mesh.dp_size
    result: dict[str, Any] = {"tokens": tokens, "logprobs": [], "seconds": [], "bare": [], "memory": 0}
    if loop := job["loop"]:
        result["bare tokens"] = ray.get(loop.load.remote(sequences))
    for round_ in range(run.config.train.steps):
        if round_ == workload.WARM - 1 and loop:
            ray.get(loop.forget_memory.remote())
        if loop:
            result["bare"].append(ray.get(loop.round.remote()))
        started = now(run.device)
        made = collector.build_batch([each.completion for each in judged]).with_scores(judged)
        batch, _ = compute_advantages(run, compute_logprobs(run, made))
        memory.forget()
        between = now(run.device)
        update(run, batch)
        ended = now(run.device)
        peak = memory.peak() if round_ >= workload.WARM - 1 else 0
        slowest = run.max_over_ranks([between - started, ended - between, peak])
        result["logprobs"].append(slowest[0])
        result["seconds"].append(slowest[1])
        result["memory"] = max(result["memory"], slowest[2])
        run.step += 1
    if loop:
        result["bare memory"] = ray.get(loop.peak_memory.remote())
    if job["profile"]:
        result["profile"] = profiled(lambda: update(run, batch))
    close_rank(run, collector, checkpointer, inputs.reporter)
    if mesh.rank == 0:
        _result(run.config).write_text(json.dumps(result))


def made_up(config: RunConfig, tokenizer: Any) -> list[Any]:
    """This rank's share of a step: real prompts, and completions and scores drawn at random."""
    import numpy as np

    from rlx.runs.worker import prompt_share
    from rlx.types import Completion, ScoredCompletion

    share = prompt_share("train")
    stream = share.stream(config.seed)
    limit, draw = config.rollout.max_tokens, np.random.default_rng((config.seed, share.rank))
    judged = []
    for prompt in stream.next(config.train.prompts_per_step):
        for sample in range(config.train.samples_per_prompt):
            length = int(draw.integers(max(1, limit // 8), limit + 1))
            ids = tuple(int(i) for i in draw.integers(0, len(tokenizer), length))
            completion = Completion(prompt, sample, ids, (-1.0,) * length, length < limit, 0)
            judged.append(ScoredCompletion(completion, float(draw.random()), False, {}))
    return judged


if __name__ == "__main__":
    sys.exit(main())
