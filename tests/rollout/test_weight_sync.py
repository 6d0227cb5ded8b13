"""Weights that engine workers receive by themselves, from shared memory or a process group; engines that fail.

On CPU; CUDA IPC and NCCL run the same code and are tested in tests/gpu.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from shared import start_engine, stop_engine
from test_engine import CLOSE, FAR, PROMPTS, SAMPLING, Side, generate_all, versions
from torch import Tensor

from rlx.config.sections.rollout import TransportName
from rlx.mesh import Mesh
from rlx.models import loading, lora, policy
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync import buckets, process_group, receiver, sender, shared_memory
from rlx.rollout.weight_sync.base import Incoming, Source, UpdateInterruptedError
from rlx.rollout.weight_sync.receiver import Receiver
from rlx.rollout.weight_sync.sender import OutgoingUpdate, SendingRank, UpdatePlan, UpdateRequest
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.types import ShardedWeight, WeightSyncError

BUCKET = 100_000  # bytes: the tiny model's larger tensors alone, some together
SECONDS = 60.0
START_S = 300.0  # an engine that starts beside other work takes minutes


@dataclass
class Pair:
    """Two engines, and a policy whose weights they take."""

    engines: tuple[Any, Any]
    policy: policy.Policy
    sync: WeightSync
    version: int = field(default_factory=lambda: next(versions))

    def weights(self) -> list[ShardedWeight]:
        """The policy's weights, for the engine that ties its embeddings and for the one that does not."""
        tied = lora.engine_weights(self.policy)
        (embedding,) = (weight for weight in tied if weight.name == "model.embed_tokens.weight")
        return [*tied, replace(embedding, name="lm_head.weight")]

    def push(
        self, timeout_s: float = SECONDS, patience_s: float = START_S, damage: Callable[[], None] | None = None
    ) -> dict[int, str]:
        """Pushes the weights; calls `damage` between the probe and the push."""
        self.version += 1
        locations = EnginePool(self.engines, seed=0).probe(patience_s)
        if damage:
            damage()
        failed = self.sync.push(self.weights(), self.version, locations, timeout_s=timeout_s)
        return {index: str(error) for index, error in failed.items()}

    @property
    def groups(self) -> dict[str, Any]:
        """The process groups that are kept, by transport."""
        ends = {name: end for name, end in self.sync.transports.items() if name in ("nccl", "gloo")}
        return {name: end.group for name, end in ends.items() if end.group}  # type: ignore[attr-defined]

    def gaps(self, engines: Sequence[Any]) -> list[float]:
        """Of each engine, the largest difference between its logprobs and the policy's."""
        sides = [Side(engine, self.policy, self.version) for engine in engines]
        return [
            side.gap(generate_all(EnginePool([side.engine], 0), PROMPTS, SAMPLING, 2, self.version)) for side in sides
        ]

    def change(self) -> None:
        Side(None, self.policy, self.version).change()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["auto", "gloo"])
def pair(request: pytest.FixtureRequest, engines: tuple[Any, Any], tiny_model: Path) -> Iterator[Pair]:
    transport: TransportName = request.param
    sync = sync_of(engines, transport)
    yield Pair(engines, loading.load_policy(str(tiny_model), head=None), sync)
    sync.close()


def sync_of(engines: Sequence[Any], transport: TransportName) -> WeightSync:
    return WeightSync(engines, Mesh.of("cpu", 1), torch.device("cpu"), torch.float32, transport, BUCKET)


def process(engine: Any) -> int:
    return int(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())))


def wait_until_both_have_it(pair: Pair) -> None:
    deadline = time.monotonic() + START_S
    # Both are up before the push: an engine that starts meanwhile is left out.
    while len(EnginePool(pair.engines, 0).probe(10)) < 2 or pair.push():
        assert time.monotonic() < deadline
    assert max(pair.gaps(pair.engines)) < CLOSE


