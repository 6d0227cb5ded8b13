"""Carries jobs, reports and messages between the driver and the workers of Ray Train.

They travel through Ray's key-value store: a queue would be one more actor, with seconds of imports. A *mailbox* is a
prefix of keys there: a worker group has one, and inside it each job has one of its own. The module also keeps a handle
of Train's controller and places Train's workers into bundles that are reserved already.
Left out: what the workers do with a job.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import ray.train.collective
from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.train import UserCallback
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.util.placement_group import PlacementGroup

from rlx.config.errors import one_line
from rlx.storage.filesystem import Storage

_POLL_S = 0.1
_MESSAGE_LENGTH = 500  # an error's text is cut to this number of characters

_FATAL = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, NameError, ImportError)


@dataclass(frozen=True)
class WorkerSpec:
    """A job: what the driver tells the workers of a run."""

    config: Mapping[str, Any]  # the settings, as a tree
    model_path: str  # Hugging Face folder or name
    folder: Storage  # of the run
    tracking_uri: str  # MLflow's
    examine: bool = False  # run the doctor instead of training
    engines: Sequence[Any] = ()  # actor handles
    reward_models: Sequence[Any] = ()  # actor handles
    mailbox: str = ""  # of the job


@dataclass(frozen=True)
class StepReport:
    """A step's report on its way from the workers to the driver."""

    metrics: dict[str, Any]
    is_last: bool  # of its job
    mailbox: str  # of its job
    checkpoint: str | None  # path of the checkpoint that was completed since the last report


class RunError(RuntimeError):
    """A run failed; the text says why in one line."""


class RunStopped(RuntimeError):
    """A run was ended from outside, e.g. because a scheduler stopped its trial."""


# ---------------------------------------------------------------------------------------------------------------------
# On a worker


def jobs(mailbox: str) -> Iterator[WorkerSpec]:
    """Yields one job after another, the same on all ranks, as the driver posts them; never ends by itself."""
    is_first, done = ray.train.get_context().get_world_rank() == 0, 0
    while True:
        number = ray.train.collective.broadcast_from_rank_zero(_next_job(mailbox, done) if is_first else None)
        content = _internal_kv_get(f"{mailbox}/job/{number}".encode())
        if content:  # the driver has not withdrawn it
            job: WorkerSpec = cloudpickle.loads(content)
            yield job
            ray.train.collective.barrier()  # other ranks may still be closing what they hold
            if is_first:
                _internal_kv_put(f"{job.mailbox}/ended".encode(), b"1")
        done = number


