"""What training reports: the Reporter protocol, and a reporter that keeps everything in memory.

Left out: MLflow and Ray Train, which training does not know. Its caller passes a reporter; rlx.runs has that for Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlx.storage.checkpoint_writer import FinishedCheckpoint


class Reporter(Protocol):
    """Receives one rank's metrics, checkpoints and messages; every rank makes the same calls in the same order."""

    @property
    def run_id(self) -> str | None:
        """The id of the run's record in the tracker; None until the tracker has made it, and on ranks without one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records a step's metrics; returns at once."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Records sample completions as a table; returns at once."""

    def flush(self) -> None:
        """Returns once everything recorded so far outlives this process."""

    def report(self, metrics: Mapping[str, float], *, is_last: bool, checkpoints: Sequence[FinishedCheckpoint]) -> None:
        """Passes a step to whoever started training; a collective call.

        Args:
            metrics: of the step, with the newest evaluation and "step".
            is_last: training ends with this step.
            checkpoints: those that have become complete since the last report, oldest first.
        """

    def should_stop(self, step: int) -> bool:
        """Whether this rank was asked to end training with the current step, which has this number."""

    def should_checkpoint(self) -> bool:
        """Whether this rank was told that its machine will be taken away soon."""

    def notify(self, message: str) -> None:
        """Tells the person who watches; a `Phase` only on rank 0."""

    def close(self) -> None:
        """Sends the remaining records for a short time; those that are left stay in the run's folder."""


@dataclass
class MemoryReporter:
    """A reporter for a plain process: it keeps everything in lists."""

    stopping: bool = False  # set it to end training with the current step
    preempted: bool = False  # set it to make the current step's checkpoint due
    run_id: str | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)  # as logged, with "step"
    samples: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)  # paths, oldest first
    messages: list[str] = field(default_factory=list)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.append({**metrics, "step": step})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if rows:
            self.samples.append((step, [dict(row) for row in rows]))

    def flush(self) -> None:
        pass

    def report(self, metrics: Mapping[str, float], *, is_last: bool, checkpoints: Sequence[FinishedCheckpoint]) -> None:
        self.reports.append(dict(metrics))
        self.checkpoints += [checkpoint.folder.path for checkpoint in checkpoints]

    def should_stop(self, step: int) -> bool:
        return self.stopping

    def should_checkpoint(self) -> bool:
        return self.preempted

    def notify(self, message: str) -> None:
        self.messages.append(message)

    def close(self) -> None:
        pass


_OF_EPISODES = {
    "episode/failed_fraction": "all episodes of step {} failed, nothing is learnt from them: rlx samples RUN shows why",
    "eval/failed_fraction": "all episodes of the evaluation after step {} failed: rlx samples RUN --held-out shows why",
}
"""shares of episodes whose environment failed, and what is said where that is all"""


def failed_episodes(step: int, metrics: Mapping[str, float], told: set[str]) -> list[str]:
    """Lines for whoever watches if all episodes of a step, or of its evaluation, have failed, the first time in a row.

    Args:
        metrics: of the step over all ranks.
        told: the metrics of which that was said before; brought up to date.
    """
    failed = [name for name in _OF_EPISODES if metrics.get(name) == 1]
    new = [name for name in failed if name not in told]
    told.difference_update(metrics)
    told.update(failed)
    return [_OF_EPISODES[name].format(step) for name in new]
