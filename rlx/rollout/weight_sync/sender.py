"""The sending end of the direct ways to the engines, on every rank: rank 0 sends to the process group, each rank to the
workers that share memory with it.

Two buffers take turns: while one is sent or read the next is filled. Whoever hangs or dies is left out, and a process
group that it was in is given up; the others of that group have to be sent to again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from rlx.actors import EngineLostError, EngineTimeoutError, RolloutError, get_result, is_alive
from rlx.rollout.weight_sync import channels
from rlx.rollout.weight_sync.buckets import Layout, byte_size, fill
from rlx.rollout.weight_sync.channels import Group, Incoming
from rlx.rollout.weight_sync.object_store import sending_failed
from rlx.rollout.weight_sync.topology import DeviceLocation, EngineLocation, Source, Transport, routes

_GRACE_S = 5.0  # in which engines say that they have given an update up
_PATIENT = 3  # times as long an engine waits for the trainer, which may have to wait for others
_LOOK_S = 1.0  # between questions whether an engine is there


@dataclass(frozen=True)
class SyncPlan:
    """How one update goes, the same on all ranks."""

    update: str
    address: tuple[str, int]  # of the store
    group: str
    world: dict[str, int]
    sources: dict[int, tuple[Source, ...]]  # of each engine that is reached directly
    processes: dict[int, str]


class WeightSender:
    """One rank's direct ways, kept from one push to the next: buffers, process groups, the store that has the notes."""

    def __init__(
        self, rank: int, ranks: int, device: torch.device, engines: Sequence[Any], transport: Transport = "auto"
    ) -> None:
        self.rank, self.device, self.engines = rank, device, engines
        self._ranks, self._transport = ranks, transport
        self.store: Any = None
        self.groups: dict[str, Group] = {}  # by kind; rank 0's
        self._course: SyncPlan | None = None  # of the push before
        self._places: list[DeviceLocation] = []
        self._buffers: list[tuple[Tensor, bytes]] = []

    def agreed(self, there: Mapping[int, EngineLocation], timeout_s: float) -> SyncPlan:
        """The course for the engines that rank 0 finds there; a collective call."""
        if not self._places:
            self._places = [here(self.device)] * self._ranks
            dist.all_gather_object(self._places, self._places[self.rank])
        told = [self._planned(there, timeout_s) if self.rank == 0 else None]
        dist.broadcast_object_list(told, src=0)
        (course,) = told
        assert course
        if self.store is None and course.sources:
            self.store = channels.opened(course.address, timeout_s)
        self._course = course
        return course

    def buffers(self, nbytes: int, is_shared: bool) -> list[tuple[Tensor, bytes]]:
        """Two, of so many bytes at least, and the handles by which others map them, if they can."""
        if not self._buffers or len(self._buffers[0][0]) < nbytes or (is_shared and not self._buffers[0][1]):
            self._free_buffers()
            if is_shared:
                self._buffers = [channels.shared(nbytes, self.device) for _ in range(2)]
            else:
                empty = partial(torch.empty, nbytes, dtype=torch.uint8, device=self.device)
                self._buffers = [(empty(), b"") for _ in range(2)]
        return self._buffers

    def close(self) -> None:
        """Gives up the process groups and frees the buffers."""
        for group in self.groups.values():
            group.abandon()
        self._free_buffers()
        self.groups, self.store = {}, None

    def _free_buffers(self) -> None:
        for handle in (handle for _, handle in self._buffers if handle):
            channels.forget(handle)
        self._buffers = []

    def _planned(self, there: Mapping[int, EngineLocation], timeout_s: float) -> SyncPlan:
        found = routes(there, self._places, self._transport)
        if self.store is None and found:
            self.store = channels.kept(ray.util.get_node_ip_address(), timeout_s)
        processes = {index: there[index].process for index in found}
        world = {
            kind: 1 + sum(source.kind == kind for own in found.values() for source in own) for kind in ("nccl", "gloo")
        }
        before = self._course
        is_same = before and (before.sources, before.processes) == (found, processes)
        whole = all(kind in self.groups for kind, count in world.items() if count > 1)
        group = before.group if before and is_same and whole else uuid.uuid4().hex
        address = (self.store.host, self.store.port) if self.store else ("", 0)
        return SyncPlan(uuid.uuid4().hex, address, group, world, found, processes)


