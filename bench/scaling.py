"""Scaling: the same work for each rank, or in all, on 1, 2, 4 ranks; tokens per second and rank.

    python bench/scaling.py [--gpu] [--ranks 1,2,4] [--steps N] [--whole-step] [--strong] [--SECTION.SETTING VALUE ...]

The update is bench/update.py's, without the bare loop and without engines, on 1, 2 and where there are as many GPUs 4
workers; on a CPU on 1 and 2, which share its cores. `--whole-step` makes real runs besides, with as many engines as
workers, where there are GPUs for both (with `rollout.placement colocated` they share them). train.prompts_per_step is
for each rank; with `--strong` it is for all together, and the shares say how much of each further GPU is of use. With
`--parallel.sp 2 --scaling.num-workers 2`, or tp, a rank is a replica of two workers.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import table
import update
import workload

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(6, 6))
    options.add_argument("--ranks", help="numbers of workers, ascending (default: 1,2 and with four GPUs 4)")
    options.add_argument("--whole-step", action="store_true", help="measure whole steps too")
    options.add_argument("--profile", action="store_true", help="print where the time of the first rank's update goes")
    options.add_argument("--strong", action="store_true", help="the ranks share the work of one")

    def script() -> int:
        args, config = workload.read(options, argv)
        if config.scaling.num_workers > config.parallel.neighbours:
            raise ConfigError("scaling.num_workers: --ranks says how many replicas there are; give those of one")
        replicas = workload.gpus() // config.parallel.neighbours if config.scaling.use_gpu else None
        counts = ranks("--ranks", args.ranks, replicas)
        work = {"train.prompts_per_step": config.train.prompts_per_step} if args.strong else {}
        alone = {count: scaled(config, count, work | without_engines(config)) for count in counts}
        load = os.getloadavg()[0]
        with workload.prepared(alone[counts[-1]]) as (ready, path):
            here = {"storage": ready.storage, "model.path": path}
            figures = per_rank(
                "update", {n: updated(scaled(one, 1, here), path, args.profile) for n, one in alone.items()}
            )
            if args.whole_step:
                whole = {n: scaled(config, n, work | here | {"rollout.num_engines": n}) for n in counts}
                figures |= per_rank("step", {n: stepped(one, path) for n, one in whole.items() if fits(one)})
            facts = update.described(config) | {"ranks": ", ".join(map(str, counts))}
            facts["per rank"] = "its share of the same work" if args.strong else "the same work"
            table.finish("scaling", figures, ready, args.out, load, facts)
        return 0

    return exit_code(script)


def ranks(option: str, given: str | None, gpus: int | None) -> list[int]:
    """The numbers of ranks to measure, as an option gives them; `gpus` is None on a CPU.

    Raises:
        ConfigError: they are not ascending numbers, or more than there are GPUs.
    """
    if given is None:
        return [count for count in (1, 2, 4) if count <= (2 if gpus is None else gpus)]
    counts = [int(word) for word in given.split(",") if word.strip().isdecimal()]
    if len(counts) != given.count(",") + 1 or counts != sorted(set(counts)) or counts[0] < 1:
        raise ConfigError(f"{option} {given}: expected ascending numbers, such as 1,2,4")
    if gpus is not None and counts[-1] > gpus:
        raise ConfigError(f"{option} {given}: this machine has {gpus} GPUs")
    return counts


def scaled(config: RunConfig, times: int, more: Mapping[str, Any]) -> RunConfig:
    """The config for so many times the workers, with as much work for each; `more` are further settings."""
    own = {"scaling.num_workers": config.scaling.num_workers * times}
    own |= {"train.prompts_per_step": config.train.prompts_per_step * times}
    return from_tree(with_overrides(config.model_dump(), own | dict(more)), f"{times} x the workers")


def without_engines(config: RunConfig) -> dict[str, Any]:
    """The settings in which each worker has a GPU to itself, if there are any."""
    alone = workload.gpu_shares(workload.gpus(), engines=False) if config.scaling.use_gpu else workload.NO_ENGINES
    return alone | {"rollout.placement": "separate"}


def fits(config: RunConfig) -> bool:
    """Whether there is a GPU for each engine and each worker; on a CPU whole steps are measured on what there is."""
    of_each = 1 if config.rollout.placement == "colocated" else 2
    return not config.scaling.use_gpu or of_each * config.scaling.num_workers <= workload.gpus()


def updated(config: RunConfig, path: str, profile: bool = False) -> float:
    """Tokens per second and rank in rlx's update."""
    result = update.on_ranks(config, path, profile=profile)
    if profile:
        print(result["profile"], flush=True)
    rate = float(result["tokens"] / statistics.median(result["seconds"][workload.WARM :]))
    memory = result["memory"] / 2**30
    workload.say(f"{config.scaling.num_workers} ranks: {rate:,.0f} tokens/s per rank in updates, {memory:.1f} GiB")
    return rate


def stepped(config: RunConfig, path: str) -> float:
    """Response tokens per second and rank over whole steps."""
    from rlx.runs import preflight

    steps = workload.counted_steps(config, preflight.prompt_tables(config, path), f"ranks-{config.scaling.num_workers}")
    workload.processes().close()
    drawn = config.train.prompts_per_step * config.train.samples_per_prompt / config.scaling.num_workers
    return drawn * statistics.median(step["response/length_mean"] / step["time/step"] for step in steps)


def per_rank(what: str, rates: Mapping[int, float]) -> dict[str, float]:
    """Tokens per second and rank, and each as a share of what the next smaller number of ranks has."""
    figures = {f"{what} tokens/s per rank, {count} ranks": rate for count, rate in rates.items()}
    for (few, before), (many, after) in itertools.pairwise(rates.items()):
        figures[f"{what} tokens/s per rank, {many} / {few} ranks"] = after / before
    return figures


if __name__ == "__main__":
    sys.exit(main())
