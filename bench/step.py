"""Where a step's time goes, and what generating ahead saves of it.

    python bench/step.py [--gpu] [--steps N] [--skip overlap] [--bare] [--SECTION.SETTING VALUE ...]

Two real runs with the same engines and workers, each on CPUs or GPUs of their own: strictly on-policy (k = 0), and with
generation for the next step while this one trains (rollout.max_staleness k = 1). A step costs at least its rollout or
its update, whichever is longer; both are those of the first run, where neither disturbs the other. A rollout takes as
long as its engines draw. That is little longer than the trainer waits: they begin while the step before is reported.
Only with rollout.num_chunks above 1 does it score a chunk and compute its log-probabilities while the next is drawn.

On GPUs whose memory's speed is known (measure.py) the first run also shows how near its engines are to it: the least
seconds of reading weights, keys and values for each token, by those in which they drew, prefill included. `--bare`
measures bench/rollout.py's figures in the first run too, and so spares its start.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import alike
import rollout
import table
import torch
import workload
from measure import bandwidth, least_drawing_s, shape_of

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig

Steps = Sequence[Mapping[str, Any]]
"""the metrics of a run's counted steps"""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(5, 3))
    options.add_argument("--skip", choices=("overlap",), help="only the parts of a step with k = 0")
    options.add_argument("--bare", action="store_true", help="bench/rollout.py's figures as well")

    def script() -> int:
        args, config = workload.read(options, argv)
        check(config, overlap=not args.skip)
        if args.bare:
            rollout.check(config)
        load = os.getloadavg()[0]
        with workload.prepared(config) as (ready, path):
            figures = measure(ready, path, overlap=not args.skip, bare=args.bare)
            table.finish("step", figures, ready, args.out, load, rollout.described(ready))
        return 0

    return exit_code(script)


def check(config: RunConfig, overlap: bool) -> None:
    """ConfigError for a config whose steps are not measured."""
    if config.rollout.max_staleness:
        raise ConfigError("rollout.max_staleness: 0 and 1 are measured; leave it out")
    if overlap and config.rollout.placement == "colocated":
        raise ConfigError("rollout.placement colocated: nothing overlaps where both take turns; add --skip overlap")
    if overlap:
        ahead(config)


def ahead(config: RunConfig) -> RunConfig:
    """The config with k = 1."""
    return from_tree(with_overrides(config.model_dump(), {"rollout.max_staleness": 1}), "k = 1")


def measure(config: RunConfig, path: str, overlap: bool, bare: bool) -> dict[str, float]:
    """The runs, one after the other with the same crew, and bare vLLM before and after them."""
    from rlx.runs import preflight

    tables = preflight.prompt_tables(config, path)
    before = rollout.alone(config, path, tables) if bare else []
    now = workload.counted_steps(config, tables, "k0")
    figures = parts(now) | decoding(config, path, now)
    if overlap:
        figures |= compared(now, workload.whole_steps(ahead(config), tables, "k1"))
    workload.processes().close()
    return figures | (rollout.compared(now, before, rollout.alone(config, path, tables)) if bare else {})


def parts(steps: Steps) -> dict[str, float]:
    """Medians of the parts of a step, in seconds and as shares of it."""
    whole = workload.median(steps, "time/step")
    seconds = {part: workload.median(steps, f"time/{part}") for part in workload.PARTS}
    return {"step with k = 0, s": whole, "engines draw, s": workload.median_drawing_s(steps)} | {
        f"{name}{unit}": value / by
        for name, value in seconds.items()
        for unit, by in ((", s", 1.0), (" / step", whole))
    }


def decoding(config: RunConfig, path: str, steps: Steps) -> dict[str, float]:
    """The share of the memory's roofline; nothing on GPUs whose is not known, in float32, and of episodes."""
    rate = bandwidth(torch.cuda.get_device_name()) if config.scaling.use_gpu else None
    if not rate or config.model.dtype == "float32" or config.environment.name:
        return {}
    lm = shape_of(path)
    shares = [least_s(config, lm, rate, step) / workload.drawing_s(step) for step in steps]
    return {"decode, share of the memory roofline": statistics.median(shares)}


def least_s(config: RunConfig, lm: Any, rate: float, step: Mapping[str, Any]) -> float:
    """The least seconds in which engines could draw a step's responses.

    Args:
        lm: the policy; its weights are not needed.
        rate: bytes a second from a GPU's memory.
    """
    completions, response = alike.completions(config), step["response/length_mean"]
    trained = step["tokens/update_per_s"] * step["time/update"] / config.train.ppo_epochs
    return least_drawing_s(
        lm,
        rate * config.rollout.tensor_parallel,
        sequences=completions / config.rollout.num_engines,
        prompt=trained / completions - response,
        response=response,
        longest=step["response/length_max"],
    )


def compared(now: Steps, ahead: Steps) -> dict[str, float]:
    """What a step with k = 1 takes beside one with k = 0, and beside the parts of that."""
    step = workload.median(ahead, "time/step")
    parts = {part: workload.median(now, f"time/{part}") for part in workload.PARTS}
    trainer = sum(seconds for part, seconds in parts.items() if part != "rollout")
    rollout = workload.median_drawing_s(now)
    return {
        "step with k = 1, s": step,
        "step with k = 1 / max(rollout, update)": step / max(rollout, parts["update"]),
        "step with k = 1 / max(rollout, all the trainer does)": step / max(rollout, trainer),
        "step with k = 1 / step with k = 0": step / workload.median(now, "time/step"),
        "the least that could be": max(rollout, trainer) / workload.median(now, "time/step"),
    }


if __name__ == "__main__":
    sys.exit(main())
