"""Does a step of a run again and compares it with the record: rlx replay RUN --step 37

Left out: the comparison itself (rlx.replay).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlx.cli import listing
from rlx.cli.options import exit_code
from rlx.cli.timemachine import running

if TYPE_CHECKING:
    from rlx.storage.filesystem import Storage


def main(argv: Sequence[str] | None = None) -> int:
    parser = running.parser_of(
        "Does the steps from the newest checkpoint before a step again, in a folder of its own, compares every metric "
        "with what was logged, and shows what the step trained on. The run itself is only read.",
        "RUN --step N [--prompt I] [--keep] [--gap X] [--trust]",
    )
    parser.add_argument("run", metavar="RUN", type=listing.run_argument, help="a run's name, or its folder or address")
    parser.add_argument("--step", metavar="N", type=int, required=True, help="the step to do again")
    parser.add_argument("--prompt", metavar="I", type=int, help="show the tokens of the prompt in this row")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the replay, for rlx samples")
    running.add_places(parser)
    running.add_gap(parser)
    return exit_code(lambda: replay(parser.parse_args(argv)))


def replay(args: argparse.Namespace) -> int:
    """Replays a step, and says whether the record holds; returns 1 if it does not."""
    running.check_run(args.run, args.storage)
    from rlx.replay import branches, comparing, recorded

    run = recorded.RecordedRun.read(args.run, args.storage)
    branch = branches.branch_to(run, args.step, trust=args.trust)
    branch = replace(branch, changes=running.moved(args), attributes_gradient=True)
    logged = recorded.logged_metrics(run, args.tracking_uri, trust=args.trust)
    print(f"run {run.name}: {running.steps_text(branch.steps)} again, from {branch.origin}")
    with branches.scratch(run, keep=args.keep) as place, running.processes() as shared:
        branch = place.placed(branch)
        prepared = branch.prepare()
        folder, again = running.do_steps(prepared, branch, shared)
        comparison = comparing.compare(branch, folder, logged, again, running.allowed_gap(args, prepared))
        print("\n" + "\n".join(running.verdict_lines(comparison, branch.steps)))
        print(f"\n{opened_step(folder, args.step, args.prompt)}")
        if args.keep:
            print(f"\nkept: rlx samples {shlex.quote(folder.path)} --step {args.step} --html FILE")
    return 0 if comparison.holds else 1


def opened_step(folder: Storage, step: int, index: int | None) -> str:
    """Returns what a step of a replay trained on, or the tokens of one of its prompts."""
    from rlx.cli.timemachine import step_tables
    from rlx.replay import inside_step

    prompts = inside_step.step_prompts(folder, step)
    if index is not None:
        return step_tables.tokens_table(inside_step.prompt_at(prompts, index))
    return f"step {step} trained on {len(prompts)} prompts\n\n{step_tables.prompts_table(prompts)}"
