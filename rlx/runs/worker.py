"""What a Ray Train worker does with one job: it connects training to Ray, vLLM and the tracker, and trains.

This is the only place where training meets Ray. Which jobs there are, and how messages reach the driver, is in
ray_train.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import ray.train
import ray.train.torch
import ray.util
import torch

from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections import RewardConfig
from rlx.data.stream import Share
from rlx.mesh import Mesh
from rlx.rewards import reward_model
from rlx.rewards.remote import RemoteReward
from rlx.rollout.engine_group import EngineGroup
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.runs import doctor, ray_train
from rlx.runs.ray_train import WorkerSpec
from rlx.storage.filesystem import Storage, retry
from rlx.tracking.base import Tracker
from rlx.tracking.memory import NullTracker
from rlx.tracking.tracker import OutboxTracker
from rlx.training import loop, setup
from rlx.training.setup import TrainingInputs, WeightSource
from rlx.types import Scorer

_CLOSE_S = 5.0  # longest wait for the tracker at the end of a run


@dataclass(frozen=True)
class RayReporter:
    """Reports to the run's driver through Ray Train, and to the tracker; see `training.reporting.Reporter`."""

    tracker: Tracker
    mailbox: str
    rank: int

    @property
    def run_id(self) -> str | None:
        return self.tracker.run_id if self.rank == 0 else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.tracker.log(metrics, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self.tracker.log_samples(rows, step)

    def flush(self) -> None:
        self.tracker.flush()

    def report(self, metrics: Mapping[str, float], *, is_last: bool, checkpoint: Storage | None) -> None:
        reported = None
        if checkpoint and self.rank == 0:
            reported = ray.train.Checkpoint(checkpoint.path, checkpoint.filesystem)
        ray_train.report(self.mailbox, metrics, is_last, reported)

    def should_stop(self) -> bool:
        return self.rank == 0 and ray_train.is_to_stop(self.mailbox)

    def notify(self, message: str) -> None:
        ray_train.notify(self.mailbox, message)

    def close(self) -> None:
        self.tracker.close(_CLOSE_S)


def run_job(spec: WorkerSpec) -> None:
    """Trains, or examines with the doctor, as the job says; every rank calls it."""
    inputs = inputs_of(spec)
    trainer, collector, checkpointer = setup.build(inputs)
    if spec.examine:
        figures = doctor.examine(trainer, collector)
        inputs.reporter.report(figures, is_last=True, checkpoint=None)
    else:
        loop.train(trainer, collector, checkpointer, inputs.reporter)
    setup.close(trainer, collector, checkpointer, inputs.reporter)


def inputs_of(spec: WorkerSpec) -> TrainingInputs:
    """What training needs, connected to this worker's Ray cluster.

    Raises:
        ConfigError: this worker's node does not see the run's folder.
    """
    config = RunConfig.model_validate(spec.config)
    if not spec.examine:
        _check_folder(spec.folder)
    rank = ray.train.get_context().get_world_rank()
    device = ray.train.torch.get_device()
    names = ["train", "held_out", *(["ptx"] if config.data.ptx_source else [])]
    notify = partial(ray_train.notify, spec.mailbox)
    is_recorded = rank == 0 and not spec.examine
    tracker = OutboxTracker(spec.tracking_uri, spec.folder, "rank_0", notify) if is_recorded else NullTracker()
    return TrainingInputs(
        config=config,
        model_path=spec.model_path,
        device=device,
        tables={name: prompt_share(name) for name in names},
        folder=spec.folder,
        reporter=RayReporter(tracker, spec.mailbox, rank),
        connect_engines=partial(_connect_engines, config, spec, device),
        connect_scorers=partial(_connect_scorers, config.reward, config.rollout.timeout_s, spec.reward_models),
    )


def prompt_share(name: str) -> Share:
    """This worker's share of a prompt table, see `rlx.data.blocks.RankShares`."""
    return cast(Share, ray.train.get_dataset_shard(name))


def _check_folder(folder: Storage) -> None:
    if not retry((folder / "run.json").exists, f"reading {folder.path}"):
        node = ray.util.get_node_ip_address()
        raise ConfigError(
            f"storage: {folder.path} is not there on node {node}: name a folder that all nodes have mounted, or s3"
        )


def _connect_engines(
    config: RunConfig, spec: WorkerSpec, device: torch.device, mesh: Mesh, weights: WeightSource
) -> EngineGroup:
    rollout, engines, dtype = config.rollout, spec.engines, getattr(torch, config.model.dtype)
    # An engine's own process takes adapters and writes them to a file for vLLM; they have no direct way.
    adapters_only = config.model.lora_sync == "adapter"
    return EngineGroup(
        pool=EnginePool(engines, config.seed, mesh.dp_rank, rollout.timeout_s, rollout.sync_timeout_s),
        mesh=mesh,
        sync=WeightSync(engines, mesh, device, dtype, None if adapters_only else rollout.transport),
        retries=rollout.retries,
        notify=partial(ray_train.notify, spec.mailbox),
        weights=weights,
    )


def _connect_scorers(
    reward: RewardConfig, start_timeout_s: float, models: Sequence[Any], mesh: Mesh
) -> dict[str, Scorer]:
    remote: dict[str, Scorer] = {}
    if reward.model:
        starting = reward_model.ModelReward(models, start_timeout_s, mesh.dp_rank)
        starting([])  # waits until they are loaded
        remote["model"] = replace(starting, timeout_s=reward.timeout_s)
    if reward.url:
        remote["url"] = RemoteReward.from_config(reward)
    return remote
