"""What the runs of a sweep prove, from their files: pairs by seed and question, flips, rungs, sentences."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from outcome_cases import keep, log_judged_sweep, outcomes
from sweep_cases import groups_of, sweep, trial

from rlx.analysis import loading, report
from rlx.analysis.comparison import evidence as weighing
from rlx.analysis.comparison.crossed import half_width, holm
from rlx.analysis.comparison.evidence import as_json, gap_table, plan_table, spread_of, variance_table, weigh
from rlx.analysis.comparison.flips import row_of
from rlx.analysis.comparison.outcomes import EvaluatedRun, Judged, question_values
from rlx.analysis.comparison.pairs import pair_seeds, seed_table
from rlx.analysis.comparison.pareto import front
from rlx.analysis.comparison.power import ASSUMED, options
from rlx.analysis.comparison.rungs import rung_standings
from rlx.analysis.comparison.wording import gap_sentence, plan_lines, sweep_verdict
from rlx.analysis.paired import deficits
from rlx.cli.sweep import write_analysis
from rlx.config.run import RunConfig
from rlx.config.sweep import DEFAULT_METRIC
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import StorageError
from rlx.tracking import outbox
from rlx.tracking.base import RunStatus
from rlx.tracking.services import mlflow

LR = "train.actor_lr"
FIRST = np.array([[1, 1], [1, 0], [0, 0], [1, 1]], bool)  # [questions, samples]


def answers(*shares: str) -> np.ndarray:
    """Two samples of each question: 2, 1 or 0 of them right."""
    return np.array([[int(share) > 0, int(share) > 1] for share in shares])


RIGHT = [
    [
        {0: answers(*"0000"), 2: answers(*"1100"), 4: answers(*"2210")},
        {0: answers(*"0000"), 2: answers(*"2100"), 4: answers(*"2211")},
    ],
    [
        {0: answers(*"0000"), 2: answers(*"1000"), 4: answers(*"2110")},
        {0: answers(*"0000"), 2: answers(*"1100"), 4: answers(*"2200")},
    ],
    [{0: answers(*"0000"), 2: answers(*"0001")}, {0: answers(*"0000"), 2: answers(*"0000")}],
]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> str:
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_database, folder)
    uri, settings = mlflow.default_uri(folder), [{LR: 1e-4}, {LR: 2e-4}, {LR: 3e-4}]
    log_judged_sweep(uri, folder, "judged", settings, RIGHT, [LR], {"rlx.rungs": "[2]"})
    log_judged_sweep(uri, folder, "other", [{LR: 5e-4}], [RIGHT[1]], [LR])
    return uri


def loaded(uri: str, name: str = "judged") -> Any:
    found = loading.load_sweep(uri, "rlx", name)
    return found, groups_of(found)


@pytest.mark.slow
def test_settings_are_paired_by_seed_and_question(uri: str) -> None:
    """At step 4 the differences are 0, 1/2, 0, 0 on one seed and 0, 0, 1/2, 1/2 on the other: 3/16 on average. The
    third was stopped at step 2: 1/2, 1/2, 0, -1/2 and 1, 1/2, 0, 0 there, 1/4 on average."""
    groups = loaded(uri)[1]
    found = weigh(uri, groups, DEFAULT_METRIC, "max")
    table = gap_table(found.gaps)
    assert table[["behind by", "step", "seeds", "questions"]].values.tolist() == [[3 / 16, 4, 2, 4], [1 / 4, 2, 2, 4]]
    assert found.gaps[0].tables[0] - found.gaps[0].tables[1] == pytest.approx(
        np.array([[0, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    )
    assert [group.label for group in found.rivals] == ["actor_lr 0.0002", "actor_lr 0.0003"]
    assert found.compared == 2 and found.winner is not None and found.winner.seen == pytest.approx(11 / 16)


@pytest.mark.slow
def test_questions_whose_mean_was_not_logged_are_no_evidence(
    tmp_path: Path, empty_database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file was made better by hand: its setting is compared by the logged means alone, the other by questions."""
    shutil.copy(empty_database, tmp_path)
    uri = mlflow.default_uri(tmp_path)
    log_judged_sweep(uri, tmp_path, "judged", [{LR: 1e-4}, {LR: 2e-4}, {LR: 3e-4}], RIGHT, [LR])
    forged = tmp_path / "judged" / "run_1_1"
    keep(forged, {4: answers(*"2222")})
    gaps = weigh(uri, loaded(uri)[1], DEFAULT_METRIC, "max").gaps
    assert [gap.is_by_question for gap in gaps] == [False, True]
    assert gaps[0].gap.value == pytest.approx(3 / 16)  # as it was logged
    line = (
        f"{forged}/evaluations/step_000004-held_out.parquet is left out: the mean of eval/accuracy is 1 there, but 0.5"
    )
    assert capsys.readouterr().err == f"warning: {line} was logged\n"


