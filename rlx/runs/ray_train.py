"""What the driver and the workers of Ray Train say to each other, and how Train's controller is held.

Jobs, reports and handles travel through Ray's key-value store: a queue would be one more actor, with seconds of
imports. A *box* is a prefix of keys there: one for a worker group, and in it one for each job. What is trained is not
known here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

Report = Callable[[dict[str, Any], str | None], None]
"""(a step's metrics, the path of the checkpoint that has become whole since the last one)"""
Notify = Callable[[str], None]
"""what a person should know and no metric says, e.g. that an engine died and is left out until it is back"""

LAST = "last"  # among a report's metrics: whether it is its job's last
_BOX, _CHECKPOINT = "box", "checkpoint"  # whose it is, and the path of what has become whole
_POLL_S = 0.1  # how often the other side is looked for
_WORDS = 500  # longest that an error's text is passed on

_FATAL = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, NameError, ImportError)


@dataclass(frozen=True)
class WorkerSpec:
    """What the driver tells the workers of a run."""

    config: Mapping[str, Any]  # the settings, as a tree
    model_path: str  # Hugging Face folder or name
    folder: Storage  # of the run
    tracking_uri: str  # MLflow's
    examine: bool = False  # run the doctor instead of training
    engines: Sequence[Any] = ()  # actor handles
    reward_models: Sequence[Any] = ()  # actor handles
    mailbox: str = ""  # where the driver listens


class RunError(RuntimeError):
    """A run that failed; the text says why in one line."""


class RunStopped(RuntimeError):
    """A run that was ended from outside, e.g. because a scheduler stopped its trial."""


# ---------------------------------------------------------------------------------------------------------------------
# On a worker


def jobs(box: str) -> Iterator[WorkerSpec]:
    """What there is to do, one job after another on all ranks alike, as they are posted; it never ends by itself."""
    first, done = ray.train.get_context().get_world_rank() == 0, 0
    while True:
        number = ray.train.collective.broadcast_from_rank_zero(_next_job(box, done) if first else None)
        posted = _internal_kv_get(f"{box}/job/{number}".encode())
        if posted:  # not taken back meanwhile
            job: WorkerSpec = cloudpickle.loads(posted)
            yield job
            ray.train.collective.barrier()  # another rank may still be closing what it holds
            if first:
                _internal_kv_put(f"{job.mailbox}/ended".encode(), b"1")
        done = number


