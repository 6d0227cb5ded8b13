"""Runs programs that a policy wrote, so that nothing they do reaches the run, its files, its secrets or a network.

`reward` is the reward function `code`: it finds programs and tests, and turns what happened into scores. `pool` starts
a launcher for each program and says which walls hold on this machine. The modules that a launcher imports run in its
process, before the program: `launcher` takes one program through its tests, `namespaces`, `landlock` and `seccomp` are
the walls, `watch` sees what a program uses, `kernel` calls the C library. `inside` runs within the walls.
Left out: other languages than Python, and programs that need packages.

Example:
    from rlx.config.sections.reward import RewardConfig
    from rlx.rewards.sandbox.pool import Limits, Program, Sandbox

    sandbox = Sandbox.open(strict=True)  # ConfigError where neither files nor network can be shut
    limits = Limits.of(RewardConfig())
    ran = sandbox.run(Program("print(int(input()) ** 2)", ("3", "4")), limits)
    assert [each.output for each in ran] == [b"9\\n", b"16\\n"]
    assert sandbox.run_tests("def double(x): return 2 * x", "assert double(2) == 4", limits).passed == [True]
"""