def here(device: torch.device) -> DeviceLocation:
    """Where this process computes."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return DeviceLocation(ray.get_runtime_context().get_node_id(), gpu)


class WeightBroadcast:
    """One update on its way from one rank; `failed` has the engines that did not take it, `again` those that could not
    because others failed, or the way to them broke; and why."""

    def __init__(
        self,
        direct: WeightSender,
        course: SyncPlan,
        layouts: Sequence[Layout],
        version: int,
        timeout_s: float,
        keep: bool,
    ) -> None:
        """Tells the engines, on rank 0, and joins them in the process groups."""
        self.failed: dict[int, EngineLostError] = {}
        self.again: dict[int, EngineLostError] = {}
        self._direct, self._course, self._layouts, self._version = direct, course, layouts, version
        self._timeout_s, self._keep = timeout_s, keep
        self._looked = time.monotonic()
        self._nbytes = max(map(byte_size, layouts))
        self._works: list[dict[str, Any]] = []  # of each bucket, by kind of group
        mine = Source("shared", direct.rank)
        readers = {i: [w for w, source in enumerate(own) if source == mine] for i, own in course.sources.items()}
        self._readers = {index: workers for index, workers in readers.items() if workers}
        self._serves = bool(self._readers) or (direct.rank == 0 and max(course.world.values()) > 1)
        self._calls: dict[Any, int] = {}
        if direct.rank == 0:
            self._tell()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends the next bucket; returns while it is on its way, on a GPU even before it is filled."""
        if not self._serves:
            return
        number, layout = len(self._works), self._layouts[len(self._works)]
        self._free(number - 2)
        buffers = self._direct.buffers(self._nbytes, bool(self._readers))
        buffer, handle = buffers[number % 2]
        bucket = buffer[: byte_size(layout)]
        fill(bucket, layout, tensors)
        self._works.append({})
        for kind, group in list(self._direct.groups.items()):
            try:
                self._works[-1][kind] = group.broadcast(bucket)
            except RuntimeError:  # somebody has left: their calls say who
                self._break(kind)
        if self._readers:
            self.wait_for_gpu()
            self._direct.store.set(channels.written(self._course.update, number, self._direct.rank), handle)

    def finish(self) -> None:
        """Returns once every engine has loaded the update, or failed to."""
        for number in range(max(0, len(self._works) - 2), len(self._works)):
            self._free(number)
        deadline = self._deadline()
        while self._calls and time.monotonic() < deadline:
            ray.wait(list(self._calls), timeout=max(0.0, deadline - time.monotonic()))
            self._look()
        if self._calls:
            self._break_all()
            ray.wait(list(self._calls), num_returns=len(self._calls), timeout=_GRACE_S)
            for call, index in list(self._calls.items()):
                self._take(call, index)

    def wait_for_gpu(self) -> None:
        """Until a bucket is filled, for those who do not wait for the GPU's stream; a copy to the host would wait as
        long as the stream does for a group of which one is gone, and nobody would look."""
        if self._direct.device.type != "cuda":
            return
        filled = torch.cuda.Event()
        filled.record()
        try:
            channels.wait(filled.query, self._deadline(), self._look)
        except TimeoutError:  # it waits for a group
            self._break_all()
            filled.synchronize()

    def _tell(self) -> None:
        course, direct = self._course, self._direct
        told = {
            index: Incoming(
                course.update,
                course.processes[index],
                course.address,
                course.group,
                course.world,
                sources,
                tuple(self._layouts),
                _PATIENT * self._timeout_s,
                self._keep,
            )
            for index, sources in course.sources.items()
        }
        self._calls = {direct.engines[i].update.remote(incoming, self._version): i for i, incoming in told.items()}
        for kind, group in list(direct.groups.items()):
            if group.name != course.group or course.world[kind] == 1:
                direct.groups.pop(kind).abandon()
        for kind, count in course.world.items():
            if count > 1 and kind not in direct.groups:
                self._join(kind, next(iter(told.values())))

    def _join(self, kind: str, incoming: Incoming) -> None:
        try:
            group = Group(kind, incoming, 0, self._direct.device, self._deadline(), partial(self._expect_all, kind))
            self._direct.groups[kind] = group
        except (TimeoutError, RuntimeError):  # the calls say who did not join
            self._break(kind)

    def _expect_all(self, kind: str) -> None:
        self._look()
        if any(source.kind == kind for index in (*self.failed, *self.again) for source in self._course.sources[index]):
            raise EngineLostError("one of the group is lost")

    def _free(self, number: int) -> None:
        """Returns once a bucket's buffer may be filled again; on a GPU, what is queued from here on waits for NCCL."""
        if number < 0:
            return
        for kind, work in self._works[number].items():
            if group := self._direct.groups.get(kind):
                try:
                    group.settle(work, self._deadline(), partial(self._expect_all, kind))
                except (TimeoutError, RuntimeError):
                    self._break(kind)
        self._await_readers(number)

    def _await_readers(self, number: int) -> None:
        """Returns once those who share this rank's memory have read a bucket, or are lost."""
        deadline = self._deadline()
        for index, workers in list(self._readers.items()):
            process, update = self._course.processes[index], self._course.update
            notes = [channels.read(update, number, process, worker) for worker in workers]
            try:
                channels.wait(partial(self._is_read, index, notes), deadline, partial(self._expect, index))
            except TimeoutError:
                self._lose(index, EngineTimeoutError.of(index))
            except EngineLostError as error:
                self._lose(index, error)

    def _is_read(self, index: int, notes: list[str]) -> bool:
        """Whether an engine has read a bucket, or is not waited for any more."""
        return index not in self._readers or self._direct.store.check(notes)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _expect(self, index: int) -> None:
        """EngineLostError if an engine is not there any more, or reads no more."""
        self._look()
        if index not in self._readers:
            return
        process, store = self._course.processes[index], self._direct.store
        for note in (channels.failed(self._course.update, process, worker) for worker in self._readers[index]):
            if store.check([note]):
                raise EngineLostError(f"engine {index} failed: {store.get(note).decode()}")
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if not is_alive(self._direct.engines[index]):
                raise EngineLostError(f"engine {index} died: its process ended")

    def _look(self) -> None:
        """Takes the answers that are there."""
        if self._calls:
            for call in ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
                if call in self._calls:
                    self._take(call, self._calls[call])

    def _take(self, call: Any, index: int) -> None:
        self._calls.pop(call, None)
        try:
            if reason := get_result(call, index, time.monotonic()):
                self.again[index] = sending_failed(self._version, EngineLostError(f"engine {index}: {reason}"))
                self._leave(index)
        except RolloutError as error:
            self._lose(index, error)

    def _lose(self, index: int, error: Exception) -> None:
        self.failed.setdefault(index, sending_failed(self._version, error))
        self._calls = {call: i for call, i in self._calls.items() if i != index}
        self._leave(index)

    def _leave(self, index: int) -> None:
        """Waits no more for an engine that takes no more."""
        self._readers.pop(index, None)
        for kind in {source.kind for source in self._course.sources[index]}:
            self._break(kind)

    def _break_all(self) -> None:
        for kind in list(self._direct.groups):
            self._break(kind)

    def _break(self, kind: str) -> None:
        """Gives a process group up, and tells those that are in it."""
        if kind == "shared":
            return
        self._direct.store.set(channels.given_up(self._course.group), "")
        if group := self._direct.groups.pop(kind, None):
            group.abandon()
