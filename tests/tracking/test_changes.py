"""What a resume notes of the settings that it changes."""

from pathlib import Path
from typing import Any

import pytest
from test_run_folder import put, settings

from rlx.config.errors import ConfigError
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import read_checkpoint
from rlx.tracking import changes


def noted(folder: Path, step: int, **now: Any) -> tuple[bool, dict[int, list[str]]]:
    """What is noted when a run goes on from a step with these settings, and whether steps are done again with others.

    Step 0: the run begins.
    """
    start = read_checkpoint(open_storage(str(folder)) / f"step_{step:06d}") if step else None
    again = changes.note_changes(open_storage(str(folder)), settings(**now), start)
    return again, changes.noted_changes(open_storage(str(folder)))


def test_a_resume_with_other_settings_than_its_checkpoint_changes_steps(tmp_path: Path) -> None:
    assert noted(tmp_path, 0, train__actor_lr=2e-3) == (False, {})
    put(tmp_path, 10, train__actor_lr=2e-3)
    put(tmp_path, 20, train__actor_lr=1e-3)
    assert noted(tmp_path, 20, train__actor_lr=1e-3, train__steps=90, checkpoint__every=3) == (False, {})
    assert not (tmp_path / changes.CHANGES).exists()
    assert noted(tmp_path, 20, train__actor_lr=2e-3) == (True, {20: ["train.actor_lr"]})


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {}, set()),
        ({"train__lr_schedule": "linear"}, {"train__lr_schedule": "linear"}, {"train.steps"}),
        ({"train__lr_schedule": "cosine"}, {}, {"train.steps", "train.lr_schedule"}),
        ({}, {"train__lr_schedule": "linear"}, {"train.steps", "train.lr_schedule"}),
        ({"rollout__max_staleness": 1}, {"rollout__max_staleness": 1}, {"train.steps"}),
    ],
)
def test_another_end_changes_steps_that_follow_it(
    before: dict[str, Any], now: dict[str, Any], changed: set[str], tmp_path: Path
) -> None:
    """With a rate that is the same in all steps, the end is where it is."""
    put(tmp_path, 30, train__steps=30, **before)
    expected = (True, {30: sorted(changed)}) if changed else (False, {})
    assert noted(tmp_path, 30, train__steps=60, **now) == expected


def test_what_a_resume_changes_is_kept_beside_what_earlier_ones_changed(tmp_path: Path) -> None:
    put(tmp_path, 10, train__actor_lr=1e-3)
    put(tmp_path, 20, train__actor_lr=2e-3)
    assert noted(tmp_path, 10, train__actor_lr=2e-3) == (True, {10: ["train.actor_lr"]})
    assert noted(tmp_path, 20, train__actor_lr=2e-3) == (False, {10: ["train.actor_lr"]})  # as after a kill
    both = {10: ["train.actor_lr"], 20: ["algorithm.gamma"]}
    assert noted(tmp_path, 20, train__actor_lr=2e-3, algorithm__gamma=0.9) == (True, both)


def test_what_a_resume_does_again_is_not_what_an_earlier_one_has_noted(tmp_path: Path) -> None:
    """A mistyped rate is put right; then the newest checkpoint is found to be damaged; then the run begins again."""
    for step in (10, 20):
        put(tmp_path, step, train__actor_lr=1e-3)
    assert noted(tmp_path, 20, train__actor_lr=5.0) == (True, {20: ["train.actor_lr"]})
    for _ in range(2):  # the mistyped one may have recorded more steps than the first that follows it
        assert noted(tmp_path, 20, train__actor_lr=1e-3) == (True, {20: []})
    assert noted(tmp_path, 10, train__actor_lr=2e-3) == (True, {10: ["train.actor_lr"]})
    assert noted(tmp_path, 0) == (True, {0: []})


def test_a_damaged_note_is_one_line(tmp_path: Path) -> None:
    (tmp_path / changes.CHANGES).write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"changes\.json is damaged: it is not what rlx wrote$"):
        changes.noted_changes(open_storage(str(tmp_path)))


def test_a_run_that_begins_again_with_other_settings_does_its_steps_again(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    changes.note_resume(folder, settings(), settings(train__steps=90))
    assert changes.noted_changes(folder) == {}
    changes.note_resume(folder, settings(), settings(train__actor_lr=2e-3))
    assert changes.noted_changes(folder) == {0: ["train.actor_lr"]}
    # A resume that goes on with them, and one that is killed before it is there.
    changes.note_resume(folder, settings(train__actor_lr=2e-3), settings(train__actor_lr=2e-3))
    assert noted(tmp_path, 0, train__actor_lr=2e-3)[0]
    (tmp_path / changes.CHANGES).write_text("[1]")
    with pytest.raises(ConfigError, match="it is not what rlx wrote"):
        changes.note_resume(folder, settings(), settings())
