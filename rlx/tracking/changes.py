"""At which steps of a run resumes have changed settings that its steps depend on.

Most checkpoints are deleted, and with them what their steps were done with; changes.json in the run's folder stays.
It is written once a checkpoint is restored: a resume that ends before that changes nothing. Only where there
is none, and a run begins again, it is written before workers start.
Left out: which settings a resume may change (rlx.runs), and the values that they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from rlx.config.errors import ConfigError
from rlx.config.loading import steps_differ_in
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import Storage, retry, write_record

CHANGES = "changes.json"
"""file in the folder of a run that was resumed with other settings"""
_CHANGES = TypeAdapter(dict[int, list[str]])


def note_changes(folder: Storage, tree: Mapping[str, Any], start: CheckpointEntry | None) -> bool:
    """Keeps which settings of a run change now that it goes on from a checkpoint with those of a tree.

    What was kept of that step and of later ones goes: these steps are done again from here.

    Args:
        start: what was restored; None: the run begins with its first step.

    Returns:
        Whether later steps may be recorded that were done with other settings.

    Raises:
        ConfigError, StorageError: what was kept before is damaged, or the storage keeps failing.
    """
    manifest, known = start and start.manifest, retry(partial(noted_changes, folder), f"reading {folder}")
    step, changed = (manifest.step, steps_differ_in(manifest.config, tree)) if manifest else (0, set())
    again = bool(changed) or max(known, default=-1) >= step
    if again:  # also when nothing changes now: later resumes have the same steps to do again
        _write(folder, {at: keys for at, keys in known.items() if at < step} | {step: sorted(changed)})
    return again


def note_resume(folder: Storage, before: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Keeps what changes where a run without a checkpoint begins again; call it before workers start.

    Args:
        before: the settings with which it began.

    Raises:
        ConfigError, StorageError: as `note_changes`.
    """
    known = retry(partial(noted_changes, folder), f"reading {folder}")
    if changed := steps_differ_in(before, tree):
        _write(folder, known | {0: sorted(changed)})


def noted_changes(folder: Storage) -> dict[int, list[str]]:
    """The settings that resumes of a run have changed, by the step after which they did; empty if none has.

    An empty list: an earlier resume had changed some there, and a later one went back to the settings before.

    Raises:
        ConfigError: the file is not what rlx wrote.
    """
    file = folder / CHANGES
    if not file.exists():
        return {}
    try:
        return _CHANGES.validate_json(file.read_text())
    except ValueError:
        raise ConfigError(f"{file} is damaged: it is not what rlx wrote") from None


def _write(folder: Storage, noted: dict[int, list[str]]) -> None:
    file = folder / CHANGES
    write_record(file, _CHANGES.dump_json(noted).decode())
