"""The progress of a run, and the table of a sweep on screens of several sizes."""

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from rlx.tracking.console import RunProgress, SweepProgress, metrics_line
from rlx.tracking.startup import StartUp
from rlx.types import Phase

SETTINGS = {
    "train.actor_lr": 0.0001712,
    "train.critic_lr": 0.0003684,
    "algorithm.kl_coef": 0.01605,
    "train.ppo_epochs": 2,
}
METRICS = {
    "reward/mean": 0.406,
    "task/accuracy": 0.407,
    "eval/accuracy": 0.833,
    "kl/ref": 0.2909,
    "tokens/rollout_per_s": 1428.0,
    "time/step": 0.5,
}


def screen(width: int, height: int, metric: str = "eval/accuracy") -> tuple[SweepProgress, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, width=width, height=height, force_terminal=True, color_system=None, highlight=False)
    return SweepProgress(120, metric, console), text


def lines(progress: SweepProgress, text: io.StringIO) -> list[str]:
    """The lines that the screen shows now."""
    start = text.tell()
    progress.console.print(progress.render())
    return [line.rstrip() for line in text.getvalue()[start:].splitlines()]


def sweep_of(width: int, height: int, *, over: int, running: int) -> tuple[SweepProgress, io.StringIO]:
    progress, text = screen(width, height)
    for i in range(over + running):
        state = "finished" if i < over else "running"
        progress.update(f"trial_{i:05d}", SETTINGS, METRICS | {"step": 120 if i < over else 7}, state)
    return progress, text


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_nothing_is_cut_or_broken(width: int) -> None:
    shown = lines(*sweep_of(width, 24, over=1, running=1))
    screen_text = "\n".join(shown)
    assert "…" not in screen_text and max(map(len, shown)) <= width - 2
    assert len(shown) <= 4
    for text in ("0.0001712", "0.0003684", "0.01605", "120/120", "0.833", "finished", "running"):
        assert text in screen_text
    if width == 140:
        assert "trial_00001" in screen_text and "0:56" in screen_text


def test_running_trials_stay_on_a_low_screen() -> None:
    progress, text = sweep_of(140, 24, over=30, running=3)
    shown = lines(progress, text)
    assert len(shown) <= 23
    assert all(any(f"trial_{i:05d}" in line for line in shown) for i in (30, 31, 32))
    assert shown[-1] == "and 13 finished"
    progress.__exit__()
    assert len(lines(progress, text)) == 1 + 33


def test_before_the_first_step_and_with_changed_settings() -> None:
    progress, text = screen(140, 24)
    progress.message(Phase("prompts and first trial"))
    assert lines(progress, text)[0] == "starting: prompts and first trial 0 s"
    progress.update("trial_00000", SETTINGS, {}, "running")
    assert lines(progress, text)[-1].endswith("starting 0 s")
    progress.update("trial_00000", SETTINGS | {"train.ppo_epochs": 4, "train.actor_lr": 0.5}, {"step": 1}, "running")
    last = lines(progress, text)[-1].split()
    assert last == ["trial_00000", "0.5", "0.0003684", "0.01605", "4", "1/120", "running"]


def test_the_metric_of_a_sweep_takes_the_place_of_the_accuracy() -> None:
    progress, text = screen(140, 24, "eval/reward")
    progress.update("trial_00000", SETTINGS, METRICS | {"step": 7, "eval/reward": 1.125}, "running")
    shown = "\n".join(lines(progress, text))
    assert "eval/reward" in shown and "1.125" in shown and "0.833" not in shown and "held-out" not in shown


def test_what_sets_measured_is_shown_with_its_standard_error() -> None:
    found = {"eval/aime/avg_at_16": 0.4125, "eval/aime/avg_at_16_se": 0.0314, "eval/aime/pass_at_4": 0.7}
    line = metrics_line(METRICS | found | {"eval/one/avg_at_2": 0.5})
    assert line.endswith("  aime 0.412±0.031  one 0.500")
    progress, text = screen(140, 24, "eval/aime/avg_at_16")
    progress.update("trial_00000", SETTINGS, METRICS | found | {"step": 7}, "running")
    assert "0.412±0.031" in "\n".join(lines(progress, text))


def test_the_share_of_episodes_that_failed_is_shown_where_there_are_some() -> None:
    assert "failed" not in metrics_line(METRICS | {"episode/failed_fraction": 0.0, "eval/failed_fraction": 0.0})
    line = metrics_line(METRICS | {"episode/failed_fraction": 0.25, "eval/failed_fraction": 1.0})
    assert line.endswith("  failed 0.250  held-out failed 1.000")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def started(progress: RunProgress | SweepProgress, clock: Callable[[float], None]) -> None:
    for begun, phase in enumerate(("Ray cluster", "prompts", "workers")):
        clock(begun * begun * 2.0)
        progress.message(Phase(phase))
    clock(20.0)


def test_a_start_is_shown_phase_by_phase_with_its_seconds(clock: Callable[[float], None]) -> None:
    text = io.StringIO()
    run = RunProgress(4, Console(file=text, width=120))
    started(run, clock)
    run.step({"step": 0, "eval/accuracy": 0.5}, None)
    run.step({"step": 1}, None)
    assert text.getvalue().splitlines() == [
        "starting: Ray cluster", "starting: prompts", "starting: workers",
        "started in 20 s: Ray cluster 2 s, prompts 6 s, workers 12 s",
        "step 0/4  held-out 0.500", "step 1/4    left 0:00",
    ]  # fmt: skip


def test_on_a_terminal_the_present_phase_is_shown_with_its_seconds_so_far(clock: Callable[[float], None]) -> None:
    text = io.StringIO()
    run = RunProgress(4, Console(file=text, width=120, force_terminal=True))
    started(run, clock)
    run.console.print(run._live.get_renderable())
    assert text.getvalue() == "starting: workers 12 s\n"
    assert StartUp().summary() == StartUp().now == ""


def test_a_sweep_in_a_file_says_how_long_each_trial_took_to_start(clock: Callable[[float], None]) -> None:
    text = io.StringIO()
    sweep = SweepProgress(4, console=Console(file=text, width=120))
    started(sweep, clock)
    sweep.update("trial_00000", {"train.ppo_epochs": 2}, {}, "running")
    sweep.update("trial_00001", {"train.ema_decay": 0.9999, "algorithm.kl_coef": 0.1 + 0.2}, {}, "running")
    clock(51.0)
    sweep.update("trial_00000", {}, {"step": 0, "time/eval": 1.0, "eval/accuracy": 0.5}, "running")
    assert text.getvalue().splitlines()[3:] == [
        "trial_00000 running  train.ppo_epochs 2",
        "trial_00001 running  train.ema_decay 0.9999  algorithm.kl_coef 0.3",
        "trial_00000 running  step 0/4  held-out 0.500  started in 31 s",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["worker 0: [/__w/gloo/pair.cc:537] closed", "[Rank 0] no :smile: [bold]", "[/]"])
def test_texts_that_look_like_markup_are_shown_unchanged(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(4) as run:
        run.status(text)
        run.message(text)
    with SweepProgress(4) as sweep:
        sweep.update("trial_00000", {"reward.answer_pattern": text}, {}, "running")
        sweep.console.print(sweep.render(), soft_wrap=True)
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert shown.count(text) == 4
