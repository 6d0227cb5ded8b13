"""`ActorGroup`: engines, reward models and Ray Train workers that start together and stay for the next run.

Starting them takes half a minute, mostly imports; the next run of the same shape begins at once. A group runs one job
at a time. After a failed or overdue job it is closed; otherwise it takes the next.
Left out: the run's folder and records (`launch`), and what travels between driver and workers (`ray_train`).
"""

from __future__ import annotations

import enum
import gc
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlx import actors
from rlx.config.errors import ConfigError
from rlx.config.sections import ModelConfig, RolloutConfig, ScalingConfig, flatten
from rlx.data.blocks import RankShares
from rlx.rewards import reward_model
from rlx.rollout.engine_actors import EngineSpec, start_engines
from rlx.rollout.engine_args import adapter_config, engine_args
from rlx.runs import ray_train
from rlx.runs.preflight import PreparedRun
from rlx.runs.ray_train import RunError, RunStopped, StepReport, WorkerSpec
from rlx.runs.resources import Bundle
from rlx.storage.filesystem import Storage
from rlx.types import Notify, OnReport

_ABORT_S = 30.0  # longest wait for a controller to abort; then it is killed
_START_S = 30.0  # longest wait for a controller to start
_END_S = 60.0  # longest wait for the workers to end after their last report
_STOP_S = 10.0  # longest wait for a stopped run to end by itself
_ROOM_S = 60.0  # longest wait for room on the cluster
_POLL_S = 0.1
_STARTS = 10  # attempts to place the workers, a minute each, before the run fails

# Settings that a group cannot change after its start, in addition to the engines' arguments and the resources.
_STARTED_WITH = (
    "data.",
    "parallel.tp",
    "eval.source",
    "eval.num_prompts",
    "eval.seed",
    "reward.model",
    "scaling.use_gpu",
    "scaling.accelerator_type",
    "model.trust_remote_code",
)


class GroupState(enum.Enum):
    """The state of an `ActorGroup`."""

    IDLE = enum.auto()  # it can take a job
    RUNNING = enum.auto()
    STOPPING = enum.auto()  # it was asked to end its job
    CLOSED = enum.auto()  # its processes have ended; it cannot be used again


