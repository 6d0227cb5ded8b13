"""Keeps one actor group per process, so that the next run of the same shape begins at once.

Left out: what a group does (`actor_group`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlx.runs.actor_group import ActorGroup
from rlx.runs.preflight import PreparedRun


class KeptGroup:
    """The actor group of a process, kept from one run to the next."""

    def __init__(self) -> None:
        self.group: ActorGroup | None = None

    @contextmanager
    def lease(self, prepared: PreparedRun, keep: bool = False) -> Iterator[ActorGroup]:
        """Gives the kept group if it can do the run, otherwise a new one.

        Args:
            keep: whether the group stays for the next run; otherwise it is closed at the end of the block.

        Raises:
            ConfigError: there is no room for a new group.
        """
        if not self.group or not self.group.suits(prepared):
            self.release()
            self.group = ActorGroup(prepared)
        try:
            yield self.group
        finally:
            if not keep:
                self.release()

    def stop(self) -> None:
        """Ends the run that another thread does with the group, if any, with its current step."""
        if self.group:
            self.group.stop()

    def release(self) -> None:
        """Closes the kept group."""
        if self.group:
            self.group.close()
        self.group = None


kept_group = KeptGroup()
"""the group of this process"""
