"""At which steps of a run resumes have changed settings that its steps depend on.

Most checkpoints are deleted, and with them what their steps were done with; changes.json in the run's folder stays.
Left out: which settings a resume may change (rlx.runs), and the values that they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from rlx.config.errors import ConfigError
from rlx.config.loading import steps_differ_in
from rlx.storage import checkpoint_catalog
from rlx.storage.filesystem import Storage, retry

CHANGES = "changes.json"
"""file in the folder of a run that was resumed with other settings"""
_CHANGES = TypeAdapter(dict[int, list[str]])


def changes_by(folder: Storage, tree: Mapping[str, Any]) -> tuple[int, set[str]]:
    """The step after which a run goes on with the settings of a tree, and those of them that change its steps there.

    What was recorded of later steps is then not of the steps that follow now.
    """
    found = retry(partial(checkpoint_catalog.complete_checkpoints, folder), f"reading {folder.path}")
    manifest = found[-1].manifest if found else None
    return (manifest.step, steps_differ_in(manifest.config, tree)) if manifest else (0, set())


def note_changes(folder: Storage, tree: Mapping[str, Any]) -> None:
    """Keeps which settings of a run change when it goes on with those of a tree.

    Raises:
        ConfigError, StorageError: what was kept before is damaged, or the storage keeps failing.
    """
    step, changed = changes_by(folder, tree)
    if changed:
        known = noted_changes(folder)
        noted = {**known, step: sorted({*known.get(step, ()), *changed})}
        write = partial((folder / CHANGES).write_text, _CHANGES.dump_json(noted).decode())
        retry(write, f"writing {(folder / CHANGES).path}")


def noted_changes(folder: Storage) -> dict[int, list[str]]:
    """The settings that resumes of a run have changed, by the step after which they did; empty if none has.

    Raises:
        ConfigError: the file is not what rlx wrote.
    """
    file = folder / CHANGES
    if not file.exists():
        return {}
    try:
        return _CHANGES.validate_json(file.read_text())
    except ValueError:
        raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None