class ActorGroup:
    """The processes of a run, in a placement group of their own or in that of the Tune trial around them."""

    def __init__(self, prepared: PreparedRun) -> None:
        """Reserves room and starts the engines and reward models; does not wait until they are ready.

        Raises:
            ConfigError: there is no room within a minute.
        """
        self._requirements = _requirements(prepared)
        self._state, self._state_lock = GroupState.IDLE, threading.Lock()
        self._mailbox, self._jobs, self._failures = ray_train.new_mailbox(), 0, 0
        self._job, self._reports_seen = "", 0  # mailbox of the current job; how many of its reports were taken
        self._has_workers, self._workers_ended, self._ending = False, threading.Event(), ""
        self.engines: list[Any] = []
        self.reward_models: list[Any] = []
        outer = ray.util.get_current_placement_group()
        needed = prepared.resources
        self._placement, self._owns_placement = outer or placement_group(needed.bundles, needed.strategy), not outer
        try:
            if not self._placement.wait(_ROOM_S):
                raise ConfigError(f"no room for {needed} within {_ROOM_S:.0f} s: {needed.bundles} are not free")
            spec = _engine_spec(prepared)
            self.engines = start_engines(spec, self._placement, needed.indices.engines)
            self.reward_models = _start_reward_models(prepared, self._placement)
        except BaseException:
            self.close()
            raise

    def suits(self, prepared: PreparedRun) -> bool:
        """Returns whether the group can do a run."""
        return self._state is not GroupState.CLOSED and self._requirements == _requirements(prepared)

    def run(
        self,
        prepared: PreparedRun,
        job: WorkerSpec,
        on_report: OnReport,
        notify: Notify,
        grace_s: float = 0.0,
    ) -> dict[str, Any]:
        """Does a run and returns its last metrics.

        After an interrupt (KeyboardInterrupt, once it trains) the workers first end their step, and then the interrupt
        is raised; a second interrupt, or `grace_s` seconds, ends the wait.

        Args:
            prepared: the prompt tables of a group's first run are those of all its runs.
            job: what the workers are told; the engines and reward models are added here.

        Raises:
            RunError: the run failed; the group is closed.
            RunStopped: `stop` was called meanwhile, or the group was closed.
        """
        if not self._has_workers:
            self._start_workers(prepared, job.folder)
        self._jobs, self._reports_seen = self._jobs + 1, 0
        while ray_train.failure(self._mailbox, self._failures + 1):
            self._failures += 1  # it came after the end of the previous run
        job = replace(job, engines=self.engines, reward_models=self.reward_models)
        self._enter(GroupState.RUNNING)
        self._job = ray_train.post_job(self._mailbox, self._jobs, job)
        try:
            metrics = self._relay(prepared.config.scaling.max_failures, on_report, notify, grace_s)
            self._await_end()
            return metrics
        except (RunStopped, SystemExit):  # Tune's report exits the thread of a trial that it has stopped
            self.stop()
            raise
        except BaseException:
            self.close()
            raise
        finally:
            ray_train.withdraw_job(self._mailbox, self._jobs)
            ray_train.clear(f"{self._job}/")
            self._job = ""
            self._enter(GroupState.IDLE)

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Ends the current job, if any, with its step and a checkpoint; can be called from any thread.

        A group whose step takes longer than `patience_s` is closed.
        """
        job, deadline = self._job, time.monotonic() + patience_s
        if not job or not self._enter(GroupState.STOPPING):
            return
        ray_train.ask_to_stop(job)
        while self._job == job and not ray_train.has_ended(job):
            if time.monotonic() > deadline or self._workers_ended.is_set():
                self.close()
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends every process that the group has started and frees what it has reserved."""
        if not self._enter(GroupState.CLOSED):
            return
        if self._has_workers:
            self._end_workers()
        for actor in [*self.engines, *self.reward_models]:
            ray.kill(actor)
        if self._owns_placement:
            remove_placement_group(self._placement)
        ray_train.clear(self._mailbox)

    def _enter(self, state: GroupState) -> bool:
        """Changes the state; returns False if the group is closed, which never changes."""
        with self._state_lock:
            if self._state is GroupState.CLOSED:
                return False
            self._state = state
            return True

    def _relay(self, max_failures: int, on_report: OnReport, notify: Notify, grace_s: float) -> dict[str, Any]:
        """Passes on the job's reports as they come; returns the metrics of the last one."""
        metrics: dict[str, Any] = {}
        try:
            for report in self._reports(max_failures, notify):
                metrics = report.metrics
                on_report(metrics, report.checkpoint)
        except KeyboardInterrupt:
            if metrics and grace_s:
                notify(
                    f"interrupted: finishing the step and a checkpoint, {grace_s:.0f} s at most; "
                    f"interrupt again to end at once"
                )
                ray_train.ask_to_stop(self._job)
                for report in self._reports(max_failures, notify, time.monotonic() + grace_s):
                    on_report(report.metrics, report.checkpoint)
            raise
        return metrics

    def _await_end(self) -> None:
        """Waits until the workers have ended the job: after the last report they send their last records.

        Closes a group that takes too long.
        """
        deadline = time.monotonic() + _END_S
        while not (ray_train.has_ended(self._job) or ray_train.failure(self._mailbox, self._failures + 1)):
            if self._workers_ended.wait(_POLL_S):
                return
            if time.monotonic() > deadline:
                self.close()
                return

    def _reports(self, max_failures: int, notify: Notify, until: float = math.inf) -> Iterator[StepReport]:
        """Yields the job's reports as they come, until the last one or the time `until` (of `time.monotonic`)."""
        failures_before = self._failures
        while time.monotonic() < until:
            ended = self._workers_ended.is_set()  # read before the reports, so that none is missed
            for message in ray_train.take_messages(self._job):
                notify(message)
            if report := ray_train.take_report(self._job, self._reports_seen + 1):
                self._reports_seen += 1
                yield report
                if report.is_last:
                    return
                continue
            if self._state is not GroupState.RUNNING:
                raise RunStopped("the run was stopped")
            if error := ray_train.fatal_error(self._job):
                raise RunError(error)
            if ended:
                raise RunError(self._ending)
            if failure := ray_train.failure(self._mailbox, self._failures + 1):
                self._failures += 1
                is_final = 0 <= max_failures < self._failures - failures_before
                if is_final or all(actors.is_dead(engine) for engine in self.engines):
                    raise RunError(failure)
                notify(f"{failure} - the workers are restarted")
            self._workers_ended.wait(_POLL_S)

    def _start_workers(self, prepared: PreparedRun, folder: Storage) -> None:
        """Makes Ray Train start the workers, which wait for jobs; `folder`: where Train keeps its own records."""
        trainer = _trainer(prepared, self._mailbox, folder)
        indices = prepared.resources.indices.workers
        trainer.run_config.callbacks = ray_train.callbacks(self._mailbox, self._placement, indices)

        def train() -> None:
            try:
                trainer.fit()
                self._ending = "the workers ended"
            except BaseException as error:
                self._ending = ray_train.error_message(error)
            finally:
                self._workers_ended.set()

        threading.Thread(target=train, daemon=True, name="actor-group").start()
        self._has_workers = True

    def _end_workers(self) -> None:
        if self._workers_ended.is_set() or (controller := ray_train.controller(self._mailbox, _START_S)) is None:
            return
        try:
            ray.get(controller.abort.remote(), timeout=_ABORT_S)
        except ray.exceptions.GetTimeoutError:
            ray.kill(controller)
        except ray.exceptions.RayActorError:
            pass  # abort ends the actor


