"""A crew: engines, reward models and a group of Train workers, started side by side and kept from one run to the next.

Starting one takes half a minute, mostly imports; the next run of the same shape begins at once. A crew does one run at
a time and goes on with the next however that ended, unless the run failed or did not end in time: then it is over.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.util.placement_group import placement_group, remove_placement_group

from rlx import actors
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.config.sections import flatten
from rlx.rewards import reward_model
from rlx.rollout.engine_actors import EngineSpec, start_engines
from rlx.rollout.engine_args import adapter_config, engine_args
from rlx.runs import ray_train
from rlx.runs.ray_train import LAST, Notify, Report, RunError, RunStopped, WorkerSpec
from rlx.runs.resources import ResourcePlan, plan_resources
from rlx.storage.filesystem import Storage

_ABORT_S = 30.0  # a controller that takes longer to end is killed
_START_S = 30.0  # a controller that has not started by then never will
_END_S = 60.0  # in which the workers are done after their last report
_STOP_S = 10.0  # in which a run that is stopped ends by itself
_ROOM_S = 60.0  # in which there must be room on the cluster
_POLL_S = 0.1  # how often reports are looked for
_STARTS = 10  # of the workers, a minute each, before the run fails for want of room

# Settings that a crew is made for, beside the engines' options and the plan: the prompt tables, the reward model.
_MADE_FOR = (
    "data.",
    "eval.source",
    "eval.num_prompts",
    "eval.seed",
    "reward.model",
    "scaling.use_gpu",
    "scaling.accelerator_type",
    "model.trust_remote_code",
)


class ActorGroup:
    """What a run works with, in a placement group of its own or in the one that a Tune trial holds for it."""

    def __init__(self, config: RunConfig, model: str) -> None:
        """Reserves room and starts the engines and reward models; does not wait for them.

        Args:
            model: the model's folder or name.

        Raises:
            ConfigError: there is no room within a minute.
        """
        self._made_for = _made_for(config, model)
        self._box, self._number, self._failures = ray_train.new_box(), 0, 0
        self._job, self._seen = "", 0  # box of the run that it is at, and how many of its reports were seen
        self._training = self._stopped = self.is_over = False
        self._gone = threading.Event()  # the workers are
        self._outcome: dict[str, str] = {}
        self.engines: list[Any] = []
        self.reward_models: list[Any] = []
        needed, held = plan_resources(config), ray.util.get_current_placement_group()
        self._group, self._is_own = held or placement_group(needed.bundles, needed.strategy), not held
        try:
            if not self._group.wait(_ROOM_S):
                raise ConfigError(f"no room for {needed} within {_ROOM_S:.0f} s: {needed.bundles} are not free")
            self.engines = self._start_engines(config, model, needed)
            self.reward_models = self._start_reward_models(config, needed)
        except BaseException:
            self.close()
            raise

    def suits(self, config: RunConfig, model: str) -> bool:
        """Whether it can do a run of this config."""
        return not self.is_over and self._made_for == _made_for(config, model)

    def run(
        self,
        config: RunConfig,
        job: WorkerSpec,
        folder: Storage,
        tables: Mapping[str, Any],
        on_report: Report,
        say: Notify,
        grace_s: float = 0.0,
    ) -> dict[str, Any]:
        """Does a run and gives its last metrics.

        An interrupt (KeyboardInterrupt, once it trains) first asks the workers to end with the step that they are in,
        and is raised when they have; a second one, or `grace_s` seconds, end that patience.

        Args:
            job: what the workers are told; engines and reward models are put in here.
            folder: where Train may keep its own records, on the storage.
            tables: the prompts; those of the crew's first run are those of all.

        Raises:
            RunError: it failed; the crew is over.
            RunStopped: `stop` was called meanwhile, or the crew was closed.
        """
        self._training = self._training or self._start_workers(config, folder, tables)
        self._number, self._seen, self._stopped = self._number + 1, 0, False
        while ray_train.failure(self._box, self._failures + 1):
            self._failures += 1  # after the end of the run before
        job = replace(job, engines=self.engines, reward_models=self.reward_models)
        self._job = ray_train.post_job(self._box, self._number, job)
        try:
            metrics = self._watched(config.scaling.max_failures, on_report, say, grace_s)
            self._await_end()
            return metrics
        except (RunStopped, SystemExit):  # Tune's report exits the thread of a trial that it has stopped
            self.stop()
            raise
        except BaseException:
            self.close()
            raise
        finally:
            ray_train.take_back_job(self._box, self._number)
            ray_train.clear(f"{self._job}/")
            self._job = ""

    def stop(self, patience_s: float = _STOP_S) -> None:
        """From any thread: ends the run that it is at, if any, with the step that it is in and a checkpoint; a crew
        whose step takes longer than `patience_s` is closed."""
        job, deadline = self._job, time.monotonic() + patience_s
        if not job or self.is_over:
            return
        self._stopped = True
        ray_train.ask_to_stop(job)
        while self._job == job and not ray_train.has_ended(job):
            if time.monotonic() > deadline or self._gone.is_set():
                self.close()
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends all that it has started and frees what was reserved."""
        if self.is_over:
            return
        self.is_over = True
        if self._training:
            self._end_workers()
        for actor in [*self.engines, *self.reward_models]:
            ray.kill(actor)
        if self._is_own:
            remove_placement_group(self._group)
        ray_train.clear(self._box)

    def _watched(self, max_failures: int, on_report: Report, say: Notify, grace_s: float) -> dict[str, Any]:
        """Passes the reports of the run that was posted on, as they come; the last one's metrics."""
        metrics: dict[str, Any] = {}
        try:
            for metrics, checkpoint in self._reports(max_failures, say):
                on_report(metrics, checkpoint)
        except KeyboardInterrupt:
            if metrics and grace_s:
                say(f"interrupted: finishing the step and a checkpoint, {grace_s:.0f} s at most; again ends it at once")
                ray_train.ask_to_stop(self._job)
                for metrics, checkpoint in self._reports(max_failures, say, time.monotonic() + grace_s):
                    on_report(metrics, checkpoint)
            raise
        return metrics

    def _await_end(self) -> None:
        """Returns once the workers are done with what follows the last report, their last records for MLflow above all;
        a crew that takes too long for it is closed."""
        deadline = time.monotonic() + _END_S
        while not (ray_train.has_ended(self._job) or ray_train.failure(self._box, self._failures + 1)):
            if self._gone.wait(_POLL_S):
                return
            if time.monotonic() > deadline:
                self.close()
                return

    def _reports(
        self, max_failures: int, say: Notify, until: float = math.inf
    ) -> Iterator[tuple[dict[str, Any], str | None]]:
        """A run's reports as they come, until its last, or until that time."""
        before = self._failures
        while time.monotonic() < until:
            gone = self._gone.is_set()  # asked before looking, so that nothing is missed
            for words in ray_train.take_messages(self._job):
                say(words)
            if (report := ray_train.reported(self._job, self._seen + 1)) is not None:
                self._seen += 1
                last = report[0].pop(LAST)
                yield report
                if last:
                    return
                continue
            if self._stopped:
                raise RunStopped("the run was stopped")
            if error := ray_train.fatal_error(self._job):
                raise RunError(error)
            if gone:
                raise RunError(self._outcome["words"])
            if failure := ray_train.failure(self._box, self._failures + 1):
                self._failures += 1
                if 0 <= max_failures < self._failures - before or all(
                    actors.is_dead(engine) for engine in self.engines
                ):
                    raise RunError(failure)
                say(f"{failure} - the workers are started again")
            self._gone.wait(_POLL_S)

    def _start_engines(self, config: RunConfig, model: str, needed: ResourcePlan) -> list[Any]:
        return start_engines(engine_spec(config, model), self._group, needed.places[1])

    def _start_reward_models(self, config: RunConfig, needed: ResourcePlan) -> list[Any]:
        if not needed.reward_models:
            return []
        settings = config.reward
        return reward_model.start_reward_models(
            str(settings.model),
            system=config.data.system_prompt,
            batch_tokens=settings.model_batch_tokens,
            resources=needed.reward_models[0],
            group=self._group,
            bundles=needed.places[2],
            trust_remote_code=config.model.trust_remote_code,
        )

    def _start_workers(self, config: RunConfig, folder: Storage, tables: Mapping[str, Any]) -> bool:
        """Has Ray Train start the workers, which wait for jobs."""
        trainer = _trainer(config, self._box, folder, tables)
        trainer.run_config.callbacks = ray_train.callbacks(self._box, self._group, plan_resources(config).places[0])

        def train() -> None:
            try:
                trainer.fit()
                self._outcome["words"] = "the workers ended"
            except BaseException as error:
                self._outcome["words"] = ray_train.error_words(error)
            finally:
                self._gone.set()

        threading.Thread(target=train, daemon=True, name="crew").start()
        return True

    def _end_workers(self) -> None:
        if self._gone.is_set() or (train_controller := ray_train.handle(self._box, _START_S)) is None:
            return
        try:
            ray.get(train_controller.abort.remote(), timeout=_ABORT_S)
        except ray.exceptions.GetTimeoutError:
            ray.kill(train_controller)
        except ray.exceptions.RayActorError:
            pass  # abort ends the actor


