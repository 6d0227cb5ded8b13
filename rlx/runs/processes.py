"""`RunProcesses`: the engines, reward models, environments and workers of runs, and what stays for the next run.

Engines start in the placement group of the Tune trial around them, or in one of their own. Workers are those of a Ray
Train run (`train_run`), which makes a second group. Starting everything takes half a minute, mostly imports.
Left out: the run's folder and records (`launch`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import ray.train
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.cluster.placement import Bundle
from rlx.cluster.resources import ResourcePlan
from rlx.config.errors import ConfigError
from rlx.config.sections.base import flatten
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.sweep import ReuseName
from rlx.environments.pool import end_episodes, start_hosts
from rlx.environments.trial import host_settings
from rlx.rewards import reward_model
from rlx.rollout.engine_actors import EngineSpec, start_engines
from rlx.rollout.engine_args import adapter_config, engine_args
from rlx.runs.mailbox import JobSpec, end_mailbox, start_mailbox
from rlx.runs.preflight import PreparedRun
from rlx.runs.train_run import END_S, RunStopped, TrainRun
from rlx.types import Notify, OnReport

# Settings that environments cannot change after their start.
_ENVIRONMENTS_STARTED_WITH = (
    *("environment.name", "environment.params", "environment.timeout_s"),
    *("environment.concurrency", "environment.memory_mb"),
)
# Settings that engines and reward models cannot change after their start, in addition to their arguments and resources.
_ENGINES_STARTED_WITH = ("reward.model", "model.trust_remote_code", "data.system_prompt", *_ENVIRONMENTS_STARTED_WITH)
# Settings that workers cannot change.
_WORKERS_STARTED_WITH = (
    "data.",
    "parallel.",
    "eval.source",
    "eval.sets",
    "eval.num_prompts",
    "eval.seed",
    "scaling.",
    "model.offload",
)


class RunActors:
    """The engines, reward models and environments of a run, in a placement group of their own or in that of a trial."""

    def __init__(self, prepared: PreparedRun) -> None:
        """Reserves room and starts the actors; does not wait until they are ready.

        Raises:
            ConfigError: there is no room within `wait_for_resources`.
        """
        needed, outer = prepared.resources, ray.util.get_current_placement_group()
        self.started_with = _started_with(prepared)
        self.engines: list[Any] = []
        self.reward_models: list[Any] = []
        self.environments: list[Any] = []
        self._owned = None if outer or not needed.bundles else _reserve(needed)
        self._placement = outer or self._owned
        try:
            patience_s = prepared.config.wait_for_resources
            if self._placement and not self._placement.wait(patience_s):
                raise ConfigError(f"no room for {needed} within {patience_s:.0f} s: {needed.bundles} are not free")
            if not needed.colocated:  # then each worker starts its own, where it is
                self.engines = start_engines(engine_spec_of(prepared), self._placement, needed.indices.engines)
            self.reward_models = _start_reward_models(prepared, self._placement)
            self.environments = _start_environments(prepared, self._placement)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the actors, once environments are closed, and frees what they had reserved."""
        try:
            end_episodes(self.environments)  # a run that failed or was interrupted has left some
        finally:
            for actor in [*self.engines, *self.reward_models, *self.environments]:
                ray.kill(actor)
            if self._owned:
                remove_placement_group(self._owned)


