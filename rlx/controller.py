"""Ray Train's controller of one run: started in a thread, listened to, ended from outside, cleaned up after.

Reports and handles travel through Ray's key-value store: a queue would be one more actor, with seconds of imports.
What is trained is not known here.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions
from ray import cloudpickle
from ray._raylet import PlacementGroupID
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.train import UserCallback
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rlx.config import one_line

Report = Callable[[dict[str, Any], str | None], None]
"""(a step's metrics, the path of the checkpoint that has become whole since the last one)"""
Say = Callable[[str], None]
"""what a person should know and no metric says, e.g. that an engine died and is being replaced"""

_ABORT_S = 30.0  # a controller that takes longer to end is killed
_START_S = 30.0  # a controller that has not started by then never will
_POLL_S = 0.2  # how often reports are looked for


_FATAL = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, NameError, ImportError)

_running: list[str] = []  # the boxes of this process's runs


class RunError(RuntimeError):
    """A run that failed; the text says why in one line."""


class RunStopped(RuntimeError):
    """A run that was ended from outside by `abort_running`, e.g. because a scheduler stopped its trial."""


def fit(trainer: TorchTrainer, box: str, on_report: Report, say: Say, grace_s: float = 0.0) -> dict[str, Any]:
    """trainer.fit() with its reports passed on as they come; the last one's metrics.

    An interrupt (KeyboardInterrupt, once it trains) first asks the workers to end with the step that they are in, and
    is raised when they have; a second one, or `grace_s` seconds, end that patience.

    Args:
        box: what `new_box` gave; the workers' setup has it too.
    """
    trainer.run_config.callbacks = [_Relay(box), _Handle(box)]
    outcome: dict[str, Any] = {}
    over = threading.Event()  # an interrupted Thread.join leaves the thread marked as ended (CPython 3.11)

    def train() -> None:
        try:
            outcome["result"] = trainer.fit()
        except BaseException as error:
            outcome["error"] = error
        finally:
            over.set()

    threading.Thread(target=train, daemon=True).start()
    _running.append(box)
    metrics: dict[str, Any] = {}
    posts = _Posts(box, over, say)
    try:
        try:
            for metrics, checkpoint in posts:
                on_report(metrics, checkpoint)
        except KeyboardInterrupt:
            if metrics and grace_s:
                say(f"interrupted: finishing the step and a checkpoint, {grace_s:.0f} s at most; again ends it at once")
                _internal_kv_put(f"{box}/stop".encode(), b"1")
                posts.until = time.monotonic() + grace_s
                for metrics, checkpoint in posts:
                    on_report(metrics, checkpoint)
            raise
    except BaseException:
        abort_running()
        raise
    finally:
        stopped = box not in _running
        _running.clear()
        _internal_kv_del(box.encode(), del_by_prefix=True)
    if stopped:
        raise RunStopped("the run was stopped")
    if "error" in outcome:
        raise RunError(_last_words(outcome["error"])) from outcome["error"]
    return metrics or outcome["result"].metrics or {}


def abort_running() -> None:
    """Ends the Train runs that this process has started: controller, workers and their placement group."""
    while _running:
        controller = _posted_handle(_running.pop())
        if controller is None:
            continue
        try:
            ray.get(controller.abort.remote(), timeout=_ABORT_S)
        except ray.exceptions.GetTimeoutError:
            ray.kill(controller)
        except ray.exceptions.RayActorError:
            pass  # abort ends the actor


def new_box() -> str:
    """Where a run posts what it has to say."""
    return f"rlx/posts/{uuid.uuid4().hex}"


def say(box: str, words: str) -> None:
    """On a worker: has the driver tell the person who watches."""
    _internal_kv_put(f"{box}/said/{time.time_ns():020d}".encode(), words.encode())


def is_to_stop(box: str) -> bool:
    """On a worker: whether the run is to end with the step that it is in."""
    return _internal_kv_get(f"{box}/stop".encode()) is not None


@contextmanager
def fatal_errors_posted(box: str, rank: int) -> Iterator[None]:
    """On a worker: an error of the run's own making ends the run. Train would restart the workers, only to meet it
    again; that is for processes that died, engines and servers that failed."""
    try:
        yield
    except _FATAL as error:
        words = f"worker {rank}: {type(error).__name__}: {one_line(error, 500)}"
        _internal_kv_put(f"{box}/failure".encode(), words.encode(), overwrite=False)
        raise


def note_workers(folder: str) -> None:
    """On a worker: notes the placement group that it is in, for `remove_leftovers`."""
    group = ray.util.get_current_placement_group()
    _internal_kv_put(_group_key(folder), group.id.binary())


def remove_leftovers(folder: str) -> None:
    """Frees what the workers of a run had reserved, for one whose process was killed before it could itself.

    Ray ends the workers with their owner but keeps their placement group until the job ends.
    """
    key = _group_key(folder)
    if reserved := _internal_kv_get(key):
        remove_placement_group(PlacementGroup(PlacementGroupID(reserved)))
        _internal_kv_del(key)


class _Relay(UserCallback):
    """Posts each report where `_posts` reads it. Runs in Train's controller."""

    def __init__(self, box: str) -> None:
        self.box = box
        self.count = 0

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        post = (metrics[0], checkpoint.path if checkpoint else None)
        _internal_kv_put(f"{self.box}/{self.count}".encode(), cloudpickle.dumps(post))
        self.count += 1


class _Handle(ControllerCallback):
    """Posts the controller's handle: aborting it is the one way to end a run and free its placement group that needs
    no dashboard."""

    def __init__(self, box: str) -> None:
        self.box = box

    def after_controller_start(self, train_run_context: Any) -> None:
        handle = ray.get_runtime_context().current_actor
        _internal_kv_put(f"{self.box}/controller".encode(), cloudpickle.dumps(handle))


def _posted_handle(box: str) -> Any:
    """The controller's handle; one that is only just starting is waited for, or it would go on unseen."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if posted := _internal_kv_get(f"{box}/controller".encode()):
            return cloudpickle.loads(posted)
        time.sleep(_POLL_S)
    return None


class _Posts:
    """What is posted in a box, as it comes, until the run is over or patience is."""

    def __init__(self, box: str, over: threading.Event, say: Say) -> None:
        self.box = box
        self.over = over
        self.say = say
        self.count = 0
        self.until = math.inf

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str | None]]:
        """The reports.

        Raises:
            RunError: a worker met an error that would only come again.
        """
        while True:
            over = self.over.is_set()  # asked before looking, so that nothing is missed
            self._pass_on_words()
            if (post := _internal_kv_get(f"{self.box}/{self.count}".encode())) is not None:
                self.count += 1
                yield cloudpickle.loads(post)
            elif words := _internal_kv_get(f"{self.box}/failure".encode()):
                raise RunError(words.decode())
            elif over or time.monotonic() > self.until:
                return
            else:
                self.over.wait(_POLL_S)

    def _pass_on_words(self) -> None:
        for key in sorted(_internal_kv_list(f"{self.box}/said/".encode())):
            words = _internal_kv_get(key)
            _internal_kv_del(key)
            self.say(words.decode())


def _last_words(error: BaseException) -> str:
    """One line: the first worker's own error if there is one."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items()):
        cause = getattr(failure, "cause", None) or failure
        return f"worker {rank}: {type(cause).__name__}: {one_line(cause, 500)}"
    return f"{type(error).__name__}: {one_line(error, 500)}"


def _group_key(folder: str) -> bytes:
    return f"rlx/placement_group/{folder}".encode()
