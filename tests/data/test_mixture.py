"""Several prompt tables as one, and the order that mixes them by weight."""

import itertools
import json
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from rlx.data import stream
from rlx.data.mixture import BLOCK, JoinedRows, MixedOrder
from rlx.data.stream import PromptStream, Shuffled, TableRows, digest_of
from rlx.types import Prompt


def table(size: int, name: str, entries: bool = False) -> pa.Table:
    columns: dict[str, list[object]] = {
        "question": [f"{name}{i}" for i in range(size)],
        "answer": [str(i) for i in range(size)],
        "token_ids": [[i, ord(name)] for i in range(size)],
    }
    return pa.table(columns | ({"entry": [100 + i for i in range(size)]} if entries else {}))


A, B, C = table(7, "a"), table(50, "b", entries=True), table(3, "c")
JOINED = JoinedRows(tuple(TableRows(each) for each in (A, B, C)))


def stream_of(weights: list[float], seed: int = 4, rank: int = 0, ranks: int = 1) -> PromptStream:
    return PromptStream(JOINED, seed, rank, ranks, order=MixedOrder(seed, JOINED.sizes, weights))


def test_joined_rows_are_those_of_the_tables_with_their_number() -> None:
    found = stream.prompts(JOINED, [59, 0, 7, 8, 6, 60])
    assert [(prompt.question, prompt.source, prompt.dataset_index) for prompt in found] == [
        ("c2", 2, None),
        ("a0", 0, None),
        ("b0", 1, 100),
        ("b1", 1, 101),
        ("a6", 0, None),
        ("a0", 0, None),
    ]
    assert found[0].token_ids == (2, ord("c")) and len(JOINED) == 60
    assert JOINED.digest == digest_of(pa.concat_tables([A, B, C], promote_options="default"))


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [0.7, 0.2, 0.1], [1000, 1], [1, 2, 3, 4, 5, 6, 7]])
def test_weights_are_held_within_one_percent(weights: list[float]) -> None:
    order = MixedOrder(3, [10**6] * len(weights), weights)
    starts = np.arange(len(weights)) * 10**6
    drawn = np.searchsorted(starts, np.array(order.ids(range(20 * BLOCK))) % (len(weights) * 10**6), side="right") - 1
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(drawn[:, None] == np.arange(len(weights)), axis=0)  # [draws, sources]
    draws = np.arange(1, len(drawn) + 1)[:, None]
    assert np.abs(counts / draws - shares)[8 * BLOCK :].max() < 0.01
    blocks = counts[BLOCK - 1 :: BLOCK] - draws[BLOCK - 1 :: BLOCK] * shares
    assert np.abs(blocks).max() < 3  # draws too many or too few, after any number of blocks


def test_a_whole_share_is_exact_in_every_block() -> None:
    order = MixedOrder(0, [10**6, 10**6], [3, 1])
    for start in range(0, 40 * BLOCK, BLOCK):
        sources = [prompt % (2 * 10**6) // 10**6 for prompt in order.ids(range(start, start + BLOCK))]
        assert Counter(sources) == {0: 48, 1: 16}


def test_each_source_has_its_epochs_and_no_id_comes_twice() -> None:
    drawn = stream_of([2, 1, 1]).next(400)
    assert len({prompt.id for prompt in drawn}) == 400
    for number, size in enumerate(JOINED.sizes):
        own = [prompt.question for prompt in drawn if prompt.source == number]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len(epochs) < 2 or epochs[0] != epochs[1]


def joined(shares: list[list[Prompt]]) -> list[Prompt]:
    return [prompt for row in itertools.zip_longest(*shares) for prompt in row if prompt is not None]


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_the_same_on_any_number_of_ranks_and_after_a_resume(ranks: int) -> None:
    alone = stream_of([2, 1, 1])
    shared = [stream_of([2, 1, 1], rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(40):
        step = alone.next(12)
        assert joined([each.next(12) for each in shared]) == step
    cursor = json.loads(json.dumps(alone.cursor()))
    expected = [alone.next(12) for _ in range(3)]
    again = [stream_of([2, 1, 1], rank=rank, ranks=ranks) for rank in range(ranks)]
    for each in again:
        each.seek(cursor)
    assert [joined([each.next(12) for each in again]) for _ in range(3)] == expected


def test_the_order_depends_on_the_seed_and_the_weights() -> None:
    first, again, seed, weights = (
        [prompt.question for prompt in stream_of(weights, seed).next(60)]
        for weights, seed in [([1, 1, 1], 4), ([1, 1, 1], 4), ([1, 1, 1], 5), ([1, 2, 1], 4)]
    )
    assert first == again != seed and first != weights


def test_one_source_has_the_order_of_a_single_table() -> None:
    assert MixedOrder(3, [50], [1]).ids(range(200)) == Shuffled(3, 50).ids(range(200))


def test_a_draw_far_away_is_found_at_once() -> None:
    far = 20_000_000
    started = time.perf_counter()
    ids = MixedOrder(3, [70, 90, 20], [5, 2, 1.5]).ids(range(far, far + 100))
    assert time.perf_counter() - started < 5 and len(set(ids)) == 100
    order = MixedOrder(3, [70, 90, 20], [5, 2, 1.5])
    assert [order.ids([position])[0] for position in (far + 99, 5, far)] == [ids[99], order.ids([5])[0], ids[0]]
