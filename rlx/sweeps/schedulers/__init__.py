"""Schedulers of Ray Tune: they stop bad trials early, or make a trial continue from a better one.

All of them judge trials at their evaluations alone. A trial waits there, so it ends at the step where it is stopped.
To all but PBT a candidate is one thing, whatever the number of its seeds: its runs are judged and stop together.
`by_name` lists the schedulers, `schedule` is what they know of a sweep. `seeds_as_one` shows Ray's schedulers a
candidate as one trial, `remembering` tells them on a resume what they were told before, `doubling` is Ray's ASHA with
rungs in tokens or GPU-seconds, `population` is Ray's PBT, `race` decides which candidates are out,
`racing` tells Tune, `pausing` picks what runs next. `lineage` reads back how PBT came to a trial's last weights.

Left out: which candidates are tried (rlx.sweeps.searchers).

Example:
    from rlx.sweeps.schedulers.by_name import SCHEDULERS
    from rlx.sweeps.schedulers.schedule import Schedule

    scheduler = SCHEDULERS["asha"](Schedule(steps=20, eval_every=5, space={}, seeds=3))
"""
