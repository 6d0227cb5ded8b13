"""What the benchmarks work on: their settings on CPU and GPU, the model, and real runs of them.

A benchmark's command line takes every setting of rlx over these defaults. One model is trained, the policy, and nothing
is held beside it: no critic, no reference; other settings give others. Learning rates are 0, so that every step of a
run, and the bare baseline beside it, has completions of the same lengths.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from random_models import ENDING, SHAPES, UNTRAINED, random_model, save_model

from rlx.cli.options import add_settings, parse
from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig

_BEGUN = time.monotonic()
WARM = 2
"""first steps and rounds that are not counted"""
PARTS = ("rollout", "reward", "logprobs", "update", "sync")
"""of a step, whose seconds are metrics"""
WALL = "time/wall"
"""seconds of a step of `counted_steps` from the last report to its own, whatever happened in between"""

_EVERYWHERE = {
    "name": "bench",
    "algorithm.advantage": "grpo",
    "algorithm.kl_coef": 0.0,
    "model.reference": "none",
    "train.actor_lr": 0.0,
    "train.ppo_epochs": 1,
    "train.num_minibatches": 2,
    "data.max_prompt_tokens": 128,
    "eval.every": 0,
    "eval.num_prompts": 8,
    "checkpoint.every": 0,
    "checkpoint.best_by": None,
}
# The tiny model as it is before its warm start: trained, it says three tokens, and a step is hardly any rollout; from
# random weights responses have 75 in the mean.
CPU: dict[str, Any] = _EVERYWHERE | {
    "model.path": UNTRAINED,
    "train.samples_per_prompt": 8,
    "rollout.max_tokens": 128,
    "rollout.kv_cache_mib": 64,
}
# Prompts of 123 tokens; from random weights every response is as long as may be.
GPU: dict[str, Any] = _EVERYWHERE | {
    "model.path": "qwen2-0.5b",
    "model.dtype": "bfloat16",
    "data.params": {"min_terms": 60, "max_terms": 60, "min_digits": 1, "max_digits": 1},
    "train.prompts_per_step": 64,
    "train.samples_per_prompt": 8,
    "train.micro_batch_tokens": 32_768,
    "rollout.max_tokens": 256,
    "rollout.max_num_seqs": 512,
    "scaling.use_gpu": True,
}
NO_ENGINES: dict[str, Any] = {"rollout.num_engines": 1, "rollout.resources_per_engine": {"CPU": 0.5, "GPU": 0}}
"""where none is started, so that no GPU is kept for one"""


def parser(description: str | None, steps: tuple[int, int]) -> argparse.ArgumentParser:
    """A benchmark's options: `steps` are how many it counts on CPU and on GPU, unless told otherwise."""
    options = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--gpu", action="store_true", help="the defaults for GPUs: Qwen2 0.5B's shape in bfloat16")
    options.add_argument("--steps", help=f"steps or rounds that count, default {steps[0]}, with --gpu {steps[1]}")
    options.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder for the JSON file")
    options.set_defaults(counted=steps)
    add_settings(options)
    return options


def read(
    options: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    cpu: Mapping[str, Any] = CPU,
    gpu: Mapping[str, Any] = GPU,
    engines: bool = True,
) -> tuple[argparse.Namespace, RunConfig]:
    """The options and the run's config; `gpu` has the defaults with --gpu, `cpu` those without; `engines`: see
    `gpu_shares`.

    Raises:
        ConfigError: an option or a setting cannot be used.
    """
    args, given = parse(options, sys.argv[1:] if argv is None else argv)
    if args.steps is not None and not (args.steps.isdecimal() and int(args.steps)):
        raise ConfigError(f"--steps {args.steps}: expected a whole number of at least 1")
    steps = int(args.steps or args.counted[args.gpu])
    in_turns = {**gpu, **given}.get("rollout.placement") == "colocated"
    shares = gpu_shares(gpus(), in_turns, engines)
    defaults = ({**gpu, **shares} if args.gpu else dict(cpu)) | {"train.steps": WARM + steps}
    if given.get("data.source"):
        defaults.pop("data.params", None)
    config = from_tree(with_overrides({}, defaults | given), "command line")
    check_gpu(config)
    return args, config


def check_gpu(config: RunConfig) -> None:
    """ConfigError if a GPU is asked for, and there is none."""
    if config.scaling.use_gpu and not gpus():
        raise ConfigError("scaling.use_gpu: torch sees no GPU on this machine")


def gpus() -> int:
    """How many torch sees."""
    import torch

    return torch.cuda.device_count()


