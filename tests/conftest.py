"""How tests are dealt over processes. The fixtures are in shared.py."""

import signal
from typing import Any

import pytest

# Ctrl-C ends what the tests start, also where they run in the background of a shell that ignores it. It is set here
# because a `preexec_fn` would fork this process with Ray in it: what the child writes breaks its connections.
signal.signal(signal.SIGINT, signal.default_int_handler)

WITH_RAY = (
    "cli/test_cli.py",
    "cluster/test_nodes.py",
    "data/test_blocks.py",
    "data/test_files.py",
    "data/test_hub.py",
    "data/test_prompts.py",
    "environments/test_actor_hosts.py",
    "rewards/test_reward_model.py",
    "rollout/",
    "runs/test_mailbox.py",
    "runs/test_resources.py",
    "runs/test_run",
    "runs/test_train_run.py",
    "sweeps/test_s",
    "test_malformed.py",
)
"""where tests use the fixture `ray_cluster`"""


def pytest_configure(config: pytest.Config) -> None:
    """What only hands tests out to other processes need not import what they do, which takes many seconds."""
    if getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.import_plugin("shared")


@pytest.hookimpl(optionalhook=True)  # GPU machines have no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files go to a process, and all with Ray to one: a second cluster costs more than it gains."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix("tests/")
            return "ray" if file.startswith(WITH_RAY) else file

    return ByFile(config, log)
