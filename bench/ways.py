"""How long an update takes, packed or padded, compiled or not: PYTHONPATH=$PWD python bench/ways.py --gpu [--ppo]

One process without Ray: a rank's models, and steps 4 to 7 of the loop on completions that are made up, 64 prompts of
123 tokens with 8 responses each. `--ppo` adds a critic, a reference and a second epoch; with `--tails` lengths differ.
With `python -m torch.distributed.run --nproc-per-node N bench/ways.py ...` there are N ranks, with that work for each.
Shown are, of the first rank, seconds of log-probabilities and of the update, tokens per second of the update, the most
memory in it, and the share of an H100's or H200's peak: of the operations that every token needs which the completions
have ("MFU"), and of those that are left once a prompt is computed for all of its responses ("of needed"). Nothing that
is computed again counts. Left out: rollouts, rewards, weight sync; bench/step.py has whole steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import workload
from measure import PEAK_FLOPS, Memory, now, operations, profiled
from scaling import scaled

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.mesh import Mesh
from rlx.training import experience, loop
from rlx.training.experience import RolloutBatch
from rlx.training.optimizers.groups import base_lrs
from rlx.training.setup.models import build_models
from rlx.training.setup.rank import threads
from rlx.training.trainer import Trainer
from rlx.training.update import update
from rlx.types import Completion, Prompt, ScoredCompletion

PPO = {
    "algorithm.advantage": "gae",
    "algorithm.kl_coef": 0.01,
    "model.reference": "copy",
    "train.ppo_epochs": 2,
    "train.micro_batch_tokens": 16_384,
}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"train.packing": False, "train.compile": False},
    "packed": {"train.packing": True, "train.compile": False},
    "padded, compiled": {"train.packing": False, "train.compile": True},
    "packed, compiled": {"train.packing": True, "train.compile": True},
}
ROUNDS = 4  # after one that warms up


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--ppo", action="store_true")
    parser.add_argument("--tails", action="store_true")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--profile", action="store_true", help="print what takes the GPU's time in the last way")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.SETTING=VALUE")
    given = parser.parse_args(argv)
    device = torch.device("cuda" if given.gpu else "cpu")
    base = (workload.GPU if given.gpu else workload.CPU) | (PPO if given.ppo else {})
    join_ranks(given.gpu)
    show(torch.cuda.get_device_name() if given.gpu else "CPU", base)
    with tempfile.TemporaryDirectory(prefix="rlx-ways-") as folder:
        storage = [folder]
        dist.broadcast_object_list(storage)  # one for all ranks
        base |= {"storage": storage[0], "train.steps": 1000} | dict(pair.split("=", 1) for pair in given.set)
        for name in given.ways:
            config, is_last = from_tree(with_overrides({}, base | WAYS[name])), name == given.ways[-1]
            config = scaled(config, dist.get_world_size(), {})
            show(f"{name:17}", measured(config, device, given.tails, given.profile and is_last))
            gc.collect()  # models and hooks refer to one another, and the next way needs their memory
        dist.barrier()  # the first rank's folder goes when all have ended
    dist.destroy_process_group()


def join_ranks(gpu: bool) -> None:
    """Joins the ranks that torchrun started; a process that it did not start is alone."""
    backend = "nccl" if gpu else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)


def show(*words: object) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def measured(config: RunConfig, device: torch.device, tails: bool, profile: bool) -> str:
    """Rounds of the same completions in one way."""
    trainer = trainer_of(config, device)
    memory, times = Memory(device), []
    made = made_up(config, trainer.mesh, tails).to(device)
    for _ in range(1 + ROUNDS):
        started = now(device)
        batch, _ = loop.compute_advantages(trainer, loop.compute_logprobs(trainer, made))
        memory.forget()
        between = now(device)
        update(trainer, batch)
        times.append((between - started, now(device) - between))
        if dist.get_rank() == 0:
            workload.say(f"log-probabilities {times[-1][0]:.3f} s, update {times[-1][1]:.3f} s")
        trainer.step += 1
    if profile:
        show(profiled(lambda: update(trainer, batch)))
    before, seconds = (statistics.median(column) for column in zip(*times[1:], strict=True))
    lengths, peak = (made.prompt_lengths + made.response_lengths).tolist(), memory.peak()
    passes = config.train.ppo_epochs * len(trainer.models)
    flops = [passes * needed(trainer, made, shared) / seconds / PEAK_FLOPS for shared in (False, True)]
    return (
        f"logprobs {before:6.3f} s  update {seconds:6.3f} s  {config.train.ppo_epochs * sum(lengths) / seconds:9,.0f} "
        f"tokens/s  {peak / 2**30:6.2f} GiB  MFU {flops[0]:.3f}  of needed {flops[1]:.3f}"
    )


def trainer_of(config: RunConfig, device: torch.device) -> Trainer:
    torch.set_num_threads(threads(config.scaling))  # as Ray has it in a worker
    mesh = Mesh.of(device.type, config.parallel.tp, config.parallel.sp)
    if mesh.rank == 0:
        workload.model_folder(config)  # makes it
    dist.barrier()
    made = build_models(config, workload.model_folder(config), mesh.mesh)
    return Trainer(
        config=config,
        mesh=mesh,
        device=device,
        models=made.trained,
        reference=made.reference,
        base_lrs=base_lrs(config.train, made.trained),
        kl=AdaptiveKL(config.algorithm.kl_coef, None, 1.0),
        reward_stats=RunningScores(),
        ema={},
        reduced_each_pass=made.reduced_each_pass,
        kept_unsharded=made.kept_unsharded,
    )


def made_up(config: RunConfig, mesh: Mesh, tails: bool) -> RolloutBatch:
    """This replica's completions of a step: of equal lengths, or from an eighth of the longest up."""
    replica, prompts = mesh.dp_rank, config.train.prompts_per_step // mesh.dp_size
    draw, limit = torch.Generator().manual_seed(replica), config.rollout.max_tokens
    scored = []
    for number in range(replica * prompts, (replica + 1) * prompts):
        prompt = Prompt(number, tuple(torch.randint(6, 90, (123,), generator=draw).tolist()), "", "")
        for sample in range(config.train.samples_per_prompt):
            length = int(torch.randint(limit // 8, limit + 1, (), generator=draw)) if tails else limit
            ids = tuple(torch.randint(6, 90, (length,), generator=draw).tolist())
            completion = Completion(prompt, sample, ids, (-1.0,) * length, True, 0)
            scored.append(ScoredCompletion(completion, float(torch.rand((), generator=draw)), True, {}))
    return experience.build_batch([each.completion for each in scored], 0).with_scores(scored)


def needed(trainer: Trainer, made: RolloutBatch, shared: bool) -> float:
    """`operations` of each model's passes, on average; with `shared` of each prompt once.

    A critic's output layer is as good as none.
    """
    lm = trainer.policy.lm
    prompts, responses = made.prompt_lengths.double(), made.response_lengths.double()
    first = (made.groups.diff(prepend=made.groups[:1] - 1) != 0).double() if shared else torch.ones_like(prompts)
    tokens = (prompts * first + responses).sum()
    pairs = ((prompts + responses).square() - prompts.square() * (1 - first)).sum()
    scored = responses.sum() / len(trainer.models)  # by one of them
    head = lm.get_output_embeddings().weight.numel()
    return operations(lm.base_model, head, float(tokens), float(scored), float(pairs))


if __name__ == "__main__":
    main()
