"""The page of a run that has just ended: a small one, of a few steps, for the records of the run.

It is a help and never a condition: a run waits two seconds for it at most, and no problem is one of the run. Left out:
where the page goes (rlx.runs.launch), and pages that a person asks for (rlx.cli.samples).
"""

from __future__ import annotations

import logging
import threading

from rlx.samples import reader
from rlx.samples.choosing import PageLimits, ShownStep, shown, spread
from rlx.samples.page import completions_page
from rlx.storage.filesystem import Storage

FILE = "completions.html"
_LIMITS = PageLimits(steps=3, completions=240, tokens=120_000)  # 4 MB with all values of training
_PATIENCE_S = 2.0
_LOG = logging.getLogger(__name__)


def last_page(run: Storage, name: str, patience_s: float = _PATIENCE_S) -> str | None:
    """Returns the page of a run; None if nothing was kept, it cannot be made, or not in time.

    Args:
        name: of the run, as the page shows it.
        patience_s: how long to wait.
    """
    made, is_late = list[str](), threading.Event()

    def make() -> None:
        try:
            made.extend(_page(run, name, is_late))
        except Exception as error:  # a damaged file, no room, a storage that does not answer
            _LOG.debug("no page of %s: %s", name, error)

    thread = threading.Thread(target=make, name="last page", daemon=True)
    thread.start()
    thread.join(patience_s)
    is_late.set()
    return made[0] if made else None


def _page(run: Storage, name: str, is_late: threading.Event) -> list[str]:
    """The page, or nothing; it ends after the step at which it is late."""
    steps = spread(reader.kept_steps(run), _LIMITS.steps)
    rows: list[ShownStep] = []
    for step in steps:
        if is_late.is_set():
            return []
        each = PageLimits(1, _LIMITS.completions // len(steps), _LIMITS.tokens // len(steps))
        rows += shown([(name, run, [step])], each)
    facts = {name: f"{run}/completions"}
    return [completions_page(f"Completions of run {name}", rows, facts)] if rows else []
