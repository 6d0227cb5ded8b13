"""Which prompts a curriculum takes: by their measured success, on any number of ranks, and after a resume."""

import itertools
import json
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from rlx.data.curriculum import CurriculumStream
from rlx.data.mixture import JoinedRows, MixedOrder
from rlx.data.stream import PromptRows, TableRows
from rlx.types import Prompt

STEP, SAMPLES = 12, 4
HARD, TRIVIAL, REST = 0, 1, 2


def table(size: int, name: str) -> pa.Table:
    columns = {"question": [f"{name}{i}" for i in range(size)], "answer": [str(i) for i in range(size)]}
    return pa.table(columns | {"token_ids": [[i] for i in range(size)]})


ONE = TableRows(table(300, "q"))
TWO = JoinedRows((TableRows(table(120, "a")), TableRows(table(45, "b"))))


def kind(prompt: Prompt) -> int:
    """A third of the prompts is never answered correctly, a third always."""
    return int(prompt.answer) % 3


def success(prompt: Prompt) -> float:
    draws = np.random.default_rng(prompt.id).random(SAMPLES)
    return {HARD: 0.0, TRIVIAL: 1.0}.get(kind(prompt), float((draws < 0.5).mean()))


def stream_of(rows: PromptRows, rank: int = 0, ranks: int = 1, period: int = 5) -> CurriculumStream:
    sizes = rows.sizes if isinstance(rows, JoinedRows) else [len(rows)]
    order = MixedOrder(5, sizes, [3.0, 1.0][: len(sizes)])
    return CurriculumStream(rows, 5, rank, ranks, mixed=order, target=(0.1, 0.9), period=period)


def joined(shares: list[list[Prompt]]) -> list[Prompt]:
    return [prompt for row in itertools.zip_longest(*shares) for prompt in row if prompt is not None]


def take(streams: list[CurriculumStream], steps: int) -> list[list[Prompt]]:
    """The prompts of some steps over all ranks, each of which observes what all have answered."""
    taken = []
    for _ in range(steps):
        taken.append(joined([each.next(STEP) for each in streams]))
        for each in streams:
            each.observe([success(prompt) for prompt in taken[-1]])
    return taken


@pytest.mark.parametrize("rows", [ONE, TWO])
def test_before_anything_is_measured_prompts_come_in_the_order_without_a_curriculum(rows: PromptRows) -> None:
    stream = stream_of(rows)
    plain = stream.mixed.ids(range(5 * STEP))
    assert [prompt.id for step in take([stream], 5) for prompt in step] == plain


@pytest.mark.parametrize("rows", [ONE, TWO])
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_the_same_on_any_number_of_ranks_and_after_a_resume(rows: PromptRows, ranks: int) -> None:
    alone, shared = stream_of(rows), [stream_of(rows, rank, ranks) for rank in range(ranks)]
    assert take([alone], 40) == take(shared, 40)
    again = [stream_of(rows, rank, ranks) for rank in range(ranks)]
    for each in again:
        each.seek(json.loads(json.dumps(alone.cursor())))
        each.success[:] = alone.success
    following = take([alone], 30)
    assert take(again, 30) == following
    ids = [prompt.id for step in following for prompt in step]
    assert len(set(ids)) == len(ids)


def test_informative_prompts_become_more_and_the_others_come_back() -> None:
    stream = stream_of(ONE)
    take([stream], 25)  # each prompt once
    counts: Counter[int] = Counter()
    seen: set[str] = set()
    for step in take([stream], 150):
        counts.update(kind(prompt) for prompt in step)
        seen |= {prompt.question for prompt in step}
    informative = counts[REST] / counts.total()
    # Of three prompts one is always taken, and two in every fifth epoch; some of the first kind look hard or trivial.
    assert 0.62 < informative < 0.75
    assert len(seen) == len(ONE)


def test_a_prompt_that_becomes_solvable_is_found_again() -> None:
    stream = stream_of(ONE, period=20)
    while (stream.success == 255).any():
        stream.observe([0.0] * len(stream.next(STEP)))
    assert not stream.success.any()
    turns = stream._looked_at[0] // len(ONE) + 20
    while stream._looked_at[0] // len(ONE) <= turns:
        stream.observe([0.5] * len(stream.next(STEP)))
    assert stream.success.all()  # in the last epoch of twenty at the latest


def test_the_estimate_is_half_the_newest_share() -> None:
    stream = stream_of(TableRows(table(1, "q")))
    metrics: dict[str, float] = {}
    for newest, expected in ((0.5, 0.5), (1.0, 0.75), (0.0, 0.375)):
        stream.next(1)
        metrics = stream.observe([newest])
        assert metrics["curriculum/success"] == pytest.approx(expected, abs=1 / 254)
    assert metrics["curriculum/measured_fraction"] == metrics["curriculum/in_range_fraction"] == 1


def test_a_prompt_that_was_not_measured_keeps_its_estimate() -> None:
    stream = stream_of(TableRows(table(1, "q")))
    stream.next(1)
    assert stream.observe([float("nan")]) == {"curriculum/passed_over_fraction": 0, "curriculum/measured_fraction": 0}
    for newest in (1.0, float("nan")):
        stream.next(1)
        assert stream.observe([newest])["curriculum/success"] == 1.0


def test_weights_of_sources_hold_however_many_prompts_are_passed_over() -> None:
    stream = stream_of(TWO)
    drawn = [prompt for step in take([stream], 160) for prompt in step]
    assert sum(prompt.source == 0 for prompt in drawn) / len(drawn) == pytest.approx(0.75, abs=0.01)


def test_passed_over_prompts_are_counted() -> None:
    stream, shares = stream_of(TableRows(table(30, "q"))), []
    solve: Callable[[Prompt], float] = lambda prompt: float(kind(prompt) == TRIVIAL)  # noqa: E731
    for _ in range(200):
        step = stream.next(STEP)
        shares.append(stream.observe([solve(prompt) for prompt in step])["curriculum/passed_over_fraction"])
    assert shares[0] == 0 and np.mean(shares[100:]) == pytest.approx(0.8, abs=0.03)  # all are hard or trivial


def test_a_checkpoint_without_a_curriculum_is_continued_with_one() -> None:
    from rlx.data.stream import PromptStream

    plain = PromptStream(TWO, 5, order=stream_of(TWO).mixed)
    plain.next(50)
    stream = stream_of(TWO)
    stream.seek(plain.cursor())
    assert [prompt.id for prompt in stream.next(20)] == [prompt.id for prompt in plain.next(20)]


def test_a_million_prompts_take_a_megabyte() -> None:
    class Many:
        digest = 0

        def __len__(self) -> int:
            return 10**6

    order = MixedOrder(5, [10**6], [1.0])
    stream = CurriculumStream(Many(), 5, mixed=order, target=(0.1, 0.9), period=100)  # type: ignore[arg-type]
    assert stream.success.nbytes == 10**6
    stream.success[:] = 0
    ids = stream._next_of(0, 1024)
    assert len(set(ids)) == 1024 and 50_000 < stream._looked_at[0] < 200_000
