"""Interactive figures: each one contains the values that it shows."""

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from sweep_cases import sweep, trial

from rlx.analysis import figures
from rlx.analysis.statistics import group_trials
from rlx.analysis.style import NUM_BANDS
from rlx.config.sections import DEFAULT_METRIC

LR, KIND, EPOCHS = "train.actor_lr", "algorithm.kl_estimator", "train.ppo_epochs"
LRS = [1e-5, 3e-5, 8e-5, 2e-4, 5e-4, 9e-4, 1e-3]


def settings_of(seeds: int = 2) -> list:
    """Seven settings, the better the higher the learning rate; seeds differ by 0.02."""
    return group_trials(
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


def test_four_slices_are_two_by_two() -> None:
    keys = ("a", "b", "c", "d")
    groups = group_trials(sweep(*(trial(i, {key: float(i) for key in keys}, {9: 0.1 * i}) for i in range(3))))
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
    tokens, seconds = figures.costs(settings_of(), DEFAULT_METRIC).data
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
    assert figures.axis_marks(values) == marks


def test_every_figure_has_its_data() -> None:
    for groups in (settings_of(), settings_of(seeds=1), settings_of()[:2]):
        for draw in (figures.intervals, figures.curves, figures.parallel_coordinates, figures.slices, figures.costs):
            figure = draw(groups, DEFAULT_METRIC)
            assert isinstance(figure, go.Figure)
            assert figure.data
