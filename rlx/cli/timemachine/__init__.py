"""Commands that do steps of a recorded run again: `replay`, `whatif`, `verify`; `lineage` makes a schedule of a sweep.

Left out: the comparison itself (rlx.replay).
"""
