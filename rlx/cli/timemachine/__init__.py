"""Commands that do steps of a recorded run again: `replay`, `whatif`, `verify`; `lineage` makes a schedule of a sweep.

Left out: the comparison itself (rlx.replay).

Example:
    from rlx.cli.main import main

    assert main(["replay", "try1", "--step", "37"]) == 0, "a metric of step 37 differs from what was logged"
"""
