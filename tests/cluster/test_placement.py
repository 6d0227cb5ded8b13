"""Which nodes Ray's rules choose for the bundles of a group, by hand."""

from collections.abc import Sequence

import pytest

from rlx.cluster.placement import Bundle, FreeNode, Node, meets, place, total_of


def cpus(*amounts: float) -> list[Bundle]:
    return [{"CPU": amount} for amount in amounts]


def placed(strategy: str, nodes: Sequence[float], bundles: Sequence[float]) -> tuple[bool, list[float]]:
    """Whether bundles of so many CPUs find room on nodes of so many, and what is free then."""
    free = [FreeNode(Node({"CPU": amount})) for amount in nodes]
    found = place(free, cpus(*bundles), [{}] * len(bundles), strategy)
    return found, [node.free["CPU"] for node in free]


@pytest.mark.parametrize(
    ("strategy", "nodes", "bundles", "left"),
    [
        ("PACK", [4, 8], [1, 1, 2], [4, 4]),  # the first keeps 7/8 of the larger node, which takes the others too
        ("PACK", [4, 3], [2, 2, 2], [0, 1]),  # two on the first node, where the third has no room
        ("PACK", [2, 4], [3, 2], [0, 1]),
        ("PACK", [2, 4], [3, 3], None),  # the second 3 has a node of 2 alone
        ("STRICT_PACK", [4, 8], [3, 3], [4, 2]),
        ("STRICT_PACK", [4, 4], [3, 3], None),
        ("SPREAD", [4, 8], [1, 1], [3, 7]),
        ("SPREAD", [4, 8], [1, 1, 1], [3, 6]),  # no node is unused: 1/7 of the larger is less than 1/3
        ("SPREAD", [2, 8], [3, 3], [2, 2]),  # the second 3 fits on the used node alone
        ("SPREAD", [2, 2], [3], None),
        ("STRICT_SPREAD", [4, 8], [1, 1], [3, 7]),
        ("STRICT_SPREAD", [4, 8], [1, 1, 1], None),
    ],
)
def test_each_strategy_has_its_rule(
    strategy: str, nodes: list[float], bundles: list[float], left: list[float] | None
) -> None:
    found, free = placed(strategy, nodes, bundles)
    assert (found, free) == ((True, left) if left else (False, nodes))


def test_the_node_that_keeps_the_largest_part_is_judged_by_all_resources_of_the_bundle() -> None:
    # CPU 1/2 + memory 1/10 = 0.6 of the first, 1/8 + 1/2 = 0.625 of the second; by CPUs alone it would be the second
    nodes = [FreeNode(Node({"CPU": 2.0, "memory": 10.0})), FreeNode(Node({"CPU": 8.0, "memory": 2.0}))]
    assert place(nodes, [{"CPU": 1.0, "memory": 1.0, "GPU": 0.0}], [{}], "PACK")
    assert [node.free for node in nodes] == [{"CPU": 1.0, "memory": 9.0, "GPU": 0.0}, {"CPU": 8.0, "memory": 2.0}]


def test_selectors_send_each_bundle_to_a_node_with_its_labels() -> None:
    nodes = [FreeNode(Node({"CPU": 9.0})), FreeNode(Node({"CPU": 2.0}, {"kind": "h100"}))]
    assert place(nodes, cpus(1, 1), [{"kind": "h100"}, {}], "SPREAD")
    assert [node.free for node in nodes] == [{"CPU": 8.0}, {"CPU": 1.0}]  # without what stood for the label
    assert not place(nodes, cpus(1, 1), [{"kind": "h100"}] * 2, "PACK")
    assert not place(nodes, cpus(1), [{"kind": "a100"}], "PACK")


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ("h100", True),
        ("a100", False),
        ("!a100", True),
        ("!h100", False),
        ("in(a100, h100)", True),
        ("in(a100,l4)", False),
        ("!in(a100,h100)", False),
        ("!in(a100,l4)", True),
    ],
)
def test_a_selector_names_a_value_others_or_a_list(wanted: str, met: bool) -> None:
    assert meets({"kind": "h100", "zone": "a"}, {"kind": wanted}) is met


def test_a_node_without_the_label_meets_only_what_is_refused() -> None:
    assert not meets({}, {"kind": "h100"})
    assert meets({}, {"kind": "!h100"})
    assert meets({}, {})
    assert not meets({"kind": "h100", "zone": "b"}, {"kind": "h100", "zone": "a"})  # all of them


def test_parts_of_gpus_share_the_fullest_one_and_whole_ones_are_unused() -> None:
    node = FreeNode(Node({"GPU": 3.0}))
    assert [node.take({"GPU": amount}) for amount in (0.5, 0.75, 0.25, 0.25)] == [True] * 4
    assert node.gpus == [0.25, 0.0, 1.0]  # 0.5, then 0.75 beside it, 0.25 on the fuller one, 0.25 on the other
    assert node.free == {"GPU": 1.25}
    assert not node.take({"GPU": 0.5} | {"CPU": 1.0})  # no CPU: nothing is taken
    assert node.take({"GPU": 1.0})
    assert node.gpus == [0.25, 0.0, 0.0]


def test_two_halves_of_two_gpus_are_no_whole_one() -> None:
    node = FreeNode(Node({"GPU": 2.0}))
    assert node.take({"GPU": 0.75})
    assert node.take({"GPU": 0.5})
    assert not node.take({"GPU": 0.6})  # 0.75 are free, 0.25 and 0.5 of a GPU
    assert (node.gpus, node.free) == ([0.25, 0.5], {"GPU": 0.75})


def test_a_bundle_without_gpus_takes_none() -> None:
    node = FreeNode(Node({"CPU": 1.0, "GPU": 1.0}))
    assert node.take({"CPU": 1.0})
    assert (node.gpus, node.free) == ([1.0], {"CPU": 0.0, "GPU": 1.0})
    assert FreeNode(Node({"CPU": 1.0})).take({"CPU": 1.0, "GPU": 0.0})


def test_the_total_has_each_resource_once() -> None:
    assert total_of([{"CPU": 1.0, "GPU": 0.5}, {"GPU": 0.25}, {}]) == {"CPU": 1.0, "GPU": 0.75}
