"""The sections and figures of the page about what runs prove, from settings that were made up."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from outcome_cases import keep, log_judged_sweep
from sweep_cases import groups_of, sweep, trial

from rlx.analysis import loading
from rlx.analysis.comparison.evidence import Evidence, flips_of, known_spread, weigh
from rlx.analysis.comparison.outcomes import EvaluatedRun, evaluated_runs
from rlx.analysis.comparison.pairs import paired_gap
from rlx.analysis.comparison.rungs import rung_standings
from rlx.analysis.comparison.wording import gap_sentence, interval_text, sweep_verdict
from rlx.analysis.loading import Sweep
from rlx.analysis.page import comparison_figures, comparison_sections
from rlx.analysis.statistics import Group
from rlx.config.sweep import DEFAULT_METRIC
from rlx.samples.columns import COLUMNS
from rlx.tracking.services import mlflow

LR = "train.actor_lr"
QUESTIONS, SEEDS = 60, 3


def judged(share: float, seed: int) -> np.ndarray:
    """Which of 60 questions are right, one answer each: the first ones, so that the better run has all of the worse."""
    return np.arange(QUESTIONS)[:, None] < round(share * QUESTIONS) + seed


def keep_texts(run: Path, step: int, rows: Sequence[int], word: str) -> None:
    """Writes completions of held-out prompts as a run keeps them."""
    values: dict[str, Any] = {"step": step, "kind": "held_out", "sample": 0, "trained": False, "prompt": "p"}
    values |= {"expected": "yes", "score": 1.0, "correct": True, "finish": "stop", "version": step, "staleness": 0}
    made = [
        {"prompt_index": row, "group": row, "question": f"is {row} right?", "completion": f"{word} {row}"}
        for row in rows
    ]
    (run / "completions").mkdir()
    table = pa.Table.from_pylist([values | each for each in made], COLUMNS)
    pq.write_table(table, run / "completions" / f"held_out_{step:06d}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> tuple[str, Path]:
    """A race of three settings on three seeds; the last was stopped at step 2."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_database, folder)
    uri, shares = mlflow.default_uri(folder), (0.8, 0.5, 0.2)
    right = [
        [{step: judged(share * step / 4, seed) for step in ((2, 4) if share > 0.2 else (2,))} for seed in range(SEEDS)]
        for share in shares
    ]
    run = log_judged_sweep(uri, folder, "race", [{LR: share} for share in shares], right, [LR], {"rlx.rungs": "[2]"})
    mlflow.client(uri).log_text(run, "one beats another\n", "race.txt")
    keep_texts(folder / "race" / "run_0_0", 4, range(0, 60, 2), "surely")
    keep_texts(folder / "race" / "run_1_1", 4, range(40), "perhaps")
    return uri, folder


@pytest.fixture(scope="module")
def found(store: tuple[str, Path]) -> tuple[Sweep, list[Group], Evidence]:
    read = loading.load_sweep(store[0], "rlx", "race")
    groups = groups_of(read)
    return read, groups, weigh(store[0], groups, DEFAULT_METRIC, "max")


Found = tuple[Sweep, list[Group], Evidence]


@pytest.mark.slow
def test_a_clear_winner_is_named_with_its_interval(found: Found) -> None:
    _, groups, evidence = found
    assert evidence.rivals == []
    text = sweep_verdict(groups, evidence, DEFAULT_METRIC)
    assert text.startswith(
        "actor_lr 0.8 wins with eval/accuracy 0.817: actor_lr 0.5, the next, is behind by 0.3 (95 %: 0."
    )
    assert text.endswith(
        "Over many fresh seeds, expect a mean of 0.817 ± 0.043; 1 of 3 settings did not end on all of these seeds, "
        "so it may be less."
    )  # nothing was luck
    assert gap_sentence(evidence.gaps[1]).startswith("actor_lr 0.8 against actor_lr 0.2: 0.3 (95 %: ")
    stopped = sweep_verdict(groups, replace(evidence, gaps=evidence.gaps[1:]), DEFAULT_METRIC)
    assert "60 questions) where both were evaluated last, at step 2. " in stopped and "step" not in text
    assert "paired by 3 seeds and 60 questions)" in interval_text(evidence.gaps[1])


def test_flipped_questions_come_with_an_answer_of_each(found: Found) -> None:
    """48 and 30 of the questions on the first seed, one more on each further one: 20 flip in part or whole."""
    _, _, evidence = found
    flips = flips_of(evidence.nearest)
    assert flips is not None and (flips.better, flips.worse) == (20, 0)
    by_question = {flip.question: flip for flip in flips.largest}
    assert by_question["is 34 right?"].answers == ("surely 34", "perhaps 34")
    assert by_question["is 35 right?"].answers == ("", "perhaps 35")
    assert by_question["is 44 right?"].answers == ("surely 44", "")
    assert by_question["is 44 right?"].expected == "yes"
    assert by_question["generated/45/0000002d"].answers == ("", "")  # of which nobody has kept a text
    (section,) = comparison_sections.flips(evidence.nearest)
    assert section.table is not None and len(section.table) == 20
    assert (
        "A (actor_lr 0.8) answers 20 better and B (actor_lr 0.5) 0, by the mean over 3 runs at step 4" in section.note
    )


