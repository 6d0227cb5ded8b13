"""How many trials run at once as nodes come and go, and what an autoscaler is asked for."""

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlx.cluster.placement import Node
from rlx.cluster.resources import ResourcePlan
from rlx.config.errors import ConfigError
from rlx.sweeps import room
from rlx.sweeps.records import SweepPlan
from rlx.sweeps.room import NeededModel, Room

ONE = {"CPU": 1.0}  # half of it for the worker, half for the engine


class Changing:
    """A cluster of which a test says how many nodes it has; it keeps what was asked for and what was brought."""

    def __init__(self) -> None:
        self.count, self.asked, self.brought = 1, list[int](), list[str]()
        self.refuses, self.has_copied = False, threading.Event()
        self.has_copied.set()

    def nodes(self) -> list[Node]:
        return [Node(ONE)] * self.count

    def others(self) -> list[str]:
        return [str(number) for number in range(1, self.count)]

    def ask(self, needed: ResourcePlan, times: int) -> None:
        self.asked.append(times)

    def bring(self, path: str, setting: str) -> None:
        if self.refuses:
            raise ConfigError(f"{setting} {path}: the node is gone")
        assert self.has_copied.wait(60)
        self.brought.append(path)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Changing:
    made = Changing()
    monkeypatch.setattr(room, "cluster_nodes", made.nodes)
    monkeypatch.setattr(room.nodes, "other_nodes", made.others)
    monkeypatch.setattr(room.nodes, "bring_folder", made.bring)
    monkeypatch.setattr(room, "ask_for", made.ask)
    monkeypatch.setattr(room, "_COUNT_NODES_S", 0.0)
    monkeypatch.setattr(room.connection, "is_own_cluster", lambda: False)
    return made


def room_of(tmp_path: Path, **options: Any) -> Room:
    tree = {"scaling": {"num_workers": 1}, "rollout": {"num_engines": 1}}
    return Room(
        SweepPlan("s", tree, str(tmp_path / "space.py"), candidates=8, **options), [NeededModel("m", "model.path")]
    )


def test_trials_at_once_follow_the_cluster_as_it_grows_and_shrinks(cluster: Changing, tmp_path: Path) -> None:
    made, counts = room_of(tmp_path), []
    for cluster.count in (1, 3, 20, 2):
        counts.append(made.trials(8))
    assert counts == [1, 3, 8, 2]


def test_an_autoscaler_is_asked_for_what_is_open_and_for_no_more(cluster: Changing, tmp_path: Path) -> None:
    made, few = room_of(tmp_path), room_of(tmp_path, max_concurrent=2)
    for open_trials in (8, 3):
        made.trials(open_trials)
        few.trials(open_trials)
    few.trials(1)
    assert cluster.asked == [8, 2, 3, 2, 1]


def test_a_cluster_of_rlx_alone_is_asked_for_nothing(
    cluster: Changing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.connection, "is_own_cluster", lambda: True)
    assert room_of(tmp_path).trials(8) == 1 and cluster.asked == []


def test_new_nodes_get_the_models_and_are_tried_again_if_that_failed(cluster: Changing, tmp_path: Path) -> None:
    made = room_of(tmp_path)
    made.trials(8)
    assert cluster.brought == []
    cluster.count, cluster.refuses = 2, True
    made.trials(8)
    cluster.refuses = False
    made.trials(8)
    made.trials(8)
    assert cluster.brought == ["m"]


def test_a_sweep_does_not_wait_for_a_long_copy_and_the_node_counts_after_it(
    cluster: Changing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_MOMENT_S", 0.01)
    made = room_of(tmp_path)
    cluster.count = 3
    cluster.has_copied.clear()
    assert [made.trials(8), made.trials(8), cluster.brought] == [1, 1, []]
    cluster.has_copied.set()
    while not cluster.brought:  # once: there is one copy at a time
        time.sleep(0.01)
    monkeypatch.setattr(room, "_MOMENT_S", 60.0)
    assert [made.trials(8), cluster.brought] == [3, ["m"]]
    assert copy.deepcopy(made).trials(8) == 3  # Tune makes such copies
