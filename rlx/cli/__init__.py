"""The commands: `rlx train`, `rlx sweep` and the others, each a module with a function `main(argv) -> exit code`.

`main` is the command `rlx`, `options` has what all commands share, and `defaults/` holds the settings and the search
space of `rlx sweep`. Left out: the work itself. The commands read options, call the packages below and print; all of
rlx may be imported here, and nothing of rlx imports this package.

Example:
    from rlx.cli.main import main

    exit_code = main(["checkpoints", "--storage", "storage"])
    assert exit_code == 0
"""
