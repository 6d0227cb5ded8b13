"""TODO rlx.tracking.outbox."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlx.config.errors import ConfigError
from rlx.storage.filesystem import Storage, retry


@dataclass
class OutboxEntry:
    kind: str
    content: dict[str, Any]
    file: Storage | None = None  # where it is kept, once it is
    sent: bool = False


def run_id(folder: Storage) -> str | None:
    """The id of the MLflow run of a run's folder; None if it has none, or MLflow has not made it yet.

    Raises:
        ConfigError: its run.json is not what was written.
    """
    found = read_run_record(folder).get("mlflow_run")
    return None if found is None else str(found)


def pending(folder: Storage) -> int:
    """How many of a run's entries wait in its outbox, whoever wrote them."""
    outbox = folder / "outbox"
    return sum(len(entry_names(outbox / writer)) for writer in outbox.names())


def entry_names(outbox: Storage) -> list[str]:
    return [name for name in outbox.names() if name.removesuffix(".json").isdecimal()]


def read_entry(file: Storage) -> Any:
    """What a file of an outbox says; None if it is gone: whoever wrote it has sent it after all."""
    try:
        return file.read_json()
    except FileNotFoundError:
        return None


def read_run_record(folder: Storage) -> dict[str, Any]:
    """What run.json says; nothing if there is none."""
    file = folder / "run.json"
    if not file.exists():
        return {}
    try:
        return {"mlflow_run": None} | file.read_json()
    except (ValueError, TypeError):
        raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None


def write_run_record(folder: Storage, known: str | None, key: str) -> None:
    file = folder / "run.json"
    retry(partial(file.write_text, json.dumps({"mlflow_run": known, "key": key})), f"writing {file.path}")
