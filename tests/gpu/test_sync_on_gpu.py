"""Weight updates between GPUs: CUDA IPC, NCCL, engines that are split over GPUs, engines that die meanwhile.

Random weights of Qwen2's shape, made here; one or two GPUs, as each test says.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from test_engine import generate_all
from test_parallel_on_gpu import SHARES_GPUS
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlx.cluster import connection
from rlx.config import loading
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.mesh import Mesh
from rlx.models import fsdp, lora
from rlx.rollout.engine_actors import EngineSpec, start_engines
from rlx.rollout.engine_args import engine_args
from rlx.rollout.engine_group import EngineGroup
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync import sync
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.training import experience
from rlx.training.setup.models import build_models
from rlx.types import Completion, Prompt, Sampling

pytestmark = pytest.mark.gpu
CLOSE, FAR = 0.02, 0.05  # mean |difference of log-probabilities|, bfloat16
CLOSE_IN_FLOAT32 = 1e-4
CACHE_GIB = 5.0  # that an engine's keys and values take at least, of a fifth of a GPU
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, stop_token_ids=())
LONG = 192  # tokens, with a prompt as many as an engine takes
PROMPTS = [Prompt(i, tuple(range(100 + i, 164 + i)), "question", "answer") for i in range(16)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[int]:
    """A Ray cluster; the number of its GPUs."""
    connection.quiet_environment()
    os.environ.update(connection.OWN_CLUSTER_ENVIRONMENT | {"NCCL_NVLS_ENABLE": "0"})  # no multicast on lent machines
    with pytest.MonkeyPatch.context() as patch:  # Ray's workers find this module, and those that it imports
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield int(ray.cluster_resources().get("GPU", 0))
    ray.shutdown()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2's shape, eight layers of it, with heads that two and four GPUs can share."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    shape = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=8,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Trainer:
    """Rank 0 of one or more with a policy on a GPU, as a worker has it."""

    def __init__(
        self, rank: int, ranks: int, path: str, store: str, engines: list[Any], gpu: str | None, tp: int, dtype: str
    ) -> None:
        if gpu is not None:  # one that Ray has given to an engine
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        sync.BUCKET_BYTES["cuda"] = 64 << 20  # several buckets, as of a larger model
        self.device, self.rank = torch.device("cuda", 0), rank
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
        settings = loading.from_tree(
            {
                "model": {"dtype": dtype, "reference": "none"},
                "algorithm": {"advantage": "grpo", "kl_coef": 0},
                "parallel": {"tp": tp},
                "scaling": {"num_workers": ranks},
            }
        )
        self.grid = Mesh.of("cuda", tp)
        self.policy: Any = build_models(settings, path, self.grid.mesh).trained["policy"].model
        self.sync = WeightSync(engines, self.grid, self.device, getattr(torch, dtype))
        weights = partial(lora.engine_weights, self.policy)
        pool = EnginePool(engines, 0, hang_s=100.0)
        self.group = EngineGroup(pool, self.grid, self.sync, weights, retries=0, notify=lambda _: None)
        self.version = 0
        self.is_smaller = False

    def push(self, starting: bool = False, midway: bool = False) -> tuple[dict[int, str], float]:
        """The engines that are lost after it, and the seconds it took."""
        self.version += 1
        started = time.monotonic()
        self.group.push(self.version, starting=starting, midway=midway)
        return dict(self.group.pool.lost), time.monotonic() - started

    def kill_during_push(self, pid: int) -> None:
        """Stops an engine in the next push, after the probe, and kills it soon after."""
        pool, probe = self.group.pool, self.group.pool.probe

        def harmed(patience_s: float, calls: Sequence[Any]) -> dict[int, Any]:
            pool.probe = probe
            locations = probe(patience_s, calls)
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(2.0, os.kill, (pid, signal.SIGKILL)).start()
            return locations

        pool.probe = harmed

    def room(self) -> float:
        """GiB of the GPU's memory that are free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0] / (1 << 30)

    def kinds(self) -> dict[int, list[str]]:
        """The transports of each engine's workers in the newest update, sorted: Ray chooses their GPUs."""
        assert self.sync.plan
        return {i: sorted(source.transport for source in all_) for i, all_ in self.sync.plan.direct.items()}

    @torch.no_grad()
    def change(self) -> None:
        """As an update would, only larger, and alike on all ranks; every second one takes the first back. Weights
        shrink first: 1.2 times as large they triple what bfloat16 rounds off, 0.006 to 0.017 in the mean."""
        self.is_smaller = not self.is_smaller
        for p in self.policy.parameters():
            p.mul_(1 / 1.2 if self.is_smaller else 1.2)

    def gap(self, index: int) -> float:
        """Mean difference between an engine's log-probabilities and the policy's; all ranks call it."""
        pool = EnginePool([self.group.pool.engines[index]], 0)
        # Neighbours score the same: what is drawn twice at once may differ in the last bits, and so in tokens.
        drawn = generate_all(pool, PROMPTS, SAMPLING, 1, self.version) if self.grid.is_leader else None
        return float(self.gaps(self.grid.broadcast_from_leader(drawn)).mean())

    def gaps_around_push(self) -> tuple[float, float]:
        """The same of the first and the last eight tokens of completions that get new weights half-way."""
        pool, long = EnginePool(self.group.pool.engines, 0), replace(SAMPLING, max_tokens=LONG)
        generate_all(pool, PROMPTS, long, 1, self.version)  # whatever takes longer at first
        started = time.monotonic()
        generate_all(pool, PROMPTS, long, 1, self.version)
        seconds = time.monotonic() - started
        pending = pool.begin(PROMPTS, [long], self.version)
        time.sleep(seconds / 3)
        self.change()
        self.push(midway=True)
        pool.finish(pending, self.version)
        assert pending.is_complete, pool.lost
        gaps = self.gaps(pending.completions)
        return float(gaps[:, :8].mean()), float(gaps[:, -8:].mean())

    @torch.no_grad()
    def gaps(self, completions: list[Completion]) -> Tensor:
        """Of each token, `[B, T]`: all completions are as long as may be."""
        batch = experience.build_batch(completions, 0).to(self.device)
        assert batch.mask.all()
        scored = self.policy(batch.response_tokens(), 1.0)
        fsdp.reshard(self.policy)
        return (scored.logprobs - batch.rollout_logprobs).abs()