def report(
    mailbox: str, metrics: Mapping[str, Any], is_last: bool, checkpoint: ray.train.Checkpoint | None = None
) -> None:
    """Passes a step's metrics and the completed checkpoint to the driver; a collective call.

    Train itself only accepts checkpoints in the folder of its own run: those of a worker group's first job.
    """
    own_folder = f"{ray.train.get_context().get_storage().experiment_fs_path}/"
    step_report = StepReport(dict(metrics), is_last, mailbox, checkpoint.path if checkpoint else None)
    ray.train.report(
        asdict(step_report),  # Train takes and saves plain dicts only
        checkpoint=checkpoint if checkpoint and checkpoint.path.startswith(own_folder) else None,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def notify(mailbox: str, message: str) -> None:
    """Makes the driver show a message."""
    _internal_kv_put(f"{mailbox}/messages/{time.time_ns():020d}".encode(), message.encode())


def is_to_stop(mailbox: str) -> bool:
    """Returns whether the job is to end with its current step."""
    return _internal_kv_get(f"{mailbox}/stop".encode()) is not None


@contextmanager
def fatal_errors_posted(mailbox: str, rank: int) -> Iterator[None]:
    """Posts errors in the run's own code, which end the run, to the driver.

    Train would restart the workers, and they would fail in the same way. Restarts are for processes that died, and for
    engines and servers that failed.
    """
    try:
        yield
    except _FATAL as error:
        message = f"worker {rank}: {type(error).__name__}: {one_line(error, _MESSAGE_LENGTH)}"
        _internal_kv_put(f"{mailbox}/fatal".encode(), message.encode(), overwrite=False)
        raise


def _next_job(mailbox: str, done: int) -> int:
    while True:
        newest = int(_internal_kv_get(f"{mailbox}/newest".encode()) or 0)
        if newest > done and _internal_kv_get(f"{mailbox}/job/{newest}".encode()):
            return newest
        time.sleep(_POLL_S)


# ---------------------------------------------------------------------------------------------------------------------
# In Train's controller


def callbacks(mailbox: str, group: PlacementGroup, bundle_indices: list[int]) -> list[Any]:
    """Returns the callbacks of Train's controller: they pass on reports and failures, post the controller's handle and
    place the workers into reserved bundles.

    Args:
        group: the placement group with the bundles.
        bundle_indices: the bundle of each rank.
    """
    return [_Relay(mailbox), _Handle(mailbox, group, bundle_indices)]


class _Relay(UserCallback):
    """Posts each report in its job's mailbox, and each failure of the workers in the group's."""

    def __init__(self, mailbox: str) -> None:
        self.mailbox = mailbox
        self.reports: dict[str, int] = {}  # posted so far, by the job's mailbox
        self.failures = 0

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        step_report = StepReport(**metrics[0])
        mailbox = step_report.mailbox
        count = self.reports[mailbox] = self.reports.get(mailbox, 0) + 1
        _internal_kv_put(f"{mailbox}/report/{count}".encode(), cloudpickle.dumps(step_report))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.failures += 1
        message = _first_error(worker_exceptions)
        _internal_kv_put(f"{self.mailbox}/failed/{self.failures}".encode(), message.encode())


class _Handle(ControllerCallback):
    """Posts the controller's handle: aborting it is the only way to end its workers that needs no dashboard.

    It also makes Train use the reserved bundles, for which Train has no option.
    """

    def __init__(self, mailbox: str, group: PlacementGroup, bundle_indices: list[int]) -> None:
        self.mailbox, self.group, self.bundle_indices = mailbox, group, bundle_indices

    def after_controller_start(self, train_run_context: Any) -> None:
        reserved = {"group": self.group, "bundle_indices": self.bundle_indices}
        TrainController.worker_group_cls = type("PlacedWorkers", (_PlacedWorkers,), reserved)
        handle = ray.get_runtime_context().current_actor
        _internal_kv_put(f"{self.mailbox}/controller".encode(), cloudpickle.dumps(handle))


class _PlacedWorkers(WorkerGroup):
    """Train's worker group, in a placement group that Train does not own."""

    group: PlacementGroup
    bundle_indices: list[int]

    def _create_placement_group(self, *_: Any) -> Any:
        return _BorrowedPlacementGroup(self.group)

    def _create_workers(self, *args: Any, **options: Any) -> Any:
        return super()._create_workers(*args, **{"placement_group_bundle_indices": self.bundle_indices} | options)


class _BorrowedPlacementGroup(DefaultPlacementGroupHandle):
    """A placement group that stays when Train is done with it."""

    def shutdown(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def new_mailbox() -> str:
    """Returns an unused mailbox for a worker group and its driver; `clear` it in the end."""
    return f"rlx/{uuid.uuid4().hex}"


def post_job(mailbox: str, number: int, job: WorkerSpec) -> str:
    """Gives a worker group its next job; numbers start at 1. Returns the job's mailbox."""
    job_mailbox = f"{mailbox}/{number}"
    _internal_kv_put(f"{mailbox}/job/{number}".encode(), cloudpickle.dumps(replace(job, mailbox=job_mailbox)))
    _internal_kv_put(f"{mailbox}/newest".encode(), str(number).encode())
    return job_mailbox


def withdraw_job(mailbox: str, number: int) -> None:
    """Removes a job that has ended or was given up, so that restarted workers do not begin it again."""
    _internal_kv_del(f"{mailbox}/job/{number}".encode())


def ask_to_stop(job_mailbox: str) -> None:
    """Asks a job to end with its current step."""
    _internal_kv_put(f"{job_mailbox}/stop".encode(), b"1")


def has_ended(job_mailbox: str) -> bool:
    """Returns whether all workers have finished a job and can take another."""
    return _internal_kv_get(f"{job_mailbox}/ended".encode()) is not None


def take_report(job_mailbox: str, number: int) -> StepReport | None:
    """Removes and returns a job's report; numbers start at 1. None if it has not come yet."""
    key = f"{job_mailbox}/report/{number}".encode()
    if (content := _internal_kv_get(key)) is None:
        return None
    _internal_kv_del(key)
    step_report: StepReport = cloudpickle.loads(content)
    return step_report


def take_messages(job_mailbox: str) -> list[str]:
    """Removes and returns the messages of a job, oldest first."""
    messages = []
    for key in sorted(_internal_kv_list(f"{job_mailbox}/messages/".encode())):
        messages.append(_internal_kv_get(key).decode())
        _internal_kv_del(key)
    return messages


def fatal_error(job_mailbox: str) -> str | None:
    """Returns the error that a job would meet again after a restart; None if there was none."""
    message = _internal_kv_get(f"{job_mailbox}/fatal".encode())
    return message.decode() if message else None


def failure(mailbox: str, number: int) -> str | None:
    """Returns why the workers of a group were restarted the `number`-th time, from 1; None if they were not."""
    message = _internal_kv_get(f"{mailbox}/failed/{number}".encode())
    return message.decode() if message else None


def controller(mailbox: str, timeout_s: float) -> Any:
    """Returns the handle of the group's controller, None if there is none.

    Waits for a controller that is still starting: otherwise it would go on without a handle.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if content := _internal_kv_get(f"{mailbox}/controller".encode()):
            return cloudpickle.loads(content)
        time.sleep(_POLL_S)
    return None


def clear(mailbox: str) -> None:
    """Deletes everything in a mailbox."""
    _internal_kv_del(mailbox.encode(), del_by_prefix=True)


def error_message(error: BaseException) -> str:
    """Returns an error of Train as one line: the first worker's own error if there is one."""
    failures = getattr(error, "worker_failures", None) or {}
    return _first_error(failures) if failures else f"{type(error).__name__}: {one_line(error, _MESSAGE_LENGTH)}"


def _first_error(failures: dict[int, Exception]) -> str:
    rank = min(failures)
    cause = getattr(failures[rank], "cause", None) or failures[rank]
    return f"worker {rank}: {type(cause).__name__}: {one_line(cause, _MESSAGE_LENGTH)}"
