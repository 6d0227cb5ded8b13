"""Fixtures that several test files share, and what they are made of. The process that only hands out tests has none."""

import rlx  # noqa: F401  # first: torch reads how threads wait when it is imported, and they must not spin

# isort: split
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import ray
import s3
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.state import list_actors
from script_run import ScriptRun
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.cluster import connection
from rlx.config.experiment import EXPERIMENT_FILE
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.rollout import RolloutConfig
from rlx.mesh import Mesh
from rlx.models.tiny import WarmStart, make_tiny_model
from rlx.rollout.engine_actors import EngineSpec, start_engines
from rlx.rollout.engine_args import engine_args
from rlx.runs.processes import RunProcesses
from rlx.tracking.services import mlflow

torch.set_num_threads(1)  # two pools of spinning threads on two cores would be slow


LIKE_TINY = ("--config", str(EXPERIMENT_FILE))
"""options with which a command trains a model of the tests as it does rlx's own; `over_experiment` does it to a tree"""

SHORT_RECIPE = WarmStart(
    right_steps=30, careless_steps=2, held_out_size=32, hidden=128, mlp=128, heads=4, kv_heads=2, warmup_steps=5
)


KEPT = RunProcesses("workers")
"""engines and workers that one run leaves for the next of the same shape: starting them takes most of a run's time"""


@pytest.fixture(scope="session", autouse=True)
def user_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The key that signs settings is one of the tests."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def ray_cluster(s3_server: str) -> Iterator[None]:
    """One Ray cluster for the whole session: starting one takes ten seconds. Its workers have the keys for S3."""
    connection.quiet_environment()
    # Else the tests without Ray, which run beside, would hold its workers up.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    connection.start_cluster(num_cpus=4)
    yield
    KEPT.close()
    ray.shutdown()


@pytest.fixture(scope="module")
def free_cluster(ray_cluster: None) -> None:
    """The session's cluster without what a run of another module has left for the next."""
    KEPT.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings that has learnt the form of an answer and little else."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    make_tiny_model(folder, recipe=SHORT_RECIPE)
    return folder


