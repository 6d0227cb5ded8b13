"""What a resume notes of the settings that it changes."""

from pathlib import Path
from typing import Any

import pytest
from test_run_folder import put, settings

from rlx.config.errors import ConfigError
from rlx.storage.addresses import open_storage
from rlx.tracking import changes


def test_a_resume_with_other_settings_than_its_checkpoint_changes_steps(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    assert changes.changes_by(folder, settings(train__actor_lr=2e-3)) == (0, set())  # it begins
    put(tmp_path, 10, train__actor_lr=2e-3)
    put(tmp_path, 20, train__actor_lr=1e-3)
    same = settings(train__actor_lr=1e-3, train__steps=90, checkpoint__every=3)
    assert changes.changes_by(folder, same) == (20, set())
    assert changes.changes_by(folder, settings(train__actor_lr=2e-3)) == (20, {"train.actor_lr"})


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
    assert changes.changes_by(open_storage(str(tmp_path)), settings(train__steps=60, **now)) == (30, changed)


def test_what_a_resume_changes_is_kept_beside_what_earlier_ones_changed(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for step, rate in ((10, 1e-3), (20, 2e-3)):
        put(tmp_path, step, train__actor_lr=rate)
        changes.note_changes(folder, settings(train__actor_lr=rate))  # as after a kill
        assert len(changes.noted_changes(folder)) == (step - 10) // 10
        changes.note_changes(folder, settings(train__actor_lr=rate + 1e-3))
    changes.note_changes(folder, settings(train__actor_lr=2e-3, algorithm__gamma=0.9))  # a second attempt
    assert changes.noted_changes(folder) == {10: ["train.actor_lr"], 20: ["algorithm.gamma", "train.actor_lr"]}


def test_a_damaged_note_is_one_line(tmp_path: Path) -> None:
    (tmp_path / changes.CHANGES).write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"changes\.json is damaged: it is not what rlx wrote$"):
        changes.noted_changes(open_storage(str(tmp_path)))