Started = tuple[list[Any], list[Any]]
"""trainers by rank, engines"""
Start = Callable[..., Started]


@pytest.fixture
def start(cluster: int, qwen: Path) -> Iterator[Start]:
    """Starts trainers and engines on these GPUs or parts of GPUs; ends them after the test."""
    made: list[Any] = []

    def begin(
        trainers: list[float],
        engines: list[float],
        gpu: str | None = None,
        sleeps: bool = False,
        tp: int = 1,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
    ) -> Started:
        needed = sum(trainers) + sum(engines)
        if cluster < needed:
            pytest.skip(f"needs {needed:g} GPUs, there are {cluster}")
        group = placement_group([{"CPU": 1.0, "GPU": share} for share in [*trainers, *engines]], "STRICT_PACK")
        assert group.wait(60)
        rollout = RolloutConfig(
            max_tokens=LONG,
            max_num_seqs=32,
            gpu_memory_utilization=0.2,
            enforce_eager=True,
            placement="colocated" if sleeps else "separate",
            tensor_parallel=max(1, int(engines[0])),
        )
        args = engine_args(rollout, ModelConfig(dtype=dtype), max_prompt_tokens=256 - LONG, on_gpu=True)
        places = range(len(trainers), len(trainers) + len(engines))
        share = {"CPU": 1.0, "GPU": engines[0]}
        actors = start_engines(EngineSpec(str(qwen), args, share), group, places)
        store = f"{tempfile.mkdtemp()}/store"
        ranks = [
            ray.remote(Trainer)
            .options(num_gpus=part, num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank))
            .remote(rank, len(trainers), str(qwen), store, actors, gpu, tp, dtype)
            for rank, part in enumerate(trainers)
        ]
        made.extend([*ranks, *actors, group])
        return ranks, actors

    yield begin
    for one in made[:-1]:
        ray.kill(one)
    if made:
        remove_placement_group(made[-1])


def on_all(ranks: list[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(rank, method).remote(*args) for rank in ranks], timeout=150)


def assert_pushes_arrive(ranks: list[Any], engines: int, kinds: dict[int, list[str]], close: float = CLOSE) -> None:
    assert on_all(ranks, "push", True)[0][0] == {}
    assert on_all(ranks, "kinds")[0] == kinds
    for _ in range(3):
        for index in range(engines):
            assert max(on_all(ranks, "gap", index)) <= close
        on_all(ranks, "change")
        assert min(on_all(ranks, "gap", 0)) > FAR  # the update has not been sent yet
        lost, seconds = on_all(ranks, "push")[0]
        assert lost == {}
        print(f"{kinds}: {seconds:.4f} s")
    assert max(on_all(ranks, "gap", 0)) <= close


def process(engine: Any) -> int:
    return int(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())))


