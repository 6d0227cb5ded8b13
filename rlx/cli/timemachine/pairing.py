"""The control of two branches, and tables that compare it with the others.

Left out: which branches there are (whatif.py, branched_sweep.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlx.cli import listing
from rlx.cli.arguments import terminal_width
from rlx.cli.timemachine import running

if TYPE_CHECKING:
    from rlx.replay.branches import Branch
    from rlx.replay.comparing import Comparison
    from rlx.replay.pairs import Paired
    from rlx.replay.recorded import RecordedRun, StepMetrics
    from rlx.runs.processes import RunProcesses
    from rlx.storage.filesystem import Storage


def with_name(args: argparse.Namespace, branch: Branch, name: str) -> Branch:
    """The branch as a run of a name in the storage of its run, on this machine's cluster."""
    own = {"name": name, "storage": branch.run.storage, "tracking.completions": 1.0}
    return replace(branch, changes={**branch.changes, **running.here(args), **own})


def do_control(
    args: argparse.Namespace, control: Branch, logged: StepMetrics, shared: RunProcesses
) -> tuple[Comparison, Storage]:
    """Runs the control; returns how it compares with the run, and its folder."""
    from rlx.replay import comparing

    print(f"{control.changes['name']}: {running.steps_text(control.steps)} of run {control.run.name} again")
    prepared = control.prepare()
    folder, again = running.do_steps(prepared, control, shared)
    return comparing.compare(control, folder, logged, again, running.allowed_gap(args, prepared)), folder


def control_lines(run: RecordedRun, comparison: Comparison, control: Branch) -> list[str]:
    """What the control shows: whether what follows comes from the changed settings alone."""
    if not comparison.metrics:
        return [
            f"control: run {run.name} has no steps after {control.steps[0] - 1}, so there is nothing to compare with"
        ]
    done = max(each.step for each in comparison.metrics)
    first, *others = running.verdict_lines(comparison, range(control.steps[0], done + 1))
    meaning = "what differs comes from the changed settings alone" if comparison.holds else "it is not the run"
    return [f"control: {first}: {meaning}", *others]


def paired_table(rows: Sequence[Paired]) -> str:
    """A table with a row per evaluation, and one for the prompts of training."""
    cells = [
        {
            "step": str(row.step),
            "of": row.what,
            "questions": str(row.questions),
            "control": f"{row.control:.4g}",
            "changed": f"{row.changed:.4g}",
            "difference (95 %)": f"{row.difference.value:+.3g} ± {row.difference.half_width:.2g}",
            "better": str(row.better),
            "worse": str(row.worse),
        }
        for row in rows
    ]
    numbers = {"step", "questions", "control", "changed", "difference (95 %)", "better", "worse"}
    return listing.markdown_table(cells, terminal_width(), numbers)
