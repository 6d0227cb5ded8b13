"""Whole steps of a model of billions of weights, trained in full: that it learns, and how near the GPUs' limits it is.

    python bench/large_model.py --gpu [--in-turns] [--steps N] [--SECTION.SETTING VALUE ...]

Qwen2 7B's shape with random weights, float32 weights and Adam, bfloat16 compute, gradient checkpointing. Half of the
GPUs have a worker each and the others an engine each; with `--in-turns` each GPU has both. The model is made once, in
storage/models, such that it often draws the few tokens that have a text; the reward is the share of sevens in it
(sevens.py), which training raises within steps. Shown are the parts of a step, memory, and shares of GPUs' peaks: of
the work of all tokens, as usual, and of what is left if a prompt is computed once for all of its responses. What
gradient checkpointing computes again is no work. The run is left before it would write a checkpoint, of 12 bytes a
weight. Without --gpu all of it is tried on the CPU with a small model, and no share is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import alike
import random_models
import table
import torch
import workload
from measure import PEAK_FLOPS, bandwidth, least_drawing_s, operations, shape_of

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig

SHAPES = {"talker-30m": "qwen2-30m", "talker-0.5b": "qwen2-0.5b", "talker-7b": "qwen2-7b"}
"""models that are made here, and their shapes"""
_LIKED = 9.0  # how far above the others the logits of tokens with a text are
_EVERYWHERE: dict[str, Any] = {
    "reward.functions": {"sevens:share": 1.0},
    "train.gradient_checkpointing": True,
    "train.micro_batch_tokens": 8192,
}
CPU = workload.CPU | _EVERYWHERE | {"model.path": "talker-30m", "train.actor_lr": 1e-3}
CPU |= {"rollout.max_tokens": 32, "train.prompts_per_step": 4}
GPU = workload.GPU | _EVERYWHERE | {"model.path": "talker-7b", "train.actor_lr": 2e-5}

Steps = Sequence[Mapping[str, Any]]


class Enough(Exception):
    """All steps that count are there."""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(3, 3))
    options.add_argument("--in-turns", action="store_true", help="a worker and an engine on each GPU, in turns")

    def script() -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        gpu = GPU | (placed("--in-turns" in words) if "--gpu" in words else {})
        args, config = workload.read(options, words, CPU, gpu)
        if args.in_turns and not args.gpu:
            raise ConfigError("--in-turns is for GPUs: add --gpu")
        config = with_model(config)
        load = os.getloadavg()[0]
        with workload.prepared(config) as (ready, path):
            steps = first_steps(ready, path, config.train.steps)
            figures = rewards(steps) | parts(ready, steps[-1])
            if config.scaling.use_gpu:
                figures |= shares(ready, path, steps[-1], bandwidth(torch.cuda.get_device_name()))
            table.finish("large_model", figures, ready, args.out, load, {"in turns": args.in_turns})
        return 0

    return exit_code(script)


def placed(in_turns: bool) -> dict[str, Any]:
    """The settings that use all GPUs of this machine.

    Raises:
        ConfigError: there are too few.
    """
    count = workload.gpus() if in_turns else workload.gpus() // 2
    if not count:
        raise ConfigError("--gpu: two GPUs at least, or one and --in-turns")
    memory = {"rollout.placement": "colocated", "rollout.gpu_memory_utilization": 0.4} if in_turns else {}
    return {"scaling.num_workers": count} | memory


def with_model(config: RunConfig) -> RunConfig:
    """The config with the folder of its model, which is made if need be."""
    from rlx.storage.addresses import local_folder

    name = config.model.path
    if name not in SHAPES:
        return config
    folder = local_folder(config.storage) / "models" / name
    if not folder.exists():
        make_model(SHAPES[name], folder)
    return from_tree(with_overrides(config.model_dump(), {"model.path": str(folder)}), "command line")


def make_model(shape: str, folder: Path) -> None:
    """A model with random weights that draws tokens with a text about as often as all others together.

    The rows of those tokens in the output layer read the number of its hidden states that is large at every token.
    """
    from rlx.models import tiny

    tokenizer = tiny.build_tokenizer()
    known = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    with tiny.private_torch_state(0), torch.no_grad():
        model = random_models.random_model(shape, tokenizer, tie_word_embeddings=False)
        model.lm_head.weight[known, 0] += _LIKED / random_models.steady(model)
    random_models.save_model(folder, model, tokenizer)


def first_steps(config: RunConfig, path: str, count: int) -> list[dict[str, Any]]:
    """The metrics of a run's first steps; it is left after them, without a checkpoint."""
    from rlx.runs import launch, preflight
    from rlx.storage.addresses import open_storage

    steps: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], checkpoint: str | None) -> None:
        if "time/step" not in metrics:  # of the policy as it was
            return
        steps.append(metrics)
        workload.say(f"step {len(steps)}: reward {metrics['reward/mean']:.3f}, {workload.seconds_of(metrics)}")
        if len(steps) == count:
            raise Enough

    more = {"train.steps": max(config.train.steps, count + 1), "checkpoint.every": 0}
    longer = from_tree(with_overrides(config.model_dump(), more), "command line")
    prepared = preflight.prepare(longer, tables=preflight.prompt_tables(longer, path))
    with suppress(Enough):
        launch.run(prepared, open_storage(config.storage) / "large", on_report=report, processes=workload.processes())
    return steps


