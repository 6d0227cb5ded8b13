"""The settings of the workers: how many, on which machines, and how they split a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from rlx.config.sections.base import NonEmptyText, Resources, Section


class ScalingConfig(Section):
    """Number and resources of the workers, the processes that train."""

    num_workers: PositiveInt = 1
    """number of training processes (FSDP ranks)"""
    use_gpu: bool = False
    """train on GPUs, one per worker unless resources_per_worker has another number"""
    resources_per_worker: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """resources that Ray reserves for each worker; a worker on CPU uses one thread per CPU, rounded, at least one"""
    accelerator_type: NonEmptyText | None = None
    """required GPU model of workers and engines by its name in Ray, e.g. H200"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that the nodes of the workers must have, e.g. {market-type: "!spot"}, as Ray writes them"""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """how Ray distributes the workers over nodes"""
    max_failures: int = Field(default=3, ge=-1)
    """restarts of the workers from the newest checkpoint before the run fails and waits for --resume; -1: no limit. An
    error that would repeat, such as a bad setting, fails at once. A trial whose own process is lost starts again as
    often"""
    max_preemption_failures: int = Field(default=-1, ge=-1)
    """restarts because the cloud took a node away, which do not count as failures; -1: no limit"""
    preemption_grace_s: NonNegativeFloat = 0.0
    """how long workers on other nodes may go on after a node was taken away, e.g. to finish a checkpoint"""


class ParallelConfig(Section):
    """How the workers split a model, in addition to FSDP."""

    tp: PositiveInt = 1
    """tensor parallelism: number of neighbouring workers that split each layer's matrices and train on the same
    completions; scaling.num_workers / tp replicas train on different completions"""
    sp: PositiveInt = 1
    """sequence parallelism (Ulysses): number of neighbouring workers that share the tokens of each packed row, for long
    contexts, and train on the same completions; scaling.num_workers / sp replicas train on different completions. Rows
    are packed then, and it must divide the number of attention heads. A worker computes 1 / sp of
    train.micro_batch_tokens"""

    @property
    def neighbours(self) -> int:
        """Number of workers that train on the same completions."""
        return self.tp * self.sp
