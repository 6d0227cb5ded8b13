"""What this machine cannot hold, and clusters that do not answer, are refused before Ray is imported."""

import shutil
import socket
import subprocess
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlx.cluster import machine, resources
from rlx.cluster.placement import Bundle, Node
from rlx.cluster.resources import ResourcePlan, RoleLabels
from rlx.config.errors import ConfigError

PLAN = ResourcePlan([{"CPU": 1.0, "GPU": 1.0}] * 2, [{"CPU": 0.5}])
IN_TURNS = "; --rollout.placement colocated needs no GPU for engines, which take turns with the workers"


@pytest.mark.parametrize(
    ("own", "lacking"),
    [
        ({"CPU": 4.0, "GPU": 2.0}, None),
        ({"CPU": 4.0}, None),  # GPUs that cannot be counted may be there
        ({"CPU": 4.0, "GPU": 0.0}, "2 workers and 1 engine need 2 GPU but the cluster has 0; --ray-address"),
        ({"CPU": 2.0, "GPU": 2.0}, "need 2.5 CPU but the cluster has 2;"),
    ],
)
def test_a_plan_that_a_machine_cannot_hold_is_refused(own: dict[str, float], lacking: str | None) -> None:
    if lacking is None:
        machine.check_machine(PLAN, own)
        return
    with pytest.raises(ConfigError, match=lacking):
        machine.check_machine(PLAN, own)


@pytest.mark.parametrize(
    ("own", "is_told"), [({"GPU": 0.0}, False), ({"GPU": 1.0}, False), ({"GPU": 2.0}, True), ({"GPU": 3.0}, True)]
)
def test_a_machine_with_gpus_enough_for_the_workers_alone_is_told_of_turns(own: Bundle, is_told: bool) -> None:
    plan = replace(PLAN, engines=[{"CPU": 1.0, "GPU": 1.0}] * 2)
    needs = f"scaling: 2 workers and 2 engines need 4 GPU but the cluster has {own['GPU']:g}"
    with pytest.raises(ConfigError) as error:
        machine.check_machine(plan, own)
    assert str(error.value) == f"{needs}{IN_TURNS * is_told}; --ray-address joins a larger one"


def test_engines_that_cannot_take_turns_are_not_told_to() -> None:
    engines = [{"CPU": 1.0, "GPU": 1.0}] * 2
    on_cpus = ResourcePlan([{"CPU": 1.0}], engines)
    shared = ResourcePlan([{"CPU": 1.0, "GPU": 1.0}] * 2, engines, colocated=True)
    for plan in (on_cpus, shared):
        assert resources.lack(plan, [Node({"CPU": 8.0, "GPU": 1.0})]).endswith("2 GPU but the cluster has 1")


@pytest.mark.parametrize(("workers", "engines", "nodes"), [(2, 1, 2), (1, 3, 3), (1, 1, None)])
def test_one_machine_is_no_place_for_bundles_that_want_nodes_of_their_own(
    workers: int, engines: int, nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and engines are two groups, which may share a node."""
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    plan = ResourcePlan([{"CPU": 0.1}] * workers, [{"CPU": 0.1}] * engines, strategy="STRICT_SPREAD")
    if nodes is None:
        machine.check_place(plan, "local")
        return
    with pytest.raises(ConfigError, match=rf"^scaling\.placement_strategy STRICT_SPREAD: .* need {nodes} nodes, and"):
        machine.check_place(plan, "local")


@pytest.mark.parametrize(("shown", "most"), [("", 0.0), ("-1", 0.0), ("0", 1.0)])
def test_hidden_gpus_do_not_count(shown: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    own = machine.own_resources()
    assert own["CPU"] >= 1 and own.get("GPU", 0.0) <= most


def test_a_cluster_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        machine.check_place(PLAN, f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ConfigError, match=r"^ray_address ray://127\.0\.0\.1:9: no Ray cluster answers there"):
        machine.check_place(PLAN, "ray://127.0.0.1:9")


def test_the_address_of_a_dashboard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match=r"that is a web server, perhaps Ray's dashboard"):
            machine.check_place(PLAN, f"127.0.0.1:{server.server_port}")
        server.shutdown()


def test_a_label_that_this_machine_cannot_have_is_refused() -> None:
    machine.check_labels(ResourcePlan([], [], labels=RoleLabels({"market-type": "!spot", "ray.io/node-id": "1"})))
    with pytest.raises(ConfigError, match=r"^label_selector disk: this machine has no such label"):
        machine.check_labels(ResourcePlan([], [], labels=RoleLabels(engines={"disk": "fast"})))


def test_auto_is_refused_where_no_node_of_ray_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    monkeypatch.setattr(machine, "RAY_PROCESSES", ("as-if-a-raylet",))  # others may run Ray here
    with pytest.raises(
        ConfigError, match=r"^ray_address auto: no Ray cluster is on this machine; `ray start` makes one$"
    ):
        machine.check_place(PLAN, "auto")
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "as-if-a-raylet")
    with subprocess.Popen([program, "60"]) as node:
        while Path(f"/proc/{node.pid}/comm").read_text() != "as-if-a-raylet\n":  # it has begun, but not its name
            time.sleep(0.01)
        machine.check_place(PLAN, "auto")
        node.kill()


@pytest.mark.parametrize("address", ["http://10.0.0.1", "10.0.0.1", "nosuch://x", "10.0.0.1:1:2"])
def test_an_address_of_no_kind_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    with pytest.raises(ConfigError, match=rf"^ray_address {address}: expected auto, HOST:PORT or ray://HOST:PORT$"):
        machine.check_place(PLAN, address)
    assert machine.address_of("local") is None
