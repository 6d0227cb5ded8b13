"""Which way weights take follows from where everybody is."""

import pytest

from rlx.rollout.weight_sync.topology import DeviceLocation, EngineLocation, Source, Transport, routes


def engine(*gpus: str, node: str = "a") -> EngineLocation:
    return EngineLocation("process", tuple(DeviceLocation(node, gpu) for gpu in gpus))


def ranks(*gpus: str, node: str = "a") -> list[DeviceLocation]:
    return [DeviceLocation(node, gpu) for gpu in gpus]


def nccl(rank: int) -> Source:
    return Source("nccl", rank)


def gloo(rank: int) -> Source:
    return Source("gloo", rank)


def shared(rank: int) -> Source:
    return Source("shared", rank)


def test_engines_on_the_gpus_of_trainers_share_memory_with_the_one_on_theirs() -> None:
    assert routes({0: engine("g1"), 1: engine("g0"), 2: engine("g1")}, ranks("g0", "g1")) == {
        0: (shared(1),),
        1: (shared(0),),
        2: (shared(1),),
    }


def test_nccl_reaches_every_other_gpu_once() -> None:
    there = {0: engine("g2"), 3: engine("g3", node="b"), 4: engine("g2"), 5: engine("g0")}
    # The second engine on g2 is left to the object store.
    assert routes(there, ranks("g0", "g1")) == {0: (nccl(1),), 3: (nccl(2),), 5: (shared(0),)}


def test_the_parts_of_a_split_model_each_have_their_own_way() -> None:
    there = {0: engine("g1", "g2"), 1: engine("g3", "g4"), 2: engine("g0", "g1")}
    assert routes(there, ranks("g0", "g1")) == {
        0: (shared(1), nccl(1)),
        1: (nccl(2), nccl(3)),
        2: (shared(0), shared(1)),
    }


def test_without_gpus_on_both_sides_there_is_the_object_store() -> None:
    assert routes({0: engine("g0")}, ranks("")) == {}
    assert routes({0: engine("")}, ranks("g0")) == {}
    assert routes({0: engine(""), 1: engine("", node="b")}, ranks("", "")) == {0: (shared(0),)}  # on CPUs as well


def test_what_the_object_store_does_not_reach_takes_shared_memory_or_gloo() -> None:
    there = {0: engine("", ""), 1: engine("", "", node="b"), 2: engine("g1", "g2"), 3: engine("")}
    assert routes(there, ranks("")) == {
        0: (shared(0), shared(0)),
        1: (gloo(1), gloo(2)),
        2: (gloo(3), gloo(4)),
        3: (shared(0),),
    }


@pytest.mark.parametrize(
    ("transport", "sources"),
    [
        ("auto", {0: (nccl(1),), 1: (shared(0),)}),
        ("object_store", {}),
        ("gloo", {0: (gloo(1),), 1: (gloo(2),)}),
    ],
)
def test_a_way_can_be_asked_for(transport: Transport, sources: dict[int, tuple[Source, ...]]) -> None:
    assert routes({0: engine("g1"), 1: engine("g0")}, ranks("g0"), transport) == sources
