"""Carries jobs to the workers of a run, and what they report to the process that started it: one asyncio actor.

The driver has one mailbox actor. A *box* in it belongs to one Ray Train run: jobs go in, events come out, in order.
Callers wait inside the actor, so nobody polls. The actor moves bytes and never looks into them.
Left out: what the workers do with a job (`worker`), and the driver with an event (`train_run`).
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:  # the actor's process imports nothing slow
    from rlx.cluster.nodes import FolderCopies
    from rlx.config.run import RunConfig
    from rlx.rollout.engine_actors import EngineSpec
    from rlx.storage.filesystem import Storage
    from rlx.tracking.base import TrackingService
    from rlx.types import Replay


_NEVER_REACHED = 2**62  # a number of a step or job
IS_LAST = "done"
"""the key of a report's metrics that says whether it is the last of its job; the report of an earlier step has none"""
JOB = "job_number"
"""the key of a report's metrics that numbers its job"""
CHECKPOINT_PATH = "checkpoint_path"
"""the key of a report's metrics that names the checkpoint that was reported with it, as Ray's own callback calls it"""


# ---------------------------------------------------------------------------------------------------------------------
# Jobs and events


@dataclass(frozen=True)
class JobSpec:
    """A job: what the driver tells the workers of a run."""

    config: RunConfig
    model_path: str  # Hugging Face folder or name
    folder: Storage  # of the run
    tracking: Sequence[TrackingService] = ()  # none: nothing is recorded
    signature: str = ""  # of the settings, for checkpoints
    examine: bool = False  # run the doctor instead of training
    waits: bool = False  # after each evaluation, until it is released
    replay: Replay | None = None  # None: all steps that are left, for the first time
    copies: FolderCopies | None = None  # of its models, for nodes that join later
    engines: Sequence[Any] = ()  # actor handles
    engine_spec: EngineSpec | None = None  # of the engine that each worker starts beside itself
    reward_models: Sequence[Any] = ()  # actor handles
    environments: Sequence[Any] = ()  # actor handles


@dataclass(frozen=True)
class StepReport:
    """A step that all workers have reported to Ray Train."""

    metrics: dict[str, Any]  # with "step"
    is_last: bool  # of its job
    checkpoint: str | None  # path of the checkpoint that was reported with it
    job: int = 1  # its number; what a stopped job has reported can come when the next one has begun


@dataclass(frozen=True)
class Message:
    """A message for the person who watches."""

    text: str


@dataclass(frozen=True)
class WorkersFailed:
    """Workers raised an error or died; Ray Train restarts all of them unless the error is fatal."""

    text: str
    is_fatal: bool  # it would come again


@dataclass(frozen=True)
class ControllerStarted:
    """Ray Train's controller; killing it ends its workers when nothing else does."""

    handle: Any


@dataclass(frozen=True)
class WorkersStarted:
    """All workers run, and ask for a job."""

    group: Any  # their placement group


@dataclass(frozen=True)
class JobEnded:
    """All workers have finished a job and closed what they held."""


@dataclass(frozen=True)
class TrainEnded:
    """`fit()` has returned or raised."""

    error: str  # "" if it returned
    is_lost: bool = False  # its controller died, or its workers found no room


# ---------------------------------------------------------------------------------------------------------------------
# The actor


@dataclass
class _Content:
    """What one box holds."""

    events: dict[int, bytes] = field(default_factory=dict)  # by number, until the receiver has seen them
    sent: int = 0  # number of the newest event
    job: bytes = b""  # the newest
    jobs: int = 0  # its number
    ended: int = 0  # the newest job that is over, so that restarted workers do not begin it again
    is_last: bool = False  # no job follows the newest
    stopped: int = 0  # the newest job that is to end
    released: int = -1  # the newest step after which the job may go on
    is_closed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Lets everyone look again who waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def close(self) -> None:
        """Frees what it holds; from now on nobody waits for anything."""
        self.events, self.job, self.is_closed, self.is_last, self.ended = {}, b"", True, True, self.jobs
        self.stopped = self.released = _NEVER_REACHED
        self.wake()


