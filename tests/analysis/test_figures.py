"""Interactive figures: each one contains the values that it shows."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from sweep_cases import groups_of, sweep, trial

from rlx.analysis.page import comparison_figures, explorer, figures, layout, trial_figures
from rlx.analysis.progress import best_so_far, find_rungs
from rlx.analysis.style import NUM_BANDS
from rlx.config.sweep import DEFAULT_METRIC

LR, KIND, EPOCHS = "train.actor_lr", "algorithm.kl_estimator", "train.ppo_epochs"
LRS = [1e-5, 3e-5, 8e-5, 2e-4, 5e-4, 9e-4, 1e-3]


def settings_of(seeds: int = 2) -> list:
    """Seven settings, the better the higher the learning rate; seeds differ by 0.02."""
    return groups_of(
        sweep(
            *(
                trial(
                    i,
                    {LR: lr, KIND: "k1" if i % 2 else None, EPOCHS: 1 + i % 2, "seed": seed},
                    {0: 0.1, 9: 0.1 * i + 0.02 * seed},
                )
                for i, lr in enumerate(LRS)
                for seed in range(seeds)
            )
        )
    )


def test_intervals_show_each_mean_and_each_run() -> None:
    runs, means = figures.intervals(settings_of(), DEFAULT_METRIC).data
    assert sorted(runs.x) == pytest.approx(sorted(0.1 * i + 0.02 * seed for i in range(7) for seed in range(2)))
    assert list(means.x) == pytest.approx([0.1 * i + 0.01 for i in reversed(range(7))])
    assert list(means.error_x.array) == pytest.approx([12.706205 * 0.01] * 7, rel=1e-6)
    assert means.y[0].startswith("1  actor_lr 0.001")


def wide_interval(metric: str = DEFAULT_METRIC) -> list:
    """Two settings of two seeds each; the interval of the first reaches from -0.97 to 1.57."""
    runs = [(1.0, 0, 0.2), (1.0, 1, 0.4), (2.0, 0, 0.25), (2.0, 1, 0.25)]
    several = sweep(*(trial(i, {LR: lr, "seed": seed}, {0: 0.3, 9: value}) for i, (lr, seed, value) in enumerate(runs)))
    for each in several.trials:
        each.history[metric] = each.history[DEFAULT_METRIC]
    return groups_of(several, metric)


def test_intervals_are_drawn_up_to_the_ends_of_the_metric_and_named_in_full() -> None:
    figure = figures.intervals(wide_interval(), DEFAULT_METRIC)
    means = figure.data[1]
    assert (means.error_x.symmetric, means.error_x.array[0]) == (False, pytest.approx(0.7))
    assert means.error_x.arrayminus[0] == pytest.approx(0.3)
    assert means.hovertext[0].endswith("\n0.3 ± 1.3 over 2 runs")
    bands = [trace.y for trace in figures.curves(wide_interval(), DEFAULT_METRIC).data if trace.fill]
    assert (min(map(min, bands)), max(map(max, bands))) == (0, 1)


def test_a_wide_interval_does_not_hide_the_points() -> None:
    """Runs from 0.2 to 0.4: the axis shows twice as much on both sides, within the range of an accuracy."""
    for metric, lowest in ((DEFAULT_METRIC, 0.0), ("eval/reward", -0.2)):
        expected = pytest.approx((lowest, 0.8), abs=0.05)
        assert figures.intervals(wide_interval(metric), metric).layout.xaxis.range == expected
        assert figures.slices(wide_interval(metric), metric).layout.yaxis.range == expected
        assert figures.costs(wide_interval(metric), metric, "max").layout.yaxis.range == expected
    low, high = figures.curves(wide_interval(), DEFAULT_METRIC).layout.yaxis.range  # means from 0.25 to 0.3
    assert (low, high) == pytest.approx((0.15, 0.4), abs=0.02)


def test_a_setting_of_one_run_has_no_bar_and_no_band() -> None:
    groups = settings_of(seeds=1)
    assert set(figures.intervals(groups, DEFAULT_METRIC).data[1].error_x.array) == {None}
    assert not [trace for trace in figures.curves(groups, DEFAULT_METRIC).data if trace.fill]


def test_curves_are_means_by_step_with_bands_for_the_best() -> None:
    figure = figures.curves(settings_of(), DEFAULT_METRIC)
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines"}
    assert len(lines) == 7
    best = next(trace for name, trace in lines.items() if name.startswith("1  "))
    assert (list(best.x), list(best.y)) == ([0, 9], pytest.approx([0.1, 0.61]))
    assert len([trace for trace in figure.data if trace.fill == "toself"]) == NUM_BANDS
    assert len({trace.line.width for trace in lines.values()}) == 2  # the others are thinner
    assert all(trace.showlegend for trace in lines.values())
    assert figure.data[-1].name == best.name  # on top


def test_marks_of_settings_that_nearly_agree_differ() -> None:
    marks = {"tickvals": [0.9999, 0.99995], "ticktext": ["0.9999", "0.99995"]}
    assert layout.setting_axis([0.9999, 0.99995]).items() >= marks.items()
    assert layout.dimension("ema_decay", [0.9999, 0.99995]).items() >= marks.items()


def test_parallel_coordinates_pass_through_each_value_on_its_scale() -> None:
    (lines,) = figures.parallel_coordinates(settings_of(), DEFAULT_METRIC).data
    lr, kind, epochs, metric = lines.dimensions
    assert list(lr.values) == pytest.approx([math.log10(value) for value in reversed(LRS)])
    assert (lr.ticktext[0], lr.ticktext[-1]) == ("1e-5", "0.001")
    assert (lr.tickvals[0], lr.tickvals[-1]) == pytest.approx((-5, -3))
    assert (list(kind.values), list(kind.ticktext)) == ([0, 1, 0, 1, 0, 1, 0], ["-", "k1"])
    assert (list(epochs.values), list(epochs.tickvals)) == ([1, 2, 1, 2, 1, 2, 1], [1, 2])
    assert list(metric.values) == pytest.approx([0.1 * i + 0.01 for i in reversed(range(7))])


def test_the_best_is_the_darkest() -> None:
    for groups, turned in ((settings_of(), True), (settings_of()[::-1], False)):
        (lines,) = figures.parallel_coordinates(groups, DEFAULT_METRIC).data
        assert lines.line.colorscale[0][1] == "#440154"
        assert lines.line.reversescale == turned


def test_slices_have_a_panel_per_varied_setting() -> None:
    figure = figures.slices(settings_of(), DEFAULT_METRIC)
    assert [list(trace.x) for trace in figure.data] == [
        pytest.approx(LRS[::-1]),
        ["-", "k1", "-", "k1", "-", "k1", "-"],
        [1, 2, 1, 2, 1, 2, 1],
    ]
    assert all(list(trace.y) == pytest.approx([0.1 * i + 0.01 for i in reversed(range(7))]) for trace in figure.data)
    assert (figure.layout.xaxis.type, figure.layout.xaxis2.type, figure.layout.xaxis3.type) == (
        "log",
        "category",
        "linear",
    )


def test_slices_leave_the_marks_of_texts_to_plotly_which_leaves_out_those_that_overlap() -> None:
    paths = [f"/data/prompts/{i:02d}/questions_of_training.jsonl" for i in range(40)]
    figure = figures.slices(
        groups_of(sweep(*(trial(i, {"a": p}, {9: 0.1}) for i, p in enumerate(paths)))), DEFAULT_METRIC
    )
    axis = figure.layout.xaxis
    assert axis.tickvals is None and list(axis.categoryarray) == list(figure.data[0].x)
    assert axis.categoryarray[1] == "…/prompts/01/questions…"


def test_four_slices_are_two_by_two() -> None:
    keys = ("a", "b", "c", "d")
    groups = groups_of(sweep(*(trial(i, {key: float(i) for key in keys}, {9: 0.1 * i}) for i in range(3))))
    figure = figures.slices(groups, DEFAULT_METRIC)
    assert [(axis.domain[0] > 0.5) for axis in figure.select_xaxes()] == [False, True, False, True]
    assert len({axis.domain for axis in figure.select_yaxes()}) == 2


@pytest.mark.parametrize("count", [1, 2, 7])
def test_legends_lie_below_the_axis_title(count: int) -> None:
    """In pixels, however high the plot is."""
    for draw in (figures.intervals, figures.curves):
        layout = draw(settings_of()[:count], DEFAULT_METRIC).layout
        plot = layout.height - layout.margin.t - layout.margin.b
        assert -layout.legend.y * plot == pytest.approx(54)
        assert layout.margin.b >= 54 + 24


def test_cost_is_the_mean_of_the_runs() -> None:
    tokens, seconds = figures.costs(settings_of(), DEFAULT_METRIC, "max").data
    assert set(tokens.x) == {900.0}
    assert list(seconds.x) == [10.0 + i for i in reversed(range(7))]


def test_importances_are_named_and_in_order() -> None:
    (bars,) = figures.importances({LR: 0.75, KIND: 0.25}).data
    assert (list(bars.y), list(bars.x), list(bars.text)) == (["actor_lr", "kl_estimator"], [0.75, 0.25], ["75%", "25%"])


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ([1, 2, 2], [1, 2]),
        ([1.0, 1.05, 2.0], []),
        ([1e-5, 1.1e-5, 1e-3], [1e-5, 1e-4, 1e-3]),
        ([1e-5, 2e-5, 1e-3], [1e-5, 2e-5, 1e-3]),
        (["b", "a", None], ["-", "a", "b"]),
        ([0.1 * i for i in range(11)], []),
        (list(np.geomspace(2.1e-5, 7e-4, 9)), [5e-5, 1e-4, 2e-4, 5e-4]),
        (list(np.geomspace(1e-3, 0.098, 9)), [1e-3, 3e-3, 1e-2, 3e-2]),
        (list(np.geomspace(1e-6, 1, 9)), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]),
    ],
)
def test_marks_are_few_and_round(values: list[Any], marks: list[Any]) -> None:
    assert layout.axis_marks(values) == marks


def test_the_history_shows_each_trial_in_the_order_of_its_end_and_the_best_so_far() -> None:
    ends = {0: 30, 1: 10, 2: 20}
    runs = [
        trial(i, {LR: lr}, {9: value}, end_ms=ends[i]) for i, (lr, value) in enumerate([(1, 0.4), (2, 0.2), (3, 0.1)])
    ]
    best, points = trial_figures.best_values(best_so_far(sweep(*runs), DEFAULT_METRIC, "max"), DEFAULT_METRIC).data
    assert (list(points.x), list(points.y), list(best.y)) == ([1, 2, 3], [0.2, 0.1, 0.4], [0.2, 0.2, 0.4])
    assert points.hovertext[0] == "trial_00001 (actor_lr 2)"
    assert list(points.marker.symbol) == ["circle"] * 3


def test_stopped_trials_end_in_a_cross_at_a_rung() -> None:
    runs = [trial(0, {LR: 1}, {0: 0.1, 2: 0.2, 4: 0.3}), trial(1, {LR: 2}, {0: 0.1, 2: 0.15}, stopped_at=2)]
    several = sweep(*runs)
    figure = trial_figures.stops(several, find_rungs(several, DEFAULT_METRIC), DEFAULT_METRIC)
    stopped, other = figure.data
    assert (stopped.name, list(stopped.y), list(stopped.marker.size)) == ("stopped", [0.1, 0.15], [0, 9])
    assert (other.name, list(other.y), list(other.marker.size)) == ("not stopped", [0.1, 0.2, 0.3], [0, 0, 0])
    assert [line.x0 for line in figure.layout.shapes] == [2]


def test_curves_are_by_tokens_if_rungs_are() -> None:
    """100 tokens a step: the first was judged at 128 and 256, and the other was stopped at 128."""
    runs = [trial(0, {LR: 1}, {0: 0.1, 2: 0.2, 4: 0.3}), trial(1, {LR: 2}, {0: 0.1, 2: 0.15}, stopped_at=2)]
    several = replace(sweep(*runs), rung_by="tokens")
    figure = trial_figures.stops(several, find_rungs(several, DEFAULT_METRIC), DEFAULT_METRIC)
    stopped, other = figure.data
    assert (list(stopped.x), list(other.x)) == ([0, 200], [0, 200, 400])
    assert [line.x0 for line in figure.layout.shapes] == [128, 256]
    assert figure.layout.xaxis.title.text == "response tokens drawn (0: before training)"


@pytest.mark.slow
def test_every_figure_has_its_data() -> None:
    for groups in (settings_of(), settings_of(seeds=1), settings_of()[:2]):
        for draw in (figures.intervals, figures.curves, figures.parallel_coordinates, figures.slices, figures.costs):
            figure = draw(groups, DEFAULT_METRIC)
            assert isinstance(figure, go.Figure)
            assert figure.data


def test_few_steps_and_trials_have_a_mark_each() -> None:
    """Plotly would set marks at halves, and write those of trials as 1, 2, 2, 3, 3."""
    few = sweep(*(trial(i, {LR: 10.0**-i, "seed": 0}, {0: 0.1, 4: 0.2}, stopped_at=4) for i in range(4)))
    groups, rungs = groups_of(few), find_rungs(few, DEFAULT_METRIC)
    drawn = [
        trial_figures.best_values(best_so_far(few, DEFAULT_METRIC, "max"), DEFAULT_METRIC),
        trial_figures.stops(few, rungs, DEFAULT_METRIC),
        figures.curves(groups, DEFAULT_METRIC),
        comparison_figures.lineage(few.trials, DEFAULT_METRIC),
        explorer.draw_first(groups, explorer.gather_curves([each.history for each in few.trials])),
    ]
    assert [figure.layout.xaxis.dtick for figure in drawn] == [1] * 5
    assert layout.whole_numbers(range(40)) == layout.whole_numbers([]) == {}