def report(box: str, metrics: Mapping[str, Any], last: bool, checkpoint: ray.train.Checkpoint | None = None) -> None:
    """Passes a step's metrics to the driver, and the checkpoint that has become whole; a collective call.

    Train itself takes checkpoints in the folder of its own run alone: those of a worker group's first job.
    """
    own = f"{ray.train.get_context().get_storage().experiment_fs_path}/"
    ray.train.report(
        {**metrics, LAST: last, _BOX: box, _CHECKPOINT: checkpoint.path if checkpoint else None},
        checkpoint=checkpoint if checkpoint and checkpoint.path.startswith(own) else None,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def notify(box: str, words: str) -> None:
    """Has the driver tell the person who watches."""
    _internal_kv_put(f"{box}/said/{time.time_ns():020d}".encode(), words.encode())


def is_to_stop(box: str) -> bool:
    """Whether the job is to end with the step that it is in."""
    return _internal_kv_get(f"{box}/stop".encode()) is not None


@contextmanager
def fatal_errors_posted(box: str, rank: int) -> Iterator[None]:
    """An error of the run's own making ends the run. Train would restart the workers, only to meet it again; that is
    for processes that died, engines and servers that failed."""
    try:
        yield
    except _FATAL as error:
        words = f"worker {rank}: {type(error).__name__}: {one_line(error, _WORDS)}"
        _internal_kv_put(f"{box}/failure".encode(), words.encode(), overwrite=False)
        raise


def _next_job(box: str, done: int) -> int:
    while True:
        newest = int(_internal_kv_get(f"{box}/newest".encode()) or 0)
        if newest > done and _internal_kv_get(f"{box}/job/{newest}".encode()):
            return newest
        time.sleep(_POLL_S)


# ---------------------------------------------------------------------------------------------------------------------
# In Train's controller


def callbacks(box: str, group: PlacementGroup, places: list[int]) -> list[Any]:
    """What Train's controller is given, so that it can be held from outside, passes on reports and failures, and puts
    its workers into bundles that are reserved already.

    Args:
        group: where the bundles are.
        places: which bundle is each rank's.
    """
    return [_Relay(box), _Handle(box, group, places)]


class _Relay(UserCallback):
    """Posts each report in its job's box, and each failure of the workers in the group's."""

    def __init__(self, box: str) -> None:
        self.box = box
        self.posted: dict[str, int] = {}
        self.failures = 0

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        box, path = metrics[0].pop(_BOX), metrics[0].pop(_CHECKPOINT)
        count = self.posted[box] = self.posted.get(box, 0) + 1
        post = (metrics[0], path)
        _internal_kv_put(f"{box}/report/{count}".encode(), cloudpickle.dumps(post))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.failures += 1
        _internal_kv_put(f"{self.box}/failed/{self.failures}".encode(), _last_words(worker_exceptions).encode())


class _Handle(ControllerCallback):
    """Posts the controller's handle, since aborting it is the one way to end its workers that needs no dashboard; and
    has it use the bundles that are reserved, for which Train has no option."""

    def __init__(self, box: str, group: PlacementGroup, places: list[int]) -> None:
        self.box, self.group, self.places = box, group, places

    def after_controller_start(self, train_run_context: Any) -> None:
        TrainController.worker_group_cls = type("Held", (_HeldWorkers,), {"held": self.group, "places": self.places})
        handle = ray.get_runtime_context().current_actor
        _internal_kv_put(f"{self.box}/controller".encode(), cloudpickle.dumps(handle))


class _HeldWorkers(WorkerGroup):
    """Train's worker group, in a placement group that is not its own."""

    held: PlacementGroup
    places: list[int]

    def _create_placement_group(self, *_: Any) -> Any:
        return _Kept(self.held)

    def _create_workers(self, *args: Any, **options: Any) -> Any:
        return super()._create_workers(*args, **{"placement_group_bundle_indices": self.places} | options)


class _Kept(DefaultPlacementGroupHandle):
    """A placement group that outlives Train's use of it."""

    def shutdown(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def new_box() -> str:
    """Where a worker group and its driver leave things for each other; `clear` it in the end."""
    return f"rlx/{uuid.uuid4().hex}"


def post_job(box: str, number: int, job: WorkerSpec) -> str:
    """Gives a worker group its next job, from 1 on; the job's box."""
    own = f"{box}/{number}"
    _internal_kv_put(f"{box}/job/{number}".encode(), cloudpickle.dumps(replace(job, mailbox=own)))
    _internal_kv_put(f"{box}/newest".encode(), str(number).encode())
    return own


def take_back_job(box: str, number: int) -> None:
    """A job that is over, or given up: restarted workers do not begin it again."""
    _internal_kv_del(f"{box}/job/{number}".encode())


def ask_to_stop(box: str) -> None:
    """Has a job end with the step that it is in."""
    _internal_kv_put(f"{box}/stop".encode(), b"1")


def has_ended(box: str) -> bool:
    """Whether all workers are done with a job, and free for another."""
    return _internal_kv_get(f"{box}/ended".encode()) is not None


def reported(box: str, number: int) -> tuple[dict[str, Any], str | None] | None:
    """Takes out a job's report of that number, from 1 on: metrics, and the checkpoint that has become whole; None if it
    is not there yet."""
    key = f"{box}/report/{number}".encode()
    if (post := _internal_kv_get(key)) is None:
        return None
    _internal_kv_del(key)
    return cloudpickle.loads(post)


def take_messages(box: str) -> list[str]:
    """What a job has had to say since the last call."""
    words = []
    for key in sorted(_internal_kv_list(f"{box}/said/".encode())):
        words.append(_internal_kv_get(key).decode())
        _internal_kv_del(key)
    return words


def fatal_error(box: str) -> str | None:
    """The error that a job would only meet again, if it has."""
    words = _internal_kv_get(f"{box}/failure".encode())
    return words.decode() if words else None


def failure(box: str, number: int) -> str | None:
    """Why the workers of a group had to be started again for that time, from 1 on; None if they had not."""
    words = _internal_kv_get(f"{box}/failed/{number}".encode())
    return words.decode() if words else None


def handle(box: str, timeout_s: float) -> Any:
    """The controller's handle; one that is only just starting is waited for, or it would go on unseen."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if posted := _internal_kv_get(f"{box}/controller".encode()):
            return cloudpickle.loads(posted)
        time.sleep(_POLL_S)
    return None


def clear(box: str) -> None:
    """Forgets all that was left in a box."""
    _internal_kv_del(box.encode(), del_by_prefix=True)


def error_words(error: BaseException) -> str:
    """One line: the first worker's own error if there is one."""
    failures = getattr(error, "worker_failures", None) or {}
    return _last_words(failures) if failures else f"{type(error).__name__}: {one_line(error, _WORDS)}"


def _last_words(failures: dict[int, Exception]) -> str:
    rank = min(failures)
    cause = getattr(failures[rank], "cause", None) or failures[rank]
    return f"worker {rank}: {type(cause).__name__}: {one_line(cause, _WORDS)}"
