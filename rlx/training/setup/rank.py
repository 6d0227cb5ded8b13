"""Builds one rank's trainer, collector and checkpointer from the config, and restores them from a checkpoint.

Left out: the objects that it builds (trainer, collector and checkpointing in rlx.training), and processes (rlx.runs).
"""

from __future__ import annotations

from pathlib import Path

import torch

from rlx.algorithms.adaptive import AdaptiveKL, RunningScores
from rlx.config.sections.scaling import ScalingConfig
from rlx.data import prompts
from rlx.mesh import Mesh
from rlx.samples.writer import discard_after
from rlx.storage.checkpoint_catalog import Retention
from rlx.storage.checkpoint_files import new_copies
from rlx.storage.checkpoint_writer import CheckpointWriter
from rlx.training.checkpointing import Checkpointer, PinnedMemory
from rlx.training.collector import RolloutCollector
from rlx.training.optimizers.groups import base_lrs
from rlx.training.reporting import Reporter
from rlx.training.setup.inputs import TrainingInputs
from rlx.training.setup.models import build_models
from rlx.training.setup.rollouts import build_collector
from rlx.training.setup.tables import supervised_rows
from rlx.training.trainer import Trainer, initial_ema


def build_rank(inputs: TrainingInputs) -> tuple[Trainer, RolloutCollector, Checkpointer]:
    """This rank's objects, continued from the newest checkpoint if the run has one; a collective call."""
    config = inputs.config
    if inputs.device.type == "cpu":
        torch.set_num_threads(threads(config.scaling))
    mesh = Mesh.of(inputs.device.type, config.parallel.tp, config.parallel.sp)
    _reset_peak_memory(inputs.device)
    made = build_models(config, inputs.model_path, mesh.mesh)
    tokenizer = prompts.load_tokenizer(inputs.model_path, config.model.trust_remote_code)
    trainer = Trainer(
        config=config,
        mesh=mesh,
        device=inputs.device,
        models=made.trained,
        reference=made.reference,
        base_lrs=base_lrs(config.train, made.trained),
        kl=AdaptiveKL(
            config.algorithm.kl_coef, config.algorithm.adaptive_kl_target, config.algorithm.adaptive_kl_horizon
        ),
        reward_stats=RunningScores(),
        ema=initial_ema(config.train, made.trained["policy"].model),
        supervised=supervised_rows(inputs, mesh, tokenizer),
        reduced_each_pass=made.reduced_each_pass,
        kept_unsharded=made.kept_unsharded,
        replay=inputs.replay,
    )
    collector = build_collector(inputs, trainer, tokenizer)
    saving = config.checkpoint
    retention = Retention(saving.keep_last, saving.best_by, saving.best_mode, saving.keep_every)
    settle = collector.completions.wait if collector.completions else None
    writer = CheckpointWriter(inputs.folder, retention, settle)
    copies = PinnedMemory(inputs.reporter.notify).copies if trainer.device.type == "cuda" else new_copies
    checkpointer = Checkpointer(trainer, collector.queue, writer, inputs.reporter.notify, copies, inputs.signature)
    checkpointer.restore()
    if mesh.rank == 0:
        discard_after(inputs.folder, trainer.step, inputs.reporter.notify, sets_aside=bool(config.environment.name))
    return trainer, collector, checkpointer


def close_rank(trainer: Trainer, collector: RolloutCollector, checkpointer: Checkpointer, reporter: Reporter) -> None:
    """Ends threads and process groups that would outlive the objects."""
    checkpointer.close()
    collector.engines.close()
    if collector.completions:
        collector.completions.close()
    reporter.close()
    trainer.mesh.close()


def threads(scaling: ScalingConfig) -> int:
    """Threads that a worker on a CPU computes with: its share of CPUs, rounded (Ray would round down).

    The engines' share does not count: sums depend on the number of threads, and a resumed run may have other engines.
    """
    return max(1, round(scaling.resources_per_worker.get("CPU", 1.0)))


def _reset_peak_memory(device: torch.device) -> None:
    """Measures peak memory from here on: this process may have done another run before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