@pytest.mark.slow
def test_updates_in_many_buckets_are_whole_one_after_the_other(pair: Pair) -> None:
    assert len(buckets.group_weights(pair.weights(), torch.float32, BUCKET)) > 4
    groups, notes = [], []
    for _ in range(3):
        assert pair.push() == {}
        assert max(pair.gaps(pair.engines)) < CLOSE
        pair.change()
        assert min(pair.gaps(pair.engines)) > FAR
        groups.append(pair.groups)
        notes.append(pair.sync._rank.store.num_keys())
    assert groups[0] == groups[1] == groups[2]  # connections are kept
    assert notes[0] == notes[1] == notes[2]  # those of an update are not


def test_one_bit_that_changes_on_the_way_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []

    def damaged(bucket: Tensor, *rest: Any) -> None:
        buckets.fill(bucket, *rest)
        filled.append(bucket)
        bucket[1000] ^= 4 * (len(filled) == 3)

    monkeypatch.setattr(sender, "fill", damaged)
    failed = pair.push()
    assert [f"engine {i} failed: the checksum" in failed[i] for i in (0, 1)] == [True, True]
    monkeypatch.undo()
    pair.change()
    assert pair.push() == {}
    assert max(pair.gaps(pair.engines)) < CLOSE


@pytest.mark.slow  # kills an engine, which takes long to start again
def test_an_engine_that_dies_during_a_push_is_named_and_the_other_has_the_weights(pair: Pair) -> None:
    assert pair.push() == {}
    pair.change()
    pid = process(pair.engines[0])

    def damage() -> None:  # stopped, so that it cannot finish before it dies
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()

    started = time.monotonic()
    failed = pair.push(damage=damage)
    assert time.monotonic() - started < SECONDS / 2
    assert list(failed) == [0]
    assert "engine 0 died" in failed[0]
    assert max(pair.gaps(pair.engines[1:])) < CLOSE
    wait_until_both_have_it(pair)


def test_an_engine_that_has_no_room_is_named_and_the_other_has_the_weights(pair: Pair) -> None:
    def fail(engine: Any) -> None:
        def no_room(*_: Any) -> Tensor:
            receiver.is_sound = buckets.is_sound
            raise torch.OutOfMemoryError("no room")

        receiver.is_sound = no_room

    assert pair.push() == {}
    pair.change()
    started = time.monotonic()
    failed = pair.push(damage=lambda: ray.get(pair.engines[0].__ray_call__.remote(fail)))
    assert time.monotonic() - started < SECONDS / 2
    assert failed == {0: f"sending weight version {pair.version}: engine 0 failed: no room"}
    assert max(pair.gaps(pair.engines[1:])) < CLOSE
    assert pair.push() == {}
    assert max(pair.gaps(pair.engines)) < CLOSE


