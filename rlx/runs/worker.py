"""What a Ray Train worker does with one job: it connects training to Ray, vLLM and the tracker, and trains.

This is the only place where training meets Ray. Left out: which jobs there are, and what the driver makes of reports
and messages (`train_run`), and what a step does (rlx.training).
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import ray.train
import ray.train.torch
import ray.util
import torch
from ray.util.metrics import Gauge

from rlx.config.errors import ConfigError, one_line
from rlx.config.run import RunConfig
from rlx.config.sections.data import DataConfig
from rlx.config.sections.rollout import EnvironmentConfig
from rlx.data import prompts, sources
from rlx.data.stream import Share
from rlx.environments.base import load_environment
from rlx.environments.pool import ActorHost, EnvironmentPool
from rlx.environments.tools import check_calls, schemas
from rlx.mesh import Mesh, gather_objects
from rlx.rewards import reward_model
from rlx.rewards.judge.cache import ReplyCache
from rlx.rewards.judge.scorer import Judge
from rlx.rewards.remote import RemoteReward
from rlx.rollout.engine_actors import EngineSpec, start_engine_here
from rlx.rollout.engine_group import EngineGroup
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.draws import EngineDraws, Episodes
from rlx.rollout.episodes.episode import EpisodeLimits
from rlx.rollout.episodes.kept import KeptEnvironments
from rlx.rollout.episodes.player import Player
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.runs import doctor
from rlx.runs.mailbox import CHECKPOINT_PATH, IS_LAST, JOB, Box, JobSpec, Message
from rlx.runs.run_folder import POINTER, keeping_details
from rlx.samples.columns import made_with
from rlx.samples.episodes import KnownEpisodes
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.checkpoint_writer import FinishedCheckpoint
from rlx.storage.filesystem import Storage, retry
from rlx.tracking.changes import note_changes
from rlx.tracking.services.mlflow_page import SystemMetrics
from rlx.tracking.tracker import OutboxTracker
from rlx.training import loop
from rlx.training.setup.inputs import TrainingInputs, WeightSource
from rlx.training.setup.rank import build_rank, close_rank
from rlx.types import KeptEpisode, Phase, Scorer, has_evaluation

_CLOSE_S = 5.0  # longest wait for the tracker at the end of a run
_SHOWN = 3  # warnings of a kind that a worker shows


@dataclass(frozen=True)
class Job:
    """A job as its workers know it."""

    spec: JobSpec
    box: Box
    number: int
    train_folder: Storage  # of the Ray Train run: that of the job's own run, unless the workers did another one before

    def notify(self, message: str) -> None:
        """Makes the driver show a message."""
        self.box.send(Message(message))


@dataclass(frozen=True)
class RayReporter:
    """Reports to the run's driver through Ray Train, and to the tracker; see `training.reporting.Reporter`."""

    tracker: OutboxTracker
    job: Job
    rank: int
    gauge: Gauge | None = None  # the newest value of each metric, for Prometheus
    machine: SystemMetrics | None = None

    @property
    def run_id(self) -> str | None:
        return self.tracker.run_id if self.rank == 0 else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        machine = self.machine.take() if self.machine else {}
        self.tracker.log({**metrics, **machine}, step)
        if self.gauge:
            for name, value in metrics.items():
                self.gauge.set(value, {"name": name, "run": str(self.job.spec.config.name)})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self.tracker.log_samples(rows, step)

    def flush(self) -> None:
        self.tracker.flush()

    def report(self, metrics: Mapping[str, float], *, is_last: bool, checkpoints: Sequence[FinishedCheckpoint]) -> None:
        """Gives Ray Train each checkpoint with the metrics of its own step, and then the step."""
        step = {**metrics, IS_LAST: is_last, JOB: self.job.number}
        earlier = [checkpoint for checkpoint in checkpoints if checkpoint.metrics["step"] != metrics["step"]]
        for checkpoint in earlier:
            self._report(checkpoint.metrics, checkpoint)
        own = [checkpoint for checkpoint in checkpoints if checkpoint not in earlier]
        self._report(step, own[0] if own else None)
        if self.job.spec.waits and self.rank == 0 and has_evaluation(metrics) and not is_last:
            self.job.box.await_release(self.job.number, int(metrics["step"]))

    def _report(self, metrics: Mapping[str, Any], checkpoint: FinishedCheckpoint | None) -> None:
        if checkpoint is None:
            ray.train.report(dict(metrics))
            return
        folder = checkpoint.folder
        metrics = {**metrics, CHECKPOINT_PATH: folder.path}
        is_own = folder.path.startswith(f"{self.job.train_folder.path}/")
        whole = ray.train.Checkpoint(folder.path, folder.filesystem)
        with whole_or_pointer(whole, is_own) as reported:
            mode = ray.train.CheckpointUploadMode
            ray.train.report(
                metrics,
                checkpoint=reported if self.rank == 0 else None,
                checkpoint_upload_mode=mode.NO_UPLOAD if is_own else mode.SYNC,
            )

    def should_stop(self, step: int) -> bool:
        replay = self.job.spec.replay
        is_end = replay is not None and step >= replay.until
        return self.rank == 0 and (is_end or self.job.box.is_stopped(self.job.number))

    def should_checkpoint(self) -> bool:
        return ray.train.get_preemption_info() is not None

    def notify(self, message: str) -> None:
        if self.rank == 0 or not isinstance(message, Phase):
            self.job.notify(message)

    def close(self) -> None:
        if self.machine:
            self.machine.close()
        self.tracker.close(_CLOSE_S)


