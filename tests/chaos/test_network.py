"""Who has no secret reads and writes nothing of a run, from another address of this machine."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch.distributed as dist
from shared import Script
from test_kill import words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Start = Callable[..., Script]


def listening(script: Script) -> set[tuple[str, int]]:
    """Where the processes of a driver listen: addresses and ports."""
    processes = [psutil.Process(script.process.pid), *psutil.Process(script.process.pid).children(True)]
    found = [each for process in processes for each in process.net_connections("tcp")]
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def is_store(host: str, port: int) -> bool:
    """Whether a store of torch answers there."""
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=3))  # type: ignore[attr-defined]
        return bool(store.num_keys() >= 0)
    except RuntimeError:
        return False


def is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(3)
        return probe.connect_ex((host, port)) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_store_is_reached_from_another_address(ranks: int, tiny_model: Path, tmp_path: Path, script: Start) -> None:
    outside = ray.util.get_node_ip_address()
    assert not outside.startswith("127."), "this machine has no other address"
    run = script("ppo.py", *words(tmp_path, tiny_model, "open", 500), "--scaling.num-workers", str(ranks))
    run.wait_for("step 2/500")
    places = listening(run)
    ports = sorted({port for _, port in places})
    with ThreadPoolExecutor(16) as pool:
        is_reached = dict(zip(ports, pool.map(partial(is_open, outside), ports), strict=True))
        reached = [port for port in ports if is_reached[port]]
        stores = sum(pool.map(partial(is_store, outside), reached))
    print(f"{len(ports)} ports, {len(reached)} of them reached from another address")
    assert not stores and len(ports) - len(reached) >= 2  # those of the process group and for weights are not reached