def test_nothing_flips_where_outcomes_are_not_kept() -> None:
    assert comparison_sections.flips(None) == []


def test_the_page_pairs_settings_with_the_best(found: Found) -> None:
    _, groups, evidence = found
    paired, chance, plans = comparison_sections.paired(groups, evidence)
    assert paired.table is not None
    assert paired.table["behind by"].tolist() == pytest.approx([0.3, 0.3])
    assert paired.table["step"].tolist() == [4, 2]
    assert chance.table is not None and chance.table["sampling"].isna().all()  # one answer to each question
    assert chance.table["step"].tolist() == [4, 4, 2]
    assert "no part of a difference" not in chance.note
    assert plans.table is not None and plans.table["seeds"].tolist() == [3, 5, 8, 3]


def test_runs_of_one_seed_without_questions_have_no_interval_to_show() -> None:
    groups = groups_of(sweep(trial(0, {LR: 1.0}, {4: 0.5}), trial(1, {LR: 2.0}, {4: 0.4})))
    runs = [[EvaluatedRun(group.ended[0], DEFAULT_METRIC, None)] for group in groups]
    pair = paired_gap((groups[0], groups[1]), (runs[0], runs[1]), 1.0)
    assert pair is not None and math.isnan(pair.gap.half_width) and not pair.is_shown
    assert comparison_sections.paired(groups, Evidence([pair])) == []
    assert gap_sentence(pair) == "actor_lr 1 and actor_lr 2 differ by 0.1 on one seed: no interval."


def test_the_figure_of_pairs_says_who_may_be_as_good(found: Found) -> None:
    _, groups, evidence = found
    ranks = {group: rank for rank, group in enumerate(groups, 1)}
    sure = comparison_figures.paired_gaps(evidence.gaps, ranks)
    assert [(trace.name, list(trace.y)) for trace in sure.data] == [
        ("more than chance", ["2  actor_lr 0.5", "3  actor_lr 0.2"])
    ]
    assert all(array > 0 for array in sure.data[0].error_x.array)
    assert sure.data[0].showlegend  # plotly leaves out the name of the only one otherwise


def test_settings_of_one_label_have_their_own_ranks(found: Found) -> None:
    _, groups, evidence = found
    alike = [replace(group, label="alike") for group in groups]
    gaps = [replace(gap, second=second) for gap, second in zip(evidence.gaps, alike[1:], strict=True)]
    section = comparison_sections.paired(alike, replace(evidence, gaps=gaps))[0]
    assert section.figure is not None
    assert list(section.figure.data[0].y) == ["2  alike", "3  alike"]


def test_the_race_is_drawn_rung_by_rung_with_its_lines(found: Found) -> None:
    read, groups, _ = found
    (section,) = comparison_sections.races(read, groups, DEFAULT_METRIC, "max", "one beats another")
    assert (section.title, section.text) == ("The race, rung by rung", "one beats another")
    assert section.figure is not None
    assert list(section.figure.layout.xaxis.range) == [-0.5, 1.5]  # room for the names of the first and the last rung
    last = section.figure.data[0]  # the worst is drawn first
    assert (last.name, list(last.marker.symbol)) == ("3  actor_lr 0.2", ["x"])
    assert [list(trace.marker.symbol) for trace in section.figure.data[1:]] == [["circle"] * 2] * 2


def test_lines_of_a_race_are_shown_without_rungs_too(found: Found, store: tuple[str, Path]) -> None:
    read, groups, _ = found
    assert loading.race_text(store[0], read) == "one beats another"
    bare = Sweep("s", "run", (LR,), read.metrics, read.trials)
    (section,) = comparison_sections.races(bare, groups, DEFAULT_METRIC, "max", "one beats another")
    assert (section.figure, section.text) == (None, "one beats another")
    assert comparison_sections.races(bare, groups, DEFAULT_METRIC, "max", "") == []


def test_low_can_be_good_at_a_rung(found: Found) -> None:
    read, groups, _ = found
    high = {(each.group.label, each.at): each.behind for each in rung_standings(read, groups, DEFAULT_METRIC, "max")}
    low = {(each.group.label, each.at): each.behind for each in rung_standings(read, groups, DEFAULT_METRIC, "min")}
    assert high["actor_lr 0.8", 4] == pytest.approx(-0.3) and low["actor_lr 0.8", 4] == pytest.approx(0.3)
    assert high["actor_lr 0.2", 2] == pytest.approx(0.3) and low["actor_lr 0.2", 2] == pytest.approx(-0.15)


