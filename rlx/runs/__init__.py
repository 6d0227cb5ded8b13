"""One training run: checks its input, starts its processes, and keeps its folder and its records.

`preflight` checks a config, `launch` does the run with the `processes` of engines and Ray Train workers (`train_run`,
`worker_group`, `worker`), and `run_folder` and `export` read what the run leaves.

Left out: what a training step does (rlx.training) and what a sweep does with many runs (rlx.sweeps).

Imports of rlx: actors, algorithms, cluster, config, data, environments, mesh, models, rewards, rollout, samples,
storage, tracking, training, types.

Example:
    from rlx.cluster import connection
    from rlx.config.loading import from_tree
    from rlx.runs import launch, preflight
    from rlx.storage.addresses import open_storage

    prepared = preflight.prepare(from_tree({"name": "first", "train": {"steps": 3}}))
    connection.connect(prepared.config, prepared.resources)
    folder = open_storage(prepared.config.storage) / "runs" / "first"
    result = launch.run(prepared, folder)
    print(result.metrics["eval/accuracy"])
"""
