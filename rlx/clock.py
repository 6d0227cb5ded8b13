"""How long the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class _End:
    pass


_END = _End()


class Clock:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self._seconds[f"time/{part}"] = self._seconds.get(f"time/{part}", 0.0) + spent

    def waiting(self, part: str, things: Iterable[T]) -> Iterator[T]:
        """Things as they come; the wait for each counts."""
        iterator = iter(things)
        while True:
            with self(part):
                thing = next(iterator, _END)
            if isinstance(thing, _End):
                return
            yield thing

    def metrics(self) -> dict[str, float]:
        """Seconds of each part by metric name, and of the whole so far."""
        return self._seconds | {"time/step": time.perf_counter() - self.started}
