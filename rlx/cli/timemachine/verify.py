"""Says whether the record of a run holds: rlx verify RUN. Left out: which steps can be done again (rlx.replay)."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlx.cli import listing
from rlx.cli.arguments import positive_int, terminal_width
from rlx.cli.options import exit_code
from rlx.cli.timemachine import running

if TYPE_CHECKING:
    from rlx.replay.branches import Branch
    from rlx.replay.comparing import Comparison
    from rlx.replay.recorded import RecordedRun, StepMetrics
    from rlx.replay.verifying import Fact
    from rlx.runs.processes import RunProcesses


def main(argv: Sequence[str] | None = None) -> int:
    parser = running.parser_of(
        "Compares what a run was made with (code, libraries, settings, prompts and model by checksum) with what is "
        "here, does random steps of it again, and says whether the record holds. The run itself is only read.",
        "RUN [--steps K] [--seed S] [--within N] [--set SETTING=PLACE ...] [--gap X] [--trust]",
    )
    parser.add_argument("run", metavar="RUN", type=listing.run_argument, help="a run's name, or its folder or address")
    parser.add_argument(
        "--steps", metavar="K", type=positive_int, default=3, help="how many steps (default: %(default)s)"
    )
    parser.add_argument("--seed", metavar="S", type=int, help="draws the steps (default: another one each time)")
    parser.add_argument(
        "--within",
        metavar="N",
        type=positive_int,
        help="draw from steps at most N after a checkpoint or the start (default: checkpoint.every, at least 10)",
    )
    running.add_places(parser)
    running.add_gap(parser)
    return exit_code(lambda: verify_record(parser.parse_args(argv)))


def verify_record(args: argparse.Namespace) -> int:
    """Prints what agrees, step by step, and the verdict; returns 1 if the record does not hold."""
    running.check_run(args.run, args.storage)
    from rlx.replay import branches, recorded, verifying

    run = recorded.RecordedRun.read(args.run, args.storage)
    logged = recorded.logged_metrics(run, args.tracking_uri, trust=args.trust)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    known = verifying.replayable(run, logged, args.within or max(10, run.every))
    steps = verifying.drawn_steps(known, args.steps, seed)
    print(
        f"run {run.name}: {len(known)} of {len(logged)} logged steps can be done again; of these {steps}, --seed {seed}"
    )
    done: list[tuple[Branch, Comparison]] = []
    facts: list[Fact] = []
    with branches.scratch(run) as place, running.processes() as shared:
        for step in steps:
            branch = branches.branch_to(run, step, trust=args.trust)
            branch = replace(branch, changes=running.moved(args), asks_again=True)
            facts = facts or verifying.facts(run, branch.prepare())
            done.append((branch, _compared(args, place.placed(branch), logged, shared)))
    print(f"\n{facts_table(facts)}\n\n{steps_table(done)}\n")
    for branch, comparison in done:
        if not comparison.holds:
            print("\n".join([*running.verdict_lines(comparison, branch.steps), ""]))
    print(record_verdict(run, facts, [comparison for _, comparison in done]))
    return 0 if all(comparison.holds for _, comparison in done) else 1


def _compared(args: argparse.Namespace, branch: Branch, logged: StepMetrics, shared: RunProcesses) -> Comparison:
    """Does a branch again and compares it."""
    from rlx.replay import comparing

    print(f"\n{running.steps_text(branch.steps)} again, from {branch.origin}")
    prepared = branch.prepare()
    folder, metrics = running.do_steps(prepared, branch, shared)
    return comparing.compare(branch, folder, logged, metrics, running.allowed_gap(args, prepared))


def facts_table(facts: Sequence[Fact]) -> str:
    """A table of what a run was made with and what is here."""
    said = {True: "yes", False: "NO", None: "?"}
    rows = [{"": each.what, "recorded": each.recorded, "here": each.here, "same": said[each.agrees]} for each in facts]
    return listing.markdown_table(rows, terminal_width())


def steps_table(done: Sequence[tuple[Branch, Comparison]]) -> str:
    """A table with a row per step that was done again."""
    said = {True: "equal", False: "DIFFER", None: "-"}
    rows = [
        {
            "step": str(branch.until),
            "from": branch.origin,
            "metrics": str(len(comparison.metrics)),
            "differ": str(len(comparison.different)),
            "largest gap": f"{comparison.largest:.1e}" if comparison.largest else "0",
            "completions": said[None if comparison.completions is None else not comparison.completions],
            "weights": said[comparison.weights],
            "questions": said[not comparison.forged if comparison.questions else None],
        }
        for branch, comparison in done
    ]
    return listing.markdown_table(rows, terminal_width(), {"step", "metrics", "differ", "largest gap"})


def record_verdict(run: RecordedRun, facts: Sequence[Fact], comparisons: Sequence[Comparison]) -> str:
    """One sentence: whether the record holds, and what else differs."""
    others = [each.what for each in facts if each.agrees is False]
    beside = f"; not the same here: {', '.join(others)}" if others else ""
    if all(comparison.holds for comparison in comparisons):
        steps = "1 step" if len(comparisons) == 1 else f"{len(comparisons)} steps"
        return f"the record of run {run.name} holds in {steps}{beside}"
    wrong = sum(not comparison.holds for comparison in comparisons)
    return f"the record of run {run.name} does NOT hold: {wrong} of {len(comparisons)} replays differ{beside}"
