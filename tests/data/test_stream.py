"""Each rank's share of the prompts of the steps, from rows in memory."""

import itertools
import json

import pyarrow as pa
import pytest

from rlx.config.errors import ConfigError
from rlx.data import stream
from rlx.data.stream import PromptStream, Share, TableRows


def table(size: int) -> pa.Table:
    return pa.table(
        {
            "question": [f"q{i}" for i in range(size)],
            "answer": [str(i) for i in range(size)],
            "token_ids": [[i, i] for i in range(size)],
        }
    )


def rows_of(size: int) -> TableRows:
    return TableRows(table(size))


def ids(stream: PromptStream, count: int) -> list[int]:
    return [prompt.id for prompt in stream.next(count)]


def test_prompts_are_the_rows_at_the_positions() -> None:
    first, second = stream.prompts(rows_of(5), [3, 1])
    assert (first.id, first.token_ids, first.question, first.answer) == (3, (3, 3), "q3", "3")
    assert first.dataset_index is None
    assert second.id == 1
    with_entries = table(2).append_column("entry", pa.array([7, 9]))
    assert [prompt.dataset_index for prompt in stream.prompts(TableRows(with_entries), range(2))] == [7, 9]
    assert stream.prompts(rows_of(5), []) == []
    chats = [[{"role": "user", "content": f"q{row}"}] for row in range(2)]
    with_chats = TableRows(table(2).append_column("messages", pa.array(chats)))
    assert [prompt.task.messages for prompt in stream.prompts(with_chats, [1, 0])] == [(chats[1][0],), (chats[0][0],)]


def test_every_prompt_comes_once_per_epoch_in_another_order() -> None:
    stream = PromptStream(rows_of(12), seed=0)
    drawn = [ids(stream, 4) + ids(stream, 8) for _ in range(3)]
    # Each draw of a prompt has an id of its own, from which its sampling seeds follow.
    assert [sorted(ids) for ids in drawn] == [list(range(start, start + 12)) for start in (0, 12, 24)]
    orders = [[i % 12 for i in ids] for ids in drawn]
    assert orders[0] != orders[1] != orders[2] != list(range(12))


def test_a_later_draw_of_a_prompt_is_the_same_prompt() -> None:
    early, late = stream.prompts(rows_of(5), [3, 8])
    assert (early.id, late.id) == (3, 8)
    assert (early.question, early.token_ids) == (late.question, late.token_ids) == ("q3", (3, 3))