@pytest.fixture(scope="session")
def untied_model(tiny_model: Path) -> Path:
    """The tiny model with a random output layer of its own."""
    folder = tiny_model.with_name("untied")
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)
    torch.nn.init.normal_(lm.lm_head.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def start_engine(model: Path, adapter: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An engine actor, starting, in a placement group of its own; with `adapter` it takes adapters alone.

    `settings`: further ones of the section rollout.

    `stop_engine` ends it.
    """
    group = placement_group([{"CPU": 0.5}])
    rollout = RolloutConfig(max_tokens=128, max_num_seqs=32, kv_cache_mib=16, **settings)
    chosen = ModelConfig(lora_rank=adapter["r"], lora_sync="adapter") if adapter else ModelConfig()
    args = engine_args(rollout, chosen, max_prompt_tokens=128, on_gpu=False)
    (engine,) = start_engines(EngineSpec(str(model), args, {"CPU": 0.5}, adapter), group, [0])
    _groups[engine] = group
    return engine


def stop_engine(engine: Any) -> None:
    """Ends an engine and gives back what was reserved for it: later runs need the room."""
    ray.kill(engine)
    remove_placement_group(_groups.pop(engine))


_groups: dict[Any, Any] = {}  # by engine


@pytest.fixture(scope="session")
def engines(ray_cluster: None, tiny_model: Path, untied_model: Path) -> Iterator[tuple[Any, Any]]:
    """An engine of the tiny model and one of the untied model; each test first pushes the weights that it needs.

    The first has the tokenizer, too, and an option of vLLM that rlx has no setting for.
    """
    reads = {"stop": ("=",), "engine_options": {"max_logprobs": 5}}
    pair = start_engine(tiny_model, **reads), start_engine(untied_model)
    yield pair
    for engine in pair:
        stop_engine(engine)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables in it, made as a first run makes it; to be copied, for that takes seconds."""
    folder = tmp_path_factory.mktemp("database")
    mlflow.client(mlflow.default_uri(folder)).search_experiments()
    return folder / "mlflow.db"


OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks:
    """Calls `function(rank, ranks, *args)` in that many processes of a gloo group; gives the ranks' results."""
    # The processes are forked from one that has imported what is slow to import, also of what test files import.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["rank_preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Python 3.11 does not pass on where modules are
        forkserver.ensure_running()

    def run(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(
                _as_rank, (ranks, folder, function, args), nprocs=ranks, start_method="forkserver"
            )
            return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(ranks)]

    return run


def _as_rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    faulthandler.enable()  # a crash says where it was
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():  # one GPU for each rank, which uses it if the function does
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(function(rank, ranks, *args), Path(folder, str(rank)))
    dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[Mesh]:
    """The mesh of this process, which has no others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield Mesh.of("cpu", 1)
    dist.destroy_process_group()


NothingLeft = Callable[[float], None]


@pytest.fixture(scope="module")
def nothing_left(ray_cluster: None) -> NothingLeft:
    """A check that in so many seconds at most, nothing is left that was not there when the module began.

    What a run keeps for the next one is there until a run of another shape, also of another module.
    """
    before = _alive().keys()

    def check(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := {key: what for key, what in _alive().items() if key not in before}) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.2)
        assert left == {}

    return check


def _alive() -> dict[str, str]:
    """Actors and placement groups by id; Ray Data keeps a few actors of its own, with an underscore."""
    listed = list_actors(filters=[("state", "!=", "DEAD")], limit=1000)
    actors = {actor.actor_id: actor.class_name for actor in listed}
    groups = {key: "placement group" for key, row in placement_group_table().items() if row["state"] != "REMOVED"}
    return {key: name for key, name in actors.items() if not name.startswith("_")} | groups


History = dict[str, dict[int, list[float]]]
"""by metric name and step, every value that was logged"""


def mlflow_history(storage: Path, run_id: str) -> History:
    """All the metrics of an MLflow run in a storage folder."""
    client = mlflow.client(mlflow.default_uri(storage))
    history: History = {}
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            history.setdefault(name, {}).setdefault(metric.step, []).append(metric.value)
    return history


class Script(ScriptRun):
    """One of experiments/, and what a test does with it."""

    def wait_for(self, text: str, seconds: float = 240) -> None:
        """Returns when it has printed the text; an error if it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while text not in self.output.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Ctrl-C in its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)


KILLED_S = 90.0
"""until a killed driver's processes are gone: Ray's agents may wait 60 s to tell a store of it that has ended too"""


def assert_all_end(script: Script, seconds: float) -> None:
    """All of a script's processes are gone in so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := script.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts scripts, and kills in the end what is left of them."""
    started: list[Script] = []

    def start(name: str, *words: str) -> Script:
        started.append(Script(tmp_path / f"output-{len(started)}.txt", name, *words))
        return started[-1]

    yield start
    for one in started:
        for process in one.processes():
            process.kill()
        one.process.wait()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A moto server, and the environment that leads to it."""
    with s3.moto() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment(address).items():
            patch.setenv(name, value)
        yield address


@pytest.fixture
def bucket(s3_server: str) -> str:
    """The address of an empty place on S3."""
    return f"s3://{s3.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_faults(s3_server: str, bucket: str) -> Iterator[tuple[str, s3.Proxy]]:
    """The address of an empty place on S3 that is reached through a proxy, and the proxy that makes requests fail."""
    proxy = s3.Proxy(s3_server)
    yield f"{bucket}?endpoint_override={proxy.address}", proxy
    proxy.close()


Where = tuple[str, dict[str, str]]
"""a storage's address, and the environment that it needs"""


@pytest.fixture(params=["folder", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """A place to write to, on this machine and on S3."""
    if request.param == "folder":
        return str(tmp_path / "run"), {}
    return request.getfixturevalue("bucket"), s3.environment(request.getfixturevalue("s3_server"))