def gpu_gib() -> float:
    """The memory of the first that torch sees, in GiB; 0 without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0


def gpu_shares(count: int, colocated: bool = False, engines: bool = True) -> dict[str, Any]:
    """What an engine and a worker take: a GPU each, or half of the only one, or one in turns; without `engines` a
    worker has even the only one to itself."""
    if not engines:
        return NO_ENGINES | {"scaling.resources_per_worker": {"CPU": 1, "GPU": 1}}
    alone = count > 1 and not colocated
    one = {"CPU": 1} | ({} if colocated else {"GPU": 1 if alone else 0.5})
    memory = {"rollout.gpu_memory_utilization": 0.8 if alone else 0.4}
    return {"rollout.resources_per_engine": one, "scaling.resources_per_worker": one} | memory


@functools.cache
def processes() -> Any:
    """The engines and workers of this process, which stay from one run to the next until they are closed."""
    from rlx.runs.processes import RunProcesses

    return RunProcesses("workers")


@contextmanager
def prepared(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """The config with a temporary storage, and the model's folder, Ray being up until the end.

    Raises:
        ConfigError: the input cannot be used.
    """
    import ray

    from rlx.cluster import connection
    from rlx.cluster.resources import plan_resources
    from rlx.runs import preflight

    with tempfile.TemporaryDirectory() as folder:
        preflight.check_files(config.data, config.eval)
        preflight.check_rewards(config.reward)
        path = model_folder(config)
        preflight.check_model(config, path)
        config = config.model_copy(update={"storage": folder, "model": config.model.model_copy(update={"path": path})})
        connection.connect(config, plan_resources(config))
        try:
            yield config, path
        finally:
            processes().close()
            ray.shutdown()


def model_folder(config: RunConfig) -> str:
    """The model; one that is known here is made in the storage, once, with random weights."""
    from rlx.models import tiny
    from rlx.runs import preflight
    from rlx.storage.addresses import local_folder

    name, known = config.model.path, [UNTRAINED, *SHAPES, *ENDING]
    if name not in known:
        if name != "tiny" and "/" not in name and nearest(name, known):
            raise ConfigError(f"model.path {name}: no such model{nearest(name, known)}")
        return preflight.model_folder(name, config.storage)
    folder = local_folder(config.storage) / "models" / name
    if not folder.exists():
        tokenizer = tiny.build_tokenizer()
        with tiny.private_torch_state(0):
            model = random_model(name, tokenizer)
        save_model(folder, model, tokenizer)
    return str(folder)


def counted_steps(config: RunConfig, tables: Mapping[str, Any], name: str = "bench") -> list[dict[str, Any]]:
    """The metrics of a real run's steps but the first, with `WALL`, and `time/step` without the times of an evaluation
    and of a checkpoint, which the last has; engines and workers stay for the next run."""
    from rlx.runs import launch, preflight
    from rlx.storage.addresses import open_storage

    steps: list[dict[str, Any]] = []
    reported = [time.monotonic()]

    def report(metrics: dict[str, Any], checkpoint: str | None) -> None:
        if "time/step" not in metrics:  # of the policy as it was
            return
        reported.append(time.monotonic())
        others = sum(metrics.get(part, 0.0) for part in ("time/eval", "time/checkpoint"))
        own = {"time/step": metrics["time/step"] - others, WALL: reported[-1] - reported[-2]}
        steps.append(metrics | own)
        say(f"{name}: step {metrics['step']} of {config.train.steps}: {seconds_of(metrics)}")

    config = config.model_copy(update={"name": name})
    place = open_storage(config.storage) / name
    launch.run(preflight.prepare(config, tables=tables), place, on_report=report, processes=processes())
    return [metrics for metrics in steps if metrics["step"] > WARM]


def whole_steps(config: RunConfig, tables: Mapping[str, Any], name: str = "bench") -> list[dict[str, Any]]:
    """As many counted steps of a run that is one step longer: its last has a checkpoint and generates nothing ahead."""
    longer = with_overrides(config.model_dump(), {"train.steps": config.train.steps + 1})
    return counted_steps(from_tree(longer, "a step more"), tables, name)[:-1]


def mean_response(config: RunConfig) -> float:
    """How many tokens the model's responses are expected to have in the mean: as many as they may, unless it is known
    here to end them by itself."""
    most = config.rollout.max_tokens
    _, mean = ENDING.get(Path(config.model.path).name, ("", math.inf))
    return mean * (1 - (1 - 1 / mean) ** most) if mean < math.inf else float(most)


def drawing_s(metrics: Mapping[str, Any]) -> float:
    """How long a step's completions were drawn, in seconds.

    Engines draw while the trainer waits (time/rollout), which begins once the step before is reported; they begin a
    little earlier. With `rollout.num_chunks` above 1 they also draw while it scores a chunk, and with
    `rollout.max_staleness` above 0 while it trains.
    """
    return float(max(metrics["time/rollout"], metrics["time/generation"]))


def median_drawing_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """The median of `drawing_s` over steps."""
    return statistics.median(map(drawing_s, steps))


def seconds_of(metrics: Mapping[str, Any]) -> str:
    """A step's seconds and those of its parts, as text."""
    return ", ".join(f"{part} {metrics[f'time/{part}']:.2f} s" for part in ("step", *PARTS))


def say(words: str) -> None:
    """Progress, after so many seconds: what is measured is known even if the rest fails."""
    print(f"[{time.monotonic() - _BEGUN:.0f} s] {words}", file=sys.stderr, flush=True)


def say_drawn(by: str, drawn: Sequence[tuple[int, float]]) -> None:
    """The tokens and seconds of each round that a baseline has drawn."""
    say(f"{by}: " + ", ".join(f"{tokens} tokens in {seconds:.2f} s" for tokens, seconds in drawn))


def median_rates(*rounds: Sequence[tuple[int, float]]) -> list[float]:
    """The median tokens per second of each of these runs of a baseline."""
    return [statistics.median(tokens / seconds for tokens, seconds in drawn) for drawn in rounds]


def median(steps: Sequence[Mapping[str, Any]], metric: str) -> float:
    """Of a metric over steps."""
    return float(statistics.median(step[metric] for step in steps))
