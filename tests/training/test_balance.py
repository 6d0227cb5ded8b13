"""Completions that travel between replicas, over gloo; tests/gpu has them travel over NCCL."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import scored_batch
from shared import OnRanks
from test_experience import PAD, completion, judged
from torch import Tensor

from rlx.mesh import Mesh
from rlx.training import experience
from rlx.training.experience import Experience, deal_minibatches, return_to_owners

ROWS, COUNT = 6, 2


def drawn(replica: int) -> Experience:
    """A replica's completions; those of different replicas are not as wide, and no two are alike."""
    generator = torch.Generator().manual_seed(replica)
    rows = []
    for number in range(ROWS):
        prompt, response = torch.randint(1, 9 * (replica + 1), (2,), generator=generator).tolist()
        own = 1 + replica * ROWS + number
        rows.append(judged(completion([own] * prompt, [own] * response, own), score=own / 2, greedy_score=-own))
    batch = scored_batch(rows, PAD)
    zero = torch.zeros_like(batch.mask)
    logprobs, values, advantages = (batch.mask * (batch.groups[:, None] + i / 4) for i in range(3))
    columns = {"logprobs": logprobs, "ref_logprobs": zero, "values": values, "entropy": zero}
    return batch.with_logprobs(columns).with_advantages(advantages, zero)


def kept(batch: Experience) -> list[list[Any]]:
    """Of each mini-batch, what is known of each completion, the padding left out."""
    names = ("rollout_logprobs", "logprobs", "ref_logprobs", "values", "entropy", "advantages", "returns")
    found = []
    for part in experience.minibatches(batch, COUNT):
        found.append([])
        for i in range(len(part.scores)):
            prompt, response = int(part.prompt_lengths[i]), int(part.response_lengths[i])
            assert not part.mask[i, response:].any() and part.mask[i, :response].all()
            columns = [getattr(part, name)[i, :response].tolist() for name in names]
            numbers = [part.groups[i].item(), part.scores[i].item(), part.greedy_scores[i].item()]
            found[-1].append([numbers, part.ids[i, : prompt + response].tolist(), *columns])
    return found


def dealt_out(rank: int, ranks: int, tp: int, device: str) -> tuple[list[list[Any]], Tensor, int, Tensor]:
    grid = Mesh.of(device, tp)
    own = drawn(grid.dp_rank).to(torch.device(device))
    own = replace(own, home=own.row + grid.dp_rank * ROWS)
    batch = deal_minibatches(own, COUNT, grid)
    # Whatever is computed where they were dealt, also twice, comes home.
    again = deal_minibatches(batch, COUNT, grid, (0, 1))
    home = return_to_owners(replace(again, values=2 * again.values), grid)
    assert kept(home) == kept(replace(own, values=2 * own.values)) and home.home.tolist() == own.home.tolist()
    assert {column.device.type for column in batch.columns.values()} == {device}
    batch = batch.to(torch.device("cpu"))
    return kept(batch), batch.prompt_lengths + batch.response_lengths, batch.mask.shape[1], batch.row


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_mini_batches_hold_the_same_completions_dealt_evenly(ranks: int, tp: int, on_ranks: OnRanks) -> None:
    assert_dealt(on_ranks(ranks, dealt_out, tp, "cpu"), ranks, tp)


def assert_dealt(found: list[Any], ranks: int, tp: int) -> None:
    before = [kept(drawn(replica)) for replica in range(ranks // tp)]
    for m in range(COUNT):
        expected = sorted(row for replica in before for row in replica[m])
        assert sorted(row for rows, *_ in found[::tp] for row in rows[m]) == expected
        assert {len(rows[m]) for rows, *_ in found} == {ROWS // COUNT}
    for rows, lengths, width, place in found:
        assert place.tolist() == list(range(ROWS))
        assert width == max(len(row[2]) for part in rows for row in part)  # cut to the replica's own longest
        assert len(lengths) == ROWS
    for i, (rows, *_) in enumerate(found):
        assert rows == found[i // tp * tp][0]  # neighbours train on the same
    if ranks > tp:  # what each had was of its own lengths
        assert [rows for rows, *_ in found[::tp]] != before
        sums = [lengths.sum().item() for _, lengths, *_ in found[::tp]]
        own = [sum(len(row[1]) for part in replica for row in part) for replica in before]
        assert max(sums) / min(sums) < 1.3 < max(own) / min(own)


def shuffled(rank: int, ranks: int, tp: int) -> list[list[list[Any]]]:
    """The mini-batches of two later passes over twelve completions of six prompts, of which a replica has its share."""
    grid = Mesh.of("cpu", tp)
    everything = experience.concat([drawn(0), drawn(1)])
    everything = replace(everything, groups=torch.arange(12) // 2)
    batch, found = everything.rows(everything.groups % grid.dp_size == grid.dp_rank), []
    for epoch in (1, 2):
        batch = deal_minibatches(batch, COUNT, grid, (5, 2, epoch))
        assert batch.row.tolist() == list(range(12 // grid.dp_size))
        found.append(kept(batch))
    return found


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (3, 1), (4, 2)])
def test_later_passes_have_the_same_mini_batches_on_any_number_of_ranks(ranks: int, tp: int, on_ranks: OnRanks) -> None:
    (alone,), found = on_ranks(1, shuffled, 1), on_ranks(ranks, shuffled, tp)
    for number, expected in enumerate(alone):
        assert [len(part) for part in expected] == [6, 6]
        for m in range(COUNT):
            joined = [row for replica in found[::tp] for row in replica[number][m]]
            assert sorted(joined) == sorted(expected[m])
    assert sorted(alone[0][0]) != sorted(alone[1][0])


def apart(rank: int, ranks: int) -> list[list[int]]:
    """The groups of each mini-batch of a second pass, in order, after a first that was dealt by completions."""
    grid = Mesh.of("cpu", 1)
    own = drawn(grid.dp_rank)
    own = replace(own, groups=torch.arange(ROWS) // 3 + 2 * grid.dp_rank)  # two groups of three
    batch = deal_minibatches(own, 1, grid)
    assert len(set(batch.groups.tolist())) > 2  # single completions have travelled
    batch = deal_minibatches(batch, 1, grid, (5, 2, 1), packed=True)
    return [part.groups.tolist() for part in experience.minibatches(batch, 1)]


def test_completions_of_a_group_are_neighbours_wherever_they_come_from(on_ranks: OnRanks) -> None:
    for (groups,) in on_ranks(2, apart):
        assert len(list(itertools.groupby(groups))) == len(set(groups))
