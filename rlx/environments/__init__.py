"""Environments: what a policy talks to over several turns, where they run, and those that ship.

`base` says what a class needs to be one, and has the table of names; `tools` makes a dialogue of a class whose methods
are tools, `agents` one of an agent that asks an OpenAI-compatible address; `host` has the instances of one process,
`pool` the processes as a rank uses them. Left out: turns of the policy, and tokens (rlx.rollout.episodes).

Programs of the policy run in `rlx.rewards.sandbox`. Only `pool` needs Ray.

Imports of rlx: actors, config, rewards, types.

Example:
    from rlx.environments.base import load_environment
    from rlx.environments.tools import calls_in
    from rlx.types import TaskRow

    call = calls_in('<tool_call>{"name": "calculate", "arguments": {"expression": "12 * 3"}}</tool_call>')[0]
    calculator = load_environment("calculator")()
    calculator.reset(TaskRow("What is 12 * 3?", "36"), seed=0)
    assert calculator.calculate(**call.arguments) == "36"
    assert calculator.score("36") == 1.0
"""
