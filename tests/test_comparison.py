"""Groups of trials: means and intervals by hand, the table and the picture of a sweep."""

import math
from pathlib import Path

import pandas as pd
import pytest

from rlx import comparison
from rlx.analysis import METRIC, WATCHED, Sweep, Trial
from rlx.comparison import compare, mean_interval
from rlx.config import ConfigError

BY = "algorithm.advantage"


def trial(number: int, kind: str, curve: dict[int, float], status: str = "FINISHED") -> Trial:
    steps = pd.Index(list(curve), name="step")
    history = pd.DataFrame({name: pd.Series(dtype=float) for name in WATCHED}, index=steps)
    history[METRIC] = list(curve.values())
    history["tokens/total"] = [100.0 * step for step in curve]
    settings: dict[str, int | float | str | None] = {BY: kind, "seed": number}
    return Trial(f"trial_{number:05d}", str(number), settings, {}, status, 10.0 + number, history)


def sweep(*trials: Trial) -> Sweep:
    return Sweep("s", "run", (BY, "seed"), WATCHED, trials)


SMALL = sweep(
    trial(0, "gae", {0: 0.1, 10: 0.5}),
    trial(1, "gae", {0: 0.1, 10: 0.7}),
    trial(2, "grpo", {0: 0.1, 10: 0.9}),
    trial(3, "grpo", {0: 0.1, 5: 0.2}, status="RUNNING"),
    trial(4, "grpo", {}, status="FAILED"),
)


def test_interval_by_hand() -> None:
    mean, half = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3
    assert half == pytest.approx(2.776445 * math.sqrt(2.5) / math.sqrt(5), rel=1e-6)  # t of 4 degrees, two-sided 95 %
    assert mean_interval([2.0, 2.0]) == (2, 0)


def test_one_run_has_no_interval() -> None:
    mean, half = mean_interval([0.25])
    assert mean == 0.25 and math.isnan(half)


def test_a_row_per_value_best_first_of_what_has_ended() -> None:
    table = compare(SMALL, BY)
    assert table[BY].tolist() == ["grpo", "gae"]
    assert table["runs"].tolist() == [1, 2]
    assert table["mean"].tolist() == pytest.approx([0.9, 0.6])
    assert (table["lowest"].tolist(), table["highest"].tolist()) == ([0.9, 0.5], [0.9, 0.7])
    assert table["±"][1] == pytest.approx(12.706205 * math.sqrt(0.02) / math.sqrt(2), rel=1e-6)
    assert table["tokens/total"].tolist() == [1000, 1000]
    assert table["seconds"].tolist() == [12, 10.5]


def test_a_setting_that_was_not_varied_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--by algorithm.advantages: sweep s varies .*nearest: algorithm.advantage$"):
        compare(SMALL, "algorithm.advantages")


def test_a_sweep_without_results_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"no trial of sweep s has ended with {METRIC}"):
        compare(sweep(trial(0, "gae", {0: 0.5}, status="RUNNING")), BY)


def test_the_picture_shows_every_group_and_run(tmp_path: Path) -> None:
    figure = comparison.figure(SMALL, BY)
    curves, ends = figure.axes
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["grpo", "gae"]
    assert [list(line.get_ydata()) for line in curves.lines] == [[0.1, 0.9], pytest.approx([0.1, 0.6])]
    assert [label.get_text() for label in ends.get_xticklabels()] == ["grpo", "gae"]
    figure.savefig(tmp_path / "figure.png")
