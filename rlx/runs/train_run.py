"""`TrainRun`: one `TorchTrainer.fit()`, whose workers do one job, or one job after another.

`make_trainer` builds Ray's trainer and its configs from rlx's config, in one place. The workers take jobs from the
run's mailbox box; steps, messages and failures come back through it.
Left out: what the workers do with a job (`worker`), engines (`processes`), the run's folder and records (`launch`).
"""

from __future__ import annotations

import gc
import math
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
import ray.train
import ray.train.collective
import ray.util
from ray.train.torch import TorchTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rlx import actors
from rlx.cluster.placement import Bundle
from rlx.cluster.resources import remove_groups
from rlx.config.errors import one_line
from rlx.data.blocks import RankShares
from rlx.runs.mailbox import (
    CHECKPOINT_PATH,
    IS_LAST,
    JOB,
    Box,
    ControllerStarted,
    JobEnded,
    JobSpec,
    Message,
    StepReport,
    TrainEnded,
    WorkersFailed,
    WorkersStarted,
)
from rlx.runs.preflight import PreparedRun
from rlx.runs.worker_group import WorkerGroupConfig, backend_of
from rlx.storage.filesystem import Storage
from rlx.types import Notify, OnReport

_LAST_RECORDS_S = 60.0  # longest wait for the workers to end after their last report
END_S = 10.0
"""longest wait for workers that were told to end"""
_START_S = 60.0  # Ray Train's wait for room in one attempt to place the workers
_WAIT_S = 5.0  # for one answer of the mailbox
_MESSAGE_LENGTH = 1000  # an error's text is cut to this number of characters
_FATAL = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, NameError, ImportError)


class RunError(RuntimeError):
    """A run failed; the text says why in one line."""


class RunLostError(RunError):
    """A run was lost, by no error of its own: its controller died, or its workers found no room. Try it again."""


class RunStopped(RuntimeError):
    """A run was ended from outside, e.g. because a scheduler stopped its trial."""


# ---------------------------------------------------------------------------------------------------------------------
# Ray's trainer


def make_trainer(prepared: PreparedRun, folder: Storage, box: Box) -> TorchTrainer:
    """Returns the trainer of a run; its own folder is that of the run, so that its checkpoints are Ray Train's too."""
    config, (parent, _, name) = prepared.config, folder.path.rpartition("/")
    return TorchTrainer(
        work,
        train_loop_config={"box": box, "folder": folder},
        torch_config=WorkerGroupConfig(backend_of(config.scaling, config.model.offload)),
        datasets=dict(prepared.tables or {}),
        dataset_config=RankShares(config.parallel.neighbours),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scaling.num_workers,
            use_gpu=config.scaling.use_gpu,
            resources_per_worker=with_fingerprint(prepared.resources.workers[0], folder),
            placement_strategy=config.scaling.placement_strategy,
            accelerator_type=config.scaling.accelerator_type,
            label_selector=config.scaling.label_selector or None,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=parent,
            storage_filesystem=folder.filesystem,
            callbacks=[_Relay(box)],
            # The newest, and the best by another rule than Ray's, stay: `checkpoint_catalog.prune` deletes the others.
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=None),
            failure_config=ray.train.FailureConfig(
                max_failures=config.scaling.max_failures,
                controller_failure_limit=max(1, round(config.wait_for_resources / _START_S)),
                max_preemption_failures=config.scaling.max_preemption_failures,
                preemption_grace_s=config.scaling.preemption_grace_s,
            ),
        ),
    )


def with_fingerprint(bundle: Bundle, folder: Storage) -> Bundle:
    """Returns a worker's bundle with some bytes of memory that only this run asks for.

    By them `resources.remove_groups` finds the workers' placement group when Ray Train's controller was killed.
    """
    return bundle | {"memory": bundle.get("memory", 0.0) + 1 + zlib.crc32(folder.path.encode()) % 2**24}


class _Relay(ray.train.UserCallback):
    """Runs in Ray Train's controller: passes reports and failures on, and ends a run whose error would come again."""

    def __init__(self, box: Box) -> None:
        self._box, self._is_known, self._checkpoint = box, False, None

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self._introduce()
        step = dict(metrics[0])
        path, is_last, job = step.pop(CHECKPOINT_PATH, self._checkpoint), step.pop(IS_LAST, None), step.pop(JOB, 1)
        self._checkpoint = path if is_last is None else None  # one of an earlier step goes with the next step
        if is_last is not None:  # after the last one, the driver may hear next, from itself, that the run has ended
            self._box.send(StepReport(step, is_last, path, job), wait=is_last)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._introduce()
        fatal = {rank: error for rank, error in worker_exceptions.items() if isinstance(_cause(error), _FATAL)}
        text = _first_error(fatal or worker_exceptions)
        self._box.send(WorkersFailed(text, bool(fatal)), wait=True)
        if fatal:
            raise RuntimeError(text)  # restarted workers would fail in the same way: Ray Train ends the run

    def _introduce(self) -> None:
        if not self._is_known:
            self._box.send(ControllerStarted(ray.get_runtime_context().current_actor))
            self._is_known = True