class RunProcesses:
    """What one process has started for its runs. One run at a time."""

    def __init__(self, reuse: ReuseName = "none", mailbox: Any = None) -> None:
        """
        Args:
            reuse: what stays for the next run of the same shape: the engines, the engines and the workers, or nothing.
            mailbox: the driver's actor; None: one is started here.
        """
        self.reuse, self._given_mailbox, self._mailbox = reuse, mailbox, mailbox
        self._actors: RunActors | None = None
        self._train: TrainRun | None = None
        self._train_started_with: list[Any] = []
        self._is_stopping, self._lock = False, threading.Lock()

    @contextmanager
    def lease(self, prepared: PreparedRun) -> Iterator[RunProcesses]:
        """Engines that suit the run are there inside the block. What is not to stay ends with it.

        Raises:
            ConfigError: there is no room for them.
        """
        self._is_stopping = False
        try:
            if self._actors and self._actors.started_with != _started_with(prepared):
                self.close()
            self._mailbox = self._mailbox or start_mailbox()
            self._actors = self._actors or RunActors(prepared)
            yield self
        except RunStopped:
            self._end_what_does_not_stay()
            raise
        except BaseException:
            self.close(patience_s=0.0)
            raise
        else:
            self._end_what_does_not_stay()

    def run(
        self,
        prepared: PreparedRun,
        job: JobSpec,
        on_report: OnReport,
        notify: Notify,
        *,
        grace_s: float = 0.0,
        again: bool = False,
    ) -> dict[str, Any]:
        """Does a job with workers, and returns its last metrics; see `TrainRun.do`.

        Args:
            job: what the workers are told, without the engines and reward models.
            again: the run has been started before.

        Raises:
            RunError: the run failed.
            RunStopped: `stop` was called meanwhile.
        """
        assert self._actors
        is_last = self.reuse != "workers"
        with self._lock:
            if self._is_stopping:
                raise RunStopped("the run was stopped")
            self._train = self._suitable_workers(prepared) or TrainRun(prepared, job.folder, self._mailbox, again)
            self._train.is_stopping = False
            self._train_started_with = _workers_started_with(prepared)
        beside = engine_spec_of(prepared) if prepared.resources.colocated else None
        job = replace(job, engines=self._actors.engines, engine_spec=beside)
        job = replace(job, reward_models=self._actors.reward_models, environments=self._actors.environments)
        return self._train.do(job, is_last, on_report, notify, grace_s)

    @property
    def engines(self) -> list[Any]:
        """Handles of the engines that run."""
        return self._actors.engines if self._actors else []

    @property
    def result(self) -> ray.train.Result | None:
        """Ray Train's result of the last run; None while its workers stay."""
        return self._train.result if self._train else None

    def release(self, step: int) -> None:
        """Lets a run that waits after its evaluations go on after a step."""
        if self._train:
            self._train.box.release(step)

    def stop(self) -> None:
        """Ends the run that another thread does, if any, after its current step."""
        with self._lock:
            self._is_stopping = True
        if self._train and not self._train.has_ended:
            self._train.stop()

    def close(self, patience_s: float = END_S) -> None:
        """Ends every process that was started here. Workers get `patience_s` to end by themselves."""
        self._end_workers(patience_s)
        if self._actors:
            self._actors.close()
        self._actors = None
        if self._mailbox is not self._given_mailbox:
            end_mailbox(self._mailbox)
        self._mailbox = self._given_mailbox

    def _suitable_workers(self, prepared: PreparedRun) -> TrainRun | None:
        """The workers that have stayed if they can do the run; otherwise they are ended."""
        if self._train and not self._train.has_ended and self._train_started_with == _workers_started_with(prepared):
            return self._train
        self._end_workers()
        return None

    def _end_what_does_not_stay(self) -> None:
        if self.reuse != "workers":
            self._end_workers()
        if self.reuse == "none":
            self.close()
        elif self._actors:  # a run that was stopped has left some; the next one has another name
            end_episodes(self._actors.environments)

    def _end_workers(self, patience_s: float = END_S) -> None:
        if self._train:
            self._train.close(patience_s)
        self._train_started_with = []  # they suit no run any more


def _reserve(needed: ResourcePlan) -> PlacementGroup:
    return placement_group(needed.bundles, needed.strategy, bundle_label_selector=needed.selectors)


def engine_spec(
    rollout: RolloutConfig, model: ModelConfig, max_prompt_tokens: int, model_path: str, bundle: Bundle
) -> EngineSpec:
    """Returns the specification with which a run's engines start; `bundle`: the resources of each."""
    args = engine_args(rollout, model, max_prompt_tokens=max_prompt_tokens, on_gpu=bundle.get("GPU", 0) > 0)
    turn_s = rollout.timeout_s / 2 if rollout.alternate else None  # the other half is for what it draws itself
    return EngineSpec(model_path, args, bundle, adapter_config(model), turn_s=turn_s)


def engine_spec_of(prepared: PreparedRun) -> EngineSpec:
    """Returns the specification of a prepared run's engines."""
    config = prepared.config
    longest, bundle = config.data.max_prompt_tokens, prepared.resources.engines[0]
    spec = engine_spec(config.rollout, config.model, longest, prepared.model_path, bundle)
    return replace(spec, bring=_bring(prepared))


def _bring(prepared: PreparedRun) -> Callable[[], None] | None:
    """What a process calls first that loads the run's models."""
    return prepared.copies.bring_here if prepared.copies else None


def _start_reward_models(prepared: PreparedRun, placement: Any) -> list[Any]:
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
        bring=_bring(prepared),
    )


def _start_environments(prepared: PreparedRun, placement: Any) -> list[Any]:
    needed, environment = prepared.resources, prepared.config.environment
    if not environment.name:
        return []
    resources = needed.environments[0]
    strategies = [PlacementGroupSchedulingStrategy(placement, bundle) for bundle in needed.indices.environments]
    own = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    return start_hosts(
        host_settings(environment), [{"scheduling_strategy": strategy, **own} for strategy in strategies]
    )


def _started_with(prepared: PreparedRun) -> list[Any]:
    """Returns what must be the same in all runs that share engines and reward models."""
    return [prepared.resources, engine_spec_of(prepared), _settings(prepared, _ENGINES_STARTED_WITH)]


def _workers_started_with(prepared: PreparedRun) -> list[Any]:
    """Returns what must be the same in all runs that share workers."""
    return [prepared.resources, prepared.model_path, _settings(prepared, _WORKERS_STARTED_WITH)]


def _settings(prepared: PreparedRun, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in flatten(prepared.config).items() if key.startswith(keys)}


def check_on_report(on_report: object) -> None:
    """Raises ConfigError for what cannot be called after each step as an `OnReport`; None is nothing to call."""
    expected = "on_report: expected a function that takes (metrics, checkpoint)"
    if on_report is None:
        return
    if not callable(on_report):
        raise ConfigError(f"{expected}, not {type(on_report).__name__}")
    if any(map(inspect.iscoroutinefunction, (on_report, type(on_report).__call__))):
        raise ConfigError(f"{expected}, not an async one: nothing awaits it")
    try:
        signature = inspect.signature(on_report)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind({}, None)
    except TypeError as error:
        raise ConfigError(f"{expected}: {error}") from None
