"""What a rank needs to train: its config, its prompts, and the live objects of other processes.

Left out: who provides them, for Ray workers rlx.runs.worker, and what is built of them (the other modules here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlx.config.run import RunConfig
from rlx.data.stream import Share
from rlx.mesh import Mesh
from rlx.rollout.base import Engines
from rlx.storage.filesystem import Storage
from rlx.training.reporting import Reporter
from rlx.types import Replay, Scorer, ShardedWeight

WeightSource = Callable[[], Sequence[ShardedWeight]]
"""gives the policy's weights for the engines, as they are when it is called on all ranks"""


@dataclass(frozen=True)
class TrainingInputs:
    """What one rank needs to train; torch.distributed is initialized before."""

    config: RunConfig
    model_path: str  # Hugging Face folder or name
    device: torch.device
    tables: Mapping[str, Share]  # this rank's prompts: "train", "held_out", and "ptx" with algorithm.ptx_coef
    folder: Storage  # of the run
    reporter: Reporter
    connect_engines: Callable[[Mesh, WeightSource], Engines]
    connect_scorers: Callable[[Mesh], dict[str, Scorer]]  # reward models and servers; a collective call
    signature: str = ""  # of the config, for checkpoints
    replay: Replay | None = None  # None: all steps that are left, for the first time
