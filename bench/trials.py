"""A sweep of eight trials on one GPU and on all: trials per hour, and what ASHA saves.

    python bench/trials.py [--gpu] [--places 1,4] [--schedulers none asha] [--trials N] [--steps N] [--SETTING VALUE]

Each sweep is `experiments/ppo_sweep.py` with a grid of learning rates; with --gpu an engine and a worker have half of a
GPU each, whatever else is given. It runs once for each number of places, GPUs of this machine (on a CPU trials at
once), with each scheduler. The reward is the share of sevens (sevens.py), which random weights can raise; trials are
compared by it in sampled answers, since greedy ones stay as they are for many steps. Times are those that MLflow has
of the trials, so Ray's start is left out. Left out, too: what a sweep costs beside runs by hand (sweep.py).
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sweep
import table
import workload
from large_model import with_model
from recovery import gpu_memory
from scaling import ranks

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking.outbox import run_id
from rlx.tracking.services import mlflow

_LEARNS: dict[str, Any] = {
    "reward.functions": {"sevens:share": 1.0},  # of this folder
    "rollout.max_tokens": 64,
    "eval.every": 2,
    "eval.num_prompts": 64,
    "eval.sets": [{"name": "sampled", "samples": 2}],
}
_METRIC = "eval/sampled/reward"
"""by which ASHA compares"""
_GPU = workload.GPU | _LEARNS | {"model.path": "talker-0.5b"}  # another random model hardly ever draws a seven
_SLOWEST, _FACTOR = 1e-5, 2.0
"""the lowest of the learning rates, and what the next one is times it"""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(6, 6))
    options.add_argument("--places", help="numbers of GPUs, or on a CPU of trials at once (default: 1 and all; 1,2)")
    options.add_argument("--trials", type=int, default=8)
    options.add_argument(
        "--schedulers", nargs="+", default=["none"], choices=["none", "asha"], help="each runs a sweep"
    )

    def script() -> int:
        args, config = workload.read(options, argv, workload.CPU | _LEARNS, _GPU)
        config = with_model(config)
        gpus = workload.gpus() if config.scaling.use_gpu else None
        places = ranks("--places", args.places or ("1,2" if gpus is None else f"1,{gpus}" if gpus > 1 else "1"), gpus)
        if args.trials < 2:
            raise ConfigError(f"--trials {args.trials}: two at least")
        load, rates = os.getloadavg()[0], [_SLOWEST * _FACTOR**n for n in range(args.trials)]
        random.Random(0).shuffle(rates)  # else each trial learns faster than those before, and ASHA stops none
        with tempfile.TemporaryDirectory(prefix="rlx-trials-") as folder:
            halves = workload.gpu_shares(1) if config.scaling.use_gpu else {}
            here = {"storage": folder, "model.path": workload.model_folder(config)}
            ready = from_tree(with_overrides(config.model_dump(), halves | here), "command line")
            figures = measured(ready, places, rates, args.schedulers) | gpu_memory()
            table.finish("trials", figures, ready, args.out, load, {"trials": args.trials, "steps": config.train.steps})
        return 0

    return exit_code(script)


def measured(
    config: RunConfig, places: Sequence[int], rates: Sequence[float], schedulers: Sequence[str]
) -> dict[str, float]:
    """The table."""
    figures: dict[str, float] = {}
    for scheduler, count in itertools.product(schedulers, places):
        found = swept(config, count, rates, scheduler)
        figures |= {f"{name}, {where(scheduler, count)}": value for name, value in found.items()}
        workload.say(str(figures))
    for scheduler, (few, many) in itertools.product(schedulers, itertools.pairwise(places)):
        hourly = [figures[f"trials an hour, {where(scheduler, count)}"] for count in (many, few)]
        figures[f"trials an hour, {where(scheduler, many)} / {few}"] = hourly[0] / hourly[1]
    return figures


def where(scheduler: str, places: int) -> str:
    """What a sweep is called in the table."""
    return f"{places} places" if scheduler == "none" else f"{scheduler}, {places} places"


def swept(config: RunConfig, places: int, rates: Sequence[float], scheduler: str) -> dict[str, float]:
    """Trials per hour of a sweep, from the first one's start to the last one's end, and the steps of all trials."""
    name, folder = f"{scheduler}-{places}", Path(config.storage)
    settings, space = folder / "settings.yaml", folder / "space.py"
    settings.write_text(config.model_dump_json())  # which is YAML, too
    space.write_text(f"from ray import tune\n\n\ndef space():\n    return {{'train.actor_lr': tune.choice({rates})}}\n")
    on_gpus = config.scaling.use_gpu
    words = [] if on_gpus else ["--max-concurrent", str(places)]
    sweep.seconds_of(
        "ppo_sweep.py", "--config", str(settings), "--space", str(space), "--search", "grid", "--name", name,
        "--scheduler", scheduler, "--metric", _METRIC, *words, variables=variables(places if on_gpus else None),
    )  # fmt: skip
    storage = open_storage(config.storage)
    runs = [storage / "sweeps" / name / "runs" / f"trial_{number:05d}" for number in range(len(rates))]
    times = [sweep.times(storage, run) for run in runs]
    seconds = max(each.ended for each in times) - min(each.begun for each in times)
    return {
        "trials an hour": 3600 * len(times) / seconds,
        "sweep without Ray's start, s": seconds,
        "steps of all trials": float(sum(steps(storage, run) for run in runs)),
    }


def steps(storage: Storage, run: Storage) -> int:
    """How many a trial has made."""
    uri = mlflow.default_uri(Path(storage.path))
    own = run_id(run)
    assert own
    return len({point.step for point in mlflow.history(uri, own, "time/step")})


def variables(gpus: int | None) -> dict[str, str]:
    """The environment of a sweep: where the reward is, and the first so many GPUs if a number is given."""
    found = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    if gpus is None:
        return found
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(workload.gpus()))))
    return found | {"CUDA_VISIBLE_DEVICES": ",".join(given.split(",")[:gpus])}


if __name__ == "__main__":
    sys.exit(main())