def test_a_connection_that_breaks_by_itself_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is known to be at fault, so none can be left out to try again."""

    def fail(engine: Any) -> None:
        def broken(*_: Any) -> Tensor:
            receiver.is_sound = buckets.is_sound
            raise UpdateInterruptedError("broken off")

        receiver.is_sound = broken

    assert pair.push() == {}
    failed = pair.push(damage=lambda: ray.get([engine.__ray_call__.remote(fail) for engine in pair.engines]))
    assert sorted(failed) == [0, 1], failed
    for index, words in failed.items():
        assert words.startswith(f"sending weight version {pair.version}: engine {index}")
        assert words.endswith("broken off")
    pair.change()
    assert pair.push() == {}
    assert max(pair.gaps(pair.engines)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["auto", "gloo", "object_store"], indirect=True)
def test_an_engine_that_hangs_is_named_in_time_and_the_other_has_the_weights(pair: Pair) -> None:
    assert pair.push() == {}
    pair.change()
    pid = process(pair.engines[1])
    started = time.monotonic()
    try:
        failed = pair.push(timeout_s=3, damage=lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - started < SECONDS / 2
    assert list(failed) == [1]
    assert failed[1].endswith("engine 1 did not answer in time")
    assert max(pair.gaps(pair.engines[:1])) < CLOSE
    wait_until_both_have_it(pair)


@pytest.mark.parametrize(
    ("error", "failed", "retry"),
    [
        (RuntimeError("no room"), {0: "sending weight version 1: engine 0 failed: no room"}, {}),
        (UpdateInterruptedError("broken off"), {}, {0: "sending weight version 1: engine 0: broken off"}),
    ],
)
def test_a_rank_without_the_engines_answers_learns_at_once_that_a_reader_stopped(
    engines: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    failed: dict[int, str],
    retry: dict[int, str],
) -> None:
    """Of several ranks that share memory with engines, only the first gets the engines' answers."""
    tensors = [torch.randn(1000) for _ in range(4)]
    groups = [[ShardedWeight(str(i), (1000,), (tensor,))] for i, tensor in enumerate(tensors)]
    layouts = tuple(buckets.layout(group, torch.float32) for group in groups)
    store, sources = process_group.create_store("127.0.0.1", SECONDS), {0: (Source("shared_memory", 1),)}
    plan = UpdatePlan("update", ("127.0.0.1", store.port), "none", sources, {0: "process"})
    ends = {"shared_memory": shared_memory.SharedMemorySender()}
    send_buffers = shared_memory.SendBuffers(torch.device("cpu"))
    second = SendingRank(1, torch.device("cpu"), engines, ends, send_buffers.get, store)
    outgoing = OutgoingUpdate(plan, UpdateRequest(1, layouts, SECONDS, midway=False), second)
    outgoing.connect()

    def stop(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(shared_memory, "map_shared", stop)

    def receive() -> None:
        incoming = Incoming("update", "process", plan.address, "none", plan.world, sources[0], layouts, 60.0, False)
        noted = Receiver(torch.device("cpu"), 0).receive(incoming, list, reads_late=False)
        assert isinstance(noted, type(error) if retry else WeightSyncError)

    reader = threading.Thread(target=receive)
    reader.start()
    started = time.monotonic()
    for tensor in tensors:
        outgoing.send([tensor])
    outgoing.finish()
    reader.join()
    assert {i: str(lost) for i, lost in outgoing.failed.items()} == failed
    assert {i: str(lost) for i, lost in outgoing.retry.items()} == retry
    assert time.monotonic() - started < SECONDS / 2
    send_buffers.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_model_that_is_split_over_processes_gets_its_weights(
    split: Any, tiny_model: Path, transport: TransportName
) -> None:
    sync = sync_of([split], transport)
    side = Side(split, loading.load_policy(str(tiny_model), head=None), next(versions))
    pool = EnginePool([split], seed=0)
    for _ in range(2):
        side.change()
        side.version += 1
        weights, locations = lora.engine_weights(side.policy), pool.probe(120)
        assert len(locations[0].workers) == 2
        assert sync.push(weights, side.version, locations, timeout_s=120.0) == {}
        assert side.gap(side.generate()) < CLOSE
    sync.close()


@pytest.fixture(scope="module")
def split(ray_cluster: None, tiny_model: Path) -> Iterator[Any]:
    """An engine of two processes, started by vLLM's mp executor."""
    engine = start_engine(tiny_model, tensor_parallel=2)
    yield engine
    stop_engine(engine)


def test_a_store_listens_on_its_address_alone() -> None:
    before = {found.laddr for found in psutil.Process().net_connections() if found.status == "LISTEN"}
    store = process_group.create_store("127.0.0.1", SECONDS)
    found = {found.laddr for found in psutil.Process().net_connections() if found.status == "LISTEN"} - before
    assert found == {("127.0.0.1", store.port)}
    process_group.open_store(("127.0.0.1", store.port), SECONDS).set("key", "value")
    assert store.get("key") == b"value"
