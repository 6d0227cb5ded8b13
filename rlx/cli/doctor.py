"""Checks that trainer and engines agree, and trains nothing: rlx doctor [--config FILE] [--SETTING VALUE]

Left out: the checks themselves (rlx.runs.doctor).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.cli.options import exit_code, parse, settings_parser
from rlx.cli.train import new_config
from rlx.config.run import RunConfig


def main(argv: Sequence[str]) -> int:
    parser = settings_parser(
        "Checks that trainer and engines agree, in a few steps that change nothing and leave no run.",
        "[--config FILE] [--SECTION.SETTING VALUE ...]",
    )

    def examine() -> int:
        args, given = parse(parser, argv)
        return check(new_config(args.config, given))  # bad settings are refused before anything slow is imported

    return exit_code(examine)


def check(config: RunConfig) -> int:
    """Prints the doctor's lines; returns 1 if a check failed."""
    from rlx.cluster.resources import naming_ways_out
    from rlx.runs import preflight, run_folder
    from rlx.tracking import console

    with naming_ways_out(config.model_dump(exclude_unset=True)), console.RunProgress(1) as progress:
        run_folder.check_start(config)
        prepared = preflight.prepare(config, progress.warm_start)
        from rlx.cluster import connection  # slow to import: what is wrong has been said by now
        from rlx.runs import launch

        progress.status("a few steps at learning rate 0")
        connection.connect(config, prepared.resources, progress.message)
        verdicts = launch.examine(prepared, notify=progress.message)
    for line in verdicts:
        print(f"{'passed' if line.passed else 'FAILED'}  {line.what}: {line.figure:.3g} ({line.demand})")
    failed = sum(not line.passed for line in verdicts)
    print(f"{failed} of {len(verdicts)} checks failed" if failed else f"all {len(verdicts)} checks passed")
    return 1 if failed else 0