@contextmanager
def whole_or_pointer(checkpoint: ray.train.Checkpoint, is_whole: bool) -> Iterator[ray.train.Checkpoint]:
    """Gives the checkpoint itself, or a small one with its address: Ray Train takes no folder of another run."""
    if is_whole:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, POINTER).write_text(json.dumps({"path": checkpoint.path}))
        yield ray.train.Checkpoint.from_directory(folder)


def run_job(spec: JobSpec, box: Box, number: int, train_folder: Storage) -> None:
    """Trains, or examines with the doctor, as the job says; every rank calls it."""
    if spec.copies:
        spec.copies.bring_here()
    job = Job(spec, box, number, train_folder)
    with shown_warnings(job, ray.train.get_context().get_world_rank()):
        _train_or_examine(job)


def _train_or_examine(job: Job) -> None:
    """Does a job on this worker, with all others; a collective call."""
    spec, inputs = job.spec, inputs_of(job)
    inputs.reporter.notify(Phase("models"))
    trainer, collector, checkpointer = build_rank(inputs)
    reporter = inputs.reporter
    if spec.examine:
        figures = doctor.examine(trainer, collector)
        reporter.report(figures | {"step": 0}, is_last=True, checkpoints=[])
    else:
        reporter = recorder(job, trainer.mesh.rank, checkpointer.resumed_from)
        try:
            with keeping_details(spec.folder), quick_collections():
                loop.train(trainer, collector, checkpointer, reporter)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                reporter.flush()  # the metrics that led there may not have reached the tracking service
            raise
    close_rank(trainer, collector, checkpointer, reporter)


def recorder(job: Job, rank: int, start: CheckpointEntry | None) -> RayReporter:
    """What a rank reports to, once it is known where the run goes on: rank 0 notes that, and records the steps.

    Args:
        start: the run's checkpoint that was restored; None: it begins.
    """
    spec = job.spec
    again = rank == 0 and note_changes(spec.folder, spec.config.model_dump(), start)
    if rank > 0 or not spec.tracking:
        return silent(job, rank)
    tracker = OutboxTracker(spec.tracking, spec.folder, "rank_0", job.notify, again=again)
    machine = SystemMetrics() if spec.config.tracking.system_metrics else None
    return RayReporter(tracker, job, rank, step_gauge(), machine)


def silent(job: Job, rank: int) -> RayReporter:
    """What a rank reports to that records nothing."""
    return RayReporter(OutboxTracker((), job.spec.folder, f"rank_{rank}"), job, rank)


class WarningRelay(logging.Handler):
    """Shows what rlx warns of on this worker to whoever watches the run, each kind a few times."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.job, self.rank, self.counts = job, rank, Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.counts[record.msg] += 1
            if (count := self.counts[record.msg]) <= _SHOWN:
                more = "; further ones like this are not shown" if count == _SHOWN else ""
                self.job.notify(f"worker {self.rank}: {record.getMessage()}{more}")
        except Exception:
            self.handleError(record)


@contextmanager
def shown_warnings(job: Job, rank: int) -> Iterator[None]:
    """Shows warnings of this worker in the driver, which its own output does not reach."""
    relay, log = WarningRelay(job, rank), logging.getLogger("rlx")
    log.addHandler(relay)
    try:
        yield
    finally:
        log.removeHandler(relay)


@contextmanager
def quick_collections() -> Iterator[None]:
    """Has Python's collections look at new objects only.

    To look at all objects of torch, transformers and Ray takes half a second, in which no turn of an episode goes on.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def inputs_of(job: Job) -> TrainingInputs:
    """What training needs, connected to this worker's Ray cluster.

    Raises:
        ConfigError: this worker's node does not see the run's folder.
    """
    spec, config = job.spec, job.spec.config
    if not spec.examine:
        _check_folder(spec.folder)
    device = ray.train.torch.get_device()
    names = [name for use in ("train", "held_out") for name in sources.table_names(config.data, use)]
    names += [sources.set_table(each.name) for each in config.eval.sets if each.source]
    names += ["ptx"] if config.data.ptx_source else []
    connections = Connections(config, job, device)
    return TrainingInputs(
        config=config,
        model_path=spec.model_path,
        device=device,
        tables={name: prompt_share(name) for name in names},
        folder=spec.folder,
        reporter=silent(job, ray.train.get_context().get_world_rank()),
        connect_engines=connections.engines,
        connect_scorers=connections.scorers,
        signature=spec.signature,
        replay=spec.replay,
    )


