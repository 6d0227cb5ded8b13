"""A sweep: many runs whose settings a search chooses from a space, as trials of Ray Tune.

A candidate is a point of the space, a value for each setting that is varied; each seed of it is a trial.

`plans` checks and keeps what a sweep consists of, `choices` refuses at once what it can, `tuner` runs it,
`trial_source` hands trials to Tune, `trainable` does one trial as one run of rlx.runs, `searchers` and `schedulers` say
which candidates are tried and which trials stop early. `records` keeps, in the sweep's folder, all that a resume needs.

Left out: tables and figures of a sweep (rlx.analysis).

Imports of rlx: analysis, cluster, config, runs, storage, tracking, types.

Example:
    from rlx.config.run import RunConfig
    from rlx.cluster import connection
    from rlx.cluster.resources import plan_resources
    from rlx.storage.addresses import open_storage
    from rlx.sweeps import plans, tuner
    from rlx.sweeps.records import SweepPlan

    storage = open_storage("storage")
    connection.connect(RunConfig(), plan_resources(RunConfig()))
    plan = plans.check_sweep(SweepPlan("s", {"train": {"steps": 4}}, "my_space.py", candidates=2))
    records = tuner.run_sweep(plan, storage, watch=lambda trial, settings, metrics, state: print(trial, state))
    print({name: record.state for name, record in records.items()})
"""
