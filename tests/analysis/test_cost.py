"""Budgets: what they pay for, and what was spent."""

import math
from dataclasses import replace

import pytest
from sweep_cases import groups_of, sweep, trial

from rlx.analysis.comparison.cost import Amount, Cost, cost_line, run_cost, spent, spent_line
from rlx.analysis.page import comparison_figures, figures
from rlx.config.errors import ConfigError
from rlx.config.sweep import DEFAULT_METRIC

LR = "train.actor_lr"
RUN = run_cost(20, 256, 100, gpus=2, step_seconds=9.0)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("500steps", (500, "steps")),
        ("2Mtokens", (2e6, "tokens")),
        ("1.5e6 tokens", (1.5e6, "tokens")),
        ("8gpu-h", (8, "gpu-h")),
        ("90 gpu-min", (90, "gpu-min")),
        ("3kgpu-s", (3000, "gpu-s")),
    ],
)
def test_amounts_are_read(text: str, amount: tuple[float, str]) -> None:
    assert Amount.of(text) == amount


@pytest.mark.parametrize(
    "text",
    ["", "8", "8h", "gpu-h", "-1steps", "0steps", "8 GPU-h", "1e999999x", "1e999steps", "1e308Mtokens", "1e308gpu-h"],
)
def test_other_texts_are_refused_with_what_can_be_written(text: str) -> None:
    with pytest.raises(ConfigError, match=r"an amount such as 500steps, 2Mtokens, 90gpu-min or 8gpu-h$"):
        Amount.of(text)


def test_a_run_costs_its_steps_its_longest_answers_and_its_gpus() -> None:
    assert RUN == (20, 20 * 256 * 100, 20 * 9 * 2)
    assert RUN.times(3) == (60, 1_536_000, 1080)
    assert run_cost(20, 256, 100, gpus=0).gpu_seconds == 0
    assert str(RUN) == "20 steps, 512,000 tokens, 0.1 GPU-hours"
    assert str(RUN.times(10)._replace(gpu_seconds=math.nan)) == "200 steps, 5.12 M tokens"


@pytest.mark.parametrize(("text", "count"), [("130steps", 2), ("5Mtokens", 3), ("1gpu-h", 3), ("18gpu-min", 1)])
def test_a_budget_pays_for_whole_settings_with_all_seeds(text: str, count: int) -> None:
    assert Amount.of(text).affords(RUN.times(3)) == count


def test_a_budget_that_pays_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="one setting with its seeds takes 60 at most"):
        Amount.of("59steps").affords(RUN.times(3))
    with pytest.raises(ConfigError, match="no run of this model has told yet how long a step takes"):
        Amount.of("8gpu-h").affords(run_cost(20, 256, 100, gpus=1))
    with pytest.raises(ConfigError, match="runs use no GPU; give steps or tokens"):
        Amount.of("8gpu-h").affords(run_cost(20, 256, 100, gpus=0))


def test_what_was_spent_is_what_the_runs_did() -> None:
    """Two runs of 4 and 2 steps, 400 and 200 tokens, 10 and 11 seconds."""
    several = sweep(trial(0, {LR: 1.0}, {0: 0.4, 2: 0.5, 4: 0.6}), trial(1, {LR: 2.0}, {0: 0.4, 2: 0.1}))
    cost = spent(several, gpus=2)
    assert cost == (6, 600, pytest.approx(42))
    assert spent_line(cost, Cost(8, 1e6, math.nan)) == (
        "spent 6 steps, 600 tokens, 0.0117 GPU-hours; planned at most 8 steps, 1 M tokens: 75% of its steps"
    )


def test_a_branch_has_not_spent_what_its_parent_did() -> None:
    """It begins with the row of step 30: 3000 tokens so far, and as every row 4 seconds, which were the parent's."""
    branch = trial(2, {LR: 1.0}, {30: 0.5, 40: 0.6, 50: 0.7})
    assert spent(sweep(branch), gpus=2) == (20, 2000, pytest.approx(16))
    begun = trial(2, {LR: 1.0}, {30: 0.5})
    assert spent(sweep(branch, begun), gpus=2) == (20, 2000, pytest.approx(16))


def test_steps_that_pbt_discards_were_paid_for() -> None:
    """Four steps, of which the last two were discarded; then four from step 2, whose first row was another trial's."""
    before, after = (
        trial(0, {LR: 1.0}, dict.fromkeys(range(5), 0.5)),
        trial(0, {LR: 2.0}, dict.fromkeys(range(2, 7), 0.6)),
    )
    joined = after.history.combine_first(before.history[before.history.index <= 2])
    cloned = replace(after, history=joined, histories=(before.history, after.history))
    population = replace(sweep(cloned), options={"scheduler": "pbt"}, planned=Cost(6, 600, 0)._asdict() | {"gpus": 0})
    assert spent(population, gpus=1) == (8, 800, pytest.approx(10 + 8))
    line = "spent 8 steps, 800 tokens; planned at most 6 steps, 600 tokens, without steps that pbt discards: "
    assert cost_line(population) == f"{line}133% of its steps"


def test_settings_that_nobody_beats_are_marked() -> None:
    """The first is best and took the fewest seconds, the second took fewer tokens, the third is worse in all."""
    runs = (trial(0, {LR: 1.0}, {2: 0.5, 4: 0.6}), trial(1, {LR: 2.0}, {2: 0.4}), trial(3, {LR: 3.0}, {2: 0.1}))
    groups = groups_of(sweep(*runs))
    tokens, seconds = figures.costs(groups, DEFAULT_METRIC, "max").data
    assert list(tokens.marker.symbol) == ["diamond", "diamond", "circle"]
    assert list(tokens.x) == [400, 200, 200] and list(seconds.x) == pytest.approx([10, 11, 13])


def test_arrows_lead_from_where_a_trial_continued() -> None:
    first = trial(1, {LR: 1.0}, {2: 0.5, 4: 0.6})
    second = trial(2, {LR: 2.0}, {2: 0.4, 4: 0.7}, origins=("trial_00001@2", "elsewhere@2"))
    figure = comparison_figures.lineage([first, second], DEFAULT_METRIC)
    arrows = [each for each in figure.layout.annotations if each.arrowcolor]
    assert [(each.x, each.ay, each.y) for each in arrows] == [(2, 0, 1)]
    assert list(figure.data[-1].marker.color) == [0.5, 0.6, 0.4, 0.7]
