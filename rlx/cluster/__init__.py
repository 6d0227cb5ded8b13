"""The Ray cluster that runs work on: joining or starting it, and what a run takes from it.

`connection` joins or starts a cluster, `resources` says what a run needs of it and waits for room, `machine` refuses
at once what this machine cannot hold, `nodes` brings folders to other nodes, `watch` notices that a cluster of this
process has died, `leftovers` deletes what earlier ones have left.

Left out: the processes of a run (rlx.runs).

Imports of rlx: config, types.

Example:
    from rlx.cluster import connection
    from rlx.cluster.resources import plan_resources
    from rlx.config.run import RunConfig

    connection.connect(RunConfig(), plan_resources(RunConfig()))
    print(plan_resources(RunConfig()))
"""