def prompt_share(name: str) -> Share:
    """This worker's share of a prompt table, see `rlx.data.blocks.RankShares`."""
    return cast(Share, ray.train.get_dataset_shard(name))


def _check_folder(folder: Storage) -> None:
    if not retry((folder / "run.json").exists, f"reading {folder}"):
        node = ray.util.get_node_ip_address()
        raise ConfigError(
            f"storage: {folder} is not there on node {node}: name a folder that all nodes have mounted, or s3"
        )


@functools.cache
def step_gauge() -> Gauge:
    """The metrics of the newest step, as each Ray node serves them to Prometheus."""
    return Gauge("rlx_step", "Metrics of the newest step of a run, by their names in MLflow.", ("run", "name"))


@dataclass(frozen=True)
class Connections:
    """A worker's ways to the engines, reward models and reward servers of its run."""

    config: RunConfig
    job: Job
    device: torch.device

    def engines(self, mesh: Mesh, weights: WeightSource) -> EngineGroup:
        """The engines, which may still be starting; a collective call if they run beside the workers."""
        config, spec, dtype = self.config, self.job.spec, getattr(torch, self.config.model.dtype)
        rollout, engines, name = config.rollout, spec.engines, str(config.name)
        if spec.engine_spec:
            engines = _engines_beside(spec.engine_spec)
        pool = EnginePool(engines, config.seed, mesh.dp_rank, rollout.timeout_s, rollout.sync_timeout_s, name)
        # An engine's own process takes adapters and writes them to a file for vLLM; they have no direct way.
        adapters_only = config.model.lora_sync == "adapter"
        return EngineGroup(
            pool=pool,
            mesh=mesh,
            sync=WeightSync(engines, mesh, self.device, dtype, None if adapters_only else rollout.transport),
            retries=rollout.retries,
            notify=self.job.notify,
            weights=weights,
            episodes=self._episodes(pool, mesh) if config.environment.name and mesh.is_leader else None,
        )

    def _episodes(self, pool: EnginePool, mesh: Mesh) -> Episodes:
        """What plays with the environments, which may still be starting."""
        config, spec, owner = self.config, self.job.spec, f"{self.config.name}/{mesh.dp_rank}/"
        own = config.environment
        waves = math.ceil(mesh.dp_size / own.concurrency)  # all ranks share the hosts, and each has one call at least
        hosts = [ActorHost(each, waves * own.timeout_s) for each in spec.environments]
        environments = EnvironmentPool(
            hosts,
            owner,
            retries=own.retries,
            concurrency=max(1, own.concurrency // mesh.dp_size),
            notify=self.job.notify,
        )
        tokenizer = prompts.load_tokenizer(spec.model_path, config.model.trust_remote_code)
        limits = EpisodeLimits(own.max_turns, own.turn_tokens, config.data.max_prompt_tokens)
        draws = EngineDraws(pool)
        dialogue = dialogue_of(own, config.data, tokenizer)
        kept = KeptEnvironments(environments, self._kept_episodes, dialogue)
        player = Player(draws, kept, dialogue, limits, config.seed, own.repeat)
        player.loop.run(environments.forget())  # what an earlier process of this rank has left
        return Episodes(draws, player)

    def _kept_episodes(self) -> MutableMapping[str, KeptEpisode]:
        """The episodes that the run has kept of steps that it does again."""
        spec, config = self.job.spec, self.config
        read = (spec.replay and spec.replay.known_episodes) or KnownEpisodes.before_resume(spec.folder).read
        return read(made_with(config.environment, config.data.chat_template_args, config.seed), self.job.notify)

    def scorers(self, mesh: Mesh) -> dict[str, Scorer]:
        """The scorers that are not functions of this process, once reward models are loaded."""
        reward, remote = self.config.reward, dict[str, Scorer]()
        if reward.model:
            models = self.job.spec.reward_models
            starting = reward_model.ModelReward(models, self.config.rollout.timeout_s, mesh.dp_rank)
            starting([])  # waits until they are loaded
            remote["model"] = replace(starting, timeout_s=reward.timeout_s)
        if reward.url:
            remote["url"] = RemoteReward.from_config(reward)
        if reward.judge_url:
            remote["judge"] = Judge.from_config(reward, ReplyCache(self.job.spec.folder / "judge"))
        return remote


def dialogue_of(environment: EnvironmentConfig, data: DataConfig, tokenizer: Any) -> Dialogue:
    """What writes the messages of episodes with this environment as tokens.

    Raises:
        ConfigError: the model's chat template takes no turns or no tools or writes calls that are not read, or a tool
            is not described.
    """
    found = load_environment(str(environment.name))
    try:
        tools = schemas(found)
    except ValueError as error:
        raise ConfigError(f"environment.name {environment.name}: {one_line(error)}") from None
    extends = environment.history == "extend"
    return Dialogue(tokenizer, tools, data.chat_template_args, extends, check_calls)


def _engines_beside(spec: EngineSpec) -> list[Any]:
    """Starts an engine on the GPU of each rank; returns those of all ranks, in their order. A collective call."""
    return gather_objects(start_engine_here(spec))