# ---------------------------------------------------------------------------------------------------------------------
# On a worker


def work(setup: dict[str, Any]) -> None:
    """Does one job after another; Ray Train runs it on each worker."""
    # Imported here, so that Ray Train's controller need not import torch and transformers.
    import torch

    from rlx.runs.worker import run_job

    box: Box = setup["box"]
    for number, job in _jobs(box):
        run_job(job, box, number, setup["folder"])
        gc.collect()  # the models and optimizers of a run have reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engines may be on the same GPU


def _jobs(box: Box) -> Iterator[tuple[int, JobSpec]]:
    """Yields one job after another with its number, the same on all ranks, until the driver says that no more come."""
    is_first, done = ray.train.get_context().get_world_rank() == 0, 0
    if is_first:
        box.send(WorkersStarted(ray.util.get_current_placement_group()))
    while True:
        number = ray.train.collective.broadcast_from_rank_zero(box.next_job(done) if is_first else None)
        if number is None:
            return
        job = box.read_job(number)
        if job is not None:
            yield number, job
        ray.train.collective.barrier()  # other ranks may still be closing what they hold
        if is_first:
            box.send(JobEnded())
        done = number


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


class TrainRun:
    """One Ray Train run, as the process that started it sees it. `close` ends it."""

    def __init__(self, prepared: PreparedRun, folder: Storage, mailbox: Any, again: bool) -> None:
        """Starts Ray's trainer in a thread; does not wait for the workers.

        Args:
            folder: of the run, or of the first run if the workers stay for others.
            again: the run has been started before, and may have left a placement group.
        """
        self.box, self._mark = Box.new(mailbox), with_fingerprint(prepared.resources.workers[0], folder)
        self._seen = 0  # events
        self.is_stopping = False  # the current job, or the next one, is to end at once
        self._is_idle, self._ended = threading.Event(), threading.Event()
        self._is_idle.set()
        self._controller: Any = None
        self._job, self._is_job_over = 0, False  # number of the newest job, and whether the workers have finished it
        self.result: ray.train.Result | None = None  # Ray's, once it has ended well
        self._group: PlacementGroup | None = None  # of the workers, once they run
        if again:
            remove_groups(self._mark)
        trainer = make_trainer(prepared, folder, self.box)
        threading.Thread(target=self._fit, args=(trainer,), daemon=True, name="ray-train").start()

    @property
    def has_ended(self) -> bool:
        """Whether it can do no more jobs."""
        return self._ended.is_set()

    def do(
        self,
        job: JobSpec,
        is_last: bool,
        on_report: OnReport,
        notify: Notify,
        grace_s: float = 0.0,
    ) -> dict[str, Any]:
        """Makes the workers do a job, and returns its last metrics.

        After an interrupt (KeyboardInterrupt, once it trains) the workers first end their step, and then the interrupt
        is raised; a second interrupt, or `grace_s` seconds, ends the wait.

        Args:
            is_last: the workers end after it, and Ray Train finishes.

        Raises:
            RunError: the run failed.
            RunStopped: `stop` was called meanwhile.
        """
        self._is_idle.clear()
        self._is_job_over = False
        self._job = self.box.post(job, is_last)
        if self.is_stopping:  # `stop` came before there was a job
            self.box.stop()
        try:
            metrics = self._relay(job.engines, on_report, notify, grace_s)
            self._await_end(is_last)
            if self.is_stopping:
                raise RunStopped("the run was stopped")
            return metrics
        except RunStopped:  # `on_report` may raise it, too
            self.box.stop()
            self._await_end(is_last)
            raise
        finally:
            self.box.end_job(is_last)
            self._is_idle.set()

    def stop(self, patience_s: float = END_S) -> None:
        """Ends the current job, if any, with its step and a checkpoint; can be called from any thread.

        Workers whose step takes longer than `patience_s` are ended without one.
        """
        self.is_stopping = True
        self.box.stop()
        if not self._is_idle.wait(patience_s):
            self.kill()

    def close(self, patience_s: float = END_S) -> None:
        """Ends the workers. They get `patience_s` to end by themselves."""
        if not self.has_ended:
            _end_jobs(self.box)
            if not self._ended.wait(patience_s):
                self.kill()
        self.box.close()

    def kill(self) -> None:
        """Ends the workers at once. If they are still starting, they end when they ask for their job."""
        _end_jobs(self.box)
        if self.has_ended:
            return
        if self._controller:
            ray.kill(self._controller)
            self._ended.wait(END_S)
        self._remove_group()

    def _remove_group(self) -> None:
        """Frees what the workers hold: Ray Train does not if its controller was killed."""
        if self._group:
            remove_placement_group(self._group)
        else:
            remove_groups(self._mark)

    def _fit(self, trainer: TorchTrainer) -> None:
        ended = TrainEnded("")
        try:
            self.result = trainer.fit()
        except ray.exceptions.RayActorError:
            ended = TrainEnded("Ray Train's controller died", is_lost=True)
        except ray.train.ControllerError as error:
            ended = TrainEnded(error_message(error), is_lost=True)
        except BaseException as error:
            ended = TrainEnded(error_message(error))
        if ended.error:
            self._remove_group()
        self._ended.set()
        self.box.send(ended)

    def _relay(self, engines: Sequence[Any], on_report: OnReport, notify: Notify, grace_s: float) -> dict[str, Any]:
        """Passes on the job's reports as they come; returns the metrics of the last one."""
        metrics: dict[str, Any] = {}
        try:
            for report in self._reports(engines, notify):
                metrics = report.metrics
                on_report(metrics, report.checkpoint)
        except KeyboardInterrupt:
            if metrics and grace_s:
                notify(
                    f"interrupted: finishing the step and a checkpoint, {grace_s:.0f} s at most; "
                    f"interrupt again to end at once"
                )
                self.box.stop()
                for report in self._reports(engines, notify, time.monotonic() + grace_s):
                    on_report(report.metrics, report.checkpoint)
            raise
        return metrics

    def _reports(self, engines: Sequence[Any], notify: Notify, until: float = math.inf) -> Iterator[StepReport]:
        """Yields the job's reports as they come, until the last one or the time `until` (of `time.monotonic`)."""
        failure, has_fatal = "", False
        for event in self._events(until):
            match event:
                case StepReport() if event.job == self._job:
                    yield event
                    if event.is_last:
                        return
                case Message(text):
                    notify(text)
                case WorkersFailed(text, is_fatal):
                    failure, has_fatal = text, has_fatal or is_fatal
                    if engines and all(map(actors.is_dead, engines)):
                        raise RunError(text)
                    if not is_fatal:
                        notify(f"{text} - the workers are restarted")
                case TrainEnded(error, is_lost):
                    if self.is_stopping:
                        raise RunStopped("the run was stopped")
                    if is_lost and not has_fatal:
                        raise RunLostError(error)
                    raise RunError(failure or error or "the workers ended")

    def _events(self, until: float = math.inf) -> Iterator[Any]:
        """Yields events as they come."""
        while (left := until - time.monotonic()) > 0:
            for event in self.box.receive(self._seen, min(_WAIT_S, left)):
                self._seen += 1
                if isinstance(event, WorkersStarted):
                    self._group = event.group
                self._is_job_over |= isinstance(event, JobEnded)  # it may come before the last report
                if isinstance(event, ControllerStarted):
                    self._controller = event.handle
                yield event

    def _await_end(self, is_last: bool) -> None:
        """Waits until the workers have ended the job: after the last report they send their last records.

        Workers that take too long are ended.
        """
        deadline = time.monotonic() + _LAST_RECORDS_S
        events = self._events(deadline)
        while not (self.has_ended or (self._is_job_over and not is_last)):
            if next(events, None) is None:
                self.kill()
                return


def error_message(error: BaseException) -> str:
    """Returns an error of Ray Train as one line: the first worker's own error if there is one."""
    failures = getattr(error, "worker_failures", None) or {}
    return _first_error(failures) if failures else f"{type(error).__name__}: {one_line(error, _MESSAGE_LENGTH)}"


def _first_error(failures: Mapping[int, Exception]) -> str:
    rank = min(failures)
    cause = _cause(failures[rank])
    return f"worker {rank}: {type(cause).__name__}: {one_line(cause, _MESSAGE_LENGTH)}"


def _cause(error: Exception) -> BaseException:
    return getattr(error, "cause", None) or error


def _end_jobs(box: Box) -> None:
    with suppress(ray.exceptions.RayError):  # without its mailbox, a run is ended all the same
        box.end_job(is_last=True)