@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", CLOSE), ("float32", CLOSE_IN_FLOAT32)])
def test_an_engine_on_the_trainers_gpu_reads_its_memory(dtype: str, close: float, start: Start) -> None:
    ranks, _ = start([0.5], [0.5], dtype=dtype)
    assert_pushes_arrive(ranks, 1, {0: ["shared_memory"]}, close)


def test_an_engine_that_sleeps_leaves_its_memory_to_the_trainer_also_after_it_was_replaced(start: Start) -> None:
    ranks, (engine,) = start([0.5], [0.5], sleeps=True)

    def assert_wakes_with_new_weights(asleep: float) -> None:
        on_all(ranks, "change")
        assert on_all(ranks, "push", True)[0][0] == {}
        assert on_all(ranks, "gap", 0)[0] <= CLOSE
        assert asleep - on_all(ranks, "room")[0] > CACHE_GIB

    ray.get(engine.probe.remote(""))
    assert_wakes_with_new_weights(on_all(ranks, "room")[0])
    ray.get(engine.sleep.remote())
    assert_wakes_with_new_weights(on_all(ranks, "room")[0])
    os.kill(process(engine), signal.SIGKILL)
    time.sleep(5)
    ray.get(engine.probe.remote(""))
    assert_wakes_with_new_weights(on_all(ranks, "room")[0])


@pytest.mark.parametrize(("trainers", "tp", "engines"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (2, 2, 2)])
def test_engines_on_other_gpus_are_sent_to_by_nccl(trainers: int, tp: int, engines: int, start: Start) -> None:
    ranks, _ = start([1.0] * trainers, [1.0] * engines, tp=tp)
    assert_pushes_arrive(ranks, engines, {index: ["nccl"] for index in range(engines)})


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_is_split_over_other_gpus_is_sent_to_by_nccl(tp: int, start: Start) -> None:
    ranks, _ = start([1.0, 1.0], [2.0], tp=tp)
    assert_pushes_arrive(ranks, 1, {0: ["nccl", "nccl"]})


def test_completions_go_on_with_weights_that_come_meanwhile(start: Start) -> None:
    ranks, _ = start([0.5], [0.5])
    on_all(ranks, "push", True)
    ((before, after),) = on_all(ranks, "gaps_around_push")
    assert before > FAR
    assert after <= CLOSE


def test_every_rank_serves_the_engine_on_its_gpu(start: Start) -> None:
    ranks, _ = start([0.6, 0.6], [0.4, 0.4])
    assert_pushes_arrive(ranks, 2, {0: ["shared_memory"], 1: ["shared_memory"]})


def test_a_policy_whose_layers_are_cut_over_gpus_is_sent_whole(start: Start) -> None:
    ranks, _ = start([0.6, 0.6], [0.4, 0.4], tp=2)
    assert_pushes_arrive(ranks, 2, {0: ["shared_memory"], 1: ["shared_memory"]})


def test_a_policy_whose_rows_and_layers_are_cut_is_sent_whole(start: Start) -> None:
    trainer, engine = (0.4, 0.2) if SHARES_GPUS else (0.6, 0.4)
    ranks, _ = start([trainer] * 4, [engine] * 2, tp=2)
    assert_pushes_arrive(ranks, 2, {0: ["shared_memory"], 1: ["shared_memory"]})


@pytest.mark.parametrize("parts", [2, 4])
def test_a_model_that_is_split_over_gpus_is_read_on_one_and_sent_to_the_others(parts: int, start: Start) -> None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    ranks, _ = start([0.0], [float(parts)], gpu=first)
    assert_pushes_arrive(ranks, 1, {0: ["nccl"] * (parts - 1) + ["shared_memory"]})


@pytest.mark.parametrize("trainer", [1.0, 0.4])
def test_an_engine_that_dies_during_a_push_is_named_and_comes_back(start: Start, trainer: float) -> None:
    """With a GPU of its own the trainer sends by NCCL to the first engine, and to the second, on the same GPU as the
    first, through the object store; else both read its memory."""
    ranks, engines = start([trainer], [0.5, 0.5] if trainer == 1.0 else [0.3, 0.3])
    (lost, _), *_ = on_all(ranks, "push", True)
    assert lost == {}
    on_all(ranks, "change")
    on_all(ranks, "kill_during_push", process(engines[0]))
    (lost, seconds), *_ = on_all(ranks, "push")
    assert list(lost) == [0]
    assert seconds < 30
    assert max(on_all(ranks, "gap", 1)) <= CLOSE
    deadline = time.monotonic() + 150
    while on_all(ranks, "push", True)[0][0]:
        assert time.monotonic() < deadline
    assert max(on_all(ranks, "gap", 0)) <= CLOSE
