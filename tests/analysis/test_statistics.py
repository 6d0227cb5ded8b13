"""Groups of trials: means and intervals computed by hand, order, differences, tables, and the static picture."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sweep_cases import groups_of, sweep, trial

from rlx.analysis import static_figure, statistics, style, tables
from rlx.analysis.comparison.evidence import Evidence
from rlx.analysis.comparison.wording import sweep_verdict
from rlx.analysis.loading import SettingValue
from rlx.analysis.page import layout, trial_figures
from rlx.analysis.sentences import difference_sentence, summary_sentence
from rlx.analysis.statistics import difference, mean_interval
from rlx.config.errors import ConfigError
from rlx.config.sweep import DEFAULT_METRIC

LR, KIND = "train.actor_lr", "algorithm.advantage"


def setting(lr: float, seed: int, kind: str = "gae") -> dict[str, SettingValue]:
    return {LR: lr, KIND: kind, "seed": seed}


SMALL = sweep(
    trial(0, setting(1e-4, 0), {0: 0.1, 5: 0.3, 10: 0.5}),
    trial(1, setting(1e-4, 1), {0: 0.1, 5: 0.4, 10: 0.7}),
    trial(2, setting(3e-4, 0), {0: 0.1, 5: 0.9}, stopped_at=5),
    trial(3, setting(3e-4, 1), {0: 0.1, 5: 0.2}, status="RUNNING"),
    trial(4, setting(1e-3, 0, "grpo"), {}, status="FAILED"),
    trial(5, setting(1e-3, 1, "grpo"), {0: 0.2, 10: 0.2}, status="KILLED"),
)


def test_interval_by_hand() -> None:
    mean, half = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3
    assert half == pytest.approx(2.776445 * math.sqrt(2.5) / math.sqrt(5), rel=1e-6)  # t of 4 degrees, two-sided 95 %
    assert mean_interval([2.0, 2.0]) == (2, 0)


@pytest.mark.parametrize("right", [384, 512])
def test_equal_accuracies_are_as_uncertain_as_their_questions(right: int) -> None:
    bounds = stats.binomtest(right, 512).proportion_ci(0.95, method="wilson")
    mean, half = mean_interval([right / 512] * 3, num_questions=512)
    assert (mean, half) == pytest.approx((right / 512, (bounds.high - bounds.low) / 2))
    assert half > 0
    assert mean_interval([0.1, 0.9], num_questions=512) == mean_interval([0.1, 0.9])  # wider by itself


@pytest.mark.parametrize(("values", "expected"), [([0.25], 0.25), ([], math.nan)])
def test_fewer_than_two_runs_have_no_interval(values: list[float], expected: float) -> None:
    mean, half = mean_interval(values)
    assert mean == expected or (math.isnan(mean) and math.isnan(expected))
    assert math.isnan(half)


def test_a_setting_is_its_trials_of_all_seeds_and_counts_those_that_have_ended() -> None:
    groups = groups_of(SMALL)
    assert [group.settings for group in groups] == [
        {LR: 3e-4, KIND: "gae"},
        {LR: 1e-4, KIND: "gae"},
        {LR: 1e-3, KIND: "grpo"},
    ]
    assert [group.values for group in groups] == [(0.9,), (0.7, 0.5), (0.2,)]
    assert [len(group.trials) for group in groups] == [2, 2, 2]
    assert groups[1].half_width == pytest.approx(12.706205 * math.sqrt(0.02) / math.sqrt(2), rel=1e-6)
    assert [group.label for group in groups][1] == "actor_lr 0.0001, advantage gae"


def test_one_lucky_run_does_not_make_a_setting_the_best() -> None:
    lucky = sweep(
        trial(0, setting(1, 0), {9: 0.99}),
        trial(1, setting(1, 1), {9: 0.1}),
        trial(2, setting(2, 0), {9: 0.6}),
        trial(3, setting(2, 1), {9: 0.62}),
    )
    assert [group.settings[LR] for group in groups_of(lucky)] == [2, 1]
    assert [group.settings[LR] for group in groups_of(lucky, mode="min")] == [1, 2]


def test_equal_means_keep_their_order_and_those_without_a_value_come_last() -> None:
    tied = sweep(
        trial(0, {LR: 5.0}, {}, status="FAILED"),
        trial(1, {LR: 4.0}, {9: 0.5}),
        trial(2, {LR: 3.0}, {9: 0.5}),
        trial(3, {LR: 2.0}, {9: 0.5}, status="RUNNING"),
    )
    for mode in ("max", "min"):
        assert [group.settings[LR] for group in groups_of(tied, mode=mode)] == [4, 3, 2, 5]


def test_what_failed_is_behind_all_that_did_not() -> None:
    early = sweep(
        trial(0, {LR: 1.0}, {0: 0.9}, status="FAILED"),
        trial(1, {LR: 2.0}, {0: 0.1, 9: 0.3}),
        trial(2, {LR: 3.0}, {0: 0.1, 10: 0.4}, status="KILLED"),
        trial(3, {LR: 4.0}, {}, status="RUNNING"),
    )
    groups = groups_of(early)
    assert [group.settings[LR] for group in groups] == [3, 2, 4, 1]
    assert groups[-1].values == () and groups[-1].ended == ()
    assert tables.trial_table(early, DEFAULT_METRIC, "max")["trial"].tolist()[-1] == "trial_00000"
    assert summary_sentence(groups, DEFAULT_METRIC).startswith("actor_lr 3 is ahead of actor_lr 2 by 0.1;")


def test_trials_that_were_cut_are_not_compared_and_those_that_were_stopped_are() -> None:
    """0.9 after two steps says nothing of ten; a scheduler has compared whom it stopped."""
    cut = sweep(
        trial(0, setting(1, 0), {0: 0.1, 2: 0.9}, status="KILLED"),
        trial(1, setting(1, 1), {0: 0.1, 4: 0.9}, status="KILLED"),
        trial(2, setting(2, 0), {2: 0.95, 10: 0.4}, status="KILLED"),  # after its last step
        trial(3, setting(2, 1), {2: 0.95, 10: 0.42}),
        trial(4, setting(3, 0), {2: 0.3}, status="KILLED", stopped_at=2),
    )
    groups = groups_of(cut)
    assert [group.values for group in groups] == [(0.42, 0.4), (0.3,), ()]
    assert tables.group_table(groups)["notes"].tolist() == [
        "1 killed",
        "stopped at 2",
        "2 killed at 2 to 4 of 10 steps",
    ]
    assert [name[-1] for name in tables.trial_table(cut, DEFAULT_METRIC, "max")["trial"]] == ["3", "2", "4", "0", "1"]
    said = "Not compared, because trials were interrupted or wait: actor_lr 1, advantage gae (2 to 4 of 10 steps)."
    assert sweep_verdict(groups, Evidence([]), DEFAULT_METRIC).endswith(said)
    none = sweep_verdict(groups[2:], Evidence([]), DEFAULT_METRIC)
    assert none == f"No trial has ended with a finite {DEFAULT_METRIC}. {said}"
    many = groups_of(sweep(*(trial(i, {LR: i}, {i: 0.5}, status="KILLED") for i in range(1, 6))))
    assert sweep_verdict(many, Evidence([]), DEFAULT_METRIC).endswith("wait: 5 settings (1 to 5 of 10 steps).")


@pytest.mark.parametrize("last", [math.inf, -math.inf])
def test_a_setting_of_which_a_trial_diverged_is_not_compared_by_an_older_value(last: float) -> None:
    some = sweep(
        trial(0, setting(1, 0), {0: 0.1, 5: 0.9, 10: last}),
        trial(1, setting(1, 1), {0: 0.1, 5: 0.9, 10: 0.9}),
        trial(2, setting(2, 0), {0: 0.1, 5: last, 10: 0.4}),
        trial(3, setting(2, 1), {0: 0.1, 5: 0.4, 10: last}, stopped_at=5),  # it logged one step more
        trial(4, setting(3, 0), {0: 0.1, 10: last}),
    )
    groups = groups_of(some)
    assert [group.values for group in groups] == [(0.4, 0.4), (0.9,), ()]
    assert [group.is_compared for group in groups] == [True, False, False]
    notes = ["stopped at 5", "1 of 2 ended with no finite value", "1 of 1 ended with no finite value"]
    assert tables.group_table(groups)["notes"].tolist() == notes
    assert summary_sentence(groups[2:], DEFAULT_METRIC) == f"No trial has ended with a finite {DEFAULT_METRIC}."
    said = "because the last value of a trial is not finite: actor_lr 1, advantage gae; actor_lr 3, advantage gae."
    assert sweep_verdict(groups, Evidence([]), DEFAULT_METRIC).endswith(said)


def test_a_setting_of_which_a_trial_failed_is_behind_those_of_which_none_did() -> None:
    lost = sweep(
        trial(0, setting(1, 0), {9: 0.9}),
        trial(1, setting(1, 1), {5: 0.1}, status="FAILED"),
        trial(2, setting(2, 0), {9: 0.6}),
        trial(3, setting(2, 1), {9: 0.62}),
    )
    groups = groups_of(lost)
    assert [group.values for group in groups] == [(0.62, 0.6), (0.9,)]
    assert [group.is_compared for group in groups] == [True, False]
    assert tables.group_table(groups)["notes"].tolist() == ["", "1 failed"]
    assert summary_sentence(groups, DEFAULT_METRIC).endswith("there is no other setting to compare it with.")
    assert (
        summary_sentence(groups[1:], DEFAULT_METRIC)
        == f"No setting without a failed trial has ended with a finite {DEFAULT_METRIC}."
    )
    by_rate = groups_of(lost, by=LR)  # many settings: one that failed says little of the value
    assert [group.values for group in by_rate] == [(0.9,), (0.62, 0.6)]


def test_a_setting_is_not_compared_for_one_reason_even_without_a_value() -> None:
    lost = sweep(
        trial(0, setting(1, 0), {9: 0.9}, status="FAILED"),
        trial(1, setting(1, 1), {2: 0.1}, status="KILLED"),
        trial(2, setting(2, 0), {9: 0.6}, status="FAILED"),
        trial(3, setting(2, 1), {9: math.inf}),
        trial(4, setting(3, 0), {9: math.inf}),
        trial(5, setting(3, 1), {3: 0.6}, status="KILLED"),
        trial(6, setting(4, 0), {9: 0.6}),
        trial(7, setting(4, 1), {9: 0.6}, status="RUNNING"),
        trial(8, setting(5, 0), {9: 0.6}, status="RUNNING"),
    )
    found = sweep_verdict(groups_of(lost), Evidence([]), DEFAULT_METRIC).split(" Not compared, because ")[1:]
    assert found == [
        "a trial failed: actor_lr 2, advantage gae; actor_lr 1, advantage gae.",
        "the last value of a trial is not finite: actor_lr 3, advantage gae.",
    ]


def test_trials_that_differ_in_nothing_are_one_value() -> None:
    (twice,) = groups_of(sweep(trial(0, {LR: 1.0}, {9: 0.4}), trial(1, {LR: 1.0}, {9: 0.6})))
    assert twice.values == (0.5,)
    assert math.isnan(twice.half_width)


def test_nothing_varied_or_seeds_alone_are_one_setting() -> None:
    (group,) = groups_of(sweep(trial(0, {"seed": 0}, {9: 0.4}), trial(1, {"seed": 1}, {9: 0.6})))
    assert (group.label, group.mean, len(group.values)) == ("the one setting", 0.5, 2)
    (group,) = groups_of(sweep(trial(0, {}, {9: 0.4})))
    assert group.settings == {}


def test_by_one_setting_everything_else_is_chance() -> None:
    groups = groups_of(SMALL, by=KIND)
    assert [(group.settings, len(group.values)) for group in groups] == [({KIND: "gae"}, 3), ({KIND: "grpo"}, 1)]
    assert groups[0].mean == pytest.approx(0.7)


def test_a_setting_that_was_not_varied_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--by algorithm.advantages: sweep s varies .*nearest: algorithm.advantage$"):
        groups_of(SMALL, by="algorithm.advantages")


def test_a_metric_that_was_not_loaded_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'policy/loss'"):
        groups_of(SMALL, "policy/loss")


# ---------------------------------------------------------------------------------------------------------------------
# Differences


def test_the_difference_is_that_of_welch() -> None:
    one, other = [0.1, 0.4, 0.3], [0.7, 0.8, 0.75, 0.2]
    both = sweep(
        *(trial(i, setting(1, i), {9: value}) for i, value in enumerate(one)),
        *(trial(i, setting(2, i), {9: value}) for i, value in enumerate(other)),
    )
    better, worse = groups_of(both)
    gap, half = difference(better, worse)
    interval = stats.ttest_ind(other, one, equal_var=False).confidence_interval(0.95)
    assert gap == pytest.approx(0.6125 - 0.8 / 3)
    assert (gap - half, gap + half) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert (
        difference_sentence(better, worse)
        == f"The means differ by 0.35 ± {half:.2g} (95 %, Welch): which may be chance."
    )


def test_equal_runs_differ_as_far_as_rounding_tells_and_one_run_has_no_interval() -> None:
    """Values are 1 apart, so each group has a variance of 1/12, and the difference of two runs each 1/12 as well."""
    both = sweep(*(trial(i, setting(i // 2, i), {9: float(i // 2)}) for i in range(5)))
    two, one, zero = groups_of(both)
    assert difference(one, zero) == pytest.approx((1.0, 4.302653 / 12**0.5))  # t of 2 degrees of freedom
    assert difference_sentence(one, zero).endswith("which may be chance.")
    assert math.isnan(difference(two, one)[1])
    assert difference_sentence(two, one) == "The means differ by 1; there is no interval without two runs of each."


def test_runs_of_a_sweep_that_all_end_alike_differ_by_nothing() -> None:
    first, second = groups_of(sweep(*(trial(i, setting(i // 2, i), {9: 0.5}) for i in range(4))))
    assert difference(first, second) == (0.0, 0.0)


def test_runs_that_are_equal_are_known_to_the_resolution_of_the_sweep() -> None:
    """Two runs each with 0.5, and with 0.3 and 0.31."""
    ends = [0.5, 0.5, 0.3, 0.31]
    runs = [trial(i, setting(1 + i // 2, i), {9: end}) for i, end in enumerate(ends)]
    equal, unequal = groups_of(sweep(*runs))
    assert equal.half_width == pytest.approx(stats.t.ppf(0.975, 1) * 0.01 / 12**0.5 / 2**0.5)
    assert unequal.half_width == mean_interval([0.3, 0.31]).half_width


def test_runs_that_agree_by_luck_are_no_certainty() -> None:
    ends = [0.871, 0.87, 0.87, 0.85, 0.85, 0.85]  # values are 0.001 apart
    runs = [trial(i, setting(1 + i // 3, i), {0: 0.5, 9: end}) for i, end in enumerate(ends)]
    certain, doubtful = groups_of(sweep(*runs)), groups_of(sweep(*runs, num_questions=512))
    assert summary_sentence(certain, DEFAULT_METRIC).endswith("do not overlap.")
    assert "not shown to be better: intervals overlap" in summary_sentence(doubtful, DEFAULT_METRIC)
    assert difference_sentence(*certain).endswith("more than chance.")
    assert difference(*doubtful)[1] == pytest.approx(math.hypot(doubtful[0].half_width, doubtful[1].half_width))
    assert difference_sentence(*doubtful).endswith("which may be chance.")
    curve = statistics.mean_curve(doubtful[0], DEFAULT_METRIC)
    assert curve["high"].iloc[-1] - curve["mean"].iloc[-1] == pytest.approx(doubtful[0].half_width)


def test_the_summary_states_whether_intervals_overlap() -> None:
    def summary(*values: tuple[float, ...]) -> str:
        runs = [(lr, seed, value) for lr, each in enumerate(values) for seed, value in enumerate(each)]
        return summary_sentence(
            groups_of(sweep(*(trial(0, {LR: lr, "seed": seed}, {9: value}) for lr, seed, value in runs))),
            DEFAULT_METRIC,
        )

    assert summary((0.7, 0.71, 0.72), (0.5, 0.51, 0.52)) == (
        "actor_lr 0 wins with eval/accuracy 0.71 ± 0.025 over 3 runs; the next is 0.51 ± 0.025 over 3 runs "
        "(actor_lr 1): the intervals do not overlap."
    )
    assert summary((0.7, 0.5), (0.5, 0.4)) == (
        "actor_lr 0 is ahead of actor_lr 1 by 0.15; not shown to be better: intervals overlap "
        "(eval/accuracy 0.6 ± 1.3 over 2 runs against 0.45 ± 0.64 over 2 runs)."
    )
    assert summary((0.7,), (0.5,)) == (
        "actor_lr 0 is ahead of actor_lr 1 by 0.2; not shown to be better: with one run of a setting there is no "
        "interval; use --seeds 3 (eval/accuracy 0.7 over 1 run against 0.5 over 1 run)."
    )
    cloned = trial(0, {LR: 0}, {9: 0.7}, origins=("trial_00001@4",))
    text = summary_sentence(groups_of(sweep(cloned, trial(1, {LR: 1}, {9: 0.5}))), DEFAULT_METRIC)
    assert "there is no interval; rlx lineage says how to run the best on fresh seeds (" in text
    assert summary((0.7, 0.5), (0.7, 0.5)).startswith("actor_lr 0 is level with actor_lr 1; not shown to be better")
    assert summary((0.7, 0.8)).endswith("there is no other setting to compare it with.")


def test_without_a_result_there_is_no_winner() -> None:
    assert summary_sentence(groups_of(sweep(trial(0, {LR: 1.0}, {5: 0.5}, status="RUNNING"))), DEFAULT_METRIC) == (
        "No trial has ended with a finite eval/accuracy."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def test_a_row_per_setting_with_what_is_to_be_said_of_its_trials() -> None:
    table = tables.group_table(groups_of(SMALL))
    assert table["rank"].tolist() == [1, 2, 3]
    assert table["actor_lr"].tolist() == [3e-4, 1e-4, 1e-3]
    assert table["runs"].tolist() == [1, 2, 1]
    assert table["mean"].tolist() == pytest.approx([0.9, 0.6, 0.2])
    assert (table["lowest"].tolist(), table["highest"].tolist()) == ([0.9, 0.5, 0.2], [0.9, 0.7, 0.2])
    assert table["tokens"].tolist() == [500, 1000, 1000]
    assert table["seconds"].tolist() == [12, 10.5, 15]
    assert table["notes"].tolist() == ["1 running; stopped at 5", "", "1 killed; 1 failed"]  # best trial first


def test_a_trial_that_went_on_from_another_says_so() -> None:
    (note,) = tables.group_table(groups_of(sweep(trial(0, {LR: 1.0}, {9: 0.5}, origins=("trial_00001@6",)))))["notes"]
    assert note == "continued from trial_00001@6"


def test_without_anything_to_say_there_is_no_column_for_it() -> None:
    assert list(tables.group_table(groups_of(sweep(trial(0, {LR: 1.0}, {9: 0.5})))))[-1] == "seconds"


def test_a_row_per_trial_by_the_last_value_then_the_best() -> None:
    tied = sweep(
        trial(0, {LR: 1.0}, {0: 0.2, 5: 0.6}),
        trial(1, {LR: 2.0}, {}, status="FAILED"),
        trial(2, {LR: 3.0}, {0: 0.1, 5: 0.7, 8: 0.5, 10: 0.6}, stopped_at=10),
    )
    table = tables.trial_table(tied, DEFAULT_METRIC, "max")
    assert table["trial"].tolist() == ["trial_00002", "trial_00000", "trial_00001"]
    assert table[["final", "best", "first", "steps", "tokens"]].values[0].tolist() == [0.6, 0.7, 0.1, 10, 1000]
    assert table["stopped"].tolist()[0] == 10
    assert table["status"].tolist() == ["FINISHED", "FINISHED", "FAILED"]
    assert table["final"].isna().tolist() == [False, False, True]
    least = tables.trial_table(tied, DEFAULT_METRIC, mode="min")
    assert least["trial"].tolist() == ["trial_00002", "trial_00000", "trial_00001"]
    assert least["best"].tolist()[:2] == [0.5, 0.6]  # before training both were lower


def test_names_lose_their_section_unless_two_would_be_alike() -> None:
    assert style.short_names(["train.actor_lr", "seed"]) == ["actor_lr", "seed"]
    assert style.short_names(["data.seed", "seed", "eval.num_prompts"]) == ["data.seed", "seed", "num_prompts"]


def test_the_table_is_markdown_with_numbers_a_person_can_read() -> None:
    head, rule, first, *_ = tables.format_table(tables.group_table(groups_of(SMALL))).splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert head.startswith("| rank | actor_lr ")
    assert set(rule) == set("|-")
    assert cells[:6] == ["1", "0.0003", "gae", "1", "0.9", "-"]


def test_what_looks_like_markup_stays_in_the_table() -> None:
    text = tables.format_table(pd.DataFrame({"answer_pattern": ["[/a]", "[b] :smile:"]}))
    assert "| [/a] " in text and "| [b] :smile: " in text


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (200, []),
        (110, ["tokens"]),
        (88, ["tokens", "lowest", "highest"]),
        (80, tables.OPTIONAL_COLUMNS),
        (20, tables.OPTIONAL_COLUMNS),
    ],
)
def test_a_narrow_terminal_goes_without_the_least_important(width: int, left_out: list[str]) -> None:
    table = tables.group_table(groups_of(SMALL))
    head, *rest = tables.format_table(table, width).splitlines()
    names = [name.strip() for name in head.strip("|").split("|")]
    assert names == [name for name in table if name not in left_out]
    assert len(head) <= max(width, 74)  # what is left needs so much: numbers are never broken
    assert [line.split("|")[2].strip() for line in rest if line[2:6].strip()][1:] == ["0.0003", "0.0001", "0.001"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.67, "12,346"),
        (16384, "16,384"),
        (9.1734e-5, "9.17e-5"),
        (0.12345, "0.123"),
        (0.0, "0"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_numbers_as_text(value: float | None, text: str) -> None:
    assert style.as_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9999, "0.9999"),
        (0.99995, "0.99995"),
        (1.0, "1"),
        (1234.5, "1,234.5"),
        (1e-5, "1e-5"),
        (0.1 + 0.2, "0.3"),
        (None, "-"),
        ([{"source": "a.jsonl"}], "[{'source': 'a.jsonl'}]"),
    ],
)
def test_settings_are_given_in_full(value: Any, text: str) -> None:
    assert style.settings_labels([{"train.ema_decay": value}]) == [f"ema_decay {text}"]


def test_long_texts_are_shortened_in_names_figures_and_tables() -> None:
    prompts = [f"Add $a and {middle * 300} then stop." for middle in ("x", "y")] + ["Add."]
    groups = groups_of(
        sweep(*(trial(i, {"data.system_prompt": each}, {9: 0.5 - i / 9}) for i, each in enumerate(prompts)))
    )
    short = [f"system_prompt Add $a and {middle * 28}…{middle * 9} then stop." for middle in ("x", "y")]
    assert [group.label for group in groups] == [*short, "system_prompt Add."]
    table = tables.group_table(groups)
    assert max(map(len, tables.format_table(table).splitlines())) < 160  # of the terminal
    assert tables.cell_texts(table)[0][1] == prompts[0]  # of the page
    assert max(map(len, layout.setting_axis(prompts)["categoryarray"])) == 24
    assert max(map(len, layout.dimension("system_prompt", prompts)["ticktext"])) == 24
    labels = static_figure.draw(groups, "title", DEFAULT_METRIC).axes[1].get_yticklabels()
    assert max(len(line) for label in labels for line in label.get_text().splitlines()) <= 50
    static_figure.draw(groups, "title", DEFAULT_METRIC).savefig(io.BytesIO())  # $ begins no formula


def test_the_picture_has_the_words_of_a_setting_without_commas_of_its_own() -> None:
    prompt = f"{'a' * 22} {'b' * 24}"
    groups = groups_of(sweep(*(trial(i, {"p": prompt, "k": i}, {9: 0.5}) for i in range(2))))
    label = static_figure.draw(groups, "title", DEFAULT_METRIC).axes[1].get_yticklabels()[0].get_text()
    assert label == f"p {'a' * 22} {'b' * 24}\nk 0"


@pytest.mark.parametrize(
    ("texts", "short"),
    [
        (
            [f"Qwen/Qwen2.5-Math-{size}-Instruct" for size in ("1.5B", "7B")],
            ["…2.5-Math-1.5B-Instruct", "…2.5-Math-7B-Instruct"],
        ),
        (
            [f"{'a' * 50}{each}{'b' * 50}" for each in ("x", "")],
            [f"…{'a' * 10}x{'b' * 10}…", f"…{'a' * 10}{'b' * 10}…"],
        ),
        ([f"{'a' * 50}{x * 40}{'b' * 50}" for x in "xy"], [f"…{'a' * 5}{x * 7}…{x * 4}{'b' * 5}…" for x in "xy"]),
        (["a" * 50, "b"], [f"{'a' * 15}…{'a' * 8}", "b"]),
        (
            [f"{'a' * 50}{each}{'b' * 50}" for each in ("x" * 40, "")],  # also if one of them has no part of its own
            [f"…{'a' * 5}{'x' * 7}…{'x' * 4}{'b' * 5}…", f"…{'a' * 5}{'b' * 5}…"],
        ),
    ],
)
def test_long_texts_that_begin_and_end_alike_are_shortened_to_where_they_differ(
    texts: list[str], short: list[str]
) -> None:
    assert style.short_texts(texts, 24) == short
    assert layout.setting_axis(texts)["categoryarray"] == style.short_texts(sorted(texts), 24)


def test_long_texts_of_a_setting_differ_wherever_their_settings_are_named() -> None:
    """Each differs from the first at a place of its own, as edits of a prompt do."""
    prompt = "".join(f"{number:04d}" for number in range(200))
    prompts = [prompt, *(f"{prompt[:at]}x{prompt[at:]}" for at in range(100, 700, 100))]
    several = sweep(*(trial(i, {"data.system_prompt": each}, {9: 0.5}) for i, each in enumerate(prompts)))
    groups = groups_of(several)
    lines = tables.format_table(tables.group_table(groups)[["system_prompt", "mean"]]).splitlines()[2:]
    for texts in (
        [group.label for group in groups],
        lines,
        [*trial_figures.described(several.trials).values()],
        layout.setting_axis(prompts)["categoryarray"],
        layout.dimension("system_prompt", prompts)["ticktext"],
    ):
        assert len(set(texts)) == len(prompts) and max(map(len, texts)) < 110


def test_settings_that_nearly_agree_differ_in_tables_and_metrics_are_rounded() -> None:
    decays = [0.9999, 0.99995]
    near = sweep(*(trial(i, {"train.ema_decay": decay}, {5: 0.123456}) for i, decay in enumerate(decays)))
    for table in (tables.group_table(groups_of(near)), tables.trial_table(near, DEFAULT_METRIC, "max")):
        text = tables.format_table(table)
        assert all(each in text for each in ("0.9999 ", "0.99995 ", "0.123 ")) and "0.1234" not in text


# ---------------------------------------------------------------------------------------------------------------------
# Curves


def test_a_run_that_ended_early_keeps_its_last_value_in_the_mean() -> None:
    runs = (trial(0, setting(1, 0), {0: 0.1, 5: 0.3, 10: 0.5}), trial(1, setting(1, 1), {0: 0.1, 5: 0.9}, stopped_at=5))
    (group,) = groups_of(sweep(*runs))
    curve = statistics.mean_curve(group, DEFAULT_METRIC)
    assert curve["mean"].to_dict() == pytest.approx({0: 0.1, 5: 0.6, 10: 0.7})
    assert curve["mean"].iloc[-1] == pytest.approx(group.mean)
    assert (curve["high"] - curve["low"]).tolist() == pytest.approx(
        [0, 2 * 12.706205 * 0.3, 2 * 12.706205 * 0.2], rel=1e-6
    )


def test_the_picture_shows_every_group_and_run(tmp_path: Path) -> None:
    groups = groups_of(SMALL)
    figure = static_figure.draw(groups, "s", DEFAULT_METRIC)
    curves, ends = figure.axes
    drawn = {tuple(np.round(line.get_ydata(), 6)) for line in curves.lines}
    assert drawn == {(0.1, 0.9), (0.1, 0.35, 0.6), (0.2, 0.2)}
    assert [text.get_text() for text in ends.get_yticklabels()] == [group.label for group in groups]
    figure.savefig(tmp_path / "figure.png")


def test_the_caption_says_how_many_runs_a_setting_has() -> None:
    alone = [trial(0, {LR: 1.0}, {0: 0.1, 9: 0.2}), trial(1, {LR: 2.0}, {0: 0.1, 9: 0.3})]
    pair = [trial(i + 2, {LR: 3.0, "seed": i}, {0: 0.1, 9: 0.2 + i}) for i in range(2)]
    seeded = [replace(each, settings={**each.settings, "seed": 0}) for each in alone]
    for runs, caption, title in (
        (alone, "one run each, so no interval", "last value of each run"),
        (pair, "mean and 95 % interval of 2 runs each", "last value of each run; mean, 95 % interval"),
        (seeded + pair, "mean and 95 % interval of 1 or 2 runs each", "last value of each run; mean, 95 % interval"),
    ):
        figure = static_figure.draw(groups_of(sweep(*runs)), "s", DEFAULT_METRIC)
        assert figure.texts[1].get_text() == caption
        assert figure.axes[1].get_title() == title


def test_a_wide_interval_is_cut_in_the_picture_too() -> None:
    runs = [(1.0, 0, 0.2), (1.0, 1, 0.4), (2.0, 0, 0.25), (2.0, 1, 0.25)]
    wide = groups_of(sweep(*(trial(i, {LR: lr, "seed": s}, {0: 0.3, 9: v}) for i, (lr, s, v) in enumerate(runs))))
    curves, ends = static_figure.draw(wide, "s", DEFAULT_METRIC).axes
    band = curves.collections[-1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0, 1)
    assert curves.get_ylim() == pytest.approx((0.15, 0.4), abs=0.02)  # means from 0.25 to 0.3
    assert ends.get_xlim() == pytest.approx((0, 0.8), abs=0.05)  # runs from 0.2 to 0.4


def test_only_the_best_are_named_and_all_are_drawn() -> None:
    many = groups_of(sweep(*(trial(i, {LR: float(i)}, {0: 0.0, 9: i / 30}) for i in range(30))))
    curves, ends = static_figure.draw(many, "s", DEFAULT_METRIC).axes
    assert len(curves.lines) == 30
    assert len(curves.collections) == style.NUM_BANDS
    assert ends.get_yticklabels()[0].get_text() == "actor_lr 29"
    assert len(set(style.colors(30)[: style.NUM_NAMED])) == style.NUM_NAMED
    assert len(set(style.colors(30)[style.NUM_NAMED :])) == 1


def test_a_sweep_without_results_is_an_empty_picture(tmp_path: Path) -> None:
    groups = groups_of(sweep(trial(0, {LR: 1.0}, {}, status="FAILED")))
    figure = static_figure.draw(groups, "s", DEFAULT_METRIC)
    assert not figure.axes[0].lines
    assert statistics.mean_curve(groups[0], DEFAULT_METRIC).empty
    assert isinstance(tables.group_table(groups), pd.DataFrame)
    figure.savefig(tmp_path / "figure.png")