def test_low_can_be_good(uri: str) -> None:
    groups = list(reversed(loaded(uri)[1]))
    gaps = weigh(uri, groups, DEFAULT_METRIC, "min").gaps
    assert gaps[-1].gap.value == pytest.approx(1 / 4)


def test_the_better_answers_are_the_low_ones_where_low_is_good(uri: str) -> None:
    flips = weighing.flips_of(weigh(uri, loaded(uri)[1][1::-1], DEFAULT_METRIC, "min").gaps[0])
    assert flips is not None and (flips.better, flips.worse) == (3, 0)
    assert flips.largest[0].first < flips.largest[0].second


def test_the_luck_of_the_best_is_off_the_low_ends(uri: str) -> None:
    found = weigh(uri, loaded(uri)[1], DEFAULT_METRIC, "max")
    assert found.winner is not None and {gap.luck for gap in found.gaps} == {found.winner.luck}
    low, high = found.gaps[0].gap.ends
    assert replace(found.gaps[0], luck=0.05).ends == pytest.approx((low - 0.05, high))


def test_other_quantities_of_a_question() -> None:
    found = outcomes(FIRST)
    expected = {
        "accuracy": [1, 0.5, 0, 1],
        "avg_at_2": [1, 0.5, 0, 1],
        "pass_at_1": [1, 0.5, 0, 1],
        "pass_at_2": [1, 1, 0, 1],
        "maj_at_2": [1, 0.5, 0, 1],
        "reward": [1, 0.5, 0, 1],
        "length": [10] * 4,
    }
    for quantity, values in expected.items():
        assert question_values(found, quantity) == pytest.approx(np.array(values))
    assert question_values(found, "avg_at_8") is question_values(found, "entropy") is None


def test_a_metric_names_its_set_of_questions() -> None:
    assert Judged.of("eval/accuracy") == ("held_out", "accuracy")
    assert Judged.of("eval/aime/pass_at_4") == ("aime", "pass_at_4")
    assert Judged.of("eval/ema/accuracy") == ("ema", "accuracy")
    assert Judged.of("kl/ref") is Judged.of("eval/a/b/c") is None
    assert Judged.of("eval/accuracy/web") is Judged.of("eval/reward/web") is None  # nothing is kept of a source alone


def test_the_spread_is_that_of_the_pairs(uri: str) -> None:
    gaps = weigh(uri, loaded(uri)[1], DEFAULT_METRIC, "max").gaps
    spread = spread_of(gaps)
    assert spread is not None
    assert spread.rest == pytest.approx(np.median([gap.gap.spread.rest for gap in gaps]))
    assert plan_table(gaps).columns.tolist()[:2] == ["seeds", "questions"]
    shares = variance_table(gaps)
    assert shares["setting"].tolist() == ["actor_lr 0.0001", "actor_lr 0.0002", "actor_lr 0.0003"]
    parts = shares[["seeds", "questions", "seed by question", "sampling"]].fillna(0).sum(axis=1)
    assert parts.tolist() == pytest.approx([1, 1, 1])


def test_without_files_the_means_are_paired(uri: str) -> None:
    groups = loaded(uri)[1]
    bare = [replace(group, ended=tuple(replace(each, origins=("t@1",)) for each in group.ended)) for group in groups]
    gaps = weigh(uri, bare, DEFAULT_METRIC, "max").gaps
    assert [gap.gap.value for gap in gaps] == pytest.approx([3 / 16, 1 / 4])
    assert not any(gap.is_by_question for gap in gaps)
    assert spread_of(gaps) is None and plan_table(gaps).empty and variance_table(gaps).empty
    assert weighing.flips_of(gaps[0]) is None


def test_questions_that_flipped(uri: str) -> None:
    flips = weighing.flips_of(weigh(uri, loaded(uri)[1], DEFAULT_METRIC, "max").gaps[0])
    assert flips is not None
    assert (flips.better, flips.worse) == (3, 0)
    assert [(row_of(flip.question), flip.first, flip.second) for flip in flips.largest] == [
        (1, 1.0, 0.75),
        (2, 0.5, 0.25),
        (3, 0.25, 0.0),
    ]


