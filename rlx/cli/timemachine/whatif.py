"""Says what other settings would have done: rlx whatif RUN@30 --set algorithm.clip_high=0.28 --steps 20

Left out: a sweep of such branches (branched_sweep).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rlx.cli.options import exit_code
from rlx.cli.timemachine import pairing, running
from rlx.config.errors import ConfigError
from rlx.config.experiment import settings_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = running.parser_of(
        "Continues a run from a checkpoint twice: unchanged, as a control that must equal the run, and with other "
        "settings. Both are runs of their own; their answers are compared question by question.",
        "RUN@STEP --steps N (--set SETTING=VALUE ... | --space FILE [OPTIONS OF rlx sweep])",
    )
    parser.add_argument("run", metavar="RUN@STEP", help="a run's name, folder or address, and one of its checkpoints")
    parser.add_argument("--steps", metavar="N", type=int, required=True, help="how many steps to do")
    parser.add_argument("--set", metavar="SETTING=VALUE", action="append", help="a changed setting; may be given again")
    parser.add_argument("--space", metavar="FILE", help="a search space: the control, then a sweep of branches")
    running.add_gap(parser)

    def script() -> int:
        args, others = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
        if bool(args.set) == bool(args.space):
            raise ConfigError("give --set SETTING=VALUE, or --space FILE")
        if args.space:
            from rlx.cli.timemachine import branched_sweep

            return branched_sweep.sweep_branches(args, others)
        if others:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        return what_if(args, running.changed_settings(args.set))

    return exit_code(script)


def what_if(args: argparse.Namespace, changes: dict[str, Any]) -> int:
    """Runs both branches and compares them; returns 1 if the control is not the run."""
    which, step = running.split_step(args.run, args.storage)
    running.check_run(which, args.storage)
    from rlx.replay import pairs, recorded
    from rlx.storage.addresses import open_storage

    run = recorded.RecordedRun.read(which, args.storage)
    control, changed = pairs.pair_of(run, step, args.steps, changes, trust=args.trust)
    logged = recorded.logged_metrics(run, args.tracking_uri, trust=args.trust)
    names = pairs.pair_names(open_storage(run.storage) / "runs", run, step)
    with running.processes() as shared:
        comparison, first = pairing.do_control(args, pairing.with_name(args, control, names[0]), logged, shared)
        differing = {key: value for key, value in changed.changes.items() if control.changes.get(key) != value}
        print(f"\n{names[1]}: {settings_text(differing)}")
        branch = pairing.with_name(args, changed, names[1])
        second, _ = running.do_steps(branch.prepare(), branch, shared)
    rows = [*pairs.paired_evaluations(first, second, step), *pairs.paired_prompts(first, second, changed.steps)]
    print("\n" + "\n".join(pairing.control_lines(run, comparison, control)))
    print(f"\n{pairing.paired_table(rows)}" if rows else "\nno evaluation or completions of both: nothing to compare")
    return 0 if comparison.holds or not comparison.metrics else 1
