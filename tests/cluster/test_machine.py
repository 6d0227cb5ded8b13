"""What this machine cannot hold, and clusters that do not answer, are refused before Ray is imported."""

import shutil
import socket
import subprocess
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlx
from rlx.cli import doctor, sweep, train
from rlx.cluster import machine, resources
from rlx.cluster.placement import Bundle, Node
from rlx.cluster.resources import ResourcePlan, RoleLabels
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides

PLAN = ResourcePlan([{"CPU": 1.0, "GPU": 1.0}] * 2, [{"CPU": 0.5}])


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


GPUS = {"scaling__use_gpu": True, "scaling__num_workers": 2, "train__prompts_per_step": 8}
TURNS = "--rollout.placement colocated, where engines take turns with the workers"


@pytest.mark.parametrize(
    ("changes", "own", "option"),
    [
        ({}, {"GPU": 0.0}, None),
        ({}, {"GPU": 1.0}, None),
        ({}, {"GPU": 2.0}, TURNS),
        ({}, {"GPU": 3.0, "CPU": 8.0}, TURNS),
        ({"rollout__num_engines": 2}, {"GPU": 2.0}, TURNS),
        ({"rollout__max_staleness": 1}, {"GPU": 2.0}, None),
        ({"rollout__max_staleness": 1}, {"GPU": 3.0}, "--rollout.num-engines 1"),
        ({"rollout__tensor_parallel": 2}, {"GPU": 2.0}, None),
        ({"rollout__resources_per_engine.GPU": 1}, {"GPU": 2.0}, None),
        ({"scaling__resources_per_worker": {"CPU": 1, "GPU": 1}}, {"GPU": 2.0}, None),
        ({"rollout__resources_per_engine.CPU": 40}, {"GPU": 4.0, "CPU": 8.0}, None),
        ({"rollout__resources_per_engine.CPU": 5}, {"GPU": 4.0, "CPU": 8.0}, "--rollout.num-engines 1"),
        ({"scaling__use_gpu": False, "rollout__num_engines": 9}, {"CPU": 2.0}, None),
    ],
)
def test_a_new_run_without_room_is_told_of_an_option_with_which_it_is_valid_and_fits(
    changes: dict[str, Any], own: Bundle, option: str | None
) -> None:
    tree = with_overrides({}, {key.replace("__", "."): each for key, each in (GPUS | changes).items()})
    with pytest.raises(ConfigError) as error, resources.naming_ways_out(tree):
        machine.check_machine(resources.plan_resources(from_tree(tree)), own)
    told = f"; there is room with {option}" if option else ""
    assert str(error.value).endswith(f"; --ray-address joins a larger one{told}")


@pytest.mark.parametrize("command", [doctor, sweep, train], ids=lambda command: command.__name__)
def test_the_commands_that_begin_something_tell_of_it(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    monkeypatch.setattr(machine, "own_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert command.main(["--scaling.use-gpu", "true", "--storage", str(tmp_path), "--ray-address", "local"])
    assert capsys.readouterr().err.endswith(f"joins a larger one; there is room with {TURNS}\n")


def test_functions_name_the_setting_as_configs_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)
    monkeypatch.setattr(machine, "own_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    given = {"scaling.use_gpu": True, "storage": str(tmp_path), "ray_address": "local"}
    (space := tmp_path / "space.py").write_text("def space(): return {'seed': 1}")
    for function in (rlx.train, partial(rlx.tuner, space=space)):
        with pytest.raises(ConfigError, match=r"one; there is room with rollout\.placement: colocated, where engines"):
            function(rlx.load_config(overrides=given))


def test_a_run_that_has_begun_is_told_of_no_option() -> None:
    config = from_tree({"scaling": {"use_gpu": True}})
    with pytest.raises(ConfigError, match=r"need 2 GPU but the cluster has 1; --ray-address joins a larger one$"):
        machine.check_machine(resources.plan_resources(config), {"GPU": 1.0})


def test_what_several_nodes_cannot_hold_is_no_way_out() -> None:
    two = [Node({"CPU": 8.0, "GPU": 1.0})] * 2
    for strategy, told in {"STRICT_PACK": "", "PACK": f"; there is room with {TURNS}"}.items():
        tree = {"scaling": {"use_gpu": True, "num_workers": 2, "placement_strategy": strategy}}
        with pytest.raises(ConfigError) as error, resources.naming_ways_out(tree):
            raise resources.NoRoomError("no room", two)
        assert str(error.value) == f"no room{told}"


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