def test_the_order_depends_on_the_seed_alone() -> None:
    first, again, other = (ids(PromptStream(rows_of(50), seed=seed), 50) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("size", [3, 20, 64])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_steps_are_the_same_on_any_number_of_ranks(size: int, ranks: int) -> None:
    alone = PromptStream(rows_of(size), seed=1)
    shared = [PromptStream(rows_of(size), seed=1, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(5):
        shares = [ids(stream, 8) for stream in shared]
        assert {len(share) for share in shares} == {8 // ranks}
        assert [prompt for row in zip(*shares, strict=True) for prompt in row] == ids(alone, 8)


def test_a_step_may_take_several_epochs() -> None:
    step = ids(PromptStream(rows_of(3), seed=0), 10)
    assert [sorted(step[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_stream_continues_at_its_cursor_on_other_ranks_too() -> None:
    stream = PromptStream(rows_of(10), seed=2)
    ids(stream, 24)
    cursor = json.loads(json.dumps(stream.cursor()))
    assert {name: cursor[name] for name in cursor if not name.endswith("_digest")} == {
        "epoch": 2,
        "offset": 4,
        "seed": 2,
        "size": 10,
    }
    expected = ids(stream, 8)
    halves = [PromptStream(rows_of(10), seed=2, rank=rank, ranks=2) for rank in range(2)]
    for half in halves:
        half.seek(cursor)
        assert half.cursor() == cursor
    assert [prompt for row in zip(*(ids(half, 8) for half in halves), strict=True) for prompt in row] == expected


@pytest.mark.parametrize(("size", "seed"), [(11, 2), (10, 3)])
def test_a_cursor_of_other_prompts_is_refused(size: int, seed: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"\(seed 2, 10 of them\) are not those of this run \(seed {seed}, {size} of them\)"
    ):
        PromptStream(rows_of(size), seed).seek(PromptStream(rows_of(10), seed=2).cursor())


@pytest.mark.parametrize("tokens", [[[1], [2, 3], [5]], [[1, 2], [3], [4]], [[3], [1], [2]]])
def test_a_cursor_of_as_many_prompts_with_other_tokens_is_refused(tokens: list[list[int]]) -> None:
    def stream(ids: list[list[int]], chunks: int = 1) -> PromptStream:
        parts = [
            pa.table({"token_ids": pa.array(part, pa.list_(pa.int64())), "answer": ["yes"] * len(part)})
            for part in (ids[i::chunks] for i in range(chunks))
        ]
        return PromptStream(TableRows(pa.concat_tables(parts)), seed=1)

    cursor = stream([[1], [2, 3], [4]]).cursor()
    stream([[1], [4], [2, 3]], chunks=2).seek(cursor)  # how the table lies in memory is nothing of the prompts
    with pytest.raises(ConfigError, match=r"prompts are not those of this run: their texts or tokens differ$"):
        stream(tokens).seek(cursor)


@pytest.mark.parametrize(
    ("answers", "entries"), [(["2", "", "5"], [7, 8, 9]), (["", "24", ""], [7, 8, 9]), (["2", "", "4"], [7, 9, 8])]
)
def test_a_cursor_of_the_same_prompts_with_other_answers_is_refused(answers: list[str], entries: list[int]) -> None:
    def stream(answers: list[str], entries: list[int]) -> PromptStream:
        columns = {"question": ["a", "b", "c"], "answer": answers, "token_ids": [[1], [2], [3]], "entry": entries}
        return PromptStream(TableRows(pa.table(columns)), seed=1)

    cursor = stream(["2", "", "4"], [7, 8, 9]).cursor()
    stream(["2", "", "4"], [7, 8, 9]).seek(cursor)
    with pytest.raises(ConfigError, match=r"prompts are not those of this run: their expected answers differ$"):
        stream(answers, entries).seek(cursor)
    stream(answers, entries).seek({name: cursor[name] for name in cursor if name != "answer_digest"})  # of before


def test_a_cursor_of_an_earlier_version_is_taken_without_its_checksum() -> None:
    stream = PromptStream(rows_of(10), seed=2)
    stream.seek({"epoch": 1, "offset": 3, "seed": 2, "size": 10, "digest": 12345})
    assert stream.position == 13


@pytest.mark.parametrize("window", [1, 3, 4096])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_do_not_depend_on_how_far_ahead_rows_are_fetched(
    window: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [ids(PromptStream(rows_of(13), 5, rank, ranks), 60) for rank in range(ranks)]
    monkeypatch.setattr("rlx.data.stream.WINDOW", window)
    for rank in range(ranks):
        stream = PromptStream(rows_of(13), 5, rank, ranks)
        found = [prompt for count in (6, 12, 0, 30, 12) for prompt in stream.next(count)]
        assert [prompt.id for prompt in found] == expected[rank]
        assert all(prompt.question == f"q{prompt.id % 13}" for prompt in found)


@pytest.mark.parametrize("position", [0, 7, 12, 13, 14, 40])
def test_a_stream_may_jump_anywhere(position: int) -> None:
    stream = PromptStream(rows_of(13), 5)
    ids(stream, 5)
    stream.seek(stream.cursor(position))
    order = ids(PromptStream(rows_of(13), 5), 60)
    assert ids(stream, 15) == order[position : position + 15]
    stream.position = 2
    assert ids(stream, 4) == order[2:6]


class Counted(TableRows):
    """Rows that record which of them were asked for."""

    def request(self, indices):  # type: ignore[no-untyped-def]
        asked.append(indices.tolist())
        return super().request(indices)


asked: list[list[int]] = []


def test_a_rank_asks_for_its_own_rows_only_and_ahead_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.data.stream.WINDOW", 4)
    asked.clear()
    stream = PromptStream(Counted(table(40)), 1, rank=1, ranks=2)
    order = ids(PromptStream(rows_of(40), 1), 40)
    ids(stream, 4)
    assert asked == [order[1:8:2], order[9:16:2]]
    ids(stream, 4)
    assert len(asked) == 2  # the first window had the rows of two steps
    ids(stream, 4)
    assert asked[2:] == [order[17:24:2]]


def test_shares_of_a_table_in_its_order() -> None:
    shares = [Share(rows_of(7), rank, 3) for rank in range(3)]
    assert [[prompt.id for prompt in share.in_order()] for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert Share(rows_of(1), 1, 2).in_order() == []
    own = shares[1].stream(4)
    assert (own.seed, own.rank, own.ranks, own.position) == (4, 1, 3, 0)


def test_the_checksum_of_parts_is_that_of_the_whole() -> None:
    whole = table(10)
    for cuts in ([0, 10], [0, 3, 10], [0, 0, 1, 9, 10], list(range(11))):
        parts = [whole.slice(start, stop - start) for start, stop in itertools.pairwise(cuts)]
        assert stream.joined_digest((len(part), stream.digest_of(part)) for part in parts) == stream.digest_of(whole)
    assert stream.digest_of(whole.slice(0, 9)) != stream.digest_of(whole)
    assert all(0 <= digest < 2**63 for digest in stream.digest_of(whole))


def test_the_checksum_of_tokens_is_that_of_earlier_versions() -> None:
    assert stream.digest_of(table(10)).tokens == 965525203214836687
