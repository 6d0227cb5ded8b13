"""Parts of a run that die while its driver lives: train workers, engines, the node that holds an engine. The run goes
on by itself, and its metrics are, to the last bit, those of a run in which nothing died.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster
from shared import History, Script, assert_all_end
from test_exact import Place, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Start = Callable[..., Script]

ENGINE, WORKER = "ray::VLLMEngine", "ray::RayTrainWorker"
TWO = ["--rollout.num-engines", "2", "--rollout.max-tokens", "16"]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def place(storage: Path, tiny_model: Path) -> Place:
    return Place(str(storage), storage, tiny_model)


@pytest.fixture
def expected(place: Place, script: Start) -> History:
    """The undisturbed run on two ranks and two engines, made once."""
    if not place.newest("whole"):
        finish(script("ppo.py", *place.words("whole", 2), *TWO))
    return place.history("whole")


def part(run: Script, name: str, chance: random.Random) -> psutil.Process:
    """One of the run's processes of that name."""
    return chance.choice(sorted(run.processes(name), key=lambda process: process.pid))


def wait_for_step(run: Script, step: int) -> None:
    deadline = time.monotonic() + 300
    while run.step() < step:
        assert run.process.poll() is None and time.monotonic() < deadline, run.output.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize("victims", [[ENGINE], [WORKER], [ENGINE, WORKER]], ids=["engine", "worker", "both"])
def test_what_dies_in_a_run_is_replaced_and_nothing_differs(
    victims: list[str], place: Place, expected: History, script: Start, request: pytest.FixtureRequest
) -> None:
    name, chance = f"hurt-{request.node.callspec.id}", random.Random(len(victims))
    run = script("ppo.py", *place.words(name, 2), *TWO)
    for step in (2, 9, 15):  # three times each
        wait_for_step(run, step)
        time.sleep(chance.uniform(0, 0.6))  # generating, updating, sending weights
        for victim in victims:
            part(run, victim, chance).kill()
    finish(run)
    assert place.history(name) == expected
    if victims == [ENGINE]:  # where the workers die too, they wait for all engines anyway and have nothing to say
        assert "left out until it is back" in run.output.read_text()
    assert_all_end(run, 10)


def test_all_engines_die_at_once(place: Place, expected: History, script: Start) -> None:
    run = script("ppo.py", *place.words("no-engine", 2), *TWO)
    wait_for_step(run, 4)
    for process in run.processes(ENGINE):
        process.kill()
    finish(run)
    assert place.history("no-engine") == expected


def test_a_hung_engine_is_replaced(place: Place, expected: History, script: Start) -> None:
    waits = ["--rollout.timeout-s", "90", "--rollout.sync-timeout-s", "5"]
    run = script("ppo.py", *place.words("hung", 2), *TWO, *waits)
    wait_for_step(run, 4)
    hung = part(run, ENGINE, random.Random(0))
    os.kill(hung.pid, signal.SIGSTOP)
    finish(run)
    assert place.history("hung") == expected
    assert "left out until it is back" in run.output.read_text()  # the run may end before a new engine has started
    assert_all_end(run, 10)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head node with room for the trainers and one engine."""
    head = {"num_cpus": 2, "resources": {"seat": 1}, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def test_a_node_dies_with_the_engine_on_it(cluster: Cluster, place: Place, expected: History, script: Start) -> None:
    second: Any = cluster.add_node(num_cpus=1, resources={"seat": 1})
    one_each = ["--rollout.resources-per-engine", "{CPU: 1, seat: 1}", "--ray-address", cluster.address]
    run = script("ppo.py", *place.words("node", 2), *TWO, *one_each, "--scaling.resources-per-worker", "{CPU: 0.5}")
    wait_for_step(run, 4)
    cluster.remove_node(second, allow_graceful=False)
    wait_for_step(run, 10)
    cluster.add_node(num_cpus=1, resources={"seat": 1})
    finish(run)
    assert place.history("node") == expected
    assert "left out until it is back" in run.output.read_text()
    assert_all_end(run, 30)