def rewards(steps: Steps) -> dict[str, float]:
    """Whether it learns."""
    return {"reward of the first step": steps[0]["reward/mean"], "reward of the last step": steps[-1]["reward/mean"]}


def parts(config: RunConfig, step: Mapping[str, Any]) -> dict[str, float]:
    """A step's seconds and memory."""
    return (
        {"step, s": step["time/step"], "response tokens/s": drawn(config, step) / step["time/step"]}
        | {f"{part}, s": step[f"time/{part}"] for part in workload.PARTS}
        | {"most memory of a worker, GiB": step["memory/peak_gib"]}
    )


def drawn(config: RunConfig, step: Mapping[str, Any]) -> float:
    """The response tokens of a step."""
    return float(step["response/length_mean"] * alike.completions(config))


def shares(config: RunConfig, path: str, step: Mapping[str, Any], rate: float | None) -> dict[str, float]:
    """The update's share of the peak, and the least seconds that a step could take as a share of those that it took.

    Args:
        rate: bytes a second from a GPU's memory; None leaves the second out.
    """
    figures, lm = dict[str, float](), shape_of(path)
    scored = drawn(config, step)
    read = step["tokens/update_per_s"] * step["time/update"] - scored
    for words, prompts in (("all tokens", read), ("prompts once", read / config.train.samples_per_prompt)):
        update = flops(config, lm, prompts + scored, scored) / config.scaling.num_workers / PEAK_FLOPS
        # A third of it is a forward pass, which the first mini-batch has no need of before the update.
        before = update / 3 * (1 - 1 / config.train.num_minibatches)
        figures[f"MFU of the update, {words}"] = update / step["time/update"]
        if rate:
            least = decode_s(config, lm, rate, read, scored) + before + update
            figures[f"least step / step, {words}"] = least / step["time/step"]
    return figures


def flops(config: RunConfig, lm: Any, tokens: float, scored: float) -> float:
    """Of an update of the policy, by the mean length."""
    completions = alike.completions(config)
    pairs = completions * (tokens / completions) ** 2
    return operations(lm.base_model, lm.get_output_embeddings().weight.numel(), tokens, scored, pairs)


def decode_s(config: RunConfig, lm: Any, rate: float, read: float, scored: float) -> float:
    """The least seconds in which engines draw all responses at once, as long as the mean."""
    completions = alike.completions(config)
    length, sequences = scored / completions, completions / config.rollout.num_engines
    return least_drawing_s(lm, rate, sequences=sequences, prompt=read / completions, response=length, longest=length)


if __name__ == "__main__":
    sys.exit(main())
