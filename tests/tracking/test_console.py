"""The progress of a run, and the table of a sweep on screens of several sizes."""

import io
import re

import pytest
from rich.console import Console

from rlx.tracking.console import RunProgress, SweepProgress

SETTINGS = {
    "train.actor_lr": 0.0001711779,
    "train.critic_lr": 0.000368356,
    "algorithm.kl_coef": 0.0160519,
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


def screen(width: int, height: int) -> tuple[SweepProgress, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, width=width, height=height, force_terminal=True, color_system=None, highlight=False)
    return SweepProgress(120, console), text


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
    for text in ("0.000171", "0.000368", "0.0161", "120/120", "0.833", "finished", "running"):
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
    assert lines(progress, text)[0].startswith("waiting for the first trial  0:0")
    progress.update("trial_00000", SETTINGS, {}, "running")
    assert lines(progress, text)[-1].endswith("starting")
    progress.update("trial_00000", SETTINGS | {"train.ppo_epochs": 4, "train.actor_lr": 0.5}, {"step": 1}, "running")
    last = lines(progress, text)[-1].split()
    assert last == ["trial_00000", "0.5", "0.000368", "0.0161", "4", "1/120", "running"]


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
