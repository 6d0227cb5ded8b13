"""Which transport an engine takes follows from where engines and trainers compute."""

from typing import get_args

import pytest

from rlx.config.sections.rollout import TransportName
from rlx.rollout.weight_sync.base import DeviceLocation, EngineLocation, Source
from rlx.rollout.weight_sync.topology import TRANSPORTS, routes


def engine(*gpus: str, node: str = "a") -> EngineLocation:
    return EngineLocation("process", tuple(DeviceLocation(node, gpu) for gpu in gpus))


def trainers(*gpus: str, node: str = "a") -> list[DeviceLocation]:
    return [DeviceLocation(node, gpu) for gpu in gpus]


def nccl(rank: int) -> Source:
    return Source("nccl", rank)


def gloo(rank: int) -> Source:
    return Source("gloo", rank)


def shared(rank: int) -> Source:
    return Source("shared_memory", rank)


STORE = Source("object_store", 0)


def test_engines_share_memory_with_the_trainer_on_their_gpu() -> None:
    assert routes({0: engine("g1"), 1: engine("g0"), 2: engine("g1")}, trainers("g0", "g1")) == {
        0: (shared(1),),
        1: (shared(0),),
        2: (shared(1),),
    }


def test_nccl_reaches_every_other_gpu_once() -> None:
    engines = {0: engine("g2"), 3: engine("g3", node="b"), 4: engine("g2"), 5: engine("g0")}
    # The second engine on g2 is left to the object store.
    assert routes(engines, trainers("g0", "g1")) == {0: (nccl(1),), 3: (nccl(2),), 4: (STORE,), 5: (shared(0),)}


def test_the_workers_of_a_split_model_each_have_their_own_transport() -> None:
    engines = {0: engine("g1", "g2"), 1: engine("g3", "g4"), 2: engine("g0", "g1")}
    assert routes(engines, trainers("g0", "g1")) == {
        0: (shared(1), nccl(1)),
        1: (nccl(2), nccl(3)),
        2: (shared(0), shared(1)),
    }


def test_without_gpus_on_both_sides_there_is_the_object_store() -> None:
    assert routes({0: engine("g0")}, trainers("")) == {0: (STORE,)}
    assert routes({0: engine("")}, trainers("g0")) == {0: (STORE,)}
    assert routes({0: engine(""), 1: engine("", node="b")}, trainers("", "")) == {0: (shared(0),), 1: (STORE,)}


def test_split_models_that_the_object_store_cannot_reach_take_shared_memory_or_gloo() -> None:
    engines = {0: engine("", ""), 1: engine("", "", node="b"), 2: engine("g1", "g2"), 3: engine("")}
    assert routes(engines, trainers("")) == {
        0: (shared(0), shared(0)),
        1: (gloo(1), gloo(2)),
        2: (gloo(3), gloo(4)),
        3: (shared(0),),
    }


def test_an_engine_that_nccl_reaches_in_part_takes_no_rank_of_its_group() -> None:
    engines = {0: engine("g1", ""), 1: engine("g2")}
    assert routes(engines, trainers("g0")) == {0: (gloo(1), gloo(2)), 1: (nccl(1),)}


@pytest.mark.parametrize(
    ("choice", "sources"),
    [
        ("auto", {0: (nccl(1),), 1: (shared(0),)}),
        ("object_store", {0: (STORE,), 1: (STORE,)}),
        ("gloo", {0: (gloo(1),), 1: (gloo(2),)}),
    ],
)
def test_the_setting_chooses(choice: TransportName, sources: dict[int, tuple[Source, ...]]) -> None:
    assert routes({0: engine("g1"), 1: engine("g0")}, trainers("g0"), choice) == sources


def test_every_value_of_the_setting_is_known() -> None:
    for choice in get_args(TransportName):
        assert routes({0: engine("")}, trainers(""), choice)
        assert choice == "auto" or choice in TRANSPORTS
