"""The curves of every metric: what the page's selector gets, how small it stays, and the figure it begins with."""

import json
from dataclasses import asdict

import pandas as pd
import pytest
from sweep_cases import groups_of, sweep, trial

from rlx.analysis.page import explorer
from rlx.analysis.page.explorer import Explorer, MetricCurve, gather_curves

LR = "train.actor_lr"


def history(steps: list[int], **metrics: list[float | None]) -> pd.DataFrame:
    """A history; the first _ of a metric's name stands for /."""
    return pd.DataFrame({name.replace("_", "/", 1): values for name, values in metrics.items()}, steps, dtype=float)


FIRST = history([0, 1, 2], eval_reward=[0.5, None, 0.7], kl_ref=[None, 0.123456, 0.2], odd_one=[1, 2, 3])
SECOND = history([0, 1, 2], eval_reward=[0.1, None, 0.2], best_x=[None, None, 1.0])


def test_metrics_come_with_meanings_axes_and_a_curve_per_trial() -> None:
    data = gather_curves([FIRST, SECOND])
    assert [metric.name for metric in data.metrics] == ["kl/ref", "eval/reward", "odd/one"]  # best/x is one value
    kl, reward, odd = data.metrics
    assert kl.curves == (MetricCurve(0, (0.1235, 0.2)), None)
    assert reward.curves == (MetricCurve(1, (0.5, 0.7)), MetricCurve(1, (0.1, 0.2)))
    assert data.steps == ((1, 2), (0, 2), (0, 1, 2))
    assert reward.axis == pytest.approx((0.076, 0.724))
    assert (kl.meaning[:15], odd.meaning) == ("mean KL(policy ", "")


def test_without_a_curve_there_is_nothing_to_select() -> None:
    assert gather_curves([history([0], eval_reward=[0.5]), history([])]).metrics == ()
    assert gather_curves([]) == Explorer((), ())


def test_long_curves_are_thinned_evenly_with_both_ends() -> None:
    (metric,) = gather_curves([history(list(range(10_000)), kl_ref=[float(i) for i in range(10_000)])]).metrics
    (curve,) = metric.curves
    assert curve is not None and len(curve.values) == 500
    assert (curve.values[0], curve.values[-1]) == (0, 9999)
    gaps = {round(b - a) for a, b in zip(curve.values, curve.values[1:], strict=False)}
    assert gaps <= {10, 19, 20, 21, 30}  # four digits


@pytest.mark.slow
def test_many_trials_and_metrics_stay_below_some_megabytes() -> None:
    metrics = {f"kl_m{number}": [0.12345 * i for i in range(1000)] for number in range(50)}
    data = gather_curves([history(list(range(1000)), **metrics)] * explorer.MAX_TRIALS)
    assert len(json.dumps(asdict(data))) < 3_500_000


def test_of_very_many_trials_the_best_are_shown() -> None:
    groups = groups_of(sweep(*(trial(i, {LR: float(i)}, {9: 0.01 * i}) for i in range(explorer.MAX_TRIALS + 5))))
    shown = explorer.shown_trials(groups)
    assert len(shown) == explorer.MAX_TRIALS
    assert shown[0].name == f"trial_{explorer.MAX_TRIALS + 4:05d}"


def test_the_first_metric_is_drawn_with_a_line_per_trial_and_a_name_per_setting() -> None:
    runs = [(1.0, 0, 0.2), (2.0, 0, 0.7), (1.0, 1, 0.4)]
    groups = groups_of(sweep(*(trial(i, {LR: lr, "seed": s}, {9: v}) for i, (lr, s, v) in enumerate(runs))))
    data = gather_curves([FIRST, history([0]), SECOND.rename(columns={"eval/reward": "kl/ref"})])
    figure = explorer.draw_first(groups, data)
    assert figure.layout.yaxis.title.text == "kl/ref"
    assert [list(trace.y) for trace in figure.data] == [[0.1235, 0.2], [], [0.1, 0.2]]
    assert [trace.name for trace in figure.data] == ["1  actor_lr 2", "2  actor_lr 1", "2  actor_lr 1"]
    assert [trace.showlegend for trace in figure.data] == [True, True, False]
    assert figure.data[0].hovertext == "trial_00001 (actor_lr 2, seed 0)"
