"""Trackers without a service: one keeps its records in memory, one drops them.

For tests, for training in a plain process, and for the ranks that record nothing. Left out: anything that outlives the
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.storage.filesystem import Storage
from rlx.tracking.base import RunStatus


@dataclass
class MemoryTracker:
    """A `Tracker` whose records are its fields."""

    run_id: str | None = "memory"
    name: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by step
    texts: dict[str, str] = field(default_factory=dict)
    status: RunStatus | None = None  # None until `open`
    is_closed: bool = False

    def open(
        self,
        experiment: str,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        parent: Storage | None = None,
    ) -> None:
        """Starts the run, or continues it."""
        self.name, self.status = name, RunStatus.RUNNING
        self.params |= params
        self.tags |= tags

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keeps the metrics of a step, unless the step has some already."""
        self.metrics.setdefault(step, {name: float(value) for name, value in metrics.items()})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Keeps the samples of a step, unless the step has some already."""
        if rows:
            self.samples.setdefault(step, [dict(row) for row in rows])

    def log_text(self, name: str, text: str) -> None:
        """Keeps a text; replaces an earlier one of the same name."""
        self.texts[name] = text

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        self.tags |= tags

    def end(self, status: RunStatus) -> None:
        """Sets the final status."""
        self.status = status

    def flush(self, patience_s: float = 1.0) -> None:
        """Does nothing: every record is in memory already."""

    def close(self, patience_s: float) -> int:
        """Closes the tracker; no record is left to send."""
        self.is_closed = True
        return 0


class NullTracker:
    """A `Tracker` that drops everything: for the ranks that record nothing."""

    run_id: str | None = None

    def _drop(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    open = log = log_samples = log_text = set_tags = end = flush = _drop

    def close(self, patience_s: float) -> int:
        """Does nothing; no record is left to send."""
        return 0
