"""Joins a Ray cluster, or starts one of this machine alone.

Left out: what a run needs of the cluster (`resources`), and what its nodes need of the driver (`nodes`).
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from rlx.cluster.leftovers import clear_leftovers, ray_folder
from rlx.cluster.machine import address_of
from rlx.cluster.resources import ResourcePlan, wait_for_room
from rlx.config.errors import ConfigError, one_line
from rlx.config.run import RunConfig
from rlx.types import Notify, Phase

# The environment of a cluster that this process starts: it needs no actors for preemption and for metrics of Ray Train.
OWN_CLUSTER_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}

# Nobody else reaches the process groups of a cluster of one node.
ONE_NODE_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
_LOG = logging.getLogger("rlx")
_own_clusters = set[str]()  # addresses


def note_own_cluster() -> None:
    """Notes that this process has started the cluster that it is in."""
    _own_clusters.add(ray.get_runtime_context().gcs_address)


def is_own_cluster() -> bool:
    """Whether this process has started its cluster; any other may grow, and have nodes with other disks."""
    return ray.get_runtime_context().gcs_address in _own_clusters


def connect(config: RunConfig, needed: ResourcePlan, notify: Notify | None = None) -> None:
    """Joins the Ray cluster at `ray_address` or RAY_ADDRESS, or starts one in this process, unless that was done.

    A cluster that was joined may still grow: there, a plan that does not fit waits as long as the config says.

    Raises:
        ConfigError: the cluster cannot be reached, or cannot hold what a run needs.
    """
    address = address_of(config.ray_address)
    if not ray.is_initialized():
        if notify:
            notify(Phase("Ray cluster"))
        quiet_environment()
        try:
            _join(address) if address else start_cluster()
        except Exception as error:  # also a bare one, where its start takes too long
            what = f"ray_address {address}" if address else f"Ray does not start here, see {ray_folder()}/ray"
            token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
            lacks_token = address and token.exists() and "RAY_AUTH_MODE" not in os.environ
            hint = "; a cluster that asks for a token needs RAY_AUTH_MODE=token" if lacks_token else ""
            if "timed out during startup" in str(error):
                hint = "; if the machine is busy, try again later, or join one that `ray start --head` has started"
            raise ConfigError(f"{what}: {one_line(error, 500)}{hint}") from None
        if address and notify:
            notify(f"joined the Ray cluster at {ray.get_runtime_context().gcs_address}")
    wait_for_room(needed, 0.0 if is_own_cluster() else config.wait_for_resources, notify or _LOG.warning)


def _join(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def start_cluster(**options: Any) -> None:
    """Starts a Ray cluster of one node in this process.

    It has a dashboard, on a free port of this machine: Ray Train's cleaner of placement groups asks it who is alive.
    """
    clear_leftovers()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # With two clusters on a machine, Ray would not know which dashboard is meant.
    os.environ.update(OWN_CLUSTER_ENVIRONMENT | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"})
    for name, value in ONE_NODE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **dashboard, **options)
    note_own_cluster()
    with suppress(OSError):  # Ray writes it for everybody to read, or somebody else has it
        Path("~/.ray/auth_token").expanduser().chmod(0o600)


def quiet_environment() -> None:
    """Sets what the libraries read when they start: less output, and reports as often as steps."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    quiet = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a config mean the same everywhere
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # also how often the controller reads reports
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