class _Trainer(TorchTrainer):
    """Ray's, without the process that looks after placement groups of Train's own: the workers are in another's."""

    def _create_default_callbacks(self) -> list[Any]:
        return [
            each for each in super()._create_default_callbacks() if not isinstance(each, PlacementGroupCleanerCallback)
        ]


def _backend(config: RunConfig) -> str:
    """What carries the workers' collectives: gradients in host memory are clipped there, over all ranks."""
    if not config.scaling.use_gpu:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if "critic" in config.model.offload else "nccl"


def _trainer(config: RunConfig, box: str, folder: Storage, tables: Mapping[str, Any]) -> TorchTrainer:
    scaling = config.scaling
    parent, _, name = folder.path.rpartition("/")
    return _Trainer(
        work,
        train_loop_config={"box": box},
        torch_config=TorchConfig(backend=_backend(config)),
        datasets=dict(tables),
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),  # each rank takes its own rows: see data.py
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=plan_resources(config).workers[0],
            accelerator_type=scaling.accelerator_type,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=parent,
            storage_filesystem=folder.filesystem,
            # Failures are counted by run, in `_reports`.
            failure_config=ray.train.FailureConfig(max_failures=-1, controller_failure_limit=_STARTS),
        ),
    )


def work(setup: dict[str, Any]) -> None:
    """What Ray Train runs on each worker: one run after another."""
    # Here, so that Train's controller need not import torch and transformers.
    import torch

    from rlx.runs.worker import run_job

    rank = ray.train.get_context().get_world_rank()
    for job in ray_train.jobs(setup["box"]):
        with ray_train.fatal_errors_posted(job.mailbox, rank):
            run_job(job)
        gc.collect()  # the run's models and optimizers are full of circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engines may be on the same GPU


def _made_for(config: RunConfig, model: str) -> list[Any]:
    """What must be the same in all runs of a crew."""
    settings = {key: value for key, value in flatten(config).items() if key.startswith(_MADE_FOR)}
    return [plan_resources(config), engine_spec(config, model), _backend(config), settings]


def engine_spec(config: RunConfig, model: str) -> EngineSpec:
    """What the engines of a run are started with."""
    bundle = plan_resources(config).engines[0]
    on_gpu, longest = bundle.get("GPU", 0) > 0, config.data.max_prompt_tokens
    args = engine_args(config.rollout, config.model, max_prompt_tokens=longest, on_gpu=on_gpu)
    return EngineSpec(model, args, bundle, adapter_config(config.model))
