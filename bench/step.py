"""Where a step's time goes, and what generating ahead saves of it.

    python bench/step.py [--gpu] [--steps N] [--skip overlap] [--bare] [--SECTION.SETTING VALUE ...]

Two real runs with the same engines and workers, each on CPUs or GPUs of their own: strictly on-policy (k = 0), and with
generation for the next step while this one trains (rollout.max_staleness k = 1). A step costs at least its rollout or
its update, whichever is longer; both are those of the first run, where neither disturbs the other. A rollout takes as
long as its engines draw, which is longer than the trainer waits: meanwhile it scores the first completions. `--bare`
measures bench/rollout.py's figures in the first run too, and so spares its start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rollout
import table
import workload

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
    """The config with k = 1, and one step more: at the last nothing is generated."""
    own = {"rollout.max_staleness": 1, "train.steps": config.train.steps + 1}
    return from_tree(with_overrides(config.model_dump(), own), "k = 1")


def measure(config: RunConfig, path: str, overlap: bool, bare: bool) -> dict[str, float]:
    """The runs, one after the other with the same crew, and bare vLLM before and after them."""
    from rlx.runs import preflight

    tables = preflight.prompt_tables(config, path)
    before = rollout.alone(config, path, tables) if bare else []
    now = workload.counted_steps(config, tables, "k0")
    figures = parts(now)
    if overlap:
        figures |= compared(now, workload.counted_steps(ahead(config), tables, "k1")[:-1])
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
