"""The time machine: steps of a recorded run done again, and compared with what was logged of them.

`recorded` reads a run's records, `branches` does its steps again in another folder, `comparing` compares metrics,
completions, weights and outcomes of questions, and `inside_step` shows what a step trained on. `pairs` compares two
branches, `verifying` a whole record.

Left out: what a step does (rlx.training), and how a run is started (rlx.runs). The run that is replayed is only read.

Imports of rlx: analysis, config, runs, samples, storage, tracking, types.

Example:
    from rlx.replay import branches, recorded

    run = recorded.RecordedRun.read("try1", "storage")
    logged = recorded.logged_metrics(run)[37]
    branch = branches.branch_to(run, 37)
    print(f"step 37 had reward {logged['reward/mean']}; done again from {branch.origin}, it takes {branch.steps}")
"""