def test_settings_are_compared_at_equal_tokens_where_rungs_are_in_tokens() -> None:
    """100 tokens a step and 50: at 128 tokens the first is between its steps 0 and 2, the other between 2 and 4."""
    curves = [({0: 0.0, 2: 0.4}, {0: 0.0, 2: 0.2}), ({0: 0.0, 2: 0.4, 4: 0.4}, {0: 0.0, 2: 0.4, 4: 0.6})]
    runs = [
        trial(2 * i + seed, {LR: float(i), "seed": seed}, curve, stopped_at=None if i else 2)
        for i, both in enumerate(curves)
        for seed, curve in enumerate(both)
    ]
    for each in runs[2:]:
        each.history["tokens/total"] /= 2
    judged = replace(sweep(*runs), rung_by="tokens")
    groups = groups_of(judged)
    standings = rung_standings(judged, groups, DEFAULT_METRIC, "max")
    assert [each.at for each in standings] == [64, 64, 128, 128]
    assert [each.is_out for each in standings[:2]] == [False, False]
    first, second = sorted(standings[2:], key=lambda each: -each.behind)
    assert (first.is_out, second.is_out) == (True, False)
    assert first.mean == pytest.approx(0.3 * 128 / 200)
    assert second.mean == pytest.approx((0.4 + 0.4 + 0.2 * 28 / 100) / 2)


def test_two_sweeps_are_compared_as_they_ended() -> None:
    """One of ten steps against one of four: at step 4 the first was behind. Step 0 is no evidence."""
    groups = groups_of(sweep(trial(0, {LR: 1.0}, {0: 0.1, 4: 0.2, 10: 0.9}), trial(1, {LR: 2.0}, {0: 0.1, 4: 0.5})))
    sides = tuple([EvaluatedRun(group.ended[0], DEFAULT_METRIC, None)] for group in groups)
    pair = groups[0], groups[1]
    ends, common = (paired_gap(pair, sides, 1.0, at_ends=each) for each in (True, False))  # type: ignore[arg-type]
    assert ends is not None and (ends.steps, ends.gap.value) == ((10, 4), pytest.approx(0.4))
    assert common is not None and (common.steps, common.gap.value) == ((4, 4), pytest.approx(-0.3))
    untrained = groups_of(sweep(trial(0, {LR: 1.0}, {0: 0.1}), trial(1, {LR: 2.0}, {0: 0.2})))
    sides = tuple([EvaluatedRun(group.ended[0], DEFAULT_METRIC, None)] for group in untrained)
    assert paired_gap((untrained[0], untrained[1]), sides, 1.0) is None  # type: ignore[arg-type]


def test_lineage_is_shown_where_trials_continued_from_others() -> None:
    alone = sweep(trial(0, {LR: 1.0}, {4: 0.5}))
    assert comparison_sections.lineages(alone, DEFAULT_METRIC) == []
    cloned = sweep(trial(0, {LR: 1.0}, {4: 0.5}), trial(1, {LR: 1.0}, {4: 0.5}, origins=("trial_00000@2",)))
    (section,) = comparison_sections.lineages(cloned, DEFAULT_METRIC)
    assert section.title == "Lineage" and section.figure is not None


def test_runs_are_read_in_the_order_of_their_seeds(found: Found, store: tuple[str, Path]) -> None:
    runs = evaluated_runs(store[0], found[1][0], DEFAULT_METRIC)
    assert [run.seed for run in runs] == [0, 1, 2]
    assert [sum(run.values(4).values()) for run in runs] == [48, 49, 50]
    assert runs[0].kept == {2, 4} and runs[0].steps == {2, 4}


def test_a_folder_that_is_gone_leaves_the_logged_means(store: tuple[str, Path], tmp_path: Path) -> None:
    uri, folder = store
    log_judged_sweep(uri, folder, "gone", [{LR: 1.0}], [[{4: judged(0.5, 0)}, {4: judged(0.5, 1)}]], [LR])
    shutil.rmtree(folder / "gone")
    group = groups_of(loading.load_sweep(uri, "rlx", "gone"))[0]
    runs = evaluated_runs(uri, group, DEFAULT_METRIC)
    assert [run.values(4) for run in runs] == [{}, {}]
    assert [run.mean(4)["all questions"] for run in runs] == pytest.approx([0.5, 31 / 60])


DAMAGED = [
    "{",
    "[]",
    '{"metric": "eval/accuracy"}',
    '{"metric": "eval/accuracy", "spread_of_differences": {"seed": "x"}}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_analysis_tells_nothing(store: tuple[str, Path], tmp_path: Path, content: str) -> None:
    uri, folder = store
    run = log_judged_sweep(uri, folder, "damaged", [{LR: 1.0}], [[{4: judged(0.5, 0)}]], [LR])
    (tmp_path / "evidence.json").write_text(content)
    mlflow.log_files(uri, run, [tmp_path / "evidence.json"], "analysis")
    assert known_spread(uri, "rlx", DEFAULT_METRIC) is None
    assert known_spread(uri, "no such experiment", DEFAULT_METRIC) is None


def test_outcomes_are_kept_as_real_runs_keep_them(tmp_path: Path) -> None:
    keep(tmp_path, {4: judged(0.5, 0)})
    assert [file.name for file in (tmp_path / "evaluations").iterdir()] == ["step_000004-held_out.parquet"]
