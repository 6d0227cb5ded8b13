"""The commands: `rlx train`, `rlx sweep` and the others, each a module with a function `main(argv) -> exit code`.

`main` is the command `rlx`, `options` has what all commands share, `arguments` what several do, and `defaults/` holds
the settings and the search space of `rlx sweep`. Left out: the work itself. The commands read options, call other
packages and print. Nothing of rlx imports this package but `python -m rlx`.

Imports of rlx: analysis, cluster, config, data, models, replay, rewards, runs, samples, storage, sweeps, tracking,
types.

Example:
    from rlx.cli.main import main

    exit_code = main(["checkpoints", "--storage", "storage"])
    assert exit_code == 0
"""
