"""What a worker does around training: phases from rank 0 alone, and the details of a failed reward function."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch.distributed as dist
from shared import OnRanks
from test_run_folder import put, settings

from rlx.config.loading import from_tree
from rlx.config.sections.scaling import ScalingConfig
from rlx.rewards.custom import RewardError
from rlx.rollout.weight_sync.process_group import choose_interface
from rlx.runs import worker
from rlx.runs.mailbox import JobSpec, Message
from rlx.runs.run_folder import keeping_details
from rlx.runs.worker_group import backend_of
from rlx.storage.filesystem import Storage
from rlx.tracking import changes
from rlx.types import Phase, Replay


@pytest.mark.parametrize(("rank", "told"), [(0, ["models", "engine 1 is back"]), (1, ["engine 1 is back"])])
def test_phases_come_from_the_first_rank_and_messages_from_all(rank: int, told: list[str]) -> None:
    sent: list[Any] = []
    folder = Storage.local(".")
    job = worker.Job(SimpleNamespace(folder=folder), SimpleNamespace(send=sent.append), 1, folder)  # type: ignore[arg-type]
    reporter = worker.silent(job, rank)
    reporter.notify(Phase("models"))
    reporter.notify("engine 1 is back")
    assert sent == [Message(text) for text in told]
    assert [isinstance(message.text, Phase) for message in sent] == [text == "models" for text in told]


def test_the_first_rank_notes_what_changes_where_the_run_goes_on(tmp_path: Path) -> None:
    """On a rank, once a checkpoint is restored: a resume that ends before that has changed nothing."""
    folder, start = Storage.local(tmp_path), put(tmp_path, 5, train__actor_lr=1e-3)
    spec = JobSpec(from_tree(settings(train__actor_lr=2e-3)), "", folder)
    job = worker.Job(spec, SimpleNamespace(), 1, folder)  # type: ignore[arg-type]
    worker.recorder(job, 1, start)
    assert changes.noted_changes(folder) == {}
    worker.recorder(job, 0, start)
    assert changes.noted_changes(folder) == {5: ["train.actor_lr"]}


@pytest.mark.parametrize(
    ("until", "asked", "ends"),
    [(None, False, [False] * 4), (None, True, [True] * 4), (2, False, [False, False, True, True])],
)
def test_a_job_ends_with_its_step_or_when_it_is_asked_to(until: int | None, asked: bool, ends: list[bool]) -> None:
    replay, folder = None if until is None else Replay(until), Storage.local(".")
    spec, box = SimpleNamespace(replay=replay, folder=folder), SimpleNamespace(is_stopped=lambda number: asked)
    job = worker.Job(spec, box, 1, folder)  # type: ignore[arg-type]
    assert [worker.silent(job, 0).should_stop(step) for step in range(4)] == ends
    assert not any(worker.silent(job, 1).should_stop(step) for step in range(4))


def test_the_details_of_a_failed_reward_function_are_kept_in_the_runs_folder(tmp_path: Path) -> None:
    with pytest.raises(RewardError) as refused, keeping_details(Storage.local(tmp_path)):
        raise RewardError("reward mine:f: raised KeyError('x') at f.py:3", "Traceback ...\ncalled with\n{}")
    (file,) = tmp_path.iterdir()
    assert str(refused.value) == f"reward mine:f: raised KeyError('x') at f.py:3; in full in {file}"
    assert file.read_text() == "reward mine:f: raised KeyError('x') at f.py:3\n\nTraceback ...\ncalled with\n{}"


@pytest.mark.parametrize("error", [RewardError("reward task: no score"), ValueError("another")])
def test_other_errors_pass_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as passed, keeping_details(Storage.local(tmp_path)):
        raise error
    assert passed.value is error and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("use_gpu", "offload", "backend"),
    [
        (False, (), "gloo"),
        (True, (), "nccl"),
        (True, ("reference",), "nccl"),
        (True, ("critic",), "cpu:gloo,cuda:nccl"),
    ],
)
def test_gradients_in_host_memory_need_gloo_too(use_gpu: bool, offload: tuple[Any, ...], backend: str) -> None:
    assert backend_of(ScalingConfig(use_gpu=use_gpu), offload) == backend


def gloo_after_choosing(rank: int, ranks: int, host: str, named: str) -> tuple[str | None, set[str]]:
    """The interface that gloo is told to take for a store on a host, and where a group listens that is made then.

    Args:
        named: an interface that the environment names before; empty: none.
    """
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update({"GLOO_SOCKET_IFNAME": named} if named else {})
    before = {each.laddr for each in psutil.Process().net_connections()}
    choose_interface((host, 9))
    dist.new_group(backend="gloo")
    new = {each.laddr for each in psutil.Process().net_connections()} - before
    return os.environ.get("GLOO_SOCKET_IFNAME"), {each.ip for each in new}


def test_gloo_listens_where_the_store_is_reached_from_unless_an_interface_is_named(on_ranks: OnRanks) -> None:
    own = ray.util.get_node_ip_address()
    ((name, listens),) = on_ranks(1, gloo_after_choosing, own, "")
    assert name and own in {each.address for each in psutil.net_if_addrs()[name]}
    assert listens == {own}
    assert on_ranks(1, gloo_after_choosing, "127.0.0.1", "") == [("lo", {"127.0.0.1"})]
    assert on_ranks(1, gloo_after_choosing, own, "lo") == [("lo", {"127.0.0.1"})]