def test_the_verdict_says_what_is_certain_and_what_to_expect(uri: str) -> None:
    groups = loaded(uri)[1]
    found = weigh(uri, groups, DEFAULT_METRIC, "max")
    text = sweep_verdict(groups, found, DEFAULT_METRIC)
    assert text.startswith("actor_lr 0.0001 is ahead of actor_lr 0.0002 by 0.19 (95 %: ")
    assert (
        "paired by 2 seeds and 4 questions), which may be chance. These may be as good: actor_lr 0.0002; actor_lr"
        in text
    )
    assert "Over many fresh seeds, expect a mean of 0.688 ±" in text
    sure = replace(found, gaps=[replace(gap, chance=0.001) for gap in found.gaps])
    assert sweep_verdict(groups, sure, DEFAULT_METRIC).startswith(
        "actor_lr 0.0001 wins with eval/accuracy 0.688: actor_lr 0.0002,"
    )


def test_none_is_ahead_by_nothing_or_less_than_that(uri: str) -> None:
    """The first two settings have ended on both seeds, the third was stopped."""
    groups = loaded(uri)[1]
    found = weigh(uri, groups, DEFAULT_METRIC, "max")
    text = sweep_verdict(groups, found, DEFAULT_METRIC)
    assert "1 of 3 settings did not end on all of these seeds, so it may be less." in text
    level, behind = ([replace(found.gaps[0], gap=found.gaps[0].gap._replace(value=value))] for value in (0.0, -0.1))
    text = sweep_verdict(groups, replace(found, gaps=level), DEFAULT_METRIC)
    assert text.startswith("actor_lr 0.0001 is level with actor_lr 0.0002: 0 (95 %: ")
    text = sweep_verdict(groups, replace(found, gaps=behind), DEFAULT_METRIC)
    assert "last, at step 4: it was behind there, which may be chance." in text


def test_a_setting_of_which_a_trial_failed_is_named_and_not_compared(uri: str) -> None:
    first, second, third = loaded(uri)[1]
    lost = replace(first, trials=(replace(first.trials[0], status=RunStatus.FAILED), *first.trials[1:]))
    found = weigh(uri, [second, third, lost], DEFAULT_METRIC, "max")
    assert [gap.second for gap in found.gaps] == [third]
    text = sweep_verdict([second, third, lost], found, DEFAULT_METRIC)
    assert text.startswith("actor_lr 0.0002 is ahead of actor_lr 0.0003 by ")
    assert text.endswith(" Not compared, because a trial failed: actor_lr 0.0001.")
    assert weighing.between(uri, second, lost, DEFAULT_METRIC, "max") is None


def test_with_one_seed_nothing_is_said_of_settings(uri: str) -> None:
    groups = [replace(group, ended=group.ended[:1]) for group in loaded(uri)[1]]
    found = weigh(uri, groups, DEFAULT_METRIC, "max")
    sure = replace(found, gaps=[replace(gap, chance=0.001) for gap in found.gaps])
    text = sweep_verdict(groups, sure, DEFAULT_METRIC)
    assert text.startswith("In eval/accuracy, the run of actor_lr 0.0001 is ahead of that of actor_lr 0.0002 by 0.")
    assert "paired by 1 seed and 4 questions). With one seed that speaks of these two runs, not of their" in text
    assert "wins" not in text and "fresh seeds" not in text
    assert "speaks of these two runs" in gap_sentence(sure.gaps[1])


