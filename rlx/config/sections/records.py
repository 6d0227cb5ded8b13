"""The settings of what a run leaves behind: checkpoints, metrics and samples."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from rlx.config.addresses import Address
from rlx.config.sections.base import NonEmptyText, Section
from rlx.config.sweep import DEFAULT_METRIC, MetricName


class CheckpointConfig(Section):
    """When checkpoints are written, which of them stay, and from which one a new run starts."""

    every: NonNegativeInt = 10
    """steps between checkpoints; the last step always has one; 0: only that one"""
    keep_last: PositiveInt | None = 2
    """number of newest checkpoints to keep; unset: all"""
    keep_every: PositiveInt | None = None
    """steps between checkpoints that stay besides, for rlx replay, whatif and verify; unset: none"""
    best_by: MetricName | None = DEFAULT_METRIC
    """metric that decides which checkpoint is the best, among steps that measured it; the best one is kept too; unset:
    none"""
    best_mode: Literal["max", "min"] = "max"
    """whether a larger or a smaller value of that metric is better"""
    async_save: bool = True
    """write checkpoints while training continues; otherwise training waits until a checkpoint is complete"""
    grace_s: NonNegativeFloat = 25.0
    """after Ctrl-C or SIGTERM: longest wait for the step to end and for a last checkpoint"""
    init_from: Address | None = None
    """folder or address of a checkpoint that a new run starts from; see also rlx train --from"""
    init_state: Literal["weights", "all"] = "weights"
    """weights: take only the models' weights from that checkpoint; all: take its complete state, the next step
    included"""


BackendName = Literal["mlflow", "tensorboard", "wandb"]


def _check_backends(names: tuple[BackendName, ...]) -> tuple[BackendName, ...]:
    if not names:
        raise ValueError(f"expected at least one of {', '.join(get_args(BackendName))}")
    if len(set(names)) < len(names):
        raise ValueError("each at most once")
    return names


class TrackingConfig(Section):
    """Where a run's metrics and samples are recorded."""

    backends: Annotated[tuple[BackendName, ...], AfterValidator(_check_backends)] = ("mlflow",)
    """services that record the run, all of them: mlflow (which sweeps and rlx export --register need), tensorboard,
    wandb (with WANDB_API_KEY, or WANDB_MODE=offline); see docs/tracking.md"""
    uri: Address | None = None
    """MLflow tracking server or database; unset: SQLite in the storage folder"""
    experiment: NonEmptyText = Field(default="rlx", max_length=500)
    """MLflow experiment, and W&B project, of the runs and sweeps"""
    samples: NonNegativeInt = 32
    """held-out completions per evaluation in the table of samples"""
    completions: float = Field(default=1.0, ge=0, le=1)
    """share of the prompts whose completions are kept in RUN/completions, of training and of evaluations; 0: none"""
    system_metrics: bool = True
    """log CPUs, memory, disk, network and GPUs of rank 0's machine with each step, by MLflow's names"""
