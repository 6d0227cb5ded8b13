"""Completions that travel between replicas, over gloo; tests/gpu has them travel over NCCL."""

from typing import Any

import pytest
import torch
from conftest import OnRanks
from test_experience import PAD, completion, judged
from torch import Tensor

from rlx.mesh import Mesh
from rlx.training import experience
from rlx.training.experience import Experience, balance_over_replicas

ROWS, COUNT = 6, 2


def drawn(replica: int) -> Experience:
    """A replica's completions; those of different replicas are not as wide, and no two are alike."""
    generator = torch.Generator().manual_seed(replica)
    rows = []
    for number in range(ROWS):
        prompt, response = torch.randint(1, 9 * (replica + 1), (2,), generator=generator).tolist()
        own = 1 + replica * ROWS + number
        rows.append(judged(completion([own] * prompt, [own] * response, own), score=own / 2, greedy_score=-own))
    batch = experience.build_batch(rows, PAD)
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
    batch = balance_over_replicas(drawn(grid.dp_rank).to(torch.device(device)), COUNT, grid)
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
