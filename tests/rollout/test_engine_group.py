"""Engines that die while all ranks use them: others take over, the dead are replaced, completions stay the same."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from test_engine import PROMPTS, SAMPLING, generate_all, versions

from rlx.actors import RolloutError
from rlx.mesh import Mesh
from rlx.models import loading, lora
from rlx.rollout.base import Output, PendingRollout, Request
from rlx.rollout.engine_group import EngineGroup
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.types import Completion, Prompt, Sampling, ShardedWeight, WeightSyncError

LONG = replace(SAMPLING, temperature=2.0, max_tokens=120)
SAMPLES = 40


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def weights(tiny_model: Path) -> list[ShardedWeight]:
    """The tiny model's weights, for the engine that ties its embeddings and for the one that does not."""
    tied = lora.engine_weights(loading.load_policy(str(tiny_model), head=None))
    (embedding,) = (weight for weight in tied if weight.name == "model.embed_tokens.weight")
    return [*tied, replace(embedding, name="lm_head.weight")]


@pytest.fixture
def messages() -> list[str]:
    return []


def group_of(
    engines: tuple[Any, ...], messages: list[str], weights: list[ShardedWeight], timeout_s: float = 120.0
) -> EngineGroup:
    pool = EnginePool(engines, seed=0, timeout_s=timeout_s)
    mesh = Mesh.of("cpu", 1)
    sync = WeightSync(engines, mesh, torch.device("cpu"), torch.float32, None)
    return EngineGroup(pool, mesh, sync, lambda: weights, retries=1, notify=messages.append)


def generated(group: EngineGroup, version: int) -> list[Completion]:
    return group.finish(group.begin(PROMPTS, [LONG] * SAMPLES, version), version)


def process(engine: Any) -> int:
    return int(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())))


def killed_soon(engine: Any, seconds: float = 0.3) -> None:
    """Stops an engine now and kills it soon, so that it cannot answer before, however fast the machine is."""
    os.kill(pid := process(engine), signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


@pytest.mark.slow
def test_prompts_of_an_engine_that_dies_are_generated_alike_by_the_others(
    engines: tuple[Any, Any], weights: list[ShardedWeight], messages: list[str]
) -> None:
    version, group = next(versions), group_of(engines, messages, weights)
    group.push(version, starting=True)
    expected = generated(group, version)
    killed_soon(engines[0])
    started = time.monotonic()
    assert generated(group, version) == expected
    assert list(group.pool.lost) == [0]
    assert messages == ["engine 0 died: its process ended - left out until it is back"]
    # Weights go to the other one while it is away, and to both once it is back.
    group.push(version + 1)
    while 0 in group.pool.lost:
        group.push(version + 1)
        assert time.monotonic() < started + 120
    assert messages[1:] == ["engine 0 is back"]
    own = EnginePool([engines[0]], seed=0)
    assert generate_all(own, PROMPTS, LONG, SAMPLES, version + 1) == generated(group, version + 1)


@pytest.mark.slow
def test_when_all_engines_die_they_are_waited_for_and_the_completions_are_the_same(
    engines: tuple[Any, Any], weights: list[ShardedWeight], messages: list[str]
) -> None:
    version, group = next(versions), group_of(engines, messages, weights)
    group.push(version, starting=True)
    expected = generated(group, version)
    for engine in engines:
        killed_soon(engine)
    assert generated(group, version) == expected
    assert sorted(messages[:2]) == [f"engine {i} died: its process ended - left out until it is back" for i in range(2)]
    assert sorted(messages[2:]) == ["engine 0 is back", "engine 1 is back"]


class Hopeless(EnginePool):
    """Engines that never answer."""

    def begin(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], version: int) -> PendingRollout:
        self.lost = {0: "engine 0 died: out of memory"}
        return PendingRollout(prompts, samplings, version, [None], [0])


def test_retries_are_bounded_and_the_error_has_the_reasons(messages: list[str]) -> None:
    sent: list[int] = []

    class Counted(EngineGroup):
        def push(self, version: int, *, starting: bool = False, midway: bool = False) -> None:
            sent.append(version)

    mesh = Mesh.of("cpu", 1)
    sync = WeightSync([None], mesh, torch.device("cpu"), torch.float32, None)
    group = Counted(Hopeless([None], seed=0), mesh, sync, list, retries=2, notify=messages.append)
    with pytest.raises(RolloutError, match=r"all engines failed, 3 times in a row, at step 7: .*out of memory"):
        group.finish(group.begin(PROMPTS[:1], [SAMPLING], 7), 7)
    assert sent == [7, 7]


@ray.remote
class Replaced:
    """An engine whose process ended while it generated with weights 1, and that has taken weights 2 since."""

    def generate(self, requests: list[Request], version: int) -> tuple[list[Output], float]:
        if version == 1:
            raise RuntimeError("its process ended")
        return [Output((7,), (-0.5,), True)] * len(requests), 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("holds", "lost"), [(1, [0]), (2, [])])
def test_an_engine_that_was_sent_weights_since_is_not_lost_by_an_earlier_failure(
    ray_cluster: None, holds: int, lost: list[int]
) -> None:
    pool = EnginePool([Replaced.remote()], seed=0)
    pending = pool.begin(PROMPTS, [SAMPLING], 1)
    pool.finish(pending, holds)
    assert list(pool.lost) == lost
    assert pending.is_complete is not bool(lost)


@pytest.mark.slow
def test_a_push_that_reaches_no_engine_names_each(weights: list[ShardedWeight], messages: list[str]) -> None:
    @ray.remote
    class Broken:
        def probe(self, run: str) -> bool:
            return True

        def lives(self) -> None:
            pass

        def start_update(self, *_: Any) -> None:
            raise RuntimeError("no memory left")

    broken = [Broken.remote(), Broken.remote()]
    group = group_of(tuple(broken), messages, weights[:1], timeout_s=20)
    with pytest.raises(WeightSyncError, match=r"engine 0 failed: .*no memory left.*; .*engine 1 failed: .*no memory"):
        group.push(1, starting=True)
    for engine in broken:
        ray.kill(engine)


@ray.remote
class Late:
    """Answers after two seconds; makes a step in each tenth of them, or is stuck."""

    def __init__(self, works: bool) -> None:
        self.works, self.began = works, time.monotonic()

    async def steps(self) -> int:
        return int(10 * (time.monotonic() - self.began)) if self.works else 7

    async def generate(self, requests: list[Request], version: int) -> tuple[list[Output], float]:
        await asyncio.sleep(2.0)
        return [Output((7,), (-0.5,), True)] * len(requests), 2.0


@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_an_engine_that_works_has_as_long_as_it_needs_and_one_that_is_stuck_has_not(
    ray_cluster: None, works: bool
) -> None:
    engine = Late.remote(works)
    ray.get(engine.steps.remote())  # it is up
    pool = EnginePool([engine], seed=0, timeout_s=0.3)
    pending = pool.begin(PROMPTS, [SAMPLING], 1)
    pool.finish(pending, 1)
    assert pending.is_complete is works
    assert pool.lost == ({} if works else {0: "engine 0 did not answer in time"})
