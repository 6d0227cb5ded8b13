"""Which completions a page or a table shows."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from sample_cases import Letters, scored, step

from rlx.config.errors import ConfigError
from rlx.samples import choosing, reader
from rlx.samples.choosing import PageLimits
from rlx.samples.columns import CompletionFile, Kind, StepCompletions
from rlx.samples.reader import KeptStep
from rlx.samples.writer import CompletionWriter, Keeping
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    """A run with an evaluation of 2 completions and steps of 4."""
    folder = open_storage(str(tmp_path))
    writer = CompletionWriter(folder, Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
    for number in (1, 2, 3):
        writer.keep(step(number))
        assert writer.wait()
    writer.keep(StepCompletions(Kind.HELD_OUT, 2, 8, [scored(0), scored(2)]))
    writer.close()
    return folder


def test_steps_are_spread_with_the_first_and_the_last() -> None:
    def kept(number: int, kind: Kind = Kind.TRAINING) -> KeptStep:
        return KeptStep(number, kind, (CompletionFile(number, kind, 0, 1),))

    steps = [kept(number) for number in range(1, 101)] + [kept(0, Kind.HELD_OUT)]
    chosen = choosing.spread(steps, 4)
    assert [each.number for each in chosen] == [0, 1, 34, 67, 100]
    assert [each.number for each in choosing.spread(steps[:3], 4)] == [1, 2, 3]


def table_of(groups: Sequence[int], tokens: Sequence[int], scores: Sequence[float] = ()) -> pa.Table:
    """Completions with a question for each six groups, of so many tokens."""
    return pa.table(
        {
            "group": groups,
            "prompt_index": [group % 6 for group in groups],
            "question": [f"question {group % 6}" for group in groups],
            "tokens": [["x"] * count for count in tokens],
            "score": scores or [0.0] * len(groups),
        }
    )


def test_whole_prompts_are_chosen_by_their_texts_within_both_limits() -> None:
    groups = [group for group in range(6) for _ in range(2)]
    tokens = [group + 1 for group in groups]
    table = table_of(groups, tokens)
    few = choosing.within(table, completions=5, tokens=1000)["group"].to_pylist()
    assert len(few) == 4 and len(set(few)) == 2 and few == sorted(few)
    other = choosing.within(table_of(groups[6:] + groups[:6], tokens[6:] + tokens[:6]), 5, 1000)
    assert set(other["group"].to_pylist()) == set(few)
    epoch = choosing.within(table_of([group + 6 for group in groups], tokens), 5, 1000)
    assert {group - 6 for group in epoch["group"].to_pylist()} == set(few)
    assert 0 < choosing.num_tokens(choosing.within(table, 100, tokens=12)) <= 12
    assert choosing.within(table, 100, 1000) == table
    assert len(choosing.within(table_of([0], [50]), 10, 10)) == 1  # at least one
    assert len(choosing.within(table.slice(0, 0), 10, 10)) == 0


def test_the_worst_and_the_best_are_ordered_by_score() -> None:
    table = table_of([0, 1, 2, 3], [1] * 4, scores=[0.5, -1.0, 2.0, -1.0])
    assert choosing.by_score(table, 3, None)["group"].to_pylist() == [1, 3, 0]
    assert choosing.by_score(table, None, 2)["group"].to_pylist() == [2, 0]
    assert choosing.by_score(table, None, None) == table
    assert choosing.of_prompt(table, 3)["group"].to_pylist() == [3]


def test_what_evaluations_leave_is_for_steps(run: Storage) -> None:
    steps = reader.kept_steps(run)
    shown = choosing.shown([("a", run, steps)], PageLimits(completions=8))
    assert [(each.kind, each.step, len(each.rows), each.kept) for each in shown] == [
        (Kind.TRAINING, 1, 2, 4),  # of 8, the evaluation takes 2 and the steps 2 each, whole prompts
        (Kind.HELD_OUT, 2, 2, 2),
        (Kind.TRAINING, 2, 2, 4),
        (Kind.TRAINING, 3, 2, 4),
    ]
    assert shown == choosing.shown([("a", run, steps)], PageLimits(completions=8))
    both = choosing.shown([("a", run, steps), ("b", run, steps)])
    assert [each.run for each in both] == ["a"] * 4 + ["b"] * 4
    assert [each.rows for each in both[:4]] == [each.rows for each in both[4:]]


def test_a_step_that_was_not_kept_is_named_with_the_nearest(run: Storage, tmp_path: Path) -> None:
    assert [each.number for each in choosing.kept_of(run, "r", [2])] == [2, 2]
    with pytest.raises(ConfigError, match=r"^run r has kept no completions of step 11; nearest: 1$"):
        choosing.kept_of(run, "r", [11])
    with pytest.raises(ConfigError, match=r"^run r has kept no completions: tracking.completions was 0"):
        choosing.kept_of(open_storage(str(tmp_path / "empty")), "r")
