"""Which groups a step trains on where several replicas have generated them, over gloo; tests/gpu has it over NCCL."""

from dataclasses import replace
from typing import Any

import pytest
from shared import OnRanks
from test_experience import completion, judged, numbers

from rlx.mesh import Mesh, exchange_objects
from rlx.training.collector import Selection
from rlx.types import ScoredCompletion

VARIED = [{0, 1, 2, 4}, set[int](), {16, 17, 19, 23}]
"""the prompts whose two completions differ, in each of three rounds of eight: replica 2 of four has one of them"""
MISSING = [4, 4, 0]
"""groups after each round"""
FIRST = [0, 1, 2, 4, 16, 17, 19, 23]
"""prompts that the step trains on after three rounds"""
ROUND, SAMPLES = 8, 2


def group(number: int, is_varied: bool) -> list[ScoredCompletion]:
    own = completion([1 + number], [2] * (1 + number), number)
    return [judged(replace(own, sample=i), score=float(i * is_varied)) for i in range(SAMPLES)]


def chosen(rank: int, ranks: int, tp: int, device: str, rounds: int) -> tuple[list[int], list[int], list[int]]:
    """How many groups were missing after each round, and the prompts of the completions taken and left out."""
    mesh = Mesh.of(device, tp)
    selection = Selection(ROUND // mesh.dp_size, SAMPLES, mesh, filtered=True, greedy=False)
    missing = []
    for number, varied in enumerate(VARIED[:rounds]):
        for prompt in range(number * ROUND + mesh.dp_rank, (number + 1) * ROUND, mesh.dp_size):
            selection.add(group(prompt, prompt in varied))
        missing.append(selection.count_missing())
    taken = selection.take()
    assert selection.taken == taken
    for i in range(0, len(taken), SAMPLES):  # they are whole, wherever they come from
        prompt = taken[i].completion.prompt.id
        assert taken[i : i + SAMPLES] == group(prompt, any(prompt in varied for varied in VARIED))
    return missing, numbers(taken[::SAMPLES]), numbers(selection.left_out[::SAMPLES])


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize(
    ("rounds", "missing", "expected"),
    [(3, MISSING, FIRST), (2, MISSING[:2], [0, 1, 2, 4, 3, 5, 6, 7])],
)
def test_all_replicas_choose_the_same_groups_together(
    ranks: int, tp: int, rounds: int, missing: list[int], expected: list[int], on_ranks: OnRanks
) -> None:
    """Once they have enough, or fill up: the same mini-batches on any number of replicas, each group on one."""
    assert_chosen(on_ranks(ranks, chosen, tp, "cpu", rounds), tp, missing, expected)


def assert_chosen(found: list[Any], tp: int, missing: list[int], expected: list[int]) -> None:
    for i, each in enumerate(found):
        assert each[0] == missing
        assert each == found[i // tp * tp]  # neighbours train on the same
    leaders = found[::tp]
    for replica, (_, taken, _) in enumerate(leaders):
        assert taken == expected[replica :: len(leaders)]
    left_out = [number for _, _, numbers in leaders for number in numbers]
    assert sorted(left_out) == sorted(set(range(len(missing) * ROUND)) - set(expected))


def exchanged(rank: int, ranks: int) -> list[list[str]]:
    return exchange_objects([[f"{rank} to {other}"] * rank for other in range(ranks)], Mesh.of("cpu", 1))


@pytest.mark.parametrize("ranks", [1, 3])
def test_objects_reach_the_replica_that_they_are_for(ranks: int, on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(ranks, exchanged)):
        assert found == [[f"{other} to {rank}"] * other for other in range(ranks)]