def engine_spec(
    rollout: RolloutConfig, model: ModelConfig, max_prompt_tokens: int, model_path: str, bundle: Bundle
) -> EngineSpec:
    """Returns the specification with which a run's engines start; `bundle`: the resources of each."""
    args = engine_args(rollout, model, max_prompt_tokens=max_prompt_tokens, on_gpu=bundle.get("GPU", 0) > 0)
    return EngineSpec(model_path, args, bundle, adapter_config(model))


def _engine_spec(prepared: PreparedRun) -> EngineSpec:
    config = prepared.config
    longest, bundle = config.data.max_prompt_tokens, prepared.resources.engines[0]
    return engine_spec(config.rollout, config.model, longest, prepared.model_path, bundle)


def _start_reward_models(prepared: PreparedRun, placement: PlacementGroup) -> list[Any]:
    needed, reward = prepared.resources, prepared.config.reward
    if not needed.reward_models:
        return []
    return reward_model.start_reward_models(
        str(reward.model),
        system=prepared.config.data.system_prompt,
        batch_tokens=reward.model_batch_tokens,
        resources=needed.reward_models[0],
        group=placement,
        bundles=needed.indices.reward_models,
        trust_remote_code=prepared.config.model.trust_remote_code,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Ray Train


class _Trainer(TorchTrainer):
    """Ray's trainer without the process that cleans up placement groups: the workers are in one of ours."""

    def _create_default_callbacks(self) -> list[Any]:
        defaults = super()._create_default_callbacks()
        return [callback for callback in defaults if not isinstance(callback, PlacementGroupCleanerCallback)]


def _trainer(prepared: PreparedRun, mailbox: str, folder: Storage) -> TorchTrainer:
    scaling = prepared.config.scaling
    parent, _, name = folder.path.rpartition("/")
    return _Trainer(
        work,
        train_loop_config={"mailbox": mailbox},
        torch_config=TorchConfig(backend=_backend(scaling, prepared.config.model.offload)),
        datasets=dict(prepared.tables or {}),
        dataset_config=RankShares(prepared.config.parallel.tp),
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=prepared.resources.workers[0],
            accelerator_type=scaling.accelerator_type,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=parent,
            storage_filesystem=folder.filesystem,
            # `ActorGroup._reports` counts the failures of each run.
            failure_config=ray.train.FailureConfig(max_failures=-1, controller_failure_limit=_STARTS),
        ),
    )


def _backend(scaling: ScalingConfig, offload: tuple[str, ...]) -> str:
    """Returns the backend of the workers' collectives.

    Gradients in host memory are clipped there over all ranks, which NCCL cannot do.
    """
    if not scaling.use_gpu:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if "critic" in offload else "nccl"


def work(setup: dict[str, Any]) -> None:
    """Does one job after another; Ray Train runs it on each worker."""
    # Imported here, so that Train's controller need not import torch and transformers.
    import torch

    from rlx.runs.worker import run_job

    rank = ray.train.get_context().get_world_rank()
    for job in ray_train.jobs(setup["mailbox"]):
        with ray_train.fatal_errors_posted(job.mailbox, rank):
            run_job(job)
        gc.collect()  # the models and optimizers of a run have reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engines may be on the same GPU


def _requirements(prepared: PreparedRun) -> list[Any]:
    """Returns what must be the same in all runs of a group."""
    config, resources = prepared.config, prepared.resources
    settings = {key: value for key, value in flatten(config).items() if key.startswith(_STARTED_WITH)}
    spec = _engine_spec(prepared)
    return [resources, spec, _backend(config.scaling, config.model.offload), settings]