class MailboxActor:
    """The boxes of all runs of a driver. Calls for a box that is closed wait for nothing and keep nothing."""

    def __init__(self) -> None:
        self._boxes = defaultdict[str, _Content](_Content)

    async def close(self, box: str) -> None:
        self._boxes[box].close()

    async def send(self, box: str, event: bytes, previous: None) -> None:
        """Adds an event once the call `previous` is done: Ray does not keep the order of an async actor's calls."""
        content = self._boxes[box]
        if not content.is_closed:
            content.sent += 1
            content.events[content.sent] = event
            content.wake()

    async def receive(self, box: str, after: int, timeout_s: float) -> list[bytes]:
        """Returns the events with larger numbers than `after`; waits for one, at most `timeout_s`.

        The events up to `after` are deleted. So a receiver that was interrupted misses none.
        """
        content = self._boxes[box]
        if content.sent <= after and not content.is_closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(content.changed.wait(), timeout_s)
        content.events = {number: event for number, event in content.events.items() if number > after}
        return list(content.events.values())

    async def post(self, box: str, job: bytes, is_last: bool) -> int:
        """Makes a job the newest and returns its number, from 1."""
        content = self._boxes[box]
        content.job, content.jobs, content.is_last, content.released = job, content.jobs + 1, is_last, -1
        content.wake()
        return content.jobs

    async def end_job(self, box: str, is_last: bool) -> None:
        """Notes that the newest job is over; with `is_last` no other follows."""
        content = self._boxes[box]
        content.ended, content.is_last = content.jobs, content.is_last or is_last
        content.wake()

    async def next_job(self, box: str, done: int) -> int | None:
        """Waits for a job after the one with the number `done` and returns its number; None if none will come."""
        content = self._boxes[box]
        while content.jobs <= max(done, content.ended):
            if content.is_last:
                return None
            await content.changed.wait()
        return content.jobs

    async def read_job(self, box: str, number: int) -> bytes | None:
        content = self._boxes[box]
        return content.job if content.jobs == number and not content.is_closed else None

    async def stop(self, box: str) -> None:
        """Asks the newest job to end."""
        content = self._boxes[box]
        content.stopped = max(content.stopped, content.jobs)
        content.wake()

    async def is_stopped(self, box: str, job: int) -> bool:
        return self._boxes[box].stopped >= job

    async def release(self, box: str, step: int) -> None:
        """Lets the newest job go on after a step."""
        content = self._boxes[box]
        content.released = max(content.released, step)
        content.wake()

    async def await_release(self, box: str, job: int, step: int) -> None:
        """Returns when a job may go on after a step, or is to end."""
        content = self._boxes[box]
        while content.released < step and content.stopped < job:
            await content.changed.wait()


def start_mailbox() -> Any:
    """Starts a mailbox actor on this node and returns its handle; `end_mailbox` ends it, or the loss of all handles.

    It lives and dies with the driver's node. (With soft affinity, Ray 2.60 puts four of five on other nodes.)
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": 10_000, "scheduling_strategy": here}
    return ray.remote(MailboxActor).options(**options).remote()


def end_mailbox(actor: Any) -> None:
    """Ends a mailbox actor, whoever still has its handle: Tune keeps those of trials, errors those of their frames."""
    with suppress(ray.exceptions.RayError):  # Ray has died
        if ray.is_initialized():  # `kill` would start it again; a shutdown has ended the actor
            ray.kill(actor)


# ---------------------------------------------------------------------------------------------------------------------
# The driver's and the workers' side


_newest_sends: dict[str, ray.ObjectRef[None]] = {}  # of this process, by box
_sending = threading.Lock()


@dataclass(frozen=True)
class Box:
    """One box of a mailbox actor, as the driver and the workers use it. It can be sent to other processes."""

    actor: Any
    name: str

    @classmethod
    def new(cls, actor: Any) -> Box:
        """Returns an unused box; `close` it in the end."""
        return cls(actor, uuid.uuid4().hex)

    def close(self) -> None:
        """Deletes the content; workers that wait for a job get none."""
        self.actor.close.remote(self.name)
        _newest_sends.pop(self.name, None)

    def send(self, event: Any, *, wait: bool = False) -> None:
        """Passes an event to the driver. The events of one process stay in their order.

        Args:
            wait: return when it is there, so that later events of other processes come after it. A mailbox that is
                gone is not waited for.
        """
        with _sending:
            previous = _newest_sends.get(self.name)
            sent = self.actor.send.remote(self.name, cloudpickle.dumps(event), previous)
            _newest_sends[self.name] = sent
        if wait:
            with suppress(ray.exceptions.RayError):
                ray.get(sent)

    def receive(self, after: int, timeout_s: float) -> list[Any]:
        """Returns the events after the first `after` of them, which are deleted; waits for one, at most `timeout_s`."""
        return [cloudpickle.loads(event) for event in ray.get(self.actor.receive.remote(self.name, after, timeout_s))]

    def post(self, job: Any, is_last: bool) -> int:
        """Gives the workers their next job; returns its number. `is_last`: they end after it."""
        return int(ray.get(self.actor.post.remote(self.name, cloudpickle.dumps(job), is_last)))

    def end_job(self, is_last: bool = False) -> None:
        """Notes that the newest job is over, so that restarted workers do not begin it again.

        Args:
            is_last: no other job follows; the workers end.
        """
        ray.get(self.actor.end_job.remote(self.name, is_last))

    def next_job(self, done: int) -> int | None:
        """Waits for a job after the one with the number `done` and returns its number; None at the end."""
        number: int | None = ray.get(self.actor.next_job.remote(self.name, done))
        return number

    def read_job(self, number: int) -> Any:
        """Returns the job with a number; None if another one has taken its place."""
        content = ray.get(self.actor.read_job.remote(self.name, number))
        return None if content is None else cloudpickle.loads(content)

    def stop(self) -> None:
        """Asks the newest job to end with its current step."""
        ray.get(self.actor.stop.remote(self.name))

    def release(self, step: int) -> None:
        """Lets the newest job go on after a step, if it is one that waits for that."""
        self.actor.release.remote(self.name, step)

    def await_release(self, job: int, step: int) -> None:
        """Returns when a job may go on after a step, or is to end."""
        ray.get(self.actor.await_release.remote(self.name, job, step))

    def is_stopped(self, job: int) -> bool:
        """Whether a job was asked to end."""
        return bool(ray.get(self.actor.is_stopped.remote(self.name, job)))