def ended(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """What the end of the sweep `judged` prints: output and errors."""
    tracked = RunConfig(storage=str(tmp_path))
    plan: Any = SimpleNamespace(name="judged", tracking_uri=uri, config=tracked, metric=DEFAULT_METRIC, mode="max")
    monkeypatch.setattr(outbox, "run_id", lambda folder: "")
    write_analysis(plan, open_storage(str(tmp_path)))
    out, err = capsys.readouterr()
    return out, err


def test_a_sweep_ends_with_what_it_proves(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = loaded(uri)[1]
    verdict = sweep_verdict(groups, weigh(uri, groups, DEFAULT_METRIC, "max"), DEFAULT_METRIC)
    assert f"\n{verdict}\n" in ended(uri, tmp_path, monkeypatch, capsys)[0]


def test_a_sweep_whose_analysis_cannot_be_written_ends_with_what_it_proves(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(report, "write_report", fail)
    out, err = ended(uri, tmp_path, monkeypatch, capsys)
    assert "| rank | actor_lr " in out and " is ahead of actor_lr 0.0002 by " in out
    assert err == f"no analysis: the disk is full; later: rlx analyze --sweep judged --storage {tmp_path}\n"


def test_numbers_are_kept_for_other_programs(uri: str) -> None:
    kept = json.loads(as_json(weigh(uri, loaded(uri)[1], DEFAULT_METRIC, "max"), DEFAULT_METRIC))
    assert kept["behind"][0]["behind by"] == 3 / 16
    assert set(kept["spread_of_differences"]) == {"seed", "question", "rest"}


@pytest.mark.slow
def test_two_sweeps_are_paired_by_their_questions(uri: str, tmp_path: Path) -> None:
    first, other = loaded(uri)[0], loaded(uri, "other")[0]
    compared = report.comparisons(first, DEFAULT_METRIC, "max", against=other)
    evidence = report.evidence_of(first, compared, uri, DEFAULT_METRIC, "max")
    report.write_report(first, tmp_path, uri, DEFAULT_METRIC, "max", compared, evidence)
    html = (tmp_path / "analysis.html").read_text()
    assert "against other: actor_lr 0.0005: 0.19 (95 %:" in html
    headings = (
        "Paired with the best",
        "What the chance is made of",
        "Rung by rung",
        "Flipped questions of the two sweeps",
    )
    assert all(f"<h2>{heading}</h2>" in html for heading in headings)


@pytest.mark.slow
def test_the_best_of_several_needs_more_to_be_ahead_of_another_sweep(uri: str) -> None:
    first, other = loaded(uri)[0], loaded(uri, "other")[0]
    pair = report.comparisons(first, DEFAULT_METRIC, "max", against=other)["against other"]
    alone, chosen = (
        weighing.between(uri, *(replace(group, chosen_from=count) for group in pair), DEFAULT_METRIC, "max")
        for count in (1, 3)
    )
    assert {group.chosen_from for group in pair} == {len(loaded(uri)[1]), len(loaded(uri, "other")[1])}
    assert alone and chosen and alone.chance < chosen.chance == min(1.0, 3 * alone.chance)
    assert gap_sentence(chosen).count("is the best of 3 settings, and was lucky, too") == 2
    assert "lucky" not in gap_sentence(alone)


def test_runs_are_paired_by_seed_or_in_order() -> None:
    one, two, three = (SimpleNamespace(seed=seed) for seed in (1, 2, 3))
    other = SimpleNamespace(seed=2)
    assert pair_seeds([one, two], [other, three]) == [(two, other)]  # type: ignore[list-item]
    assert pair_seeds([one], [other, three]) == [(one, other)]  # type: ignore[list-item]


def test_settings_on_the_same_seeds_that_went_to_the_end_are_compared() -> None:
    trials = [
        trial(3 * i + seed, {LR: float(i), "seed": seed}, {2: 0.1, 4: i / 10 + seed / 100})
        for i in range(2)
        for seed in range(2)
    ]
    stopped = trial(9, {LR: 7.0, "seed": 0}, {2: 0.9}, stopped_at=2)
    groups, values = seed_table(groups_of(sweep(*trials, stopped)), DEFAULT_METRIC)
    assert [group.settings[LR] for group in groups] == [1.0, 0.0]
    assert values == pytest.approx(np.array([[0.1, 0.11], [0.0, 0.01]]))


def test_a_trial_that_was_stopped_did_not_go_to_the_end_though_it_has_logged_the_last_step() -> None:
    trials = [
        trial(3 * i + seed, {LR: float(i), "seed": seed}, {2: 0.1, 4: i / 10 + seed / 100})
        for i in range(3)
        for seed in range(2)
    ]
    trials[5] = replace(trials[5], stopped_at=3)
    groups, _ = seed_table(groups_of(sweep(*trials)), DEFAULT_METRIC)
    assert [group.settings[LR] for group in groups] == [1.0, 0.0]
    trials = [*trials[:4], *(replace(each, stopped_at=4) for each in trials[4:])]
    groups, _ = seed_table(groups_of(sweep(*trials)), DEFAULT_METRIC)
    assert [group.settings[LR] for group in groups] == [1.0, 0.0]


def test_a_setting_is_out_at_the_rung_where_it_was_judged_though_a_seed_ended_later() -> None:
    curves = {0: {2: 0.5, 4: 0.6}, 1: {2: 0.4, 4: 0.7}, 2: {2: 0.1}, 3: {2: 0.2}}
    trials = [trial(n, {LR: float(n // 2), "seed": n % 2}, curve) for n, curve in curves.items()]
    stopped = [replace(each, stopped_at=2 + each.settings["seed"]) for each in trials[2:]]  # type: ignore[operator]
    found = sweep(*trials[:2], *stopped)
    standings = rung_standings(found, groups_of(found), DEFAULT_METRIC, "max")
    assert [(each.at, each.is_out) for each in standings] == [(2, False), (2, True)]


def test_rungs_say_how_far_each_was_behind_and_who_was_stopped(uri: str) -> None:
    found, groups = loaded(uri)
    standings = rung_standings(found, groups, DEFAULT_METRIC, "max")
    assert [(each.at, each.is_out) for each in standings] == [
        (2, False),
        (2, False),
        (2, True),
        (4, False),
        (4, False),
    ]
    assert standings[2].behind == pytest.approx((0.25 + 0.375) / 2 - 0.125 / 2)
    assert standings[0].behind == -standings[1].behind


def test_intervals_and_chances_of_a_race_pay_for_the_rungs_before(uri: str) -> None:
    """Step 4 is its second look, so the intervals are of the level 1 - 0.1 / 3."""
    found, groups = loaded(uri)
    race = replace(found, options={**found.options, "scheduler": "race"})
    last = np.array([[trial.curve(DEFAULT_METRIC)[4] for trial in group.trials] for group in groups[:2]])
    for each, looks in ((found, 1), (race, 2)):
        standing = rung_standings(each, groups, DEFAULT_METRIC, "max")[3]
        assert standing.ends == pytest.approx(deficits(last, looks)[0].ends)
    compared = report.comparisons(found, DEFAULT_METRIC, "max")
    once, paid = (report.evidence_of(each, compared, uri, DEFAULT_METRIC, "max").gaps for each in (found, race))
    assert paid[0].gap.half_width == pytest.approx(half_width(once[0].gap.parts, 0.1 / 3))
    assert paid[1].gap == once[1].gap  # at step 2, the first look
    once_by_hand = [pair.gap.chance for pair in once]
    assert [pair.chance for pair in paid] == pytest.approx(holm([min(1, 1.5 * once_by_hand[0]), once_by_hand[1]]))


def test_a_run_whose_value_is_infinite_is_not_compared() -> None:
    values = [[0.5, 0.4, 0.45], [0.3, math.inf, 0.35], [0.2, 0.1, 0.3]]
    trials = [
        trial(3 * i + seed, {LR: float(i), "seed": seed}, {4: value})
        for i, row in enumerate(values)
        for seed, value in enumerate(row)
    ]
    found = replace(sweep(*trials), rungs=(4,))
    groups = groups_of(found, mode="min")
    assert seed_table(groups, DEFAULT_METRIC)[1].tolist() == [values[2], values[0]]
    standings = rung_standings(found, groups, DEFAULT_METRIC, "min")
    assert [(each.seeds, math.isfinite(each.behind)) for each in standings] == [(2, True)] * 3


def test_added_seeds_are_looks_of_a_race() -> None:
    race = replace(sweep(trial(0, {LR: 1.0}, {4: 0.5})), options={"scheduler": "race", "seeds": "3"}, rungs=(1, 2))
    assert [race.looks(step, seeds) for step, seeds in ((1, 3), (2, 3), (4, 3), (4, 2), (4, 5))] == [1, 2, 3, 3, 5]
    assert replace(race, options={"scheduler": "asha", "seeds": "3"}).looks(4, 5) == 1
    assert replace(race, options={"scheduler": "race", "seeds": "three"}).looks(4, 5) == 3


def test_the_front_has_whom_nobody_beats() -> None:
    assert front([(1, 2), (2, 1), (2, 2), (1, 2), (math.nan, 0)]) == [True, True, False, True, False]


def test_a_plan_is_described_with_what_more_would_cost() -> None:
    assert spread_of([]) is None
    first, more = plan_lines(options(ASSUMED, 3, 256), assumed=True)
    assert first.startswith("3 seeds and 256 questions can show a difference of 0.1 ")
    assert "5 seeds: 0.0" in more and "1.7 times the training" in more and "1024 questions: " in more
    (few,) = plan_lines(options(ASSUMED, 2, 8)[:1], assumed=True, most=1)
    assert few.startswith("2 seeds and 8 questions can show no difference in four of five sweeps (")
    alone = plan_lines(options(ASSUMED, 1, 256), assumed=True)[0]
    assert alone.startswith("1 seed and 256 questions show nothing of a setting")


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    keep(tmp_path, {4: FIRST, 6: FIRST})
    (tmp_path / "evaluations" / "step_000004-held_out.parquet").write_bytes(b"no parquet")
    run = EvaluatedRun(trial(0, {LR: 1.0}, {4: 0.5}), DEFAULT_METRIC, open_storage(str(tmp_path)), frozenset({4, 6}))
    assert list(run.values(6).values()) == [1, 0.5, 0, 1]
    assert run.values(4) == {} and run.mean(4) == {"all questions": 0.5} and run.mean(6) == {}
